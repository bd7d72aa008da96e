"""Rules by which a token leaves at a layer, from the predictions of the layers so far."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fulldepth.errors import unknown

RULES = ("confidence", "margin", "entropy", "patience")


def certainty(logits: Tensor, rule: str) -> Tensor:
    """[...] how sure a prediction is, in [0, 1], from `logits: [..., V]`.

    - `confidence`: largest probability (Teerapittayanon et al. 2016 and later work on early exit);
    - `margin`: largest minus second largest probability (Schuster et al. 2022, CALM);
    - `entropy`: `1 - H / ln V`, with the entropy H in nats.

    Raises:
        FulldepthError: for another rule.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if rule == "entropy":
        logs = logits.log_softmax(-1)
        entropy = -(logs.exp() * logs).nan_to_num(0.0).sum(-1)  # 0 * -inf = nan where a probability is 0
        return 1 - entropy / math.log(max(2, logits.shape[-1]))
    if rule == "margin":
        top = logits.softmax(-1).topk(min(2, logits.shape[-1]), dim=-1).values
        return top[..., 0] - top[..., -1]
    if rule == "confidence":
        return logits.softmax(-1).amax(-1)
    raise unknown("rule", rule, RULES)


def sample_certainty(logits: Tensor, rule: str) -> Tensor:
    """[N] float64: the mean of `certainty` over the predictions of each sample, from `[N, V]` or `[N, Q, V]`."""
    values = certainty(logits, rule).double()
    return values if values.ndim == 1 else values.flatten(1).mean(1)


class ExitRule:
    """Decides for N samples, layer by layer, which of them leave; for one step of decoding, or one batch.

    A sample is a token, a text, an image, or an image with Q predictions: a detector's queries.

    A sample leaves at the first layer at which its certainty exceeds the threshold, so that nothing leaves early at 1.
    `patience` has the certainty `r / L`: r is the number of consecutive layers, up to this one, with the same
    prediction, or predictions (Zhou et al. 2020, PABEE, with r in units of the depth L).

    Args:
        rule: one of `RULES`.
        threshold: in (0, 1].
        num_layers: L.
    """

    def __init__(self, rule: str, threshold: float, num_layers: int) -> None:
        self._rule, self._threshold, self._num_layers = rule, threshold, num_layers
        self._predicted: Tensor | None = None
        self._same: Tensor | None = None

    def leaves(self, logits: Tensor) -> Tensor:
        """[N] bool: whether each sample may leave at this layer; call once per layer.

        Args:
            logits: `[N, V]`, or `[N, Q, V]`.
        """
        sure = None if self._rule == "patience" else sample_certainty(logits, self._rule)
        return self.decide(sure, logits.argmax(-1))

    def decide(self, sure: Tensor | None, predicted: Tensor) -> Tensor:
        """`leaves`, from what was read of the logits before.

        Args:
            sure: `[N]` `sample_certainty`; not read by `patience`.
            predicted: `[N]`, or `[N, Q]`: the largest entries.
        """
        if self._rule != "patience" and sure is not None:
            return sure.double() > self._threshold
        if self._predicted is None or self._same is None:
            self._same = torch.ones(len(predicted), dtype=torch.int64, device=predicted.device)
        else:
            equal = (predicted == self._predicted).view(len(predicted), -1).all(1)
            self._same = torch.where(equal, self._same + 1, 1)
        self._predicted = predicted
        return self._same.double() / self._num_layers > self._threshold

    def keep(self, rows: Tensor) -> None:
        """Go on with these tokens only: indices, or a mask over `[N]`."""
        if self._predicted is not None and self._same is not None:
            self._predicted, self._same = self._predicted[rows], self._same[rows]


def theoretical_speedup(exits: Tensor) -> float:
    r"""Layers of the full model over layers that are run: :math:`\sum_i L m_i / \sum_i i m_i`, in [1, L].

    Args:
        exits: `[L]` number of samples that leave after layers 1..L, :math:`m_i`; at least one in all.

    Source: "Representation progression and aligned training", Sec. 4.
    """
    exits = exits.double()
    layers = torch.arange(1, len(exits) + 1, dtype=torch.float64, device=exits.device)
    return float(len(exits) * exits.sum() / (layers * exits).sum())

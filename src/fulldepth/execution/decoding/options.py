"""Options of `generate` that choose layers, and the rules by which a token leaves at a layer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError, unknown
from fulldepth.execution.predictions import widened

RULES = ("confidence", "margin", "entropy", "patience")
AUTO = "auto"
MOST_DRAFTS = 64


@dataclass(frozen=True)
class Options:
    """Checked options, see `generate`.

    Raises:
        FulldepthError: for values out of range, and options that exclude each other.
    """

    num_layers: int
    """L."""
    threshold: float | None = None
    """In (0, 1]: a token leaves where the value of `rule` exceeds it, so that 1 is the full model."""
    rule: str = "confidence"
    """`confidence`, `margin`, `entropy` or `patience`, see `ExitRule`."""
    min_layer: int = 1
    """First layer at which a token may leave."""
    speculate_from: int | str | None = None
    """E in 1..L-1; `auto`: a third of the layers, and a trial."""
    draft_length: int | str = AUTO
    """K, largest number of drafts per round; `auto`: 4, and a trial, after which decoding is plain where rounds are
    slower."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise unknown("rule", self.rule, RULES)
        is_number = isinstance(self.threshold, Real | Tensor)
        if self.threshold is not None and not (is_number and 0 < self.threshold <= 1):
            raise FulldepthError(f"threshold is {self.threshold!r}; expected a number in (0, 1].")
        for name, highest, words in (
            ("min_layer", self.num_layers, ()),
            ("speculate_from", self.num_layers - 1, (None, AUTO)),
            ("draft_length", MOST_DRAFTS, (AUTO,)),
        ):
            value = getattr(self, name)
            if value not in words and not (type(value) is int and 1 <= value <= highest):
                raise FulldepthError(f"{name} is {value!r}; expected a whole number from 1 to {highest}.")
        if self.speculate_from is not None and self.threshold is not None:
            raise FulldepthError("threshold is for early exit, and speculate_from for drafts; set one of them.")
        for name, needed in {"rule": "threshold", "min_layer": "threshold", "draft_length": "speculate_from"}.items():
            if getattr(self, needed) is None and getattr(self, name) != getattr(Options, name):
                raise FulldepthError(f"{name} has no effect without {needed}; set {needed}, or leave out {name}.")


def certainty(logits: Tensor, rule: str) -> Tensor:
    """[...] how sure a prediction is, in [0, 1], from `logits: [..., V]`.

    - `confidence`: largest probability (Teerapittayanon et al. 2016 and later work on early exit);
    - `margin`: largest minus second largest probability (Schuster et al. 2022, CALM);
    - `entropy`: `1 - H / ln V`, with the entropy H in nats.
    """
    logits = widened(logits)
    if rule == "entropy":
        logs = logits.log_softmax(-1)
        entropy = -(logs.exp() * logs).nan_to_num(0.0).sum(-1)  # 0 * -inf = nan where a probability is 0
        return 1 - entropy / math.log(max(2, logits.shape[-1]))
    top = logits.softmax(-1).topk(min(2, logits.shape[-1]), dim=-1).values
    return top[..., 0] - top[..., -1] if rule == "margin" else top[..., 0]


class ExitRule:
    """Decides for N samples (tokens, texts or images), layer by layer, which of them leave.

    A sample leaves at the first layer at which its certainty exceeds the threshold, so that nothing leaves early at 1.
    `patience` has the certainty `r / L`: r is the number of consecutive layers, up to this one, with the same
    prediction (Zhou et al. 2020, PABEE, with r in units of the depth L).

    Args:
        rule: one of `RULES`.
        threshold: in (0, 1].
        num_layers: L.
    """

    def __init__(self, rule: str, threshold: float, num_layers: int) -> None:
        self._rule = rule
        self._threshold = threshold
        self._num_layers = num_layers
        self._predicted = self._same = torch.empty(0, dtype=torch.int64)

    def leaves(self, logits: Tensor) -> Tensor:
        """[N] bool: whether each sample may leave at this layer, from `[N, V]`; call once per layer."""
        sure = logits if self._rule == "patience" else certainty(logits, self._rule)
        return self.decide(sure, logits.argmax(-1))

    def decide(self, sure: Tensor, predicted: Tensor) -> Tensor:
        """`leaves`, from what was read of the logits before.

        Args:
            sure: `[N]` `certainty`; not read by `patience`.
            predicted: `[N]` the largest entries.
        """
        if self._rule != "patience":
            return sure.double() > self._threshold
        first = not len(self._same)
        self._same = (
            torch.ones_like(predicted) if first else torch.where(predicted == self._predicted, self._same + 1, 1)
        )
        self._predicted = predicted
        return self._same.double() / self._num_layers > self._threshold

    def keep(self, rows: Tensor) -> None:
        """Go on with some samples only: `[N]` bool."""
        if len(self._same):
            self._predicted = self._predicted[rows]
            self._same = self._same[rows]

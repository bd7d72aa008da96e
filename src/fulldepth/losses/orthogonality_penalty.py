"""Orthogonality loss: penalises redundant channels of a layer (CR-Guided Transformers, Sec. 3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Literal

import torch
from torch import Tensor

from fulldepth.core.errors import unknown
from fulldepth.losses.term import Context, LayerTerm, block_size, check_states, recomputed, statistics_dtype

FORMS = ("mean", "frobenius")


class OrthogonalityPenalty(LayerTerm):
    """CR's penalty on non-orthogonal channels of the attention sub-layers' output, Sec. 3.3."""

    name = "orthogonality"
    sites = ("attention_output",)
    form: Literal["mean", "frobenius"] = "mean"
    """Mean over the entries (mean, the paper's listing), or their sum (frobenius, the paper's text)."""

    def default_layers(self, num_layers: int) -> Sequence[int]:
        """Layers after those of the coherence penalty, and the last but one: 3, 5, 7, 9, 10 of 12."""
        after = range(3, round(8 * num_layers / 12) + 2, 2)
        return sorted({layer for layer in (*after, num_layers - 2) if 0 <= layer < num_layers})

    def of_layer(self, context: Context, layer: int) -> Tensor:
        """Compute `orthogonality_penalty` of the attention sub-layer's output."""
        return orthogonality_penalty(context.states["attention_output"][layer], form=self.form, mask=context.mask)


def orthogonality_penalty(h: Tensor, *, form: str = "mean", mask: Tensor | None = None, eps: float = 1e-8) -> Tensor:
    r"""Deviation of a layer's channels from orthogonality along the sequence.

    .. math:: \tilde h_d = \frac{h_d}{\|h_d\|_2 + \epsilon}, \quad G = \tilde h^\top \tilde h : [D, D], \quad
        L_{ortho} = \mathrm{mean}_{B, D, D} \, (G - I)^2

    with norms along the sequence, one `G` per sequence. Unweighted: the objective applies the weight (0.01 in the
    paper). The backward pass recomputes `G`, a few sequences at a time, and keeps only a reference to `h`. Matrix
    products are float32 (float64 for float64 states) regardless of autocast; `torch.set_float32_matmul_precision`
    applies to them.

    Args:
        h: output of a sub-layer (residual included), `[B, T, D]`.
        form: "mean" as in the paper's listing; "frobenius" as in its text, the squared Frobenius norm of `G - I` per
            sequence, averaged over sequences: `D^2` times as much.
        mask: `[B, T]`, True (or 1) = counts; other positions are excluded, even if they are NaN.
        eps: the paper's epsilon, added to the norm.

    Returns:
        Scalar, unit 1, in [0, 1] for "mean", float32 or float64. A channel that is zero throughout a sequence has no
        direction: its row of `G` and its gradient are 0.

    Raises:
        FulldepthError: if `h` is not `[B, T, D]`, for an invalid mask or an unknown form.

    Source: "CR-Guided Transformers", Sec. 3.3 and Listing 2 (which differ by `D^2`).
    """
    check_states([h], mask, dimensions=3)
    if form not in FORMS:
        raise unknown("form of the orthogonality penalty", form, FORMS)
    sequences, length, width = h.shape
    size = block_size(width * max(length, width), h.device)
    ignored = repeat(None) if mask is None else (~mask.to(h.device, torch.bool)).split(size)
    total = h.new_zeros((), dtype=statistics_dtype(h))
    for rows, ignored_rows in zip(h.split(size), ignored, strict=False):
        total = total + recomputed(_squared_deviation, rows, ignored_rows, eps)
    return total / (sequences * width**2 if form == "mean" else sequences)


def _squared_deviation(h: Tensor, ignored: Tensor | None, eps: float) -> Tensor:
    """Sum over sequences of `|G - I|_F^2`; for short ones from the `[T, T]` Gram matrix, which has the same norm."""
    with torch.autocast(h.device.type, enabled=False):
        states = h.to(statistics_dtype(h))
        if ignored is not None:
            states = states.masked_fill(ignored[..., None], 0.0)
        unit = states / (torch.linalg.vector_norm(states, dim=1, keepdim=True) + eps)
        if 2 * unit.shape[1] <= unit.shape[2]:
            # No significant cancellation: the rank is at most D/2, so the result is at least half of the first term
            squares = unit.matmul(unit.mT).square().sum()
            return squares - 2 * unit.square().sum() + len(unit) * unit.shape[-1]
        return (unit.mT.matmul(unit) - torch.eye(unit.shape[-1], dtype=unit.dtype, device=unit.device)).square().sum()

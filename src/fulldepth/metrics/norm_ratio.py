"""Norm ratio: norm of the residual stream relative to a layer's update (residual dominance)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fulldepth.metrics.base import Influence, Measure, Observation, Row, Setup
from fulldepth.metrics.jackknife import error_of, ratio_influence


def norm_ratio(h_in: Tensor, h_out: Tensor) -> Tensor:
    r"""Norm of the stream over the norm of the layer's update, per token.

    .. math:: r_l = \frac{\|h_{l-1}\|}{\|h_l - h_{l-1}\|}

    Large = the layer hardly changes the stream; 1 = the update's norm equals the input's.

    Args:
        h_in: residual stream before the layer, `[..., D]`.
        h_out: residual stream after the layer, same shape.

    Returns:
        `[...]`, unit 1, in [0, inf]; inf where the update is exactly zero, NaN where the stream is zero too.

    Raises:
        ValueError: if the shapes differ.

    Source: "Representation progression and aligned training", Fig. 11.
    """
    if h_in.shape != h_out.shape:
        raise ValueError(f"h_in and h_out must have one shape, got {tuple(h_in.shape)} and {tuple(h_out.shape)}")
    if h_in.dtype != torch.float64:
        h_in, h_out = h_in.float(), h_out.float()
    # |y|^2 - 2xy + |x|^2 would suffer from cancellation for small updates.
    return torch.linalg.vector_norm(h_in, dim=-1) / torch.linalg.vector_norm(h_out - h_in, dim=-1)


class NormRatio(Measure):
    """Mean norm ratio of every layer over tokens, with its standard error; tokens whose update is exactly zero are
    excluded.
    """

    name = "norm_ratio"
    units = dict.fromkeys(("mean", "standard_error"), "1")
    sums: Tensor
    counts: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_grouped("sums", setup.num_layers, 2)
        self.add_grouped("counts", setup.num_layers, 2)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        tokens = observation.tokens
        # One layer at a time: faster than the difference of all layers at once, and with less memory.
        ratio = torch.stack([norm_ratio(h_in, h_out) for h_in, h_out in pairwise(tokens)])
        ratio = ratio.double().to(self.sums.device)
        valid = ratio.isfinite()
        by_group = observation.weights_by_group(self.setup).flatten(1).to(ratio.device)  # [N, G * 2]
        self.sums += (ratio.where(valid, 0.0) @ by_group).view(len(ratio), -1, 2).movedim(1, 0)
        self.counts += (valid.double() @ by_group).view(len(ratio), -1, 2).movedim(1, 0)

    def compute(self) -> dict[str, Tensor]:
        """`mean`, `standard_error` and `count`, each `[L, 2]`: layers 1..L; all tokens, and without first tokens."""
        count = self.counts.sum(0)
        error = error_of(ratio_influence(self.sums, self.counts))
        return {"mean": self.sums.sum(0) / count, "standard_error": error, "count": count}

    def influences(self) -> list[Influence]:
        """On the mean of every layer and view."""
        values = ratio_influence(self.sums, self.counts)
        return [
            self.influence("mean" + suffix, values[:, layer, view], layer + 1)
            for layer in range(self.setup.num_layers)
            for view, suffix in enumerate(self.setup.views)
        ]

    def rows(self) -> list[Row]:
        """Two rows for each layer and view; no standard error for fewer than three clusters."""
        values = self.compute()
        return [
            row
            for index in range(self.setup.num_layers)
            for view, suffix in enumerate(self.setup.views)
            for row in self.rows_of(
                {name + suffix: float(values[name][index, view]) for name in ("mean", "standard_error")},
                int(values["count"][index, view]),
                index + 1,
            )
        ]

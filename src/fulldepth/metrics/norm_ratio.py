"""Norm ratio: norm of the residual stream relative to a layer's update (residual dominance)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fulldepth.metrics.base import Measure, Observation, Row, Setup


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
    """Mean norm ratio of every layer over tokens; tokens whose update is exactly zero are excluded."""

    name = "norm_ratio"
    units = dict.fromkeys(("mean",), "1")
    sums: Tensor
    counts: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.add_sum("sums", setup.num_layers, 2)
        self.add_sum("counts", setup.num_layers, 2)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        tokens = observation.tokens
        # One layer at a time: faster than the difference of all layers at once, and with less memory.
        ratio = torch.stack([norm_ratio(h_in, h_out) for h_in, h_out in pairwise(tokens)])
        ratio = ratio.double().to(self.sums.device)
        valid = ratio.isfinite()
        weights = observation.view_weights.to(ratio.device)
        self.sums += ratio.where(valid, 0.0) @ weights
        self.counts += valid.double() @ weights

    def compute(self) -> dict[str, Tensor]:
        """`mean` and `count`, each `[L, 2]`: layers 1..L; all tokens, and without first tokens."""
        return {"mean": self.sums / self.counts, "count": self.counts.clone()}

    def rows(self) -> list[Row]:
        """One row for each layer and view."""
        values = self.compute()
        return [
            self.row("mean" + suffix, mean[view], count[view], layer)
            for layer, (mean, count) in enumerate(zip(values["mean"], values["count"], strict=True), start=1)
            for view, suffix in enumerate(self.setup.views)
        ]

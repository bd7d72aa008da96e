"""Contribution of a layer and of its parts: the update relative to the stream that it is added to."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from fulldepth.metrics.base import Means, Observation, Place, Setup, cosine

PARTS = ("layer", "attention", "mlp")
"""Parts of a layer with an update of their own; the site of their rows."""
STATISTICS = ("relative_norm", "cosine", "stream_cosine")
BRANCHES = {"attention": "attention_branch", "mlp": "mlp_branch"}
"""Part -> site of its update, where that is not a difference of x, x' and y."""
STREAMS = {"attention": "attention_carried", "mlp": "mlp_input"}
"""Part -> site of the stream that such an update is added to; x if it was not captured."""


def contribution(update: Tensor, stream: Tensor) -> tuple[Tensor, Tensor]:
    r"""Norm of an update relative to the stream that it is added to, and its cosine with that stream, per token.

    .. math:: \frac{\|u\|}{\|s\|}, \quad \cos(u, s)

    A negative cosine erases what the stream holds, a positive one strengthens it, and 0 writes into other directions.

    States that are not float64 are read in float32, whose squares hold norms from 1e-16 to 1e18. Beyond, values lose
    digits, and soon they are NaN, 0 or infinite: give such states in float64.

    Args:
        update: what is added, `[..., D]`.
        stream: the state that it is added to, same shape.

    Returns:
        The relative norm, `[...]`, unit 1, in [0, inf]: inf where the stream alone is zero, NaN where both are. The
        cosine, `[...]`, in [-1, 1]: NaN where either is zero.

    Raises:
        ValueError: if the shapes differ.

    Source: Csordás, Manning and Potts 2025, "Do Language Models Use Their Depth Efficiently?", Fig. 2.
    """
    if update.shape != stream.shape:
        raise ValueError(f"update and stream must have one shape, got {tuple(update.shape)} and {tuple(stream.shape)}")
    precision = torch.float64 if stream.dtype == torch.float64 else torch.float32
    update = update.to(precision)
    stream = stream.to(precision)
    norm = torch.linalg.vector_norm(update, dim=-1)
    size = torch.linalg.vector_norm(stream, dim=-1)
    return norm / size, cosine((update * stream).sum(-1), norm, size)


class Contribution(Means):
    """Mean contribution of every layer, of its attention and of its MLP over tokens, with standard errors.

    The update of a layer is `h_l - h_{l-1}`. Where attention and MLP add to the stream as they are, their updates are
    the differences `x' - x` and `y - x'` of the stream, which is what was really added in the precision of the model.
    Where a norm follows the sum (BERT), or where there are several streams, the updates are the outputs of the
    branches, and the streams those that they are added to before the norm. Tokens without a finite value are excluded.

    `stream_cosine` is the cosine of the stream before and after a layer, or before and after its attention (x and x',
    CR-Guided Transformers, Fig. 1a).
    """

    name = "contribution"
    units = dict.fromkeys((*STATISTICS, *(f"standard_error_of_{name}" for name in STATISTICS)), "1")
    sites = ("residual", "attention_input", "attention_output")

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, len(PARTS) * len(STATISTICS) * setup.num_layers, 2)

    def update(self, observation: Observation) -> None:
        """Add one batch; without the states inside the layers, the contributions of whole layers alone."""
        h = observation.tokens  # [L+1, N, D]
        reads_x = not self.setup.chained and "attention_input" in observation.states
        x = observation.features("attention_input") if reads_x else h[:-1]  # [L, N, D]
        values = h.new_full((len(PARTS), len(STATISTICS), *h[1:, :, 0].shape), torch.nan)  # [3, 3, L, N]
        inside = "attention_output" in observation.states
        middle = observation.features("attention_output") if inside else None  # [L, N, D]
        branches = {
            site: observation.features(site)
            for site in (*BRANCHES.values(), *STREAMS.values())
            if site in observation.states
        }
        for layer, (before, after) in enumerate(zip(x, h[1:], strict=True)):
            updates = {"layer": (after - before, before)}
            values[0, 2, layer] = _cosine(before, after)
            if middle is not None:
                values[1, 2, layer] = _cosine(before, middle[layer])
                if BRANCHES["mlp"] in branches:
                    for part, site in BRANCHES.items():
                        stream = branches.get(STREAMS[part], x)
                        updates[part] = branches[site][layer], stream[layer]
                else:
                    updates["attention"] = middle[layer] - before, before
                    updates["mlp"] = after - middle[layer], before if self.setup.parallel else middle[layer]
            for part, pair in updates.items():
                values[PARTS.index(part), :2, layer] = torch.stack(contribution(*pair))
        self.add_tokens(values.flatten(0, 2).double().to(self.sums.device), observation)

    def places(self, counts: Tensor) -> Iterator[Place]:
        """Yield every mean with data: statistics of the parts, by layer, in every view."""
        layers = range(self.setup.num_layers)
        for view, suffix in enumerate(self.setup.views):
            for index, (part, statistic, layer) in enumerate(product(PARTS, STATISTICS, layers)):
                if counts[index, view]:
                    yield Place((index, view), layer + 1, suffix, part, statistic)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    """[N] cosine of two states `[N, D]`."""
    return cosine((x * y).sum(-1), torch.linalg.vector_norm(x, dim=-1), torch.linalg.vector_norm(y, dim=-1))

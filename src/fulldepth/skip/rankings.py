"""Rankings made once, without recomputing after a removal: the baselines that a search is compared with."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import torch
from pydantic import Field, FiniteFloat
from torch.nn import functional

from fulldepth.execution import body_inputs, capture
from fulldepth.execution.flops import Variant
from fulldepth.execution.scoring import BASE, Scorer
from fulldepth.hf import frozen
from fulldepth.hf.scalars import Scalars
from fulldepth.skip.loss_cache import Chunk, LossCache

STREAMS = {"attention": ("attention_carried", "attention_branch"), "mlp": ("mlp_input", "mlp_branch")}
"""Granularity -> the sites of the stream that a branch is added to, and of the branch."""
GATES = {"attention": ("b_att",), "mlp": ("b_mlp",), "layer": ("b_att", "b_mlp")}
"""Granularity -> the factors that switch it off at 0."""


def rank(
    loss_cache: LossCache, search: str, blocks: int, *, seed: int = 0, given: Sequence[int] | None = None
) -> list[int]:
    """The layers that a baseline removes, in its order.

    - `one-shot`: lowest loss when it alone is skipped.
    - `cosine`: block influence, mean over tokens of `1 - cos(x, x + A)` with the branch A (a layer: of its input and
      output); lowest first. Padding does not count. Source: ShortGPT (arXiv 2403.03853), eq. 1, for layers; LLM-Drop
      (arXiv 2406.15786) for attention and MLPs.
    - `groups`: the run of k neighbouring layers with the smallest angular distance between its input x and its output
      y, mean over tokens of `arccos(cos(x, y)) / pi`; from its last layer on. Granularity `layer`. Source: Gromov et
      al. (arXiv 2403.17887), eq. 7, there of the last token of each sequence; all tokens give the same run from fewer
      sequences. ReplaceMe (arXiv 2505.02819) takes the mean of `cos(x, y)` for its choice.
    - `taylor`: first-order change of the mean loss, `|dL/dg|` of a gate g = 1 on the branch (a layer: one gate on both
      its branches), from one backward pass; lowest first. Source: Molchanov et al. 2019 (arXiv 1906.10771), eq. 8.
    - `random`: a seeded permutation. `last`: from the last layer on. `given`: as given.

    Args:
        loss_cache: computes losses; its criterion is the loss of `one-shot`.
        search: one of the names above.
        blocks: k.
        seed: of `random`.
        given: layers of `given`.
    """
    able = list(loss_cache.costs.able)
    if search == "given":
        return list(given or ())
    if search == "last":
        return able[::-1][:blocks]
    if search == "random":
        return random.Random(seed).sample(able, blocks)
    costs = loss_cache.costs
    if search == "one-shot":
        loss_cache.need_everywhere("One-shot", loss_cache.candidates(()))
        scores = {layer: loss_cache.mean(Variant({layer})) for layer in able}
    else:
        run = blocks if search == "groups" else None
        angles = partial(influence, run=run)
        measure, price = (sensitivity, costs.training) if search == "taylor" else (angles, costs.whole)

        def on(chunk: Chunk) -> tuple[list[float], int, float]:
            return measure(loss_cache.scorer, chunk), len(chunk), sum(price(BASE, batch.shape) for batch in chunk)

        loss_cache.begin(search.capitalize(), len(loss_cache.chunks))
        count = costs.num_layers - (run or 1) + 1
        kind = Annotated[list[FiniteFloat], Field(min_length=count, max_length=count)]
        work = {f"{search} {number}": partial(on, chunk) for number, chunk in enumerate(loss_cache.chunks)}
        sums = [sum(column) for column in zip(*loss_cache.task(work, kind), strict=True)]
        loss_cache.finish()
        if run is not None:
            first = min(range(count), key=lambda start: sums[start]) + 1
            return list(range(first + run - 1, first - 1, -1))
        scores = {layer: abs(sums[layer - 1]) for layer in able}
    return sorted(able, key=lambda layer: (scores[layer], layer))[:blocks]


@torch.no_grad()
def influence(scorer: Scorer, chunk: Chunk, run: int | None = None) -> list[float]:
    """Sums over a chunk's tokens of how far a part turns the stream.

    For every layer `1 - cos(x, x + branch)`; with `run`, for every run of that many layers `arccos(cos(x, y)) / pi` of
    its input x and its output y.
    """
    scorer.plain()
    sites, span = STREAMS.get(scorer.granularity, ("residual",)), run or 1
    totals = [0.0] * (scorer.costs.num_layers - span + 1)
    for batch in chunk:
        inputs = batch.to(scorer.device).inputs
        with capture(scorer.anatomy, sites) as activations:
            scorer.anatomy.body(**body_inputs(scorer.anatomy, inputs))
        if scorer.granularity == "layer":
            pairs = list(zip(activations["residual"][:-span], activations["residual"][span:], strict=True))
        else:
            pairs = [(x, x + a) for x, a in zip(*(activations[site] for site in sites), strict=True)]
        for index, (before, after) in enumerate(pairs):
            mask = inputs["attention_mask"].to(before.device).bool()
            after = after.to(before.device)
            cosine = functional.cosine_similarity(before[mask].double(), after[mask].double(), dim=-1).clamp(-1, 1)
            totals[index] += float((1 - cosine if run is None else cosine.arccos() / math.pi).sum())
    return totals


def sensitivity(scorer: Scorer, chunk: Chunk) -> list[float]:
    """For every layer, the gradient of a chunk's summed loss with respect to a gate on the branch."""
    anatomy = scorer.anatomy
    gates = Scalars(anatomy.num_layers, (), scorer.granularity).to(scorer.device)
    factors = [
        [gates.get(layer)[name] for name in GATES[scorer.granularity]] for layer in range(1, anatomy.num_layers + 1)
    ]
    totals = [0.0] * len(factors)
    for batch in chunk:
        batch = batch.to(scorer.device)
        with torch.enable_grad(), frozen(anatomy.model):
            loss = scorer.objective(scorer.states(batch, BASE, gates), batch.targets)
            flat = torch.autograd.grad(loss, [factor for of in factors for factor in of])
        per_layer = torch.stack(flat).double().view(len(factors), -1).sum(1).tolist()
        totals = [total + more for total, more in zip(totals, per_layer, strict=True)]
    scorer.plain()
    return totals

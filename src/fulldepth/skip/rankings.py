"""Rankings made once, without recomputing after a removal: the baselines that a search is compared with."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import torch
from pydantic import Field, FiniteFloat
from torch.nn import functional

from fulldepth.core.errors import FulldepthError
from fulldepth.execution import capture
from fulldepth.execution.flops import Variant
from fulldepth.execution.scoring import BASE, Scorer
from fulldepth.hf import Block, Scalars, frozen
from fulldepth.skip.goal import Goal
from fulldepth.skip.loss_cache import Chunk, LossCache
from fulldepth.skip.plan import picks_of

SITES = {"attention": ("attention_carried", "attention_branch"), "mlp": ("mlp_input", "mlp_branch")} | {
    "layer": ("attention_input", "residual")
}
"""Part -> the sites of the stream that a branch is added to, and of the branch; of a layer, of its input and output."""
GATES = {"attention": ("b_att",), "mlp": ("b_mlp",), "layer": ("b_att", "b_mlp")}
"""Part -> the factors that switch it off at 0."""


def rank_blocks(
    loss_cache: LossCache,
    search: str,
    goal: Goal,
    *,
    seed: int = 0,
    given: Sequence[int | str] | None = None,
    scores: dict[Block, float] | None = None,
) -> list[Variant]:
    """The blocks that a baseline removes, in its order; of granularity `any`, attentions and MLPs in one ranking.

    A block that no search may remove then, as the last attention that sees all tokens, is passed over, unless `given`.

    - `one-shot`: lowest loss when it alone is skipped.
    - `cosine`: block influence, mean over tokens of `1 - cos(x, x + A)` with the branch A (a layer: of its input and
      output); lowest first. Padding does not count. Source: ShortGPT (arXiv 2403.03853), eq. 1, for layers; LLM-Drop
      (arXiv 2406.15786) for attention, for MLPs, and for both in one ranking ("joint layer drop").
    - `groups`: the run of neighbouring layers, just long enough for the goal, with the smallest angular distance of
      its input x and its output y, mean over tokens of `arccos(cos(x, y)) / pi`; from its last layer on. Source: Gromov
      et al. (arXiv 2403.17887), eq. 7, there of the last token of each sequence: all tokens take fewer sequences for
      the same choice. ReplaceMe (arXiv 2505.02819) chooses its layers by the mean of `1 - cos(x, y)` of such a run.
    - `taylor`: first-order change of the mean loss, `|dL/dg|` of a gate g = 1 on the branch (a layer: one gate on both
      its branches), from one backward pass; lowest first. Source: Molchanov et al. 2019 (arXiv 1906.10771), eq. 8.
    - `random`: a seeded permutation. `last`: from the last layer on. `given`: as given.

    Args:
        loss_cache: computes losses; its criterion is the loss of `one-shot`.
        search: one of the names above.
        goal: the ranking is cut where it is reached.
        seed: of `random`.
        given: blocks of `given`, as in `Plan.blocks`.
        scores: receives what `cosine`, `groups` and `taylor` rank by, for every candidate (of `groups` the first layer
            of a run): the mean over tokens, in nats for `taylor`.
    """
    costs = loss_cache.costs
    if search == "given":
        return picks_of(given or (), costs.granularity)
    count = int(goal.needed) if goal.target == "blocks" else len(costs.able)
    if search == "groups":
        ranked = _closest_run(loss_cache, goal, scores)
    else:
        ranked = _ranked(loss_cache, search, count, seed, scores)
    removed = BASE
    picks = list[Variant]()
    for block in ranked:
        if goal.left(removed) and removed | {block} in costs.candidates(removed):
            picks.append(Variant({block}))
            removed |= picks[-1]
    return picks


def _ranked(
    loss_cache: LossCache, search: str, count: int, seed: int, means: dict[Block, float] | None = None
) -> list[Block]:
    """Rank all candidates; the first ones are to be removed. Means over tokens are put into `means`."""
    costs = loss_cache.costs
    removable = list(costs.able)
    if search == "last":
        return removable[::-1]
    if search == "random":
        generator = random.Random(seed)
        drawn = generator.sample(removable, count)
        remaining = [block for block in removable if block not in drawn]
        return drawn + generator.sample(remaining, len(remaining))
    if search == "one-shot":
        loss_cache.need_everywhere("One-shot", [Variant({block}) for block in removable])
        scores = {block: loss_cache.mean(Variant({block})) for block in removable}
    else:
        costly = search == "taylor"
        measure = partial(influence, runs=[[block] for block in removable])
        sums = _summed(loss_cache, search, sensitivity if costly else measure, len(removable), training=costly)
        scores = dict(zip(removable, map(abs, sums), strict=True))
        if means is not None:
            tokens = _tokens(loss_cache, predicted=costly)
            means |= {block: score / tokens for block, score in scores.items()}
    return sorted(removable, key=lambda block: (scores[block], block))


def _tokens(loss_cache: LossCache, *, predicted: bool) -> int:
    """The number of tokens that are not padding, or of those that are predicted."""
    batches = [batch for chunk in loss_cache.chunks for batch in chunk]
    if predicted:
        return sum(len(batch.targets) for batch in batches)
    return sum(int(batch.inputs["attention_mask"].sum()) for batch in batches)


def _closest_run(loss_cache: LossCache, goal: Goal, means: dict[Block, float] | None = None) -> list[Block]:
    """The run of layers that turns the stream least, of those that just reach the goal; its last layer first.

    Means over tokens of the runs' angles are put into `means`, under the first block of each.

    Raises:
        FulldepthError: if none reaches it.
    """
    removable = loss_cache.costs.able
    runs = list[list[Block]]()
    for start in range(len(removable)):
        run: list[Block] = []
        for block in removable[start:]:
            if run and block.layer > run[-1].layer + 1:  # a layer between is kept
                break
            run.append(block)
            if not goal.left(Variant(run)):
                if Variant(run) in loss_cache.costs.candidates(Variant(run[:-1])):
                    runs.append(run)
                break
    if not runs:
        loss_cache.discard()
        raise FulldepthError(
            "No run of neighbouring layers reaches the target. Ask for fewer blocks, a lower speed-up or more bytes."
        )
    angles = _summed(loss_cache, "groups", partial(influence, runs=runs, angles=True), len(runs))
    if means is not None:
        tokens = _tokens(loss_cache, predicted=False)
        means |= {run[0]: angle / tokens for run, angle in zip(runs, angles, strict=True)}
    return runs[angles.index(min(angles))][::-1]


def _summed(
    loss_cache: LossCache,
    search: str,
    measure: Callable[[Scorer, Chunk], list[float]],
    length: int,
    *,
    training: bool = False,
) -> list[float]:
    """Sums over all chunks of the `length` numbers that a function gives for each, as tasks of the loss cache."""
    price = loss_cache.costs.training if training else loss_cache.costs.whole

    def on(chunk: Chunk) -> tuple[list[float], int, float]:
        return measure(loss_cache.scorer, chunk), len(chunk), sum(price(BASE, batch.shape) for batch in chunk)

    loss_cache.begin(search.capitalize(), len(loss_cache.chunks))
    kind = Annotated[list[FiniteFloat], Field(min_length=length, max_length=length)]
    work = {f"{search} {number}": partial(on, chunk) for number, chunk in enumerate(loss_cache.chunks)}
    parts = loss_cache.task(work, kind)
    loss_cache.finish()
    return [sum(sums) for sums in zip(*parts, strict=True)]


@torch.no_grad()
def influence(scorer: Scorer, chunk: Chunk, runs: Sequence[Sequence[Block]], *, angles: bool = False) -> list[float]:
    """Sums over a chunk's tokens: for every run of layers, or single branch, `1 - cos(x, y)` of its ends, or the angle.

    Of a branch A, y is x + A.
    """
    scorer.plain()
    sites = {site for run in runs for site in SITES[run[0].part]}
    totals = [0.0] * len(runs)
    for batch in chunk:
        inputs = batch.to(scorer.device).inputs
        with capture(scorer.anatomy, sorted(sites)) as activations:
            scorer.anatomy.run_body(inputs)
        for index, run in enumerate(runs):
            streams, ends = (activations[site] for site in SITES[run[0].part])
            before = streams[run[0].layer - 1]  # [B, T, D]
            after = ends[run[-1].layer] if run[0].part == "layer" else before + ends[run[0].layer - 1]
            mask = inputs["attention_mask"].to(before.device).bool()
            after = after.to(before.device)
            cosine = functional.cosine_similarity(before[mask].double(), after[mask].double(), dim=-1).clamp(-1, 1)
            totals[index] += float((cosine.arccos() / math.pi if angles else 1 - cosine).sum())
    return totals


def sensitivity(scorer: Scorer, chunk: Chunk) -> list[float]:
    """For every candidate, the gradient of a chunk's summed loss with respect to a gate on the branch."""
    anatomy = scorer.anatomy
    blocks = scorer.costs.able
    gates = Scalars(anatomy.num_layers, (), scorer.granularity).to(scorer.device)
    factors = [[gates.get(layer)[name] for name in GATES[part]] for layer, part in blocks]
    flat = list(dict.fromkeys(factor for of in factors for factor in of))
    totals = [0.0] * len(blocks)
    for batch in chunk:
        batch = batch.to(scorer.device)
        with torch.enable_grad(), frozen(anatomy.model):
            loss = scorer.objective(scorer.states(batch, BASE, gates), batch.targets)
            gradients = dict(zip(flat, torch.autograd.grad(loss, flat), strict=True))
        derivatives = [sum(float(gradients[factor]) for factor in of) for of in factors]
        totals = [total + more for total, more in zip(totals, derivatives, strict=True)]
    scorer.plain()
    return totals

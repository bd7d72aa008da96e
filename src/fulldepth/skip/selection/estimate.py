"""Upper bounds of the cost of a search, computed before it starts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from fulldepth.distributed import Processes
from fulldepth.errors import FulldepthError
from fulldepth.execution.flops import Costs, Shape
from fulldepth.execution.scoring import BASE, DIVERGENCE, SCALED, Batch, Scorer
from fulldepth.settings.search import SearchSettings, parse_budget
from fulldepth.skip.selection.elimination import round_flops, whole_flops
from fulldepth.skip.selection.fit import epoch_flops, fit_options
from fulldepth.skip.selection.loss_cache import Refit
from fulldepth.skip.selection.problem import SearchProblem


@dataclass(frozen=True)
class Estimate:
    """Upper bounds of the cost of a search and its fits. Greedy searches usually cost far less."""

    forwards: int
    """Variants times batches; a partly shared variant counts fully."""
    flops: float
    """Of the search."""
    fit_flops: float
    """Of training the scalars, with all epochs."""
    plain_forwards: int
    """`forwards` of the loop that runs the model for every candidate of every round."""
    plain_flops: float
    seconds: float
    """Of search and fits, at the pace of one timed batch."""
    pace: float
    """FLOPs per second of that batch."""

    @property
    def sentence(self) -> str:
        """The estimate as a message."""
        return (
            f"At most {self.forwards:,} forward passes of a batch and {self.flops:.3g} FLOPs to search "
            f"({self.flops / self.plain_flops:.0%} of the plain loop's {self.plain_flops:.3g}), {self.fit_flops:.3g} "
            f"to fit scalars; {_time(self.seconds)} at the pace of a first batch."
        )


def estimate_search(problem: SearchProblem, process: Processes) -> Estimate:
    """Bounds computed from shapes, and the measured pace of a batch; equal in all processes.

    Args:
        problem: the search problem.
        process: this process.
    """
    costs, settings, batches = problem.scorer.costs, problem.settings, problem.batches
    shapes = [batch.shape for batch in batches]
    pace = process.agree(_pace(problem.scorer, batches[0]))
    forwards, flops = _search(costs, shapes, settings, problem.blocks, problem.refit)
    limit = budget_of(settings, pace * process.world)
    if settings.search == "greedy" and limit is not None:
        flops = min(flops, limit)
    fits = 0.0
    if settings.fit:
        options = fit_options(settings)
        _, epoch = epoch_flops(costs, BASE, problem.examples.train, options)
        again = sum(costs.whole(BASE, shape) for shape in shapes) * (1 + options.kl)
        fits = 2 * (options.epochs * (epoch + again) + again)
    return Estimate(
        forwards=forwards,
        flops=flops,
        fit_flops=fits,
        plain_forwards=plain_forwards(costs, problem.blocks) * len(shapes),
        plain_flops=plain_flops(costs, costs.able[: problem.blocks], shapes),
        seconds=(flops / process.world + fits / min(process.world, 2)) / pace,
        pace=pace,
    )


def _pace(scorer: Scorer, batch: Batch) -> float:
    """FLOPs per second of a batch, measured in its second run."""
    for _ in range(2):
        start = time.perf_counter()
        scorer.sums(batch, [BASE])
        seconds = time.perf_counter() - start
    return scorer.costs.whole(BASE, batch.shape) / max(seconds, 1e-9)


def plain_flops(costs: Costs, picks: Sequence[int], shapes: Sequence[Shape]) -> float:
    """FLOPs of the loop that runs the model once for every candidate of every round, and once unmodified.

    Args:
        costs: of the model.
        picks: layers in the order of their removal; the plain loop does not compute skipped blocks either.
        shapes: of all batches.
    """
    variants = [BASE, *(v for number in range(len(picks)) for v in costs.candidates(picks[:number]))]
    return sum(costs.whole(variant, shape, every_position=True) for shape in shapes for variant in variants)


def plain_forwards(costs: Costs, rounds: int) -> int:
    """Passes over the data in the plain loop: 1 + L + (L - 1) + ... ."""
    return 1 + sum(len(costs.able) - number for number in range(rounds))


def budget_of(settings: SearchSettings, pace: float) -> float | None:
    """FLOPs that the search may spend, at `pace` FLOPs per second if the budget is a time; None = no bound."""
    flops, seconds = parse_budget(settings.budget)
    return flops if seconds is None else seconds * pace


def check_budget(problem: SearchProblem, expected: Estimate, budget: float | None) -> None:
    """Refuse a search that exceeds its budget.

    Raises:
        FulldepthError: with the FLOPs that it needs.
    """
    needs, greedy = expected.flops, problem.settings.search == "greedy"
    if greedy:
        costs, criterion = problem.scorer.costs, problem.settings.criterion
        rounds = problem.blocks * round_flops(costs, problem.chunks, criterion, problem.refit)
        needs = whole_flops(costs, problem.chunks) + rounds
    if budget is not None and needs > budget:
        hint = "" if greedy else ", or --search greedy, which ends rounds early"
        raise FulldepthError(
            f"The search needs up to {needs:.3g} FLOPs ({_time(needs / expected.pace)}), the budget is {budget:.3g}. "
            f"Give it more, fewer blocks or less data{hint}."
        )


def _search(
    costs: Costs, shapes: Sequence[Shape], settings: SearchSettings, blocks: int, refit: Refit | None
) -> tuple[int, float]:
    """Upper bounds of forward passes and FLOPs, including the plan's losses."""
    whole = sum(costs.whole(BASE, shape) for shape in shapes)
    forwards, flops = (blocks + 1) * len(shapes), (blocks + 1) * whole
    if settings.search in ("random", "last", "given"):
        return forwards, flops
    if settings.search in ("cosine", "taylor"):
        each = costs.training if settings.search == "taylor" else costs.whole
        return forwards + len(shapes), flops + sum(each(BASE, shape) for shape in shapes)
    rounds = range(blocks) if settings.search in ("greedy", "exact") else range(1)
    passes = sum(len(costs.able) - number for number in rounds)
    forwards += passes * len(shapes)
    if settings.criterion == SCALED and refit is not None:
        return forwards + passes * refit.forwards, flops + passes * (whole + refit.flops)
    base = [BASE] if settings.criterion == DIVERGENCE else []
    orders = (costs.able[:blocks], costs.able[::-1][:blocks])  # blocks that go first or last cost the most
    return forwards, flops + max(
        sum(costs.shared([*costs.candidates(order[:number]), *base], shape) for number in rounds for shape in shapes)
        for order in orders
    )


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"

"""`curve`: the loss after each number of removed blocks, and its break point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats
from transformers import PreTrainedModel

from fulldepth.core.distributed import Processes, processes
from fulldepth.core.number_format import in_percent, plus_minus
from fulldepth.core.progress import Watcher
from fulldepth.data.examples import units
from fulldepth.execution.heldout import HeldoutLosses
from fulldepth.execution.scoring import BASE, predicted
from fulldepth.results import Finding, Results, finite, provenance, stacked, tabulate
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.search import CurveSettings
from fulldepth.skip.elimination import chain
from fulldepth.skip.plan import Plan
from fulldepth.skip.problem import SearchProblem, prepared
from fulldepth.skip.search import check_folder, search_with

MEASURES = {"loss": (0.0, math.inf, "nats"), "kl": (0.0, math.inf, "nats"), "greedy_agreement": (0.0, 1.0, "1")}
"""Measure at every number of removed blocks -> its smallest and largest possible value, and its unit."""
KIND = "curve"
ROUNDING = 1e-12
"""Departures from the line below this share of the losses count as rounding."""
FEWEST = 5
"""Fewest documents from which a spread is estimated."""
FEWEST_POINTS = 4
"""Fewest points of a curve, with that of 0 removed blocks, of which one is compared with a line through others."""
LEVEL = 0.05
"""Probability that a straight line is found to end anywhere."""
KINK_LEVEL = 0.01
"""Probability that a turn of exactly `SHARPNESS` times those before counts as a kink; small, because the point was
selected for being above the line."""
SHARPNESS = 4.0
"""Smallest ratio of the turn at a kink to the mean of the turns before it. Parabolas reach 1, cubics 2, n^4 and
exponentials that double with every block less than 4."""
TURNS = 3
"""Most turns before a kink that it is compared with."""


class Curve(NamedTuple):
    """Result of `curve`."""

    plan: Plan
    """Plan with all removed blocks of the curve."""
    results: Results


@takes_settings(CurveSettings)
def curve(
    model: str | Path | PreTrainedModel,
    data: Any,
    *,
    settings: CurveSettings,
    watcher: Watcher,
    output: str | Path | None = None,
    tokenizer: Any = None,
    heldout: Any = None,
    resume: bool = False,
) -> Curve:
    """Remove blocks one after another, and measure the held-out loss after each removal.

    One search gives the order. Then, for every number of removed blocks (column `removed`; `layer` is the one removed
    last), without scalars, over all labelled tokens: `loss`; `kl`, KL(unmodified || modified); `greedy_agreement`, the
    share of tokens whose likeliest next token is the unmodified model's (for pairs: of the response's tokens, given
    those before). Statistics are `mean`, `low` and `high` (95 % interval over documents, by Student's t; missing for
    fewer than 5 documents). `loss_added` is paired. `break_point`: see `find_breakpoint`; without one its row is
    missing.

    Args:
        model: checkpoint folder, Hub name, or a loaded model (restored on return).
        data: as for `search`.
        settings: fields of `CurveSettings` as keywords, or an instance.
        watcher: receives progress.
        output: folder for `plan.json` (with all blocks) and the results; None = not saved.
        tokenizer: as for `search`.
        heldout: as for `search`.
        resume: continue an interrupted curve.

    Returns:
        The plan with all removed blocks, and the results.

    Raises:
        FulldepthError: as `search`.
    """
    with processes() as process, process.holding(output):
        if output is not None:
            process.first(partial(check_folder, Path(output), KIND, resume))
        with prepared(model, data, settings, process, tokenizer=tokenizer, heldout=heldout) as problem:
            if (removable := len(problem.scorer.costs.able)) < settings.blocks:
                watcher.say(
                    f"The model has {removable} blocks: the curve ends there, not at --blocks {settings.blocks}."
                )
            plan = search_with(problem, process, watcher, output=output, resume=resume)
            read = _read(problem, plan, process, watcher)
        sums = read["loss"].sums
        tokens = read["loss"].tokens
        documents = read["loss"].documents
        losses = np.stack([*sums.values()], axis=1) / tokens[:, None]
        end = find_breakpoint(losses, tokens, documents, plan.counts, seed=settings.seed)
        table = _table(plan, read, end)
        document = {
            **provenance(KIND, settings.model_dump(), seed=settings.seed),
            **plan.about(problem.scorer.anatomy),
            "break_point": asdict(end),
            "warnings": plan.data.get("warnings", []),
            "headline": _headline(plan, end, table),
        }
        results = Results(table, dict(finite(document)))
        if output is not None and process.is_main:
            results.save(output, watcher=watcher)
        process.wait()
    return Curve(plan, results)


@torch.no_grad()
def _read(problem: SearchProblem, plan: Plan, process: Processes, watcher: Watcher) -> dict[str, HeldoutLosses]:
    """Each of `MEASURES` of every held-out sequence with labels, by the number of removed blocks as text.

    Processes share the batches.
    """
    scorer = problem.scorer
    batches = problem.batches
    variants = chain(plan.picks)
    sums: dict[int, list[dict[str, list[float]]]] = {}
    watcher.begin("Curve", len(batches) * len(variants))
    for number, batch in enumerate(batches):
        if number % process.world == process.rank:
            placed = batch.to(scorer.device)
            base = scorer.states(placed, BASE)
            states = (scorer.states(placed, variant) for variant in variants)
            sums[number] = [
                scorer.state_sums(state, placed, [*MEASURES], predicted(scorer.classifier, base)) for state in states
            ]
            scorer.plain()
        watcher.advance(len(variants))
    parts = {number: part for share in process.gather(sums) for number, part in share.items()}
    readings = {}
    for name in MEASURES:
        by_removed = {
            str(removed): [value for number in range(len(batches)) for value in parts[number][step][name]]
            for step, removed in enumerate(plan.counts)
        }
        readings[name] = HeldoutLosses.of_batches(by_removed, batches).counted
    return readings


def _table(plan: Plan, read: Mapping[str, HeldoutLosses], end: Breakpoint) -> pd.DataFrame:
    """Rows with the column `removed`."""
    count = len(read["loss"].tokens)
    tokens = read["loss"].count
    tables = []
    layers = [None, *(min(pick).layer for pick in plan.picks)]
    for number, layer in zip(plan.counts, layers, strict=True):
        label = str(number)
        rows = list[tuple[Any, ...]]()
        means = {name: losses.of(label) for name, losses in read.items()}
        for name, mean in {**means, "loss_added": read["loss"].added(label)}.items():
            lowest, highest, unit = MEASURES.get(name, (-math.inf, math.inf, "nats"))
            statistics = {"mean": mean.mean}
            if mean.documents >= FEWEST:
                reach = mean.quantile() * mean.standard_error
                statistics |= {"low": max(mean.mean - reach, lowest), "high": min(mean.mean + reach, highest)}
            for statistic, value in statistics.items():
                rows.append((name, "model", layer, None, statistic, value, tokens, unit))
        tables.append(tabulate(rows, removed=number))
    if end.blocks is not None:
        answer = {"value": end.blocks, "low": end.low, "high": end.high}
        rows = [
            ("break_point", "model", None, None, name, value, count, "layers")
            for name, value in answer.items()
            if value is not None
        ]
        tables.append(tabulate(rows, removed=end.blocks))
    return stacked(tables, removed="Int64")


def _headline(plan: Plan, end: Breakpoint, table: pd.DataFrame) -> dict[str, Finding]:
    """Findings: the break point, and the loss that all removed blocks add."""
    count = plan.counts[-1]
    kind = plan.granularity
    part = "layer" if kind == "layer" else f"{kind} block".removeprefix("any ")
    removed = f"{count} removed {part}{'s' * (count > 1)}"
    rows = table[(table.measure == "loss_added") & (table.removed == count)].set_index("statistic")["value"]
    held = units(plan.data)
    too_few = f"too few held-out {held} ({end.documents}, where {FEWEST} are needed)"
    interval = f"95 %: {rows['low']:.4f} to {rows['high']:.4f}" if "low" in rows else f"no interval: {too_few}"
    excess = f"{end.excess:+.4f} {plus_minus(end.excess_error, 4)}".rstrip()
    leaves = f"The loss leaves a straight line after {end.straight_until} removed {part}s, by {excess} nats"
    if end.confidence is None:
        shape = f"No break point is stated: {too_few}."
    elif len(plan.counts) < FEWEST_POINTS:
        shape = f"No break point is stated: a line is fitted to 2 removals, and tested by a third ({removed})."
    elif end.blocks is not None:
        sure = f"{in_percent(end.confidence)} of resamples agree; 95 % of the break points are {end.low} to {end.high}"
        shape = f"Break point: {end.blocks} blocks. {leaves} ({sure})."
    elif end.straight_until == count:
        shape = f"No break point: the loss is a straight line up to {removed} ({end.documents} {held})."
    else:
        shape = f"No break point: {in_percent(end.confidence)} of resamples agree. {leaves}, without a kink."
    cost = f"{removed} add{'s' * (count == 1)} {rows['mean']:.4f} nats to the held-out loss ({interval}), not healed."
    return {
        "break_point": Finding(end.blocks, "layers", shape),
        "loss_added": Finding(float(rows["mean"]), "nats", cost),
    }


@dataclass(frozen=True)
class Breakpoint:
    """The straight first part of a curve, and whether it ends in a kink."""

    blocks: int | None
    """The last number of removed blocks before the kink; None where there is none."""
    straight_until: int
    """The last number of removed blocks on the line; all of them for fewer than `FEWEST` documents."""
    excess: float
    """Nats by which the next point lies above the line; 0 for a line to the end."""
    excess_error: float | None
    """Standard error of `excess` over documents; None for fewer than `FEWEST`."""
    confidence: float | None
    """Share of resamples with the same `blocks`; None for fewer than `FEWEST` documents."""
    low: int | None
    high: int | None
    """Upper end of the 95 % interval of the break points of resamples that have one; `low` is the lower end."""
    documents: int


def find_breakpoint(
    losses: Any, weights: Any, documents: Any = None, removed: Any = None, *, resamples: int = 1000, seed: int = 0
) -> Breakpoint:
    r"""The break point of a curve, from the losses of single sequences.

    For k = 2, 3, ... a line is fitted to the mean losses of 0..k removed blocks by least squares, and continued to
    k + 1. The first point outside the band ends the straight part:

    .. math:: e_k = f(k + 1) - \hat f_{0..k}(k + 1), \qquad |e_k| > t_{\nu}(\alpha_k / 2) \, SE(e_k), \qquad
        \alpha_k = \frac{6 \cdot 0.05}{\pi^2 (k - 1)^2}

    Sequences of one document are correlated, so they are summed: the standard error is that of the weighted mean of
    :math:`e_k` over D documents, with :math:`\nu = (\sum_d w_d)^2 / \sum_d w_d^2 - 1` degrees of freedom, which is
    D - 1 for documents of equal weight. The levels add up to 0.05. The end k is a break point if the point lies above
    the line and the curve has a kink: the turn :math:`D_k = f(k+1) - 2 f(k) + f(k-1)` exceeds 4 times the mean of the
    (at most 3) turns before it, with 99 % confidence. Where a step removes more than one block, D is the change of
    slope over the mean of both steps. A parabola or an exponential also leaves its first line, but without a kink.
    Points beyond k + 1 have no influence. Two points are always on a line, so that k is at least 2.

    The confidence is estimated by bootstrap over documents. Fewer than 5 documents give no band and no break point.

    Args:
        losses: [N, K + 1] mean loss of each held-out sequence with 0..K removed blocks, finite.
        weights: [N] tokens that count in each, above 0.
        documents: [N] label of the document of each; None = each its own.
        removed: [K + 1] ascending numbers of removed blocks; None = 0..K.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Source: Hopscotch (arXiv 2506.03303), break point; Efron 1979 (bootstrap). The test is our own: the paper reads the
    break point off the curve.
    """
    curves = np.asarray(losses, np.float64)
    tokens = np.asarray(weights, np.float64)
    assert curves.ndim == 2 and tokens.shape == curves.shape[:1], "N x K losses, N weights"  # noqa: PT018
    assert np.isfinite(curves).all() and (tokens > 0).all()  # noqa: PT018
    at = np.unique(np.arange(len(curves)) if documents is None else np.asarray(documents), return_inverse=True)[1]
    total = np.bincount(at.reshape(-1), tokens)  # [D]
    sums = [np.bincount(at.reshape(-1), tokens * column) for column in curves.T]
    means = np.stack(sums, axis=1) / total[:, None]  # [D, K + 1]
    count = len(total)
    blocks = np.arange(curves.shape[1]) if removed is None else np.asarray(removed)  # [K + 1]
    if count < FEWEST:
        return Breakpoint(None, int(blocks[-1]), 0.0, None, None, None, None, count)
    draws = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=resamples)
    last, kink = _ends(means, blocks, total, np.concatenate([np.ones((1, count)), draws]))
    answers = np.where(kink, blocks[last], 0)  # [1 + resamples], 0 = none
    breaks = answers[1:][answers[1:] > 0]
    low, high = np.quantile(breaks, (0.025, 0.975), method="nearest").tolist() if len(breaks) else (None, None)
    end = int(last[0])
    off_line = _excess(means, blocks, end) if end < means.shape[1] - 1 else np.zeros(count)
    excess, error = _weighted(off_line, total[None])
    confidence = float((answers[1:] == answers[0]).mean())
    kink_at = int(answers[0]) or None
    return Breakpoint(kink_at, int(blocks[end]), float(excess[0]), float(error[0]), confidence, low, high, count)


def _ends(
    curves: np.ndarray, blocks: np.ndarray, tokens: np.ndarray, times: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """For each of M weightings of the documents `[M, D]`: the last point on the line (K for a line to the end), and
    whether the line ends in a kink upwards.
    """
    weights = times * tokens
    last_point = curves.shape[1] - 1
    ends = np.full(len(weights), last_point)
    kinks = np.zeros(len(weights), bool)
    rounding = float(np.abs(curves).max()) * ROUNDING
    degrees = float(tokens.sum() ** 2 / (tokens**2).sum()) - 1
    slopes = np.diff(curves, axis=1) / np.diff(blocks)  # [D, K]
    all_turns = np.diff(slopes, axis=1) * 2 / (blocks[2:] - blocks[:-2])  # [D, K - 1], at points 1..K - 1
    for last in range(2, last_point):
        mean, error = _weighted(_excess(curves, blocks, last), weights)
        level = LEVEL * 6 / (math.pi * (last - 1)) ** 2
        outside = np.abs(mean) > np.maximum(stats.t.isf(level / 2, degrees) * error, rounding)
        turns = all_turns[:, :last]
        turn, turn_error = _weighted(turns[:, -1] - SHARPNESS * turns[:, -1 - TURNS : -1].mean(1), weights)
        sharp = turn > np.maximum(stats.t.isf(KINK_LEVEL, degrees) * turn_error, rounding)
        ended = outside & (ends == last_point)
        ends[ended] = last
        kinks[ended] = (sharp & (mean > 0))[ended]
    return ends, kinks


def _excess(curves: np.ndarray, blocks: np.ndarray, last: int) -> np.ndarray:
    """[D] for each curve, point last + 1 minus the least-squares line through points 0..last."""
    middle = blocks[: last + 1].mean()
    numbers = blocks[: last + 1] - middle
    slopes = curves[:, : last + 1] @ numbers / (numbers @ numbers)
    excess: np.ndarray = curves[:, last + 1] - curves[:, : last + 1].mean(1) - slopes * (blocks[last + 1] - middle)
    return excess


def _weighted(values: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[M] weighted means of `[D]` values, and their standard errors, taking values as independent."""
    total = weights.sum(1)
    means = weights @ values / total
    squares = (weights**2 * (values - means[:, None]) ** 2).sum(1)
    return means, np.sqrt(squares * len(values) / max(len(values) - 1, 1)) / total

"""`curve`: the loss after each number of removed blocks, and its break point."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from fulldepth.distributed import Processes, processes
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.execution.language_model import check_task
from fulldepth.execution.scoring import BASE
from fulldepth.hf import GRANULARITIES
from fulldepth.progress import Watcher
from fulldepth.results import DOCUMENT, Finding, Results, finite, provenance, tabulate
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.search import CurveSettings
from fulldepth.skip.assessment.breakpoint import FEWEST, Breakpoint, find_breakpoint
from fulldepth.skip.assessment.compared import HeldoutLosses, losses_of
from fulldepth.skip.plan import Plan
from fulldepth.skip.selection.elimination import chain
from fulldepth.skip.selection.outcome import joined
from fulldepth.skip.selection.problem import SearchProblem, open_for, prepared
from fulldepth.skip.selection.search import search_with
from fulldepth.uncertainty import quantile, ratio_error

MEASURES = {"loss": (0.0, math.inf, "nats"), "kl": (0.0, math.inf, "nats"), "greedy_agreement": (0.0, 1.0, "1")}
"""Measure at every number of removed blocks -> its smallest and largest possible value, and its unit."""
KIND = "curve"


class Curve(NamedTuple):
    """Result of `curve`."""

    plan: Plan
    """Plan with all removed blocks of the curve."""
    results: Results

    def plan_of(self, number: int) -> Plan:
        """The plan that removes the first `number` blocks, without scalars unless these are all blocks.

        Raises:
            FulldepthError: if the curve has fewer blocks.
        """
        if not 1 <= number <= len(self.plan.blocks):
            raise FulldepthError(f"The curve has plans of 1 to {len(self.plan.blocks)} blocks, got {number}.")
        if number == len(self.plan.blocks):
            return self.plan
        return self.plan.changed(
            blocks=self.plan.blocks[:number],
            losses=self.plan.losses[: number + 1],
            healed_loss=None,
            control_loss=None,
            scalars={},
        )


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

    Raises:
        FulldepthError: as `search`.
    """
    with processes() as process, process.holding(output):
        process.first(partial(_check_folder, output, resume))
        owner = open_for(model, settings, process).model
        if settings.search == "given":
            settings = settings.model_copy(update={"blocks": len(settings.given or ())})
        else:
            anatomy = check_task(find_anatomy(owner))
            whole = settings.granularity == GRANULARITIES[-1]
            most = anatomy.num_layers if whole else len(anatomy.layers_with(settings.granularity)) or settings.blocks
            if most < settings.blocks:
                watcher.say(f"The model has {most} blocks: the curve ends there, not at blocks = {settings.blocks}.")
                settings = settings.model_copy(update={"blocks": most})
        with prepared(owner, data, settings, process, tokenizer=tokenizer, heldout=heldout) as problem:
            plan = search_with(problem, process, watcher, output=output, resume=resume)
            read = _read(problem, plan.blocks, process, watcher)
        losses = read.sums["loss"] / read.tokens[:, None]
        end = find_breakpoint(losses, read.tokens, read.documents, seed=settings.seed)
        table = _table(plan, read, end)
        document = {
            **provenance(KIND, settings.model_dump(), seed=settings.seed),
            "model": {**plan.document()["model"], "num_layers": problem.scorer.costs.num_layers},
            "data": plan.data,
            "plan": plan.document(),
            "break_point": asdict(end),
            "warnings": plan.warnings,
            "headline": _headline(plan, end, table),
        }
        results = Results(table, dict(finite(document)))
        if output is not None and process.is_main:
            results.save(output)
        process.wait()
    return Curve(plan, results)


def _check_folder(output: str | Path | None, resume: bool) -> None:
    """Refuse a folder with results, unless they are a curve to resume."""
    if output is None:
        return
    folder = Path(output)
    if (folder / DOCUMENT).exists() and not (resume and Results.load(folder).meta.get("kind") == KIND):
        raise FulldepthError(f"{folder} already holds results. Choose another output folder.")


@torch.no_grad()
def _read(problem: SearchProblem, blocks: Sequence[int], process: Processes, watcher: Watcher) -> HeldoutLosses:
    """The `MEASURES`, `[N, K + 1]` each, of every held-out sequence with labels at every number of removed blocks."""
    scorer, batches, variants = problem.scorer, problem.batches, chain(blocks)
    sums: dict[int, list[dict[str, list[float]]]] = {}
    watcher.begin("Curve", len(batches) * len(variants))
    for number, batch in enumerate(batches):
        if number % process.world == process.rank:  # processes share the batches
            placed = batch.to(scorer.device)
            base = scorer.states(placed, BASE)
            states = (scorer.states(placed, variant) for variant in variants)
            sums[number] = [scorer.state_sums(state, placed, base, tuple(MEASURES)) for state in states]
            scorer.plain()
        watcher.advance(len(variants))
    parts = {number: part for share in process.gather(sums) for number, part in share.items()}
    columns = {
        name: np.concatenate([np.array([of[name] for of in parts[number]]).T for number in range(len(batches))])
        for name in MEASURES
    }
    read = losses_of(columns, batches)
    counts = read.tokens > 0
    columns = {name: values[counts] for name, values in columns.items()}
    return HeldoutLosses(columns, read.tokens[counts], read.documents[counts])


def _table(plan: Plan, read: HeldoutLosses, end: Breakpoint) -> pd.DataFrame:
    """Rows with the column `removed`."""
    documents, at = np.unique(read.documents, return_inverse=True)
    owns = (np.arange(len(documents))[:, None] == at).astype(np.float64)  # [D, N]
    count, tokens, per_document = len(read.tokens), int(read.tokens.sum()), owns @ read.tokens[:, None]
    sums = {name: owns @ values for name, values in read.sums.items()}  # [D, K + 1]
    sums["loss_added"] = sums["loss"] - sums["loss"][:, :1]
    reach = quantile(len(documents)) if len(documents) >= FEWEST else math.nan
    tables = []
    for number, layer in enumerate([None, *plan.blocks]):
        rows: list[tuple[Any, ...]] = []
        for name, values in sums.items():
            lowest, highest, unit = MEASURES.get(name, (-math.inf, math.inf, "nats"))
            mean = values[:, number].sum() / tokens
            error = reach * ratio_error(values[:, number], per_document[:, 0])
            statistics = {"mean": mean, "low": max(mean - error, lowest), "high": min(mean + error, highest)}
            for statistic, value in statistics.items():
                if statistic == "mean" or math.isfinite(error):
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
    return joined(tables, removed="Int64")


def _headline(plan: Plan, end: Breakpoint, table: pd.DataFrame) -> dict[str, Finding]:
    """Findings: the break point, and the loss that all removed blocks add."""
    count, kind = len(plan.blocks), plan.granularity
    part = "layers" if kind == "layer" else f"{kind} blocks"
    rows = table[(table.measure == "loss_added") & (table.removed == count)].set_index("statistic")["value"]
    few = f"{end.documents} held-out documents, and at least {FEWEST} are needed"
    interval = f"95 %: {rows['low']:.4f} to {rows['high']:.4f}" if "low" in rows else f"no interval: {few}"
    error = "" if end.excess_error is None else f" ± {end.excess_error:.4f}"
    leaves = (
        f"The loss leaves a straight line after {end.straight_until} removed {part}, by {end.excess:+.4f}{error} nats"
    )
    if end.confidence is None:
        shape = f"No break point is stated: {few}."
    elif end.blocks is not None:
        sure = f"{end.confidence:.0%} of resamples agree; 95 % of the break points are {end.low} to {end.high}"
        shape = f"Break point: {end.blocks} blocks. {leaves} ({sure})."
    elif end.straight_until == count:
        shape = f"No break point: the loss is a straight line up to {count} removed {part} ({end.documents} documents)."
    else:
        shape = f"No break point: {end.confidence:.0%} of resamples agree. {leaves}, without a kink."
    cost = f"{count} removed {part} add {rows['mean']:.4f} nats to the held-out loss ({interval}), not healed."
    return {
        "break_point": Finding(end.blocks, "layers", shape),
        "loss_added": Finding(float(rows["mean"]), "nats", cost),
    }

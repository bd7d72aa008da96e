"""`outcome`: a plan as a result folder, with an analysis of the modified model's states.

Rows, with the columns `removed` (blocks) and `state` (`original`, `skipped`, `healed`, `scalars_only`): `loss` after
every removal, healed, and of the control; the `scalar`s `b` and `s` of `attention` and `mlp`; `mmd` of every layer to
the original, without and with the scalars; `spectral_norm` of the original's projections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from transformers import PreTrainedModel

from fulldepth.distributed import Processes
from fulldepth.errors import FulldepthError
from fulldepth.execution.flops import Variant
from fulldepth.hf.scalars import FACTORS
from fulldepth.progress import Watcher
from fulldepth.results import DOCUMENT, Results, finite, provenance, tabulate
from fulldepth.settings import layer as layered
from fulldepth.settings.search import PLACES, SearchSettings
from fulldepth.skip.assessment.analysis import RESERVOIR_TOKENS, discrepancies, spectral_norms
from fulldepth.skip.assessment.outcome_headline import headline
from fulldepth.skip.assessment.tables import joined
from fulldepth.skip.plan import Plan, plan_scalars
from fulldepth.skip.scored_batches import make_batches
from fulldepth.skip.selection.problem import SearchProblem, open_for, prepared
from fulldepth.skip.summary import stopped_rounds

KIND = "skip"


def analyse(
    model: str | Path | PreTrainedModel,
    plan: Plan,
    data: Any,
    *,
    output: str | Path | None = None,
    tokenizer: Any = None,
    heldout: Any = None,
    reservoir_tokens: int = RESERVOIR_TOKENS,
    watcher: Watcher | None = None,
    **options: Any,
) -> Results:
    """The results of an existing plan, as `fulldepth skip search` saves them beside `plan.json`.

    Args:
        model: the checkpoint that the plan was made for, or the loaded model (restored on return).
        plan: the plan to analyse.
        data: as for `search`; the data of the search give the same held-out tokens.
        output: result folder; None = not saved.
        tokenizer: as for `search`.
        heldout: as for `search`.
        reservoir_tokens: most tokens that the discrepancy (MMD) is computed from.
        watcher: receives progress.
        **options: fields of `SearchSettings` that replace the plan's.

    Raises:
        FulldepthError: if the plan is for another model, or the folder holds other results.
    """
    if output is not None and (Path(output) / DOCUMENT).exists():
        raise FulldepthError(f"{output} already holds results. Choose another output folder.")
    settings, process = settings_of(plan, options), Processes()
    owner = open_for(model, settings, process).model
    plan.check_model(owner)
    opened = {"tokenizer": tokenizer, "heldout": heldout, "hashed": plan.model.hash}  # as just checked
    with prepared(owner, data, settings, process, **opened) as problem:
        results = outcome(plan, problem, reservoir_tokens=reservoir_tokens, watcher=watcher)
    if output is not None:
        results.save(output)
    return results


def settings_of(plan: Plan, options: Mapping[str, Any]) -> SearchSettings:
    """The settings recorded in a plan, updated with `options`.

    Settings of the machine and of permissions (`PLACES`: `trust_remote_code`, the tokenizer, ...) are never taken from
    the plan.
    """
    noted = plan.cost.get("settings")
    stored = noted if isinstance(noted, dict) else {}
    settings = {name: value for name, value in stored.items() if value is not None and name not in PLACES}
    if settings.get("given") is None:
        settings["blocks"] = len(plan.blocks)
    return layered(SearchSettings, {"granularity": plan.granularity, **settings}, dict(options))


def outcome(
    plan: Plan, problem: SearchProblem, *, reservoir_tokens: int = RESERVOIR_TOKENS, watcher: Watcher | None = None
) -> Results:
    """A plan as results, with the analysis of the model that it modifies.

    Args:
        plan: the plan.
        problem: its model, with the held-out data that it was scored with.
        reservoir_tokens: most tokens that the discrepancy (MMD) is computed from.
        watcher: receives progress after every batch.
    """
    watcher, scorer = watcher or Watcher(), problem.scorer
    batches = make_batches(problem.examples.heldout, problem.settings.batch_size)
    scalars = plan_scalars(plan, scorer.anatomy)
    states = {"skipped": None, **({} if scalars is None else {"healed": scalars})}
    watcher.begin("Analysis", len(states) * len(batches))
    norms, unreadable = spectral_norms(scorer.switches)
    count, tokens = len(plan.blocks), sum(example.predicted for example in problem.examples.heldout)
    tables = [*_losses(plan, tokens), *_factors(plan)]
    for state, factors in states.items():
        rows = discrepancies(
            scorer.switches,
            batches,
            Variant(plan.blocks),
            factors,
            reservoir_tokens=reservoir_tokens,
            seed=problem.settings.seed,
            watcher=watcher,
        )
        tables.append(tabulate(rows, removed=count, state=state))
    tables.append(tabulate(norms, removed=None, state="original"))
    table = joined(tables, removed="Int64", state="str")
    return Results(table, _document(plan, problem, table, unreadable))


def _losses(plan: Plan, tokens: int) -> Iterator[pd.DataFrame]:
    """The loss after every removal, healed, and of the control."""

    def row(layer: int | None, value: float) -> list[Any]:
        return [("loss", "model", layer, None, "mean", value, tokens, "nats")]

    for removed, (layer, loss) in enumerate(zip([None, *plan.blocks], plan.losses, strict=True)):
        yield tabulate(row(layer, loss), removed=removed, state="skipped" if removed else "original")
    if plan.healed_loss is not None:
        yield tabulate(row(plan.blocks[-1], plan.healed_loss), removed=len(plan.blocks), state="healed")
    if plan.control_loss is not None:
        yield tabulate(row(None, plan.control_loss.scalars_only), removed=0, state="scalars_only")


def _factors(plan: Plan) -> Iterator[pd.DataFrame]:
    """The scalars of every layer; for scalars per channel, mean and standard deviation over channels."""
    sites = {"att": "attention", "mlp": "mlp"}
    rows: list[tuple[Any, ...]] = []
    fitted = {} if plan.healed_loss is None else plan.scalars
    for layer, factors in sorted(fitted.items(), key=lambda item: int(item[0])):
        for name in (name for name in FACTORS if name in factors):
            kind, _, part = name.partition("_")
            values = np.atleast_1d(np.array(factors[name], dtype=np.float64))
            where = ("scalar", sites[part], int(layer), None)
            rows.append((*where, kind, float(values.mean()), len(values), "1"))
            if isinstance(factors[name], list):
                rows.append((*where, f"{kind}_std", float(values.std()), len(values), "1"))
    yield tabulate(rows, removed=len(plan.blocks), state="healed")


def _document(plan: Plan, problem: SearchProblem, table: pd.DataFrame, unreadable: list[str]) -> dict[str, Any]:
    """The entries of `results.json`."""
    noted = plan.document()
    document = {
        **provenance(KIND, problem.settings.model_dump(), seed=plan.seed),
        "model": {**noted["model"], "num_layers": problem.scorer.costs.num_layers},
        "data": plan.data,
        "plan": noted,
        "warnings": list(_warnings(plan, problem, unreadable)),
        "headline": headline(plan, table, problem.scorer.anatomy),
    }
    return dict(finite(document))


def _warnings(plan: Plan, problem: SearchProblem, unreadable: list[str]) -> Iterator[str]:
    """Warnings about the reliability of the numbers."""
    yield from plan.warnings
    if unsure := plan.unsure_rounds:
        yield (
            f"In {len(unsure)} of {len(plan.blocks)} rounds (number {', '.join(map(str, unsure))}) the held-out data "
            "did not tell the best two candidates apart; more data would."
        )
    yield from (f"{line[0].upper()}{line[1:]}; a higher budget may change its pick." for line in stopped_rounds(plan))
    if problem.examples.meta.get("hash") != plan.data.get("hash"):
        yield "The states were compared on other data than those that the plan was searched with."
    if unreadable:
        count = len(unreadable)
        yield f"{count} projections are offloaded or packed and have no spectral norm here (first: {unreadable[0]})."

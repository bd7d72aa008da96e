"""`outcome`: a plan as a result folder.

Rows, with the columns `removed` (blocks) and `state` (`original`, `skipped`, `healed`, `scalars_only`): `loss` after
every removal, healed, and of the control.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from fulldepth.results import COLUMNS, Finding, Results, finite, provenance, tabulate
from fulldepth.skip.plan import Plan, in_sample
from fulldepth.skip.problem import SearchProblem

KIND = "skip"
UNKNOWN = "A plan keeps no losses of single documents; fulldepth skip bench --heldout states the error."


def outcome(plan: Plan, problem: SearchProblem) -> Results:
    """A plan as results; `problem` has the held-out data that it was scored with."""
    count, tokens = len(plan.blocks), sum(example.predicted for example in problem.examples.heldout)
    kept, noted, depth = plan.control_loss, plan.document(), problem.scorer.costs.num_layers
    losses: list[tuple[int | None, float | None, int, str]] = [
        (None, plan.losses[0], 0, "original"),
        *((min(pick).layer, plan.losses[at], at, "skipped") for at, pick in enumerate(plan.picks, start=1)),
        (min(plan.picks[-1]).layer, plan.healed_loss, count, "healed"),
        (None, None if kept is None else kept.scalars_only, 0, "scalars_only"),
    ]
    tables = [
        tabulate([("loss", "model", layer, None, "mean", loss, tokens, "nats")], removed=removed, state=state)
        for layer, loss, removed, state in losses
        if loss is not None
    ]
    warnings, stopped = list(plan.data.get("warnings", [])), plan.cost.get("stopped_by_budget", [])
    if unsure := plan.cost.get("unsure_rounds"):
        warnings.append(
            f"In {len(unsure)} of {len(plan.blocks)} rounds (number {', '.join(map(str, unsure))}) the held-out data "
            "did not tell the best two candidates apart; more data would."
        )
    warnings += [f"{line.capitalize()}; a higher budget may change its pick." for line in stopped]
    document = {
        **provenance(KIND, problem.settings.model_dump(), seed=plan.seed),
        "model": {**noted["model"], "num_layers": depth},
        "data": plan.data,
        "plan": noted,
        "warnings": warnings,
        "headline": headline(plan, depth),
    }
    return Results(joined(tables, removed="Int64", state="str"), dict(finite(document)))


def headline(plan: Plan, depth: int) -> dict[str, Finding]:
    """The findings of a plan for a model of `depth` layers, by name."""
    base, last, order = plan.losses[0], plan.losses[-1], ", ".join(map(str, plan.blocks))
    sentence = (
        f"Removing {plan.what} (in the order {order}; the model has {depth} layers) changes the held-out loss by "
        f"{last - base:+.4f} nats, from {base:.4f} to {last:.4f}, not healed."
    )
    if caveat := in_sample(plan):
        sentence += f" {caveat}"
    findings = {"loss_added": Finding(last - base, "nats", sentence, no_standard_error=UNKNOWN)}
    if plan.healed_loss is None or plan.control_loss is None:
        findings["loss_healed"] = Finding(None, "nats", "No scalars were fitted: the model is not healed.")
    else:  # no differences: a plan has no errors of them
        unhelped = "" if plan.healed_loss < last else " No epoch of training them lowered it."
        sentence = (
            f"Held-out loss with scalars: {plan.healed_loss:.4f}, without: {last:.4f}.{unhelped} Control, the same "
            f"training without removal: {plan.control_loss.scalars_only:.4f}, without scalars: {base:.4f}. "
            "Differences without a standard error are not interpreted; `fulldepth skip bench --heldout` measures "
            "exports with one."
        )
        findings["loss_healed"] = Finding(plan.healed_loss, "nats", sentence)
    return findings


def joined(tables: Sequence[pd.DataFrame], **types: str) -> pd.DataFrame:
    """Concatenated tables: the tidy columns, then further ones of these types, in this order."""
    table = pd.concat([part.astype(types) for part in tables if len(part)], ignore_index=True)
    return table[[*COLUMNS, *types]]

"""`outcome`: a plan as a result folder, with an analysis of the modified model's states.

Rows, with the columns `removed` (blocks) and `state` (`original`, `skipped`, `healed`, `scalars_only`): `loss` after
every removal, healed, and of the control; `mmd` of every layer to the original, without and with the scalars.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torchmetrics import Metric

from fulldepth.execution import body_inputs, capture
from fulldepth.execution.flops import Variant
from fulldepth.execution.scoring import BASE, ScoredBatch, Scorer
from fulldepth.hf.scalars import Scalars
from fulldepth.metrics import Mmd, Observation, Setup
from fulldepth.metrics.base import Row
from fulldepth.progress import Watcher
from fulldepth.results import COLUMNS, Finding, Results, finite, provenance, tabulate
from fulldepth.skip.fit import make_batches
from fulldepth.skip.plan import Plan, in_sample, plan_scalars
from fulldepth.skip.problem import SearchProblem

KIND = "skip"
RESERVOIR_TOKENS = 2048
"""Most tokens that the discrepancy is computed from; exact if the data have no more."""
UNKNOWN = "A plan keeps no losses of single documents; fulldepth skip bench --heldout states the error."
KINDS = {"attention": ("attention block", "attention blocks"), "mlp": ("MLP", "MLPs"), "layer": ("layer", "layers")} | {
    "any": ("block", "blocks")
}
"""Granularity -> a removed block, and several."""


def outcome(plan: Plan, problem: SearchProblem, *, watcher: Watcher) -> Results:
    """A plan as results, with the analysis of the model that it modifies.

    Args:
        plan: the plan.
        problem: its model, with the held-out data that it was scored with.
        watcher: receives progress after every batch.
    """
    scorer, heldout = problem.scorer, problem.examples.heldout
    batches = make_batches(heldout, problem.settings.batch_size)
    scalars = plan_scalars(plan, scorer.anatomy)
    states = {"skipped": None, **({} if scalars is None else {"healed": scalars})}
    watcher.begin("Analysis", len(states) * len(batches))
    count, tokens = len(plan.blocks), sum(example.predicted for example in heldout)
    kept = plan.control_loss
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
    for state, factors in states.items():
        options: dict[str, Any] = {"seed": problem.settings.seed, "watcher": watcher}
        rows = discrepancies(scorer, batches, plan.removed, factors, **options)
        tables.append(tabulate(rows, removed=count, state=state))
    table, noted = joined(tables, removed="Int64", state="str"), plan.document()
    document = {
        **provenance(KIND, problem.settings.model_dump(), seed=plan.seed),
        "model": {**noted["model"], "num_layers": scorer.costs.num_layers},
        "data": plan.data,
        "plan": noted,
        "warnings": list(_warnings(plan, problem)),
        "headline": headline(plan, table, scorer.costs.num_layers),
    }
    return Results(table, dict(finite(document)))


@torch.inference_mode()
def discrepancies(
    scorer: Scorer,
    batches: Sequence[ScoredBatch],
    variant: Variant,
    scalars: Scalars | None,
    *,
    seed: int,
    watcher: Watcher,
) -> list[Row]:
    """The rows of `metrics.Mmd`: squared MMD of layers 0..L between the modified and the unmodified model.

    Every token of the batches counts except padding, as for a language model in `fulldepth measure`; the tokens are the
    same for both models. Each batch runs through both models, so that only the states of one batch and of the sample
    are in memory.

    Args:
        scorer: of the model; nothing is skipped on return.
        batches: held-out data.
        variant: layers that the modified model skips.
        scalars: its scalars, made for that variant; None = not healed.
        seed: of that sample.
        watcher: receives progress after every batch.

    Source: Hopscotch (arXiv 2506.03303), analysis of the hidden states.
    """
    anatomy, switches = scorer.anatomy, scorer.switches
    masks = [batch.inputs["attention_mask"].bool() for batch in batches]
    tokens = sum(int(mask.sum()) for mask in masks)
    measure = Mmd(
        Setup(
            num_layers=anatomy.num_layers,
            width=anatomy.width,
            sequence_length=max(mask.shape[1] for mask in masks),
            num_sequences=sum(map(len, masks)),
            num_tokens=tokens,
            reservoir_tokens=min(RESERVOIR_TOKENS, tokens),
            seed=seed,
            device=scorer.device,
        )
    )
    reservoirs: list[Metric] = [measure.setup.reservoir(site) for site in measure.sites]
    for metric in (measure, *reservoirs):  # under torchrun one process sees all the data: no sums are merged
        metric.distributed_available_fn = lambda: False
    first = 0
    try:
        with capture(anatomy, ["residual"]) as activations:

            def states(batch: ScoredBatch, skipped: Variant, factors: Scalars | None) -> Tensor:
                """[L+1, B, T, D] the residual stream of one pass."""
                scorer.plain()
                switches.skip(skipped)
                switches.scalars = factors
                activations.clear()
                anatomy.body(**body_inputs(anatomy, batch.to(scorer.device).inputs))
                return activations.stack("residual", measure.setup.device)

            for batch, mask in zip(batches, masks, strict=True):
                reference = states(batch, BASE, None)
                own = states(batch, variant, scalars)
                mask = mask.to(measure.setup.device)
                numbers = torch.arange(first, first + len(mask), device=mask.device)
                measure.update(Observation({"residual": own, "reference": reference}, mask, mask, numbers))
                first += len(mask)
                watcher.advance(1)
    finally:
        scorer.plain()
    return measure.rows()


def _warnings(plan: Plan, problem: SearchProblem) -> Iterator[str]:
    """Warnings about the reliability of the numbers."""
    yield from plan.data.get("warnings", [])
    if unsure := plan.cost.get("unsure_rounds"):
        yield (
            f"In {len(unsure)} of {len(plan.blocks)} rounds (number {', '.join(map(str, unsure))}) the held-out data "
            "did not tell the best two candidates apart; more data would."
        )
    stopped = plan.cost.get("stopped_by_budget", [])
    yield from (f"{line.capitalize()}; a higher budget may change its pick." for line in stopped)
    if problem.examples.meta.get("hash") != plan.data.get("hash"):
        yield "The states were compared on other data than those that the plan was searched with."


def headline(plan: Plan, table: pd.DataFrame, depth: int) -> dict[str, Finding]:
    """The findings of a plan by name.

    Args:
        plan: the plan.
        table: rows of `mmd`.
        depth: number of layers of the model.
    """
    findings, last = {"loss_added": loss_added(plan, depth)}, plan.losses[-1]
    if plan.healed_loss is None or plan.control_loss is None:
        findings["loss_healed"] = Finding(None, "nats", "No scalars were fitted: the model is not healed.")
    else:  # no differences: a plan has no errors of them
        unhelped = "" if plan.healed_loss < last else " No epoch of training them lowered it."
        sentence = (
            f"Held-out loss with scalars: {plan.healed_loss:.4f}, without: {last:.4f}.{unhelped} Control, the same "
            f"training without removal: {plan.control_loss.scalars_only:.4f}, without scalars: {plan.losses[0]:.4f}. "
            "Differences without a standard error are not interpreted; `fulldepth skip bench --heldout` measures "
            "exports with one."
        )
        findings["loss_healed"] = Finding(plan.healed_loss, "nats", sentence)
    rows = table[table.measure == "mmd"]
    if rows.empty:
        return findings
    ends = rows[rows.layer == rows.layer.max()].set_index("state")
    before, count = float(ends.loc["skipped", "value"]), int(ends.loc["skipped", "count"])
    scale = f"squared MMD over {count} held-out tokens, 0 = the same distribution"
    if "healed" not in ends.index:
        sentence = f"The last layer's states differ from the original's by {before:.2e} ({scale}), not healed."
        return findings | {"mmd": Finding(before, "1", sentence)}
    after = float(ends.loc["healed", "value"])
    sentence = (
        f"The last layer's states differ from the original's by {before:.2e} before and {after:.2e} after healing "
        f"({scale})."
    )
    if plan.healed_loss is not None and after > before and plan.healed_loss < last:
        sentence += " (They may scale the whole stream, which the final norm takes away and this measure does not.)"
    return findings | {"mmd": Finding(after, "1", sentence)}


def nats(value: float) -> str:
    """A loss with four decimals, or with two digits if it is below 0.001."""
    return f"{value:.4f} nats" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e} nats"


def loss_added(plan: Plan, depth: int) -> Finding:
    """The added loss, not healed."""
    base, last, count = plan.losses[0], plan.losses[-1], len(plan.blocks)
    order = ", ".join(map(str, plan.blocks))
    which = f"of layer {order}" if count == 1 else f"of layers {order}, in this order"
    if plan.granularity in ("layer", "any"):
        which = f"{order}" if count == 1 else f"{order}, in this order"
    change = f"adds {nats(last - base)} to" if last >= base else f"takes {nats(base - last)} off"
    sentence = (
        f"Removing {count} {KINDS[plan.granularity][count != 1]} ({which}; the model has {depth} layers) {change} the "
        f"held-out loss, from {base:.4f} to {last:.4f}, not healed."
    )
    if stopped := plan.cost.get("stopped_by_budget"):
        sentence += f" The search was cut short ({'; '.join(stopped)})."
    if caveat := in_sample(plan):
        sentence += f" {caveat}"
    return Finding(last - base, "nats", sentence, no_standard_error=UNKNOWN)


def joined(tables: Sequence[pd.DataFrame], **types: str) -> pd.DataFrame:
    """Concatenated tables: the tidy columns, then further ones of these types, in this order."""
    table = pd.concat([part.astype(types) for part in tables if len(part)], ignore_index=True)
    return table[[*COLUMNS, *types]]

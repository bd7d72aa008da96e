"""Findings of a plan: its cost, the effect of healing, the discrepancy of states."""

from __future__ import annotations

import pandas as pd

from fulldepth.hf import Anatomy
from fulldepth.results import Finding
from fulldepth.skip.in_sample import in_sample
from fulldepth.skip.plan import Plan
from fulldepth.skip.summary import stopped_rounds

PARTS = {
    "attention": ("attention", "attention_norm", "attention_branch"),
    "mlp": ("mlp", "mlp_norm", "mlp_branch"),
}

UNKNOWN = "A plan keeps no losses of single documents; fulldepth skip bench --heldout states the error."


def headline(plan: Plan, table: pd.DataFrame, anatomy: Anatomy) -> dict[str, Finding]:
    """The findings of a plan by name.

    Args:
        plan: the plan.
        table: rows of `mmd`.
        anatomy: the model's.
    """
    findings = {
        "loss_added": _added(plan, anatomy.num_layers),
        "loss_healed": _healed(plan),
        "mmd": _discrepancy(plan, table),
    }
    return {name: finding for name, finding in findings.items() if finding is not None}


def blocks_of(plan: Plan, number: int) -> str:
    """`1 attention block`, `3 MLPs`, `2 layers`."""
    kinds = {"attention": ("attention block", "attention blocks"), "mlp": ("MLP", "MLPs"), "layer": ("layer", "layers")}
    return f"{number} {kinds[plan.granularity][number != 1]}"


def nats(value: float) -> str:
    """A loss with four decimals, or with two digits if it is below 0.001."""
    return f"{value:.4f} nats" if abs(value) >= 1e-3 or value == 0 else f"{value:.1e} nats"


def _added(plan: Plan, depth: int) -> Finding:
    """The added loss, not healed."""
    base, last, count = plan.losses[0], plan.losses[-1], len(plan.blocks)
    order = ", ".join(map(str, plan.blocks))
    which = f"of layer {order}" if count == 1 else f"of layers {order}, in this order"
    if plan.granularity == "layer":
        which = f"{order}" if count == 1 else f"{order}, in this order"
    change = f"adds {nats(last - base)} to" if last >= base else f"takes {nats(base - last)} off"
    sentence = (
        f"Removing {blocks_of(plan, count)} ({which}; the model has {depth} layers) {change} the held-out loss, from "
        f"{base:.4f} to {last:.4f}, not healed."
    )
    if stopped := stopped_rounds(plan):
        sentence += f" The search was cut short ({'; '.join(stopped)})."
    if caveat := in_sample(plan):
        sentence += f" {caveat}"
    return Finding(last - base, "nats", sentence, no_standard_error=UNKNOWN)


def _healed(plan: Plan) -> Finding:
    """The losses with scalars, without them, and of the control; no differences, as a plan has no errors of them."""
    if plan.healed_loss is None or plan.control_loss is None:
        return Finding(None, "nats", "No scalars were fitted: the model is not healed.")
    base, last, healed = plan.losses[0], plan.losses[-1], plan.healed_loss
    unhelped = "" if healed < last else " No epoch of training them lowered it."
    sentence = (
        f"Held-out loss with scalars: {healed:.4f}, without: {last:.4f}.{unhelped} Control, the same training without "
        f"removal: {plan.control_loss.scalars_only:.4f}, without scalars: {base:.4f}. Differences without a standard "
        "error are not interpreted; `fulldepth skip bench --heldout` measures exports with one."
    )
    return Finding(healed, "nats", sentence)


def _discrepancy(plan: Plan, table: pd.DataFrame) -> Finding | None:
    """MMD at the last layer without and with scalars."""
    rows = table[table.measure == "mmd"]
    if rows.empty:
        return None
    last = rows[rows.layer == rows.layer.max()].set_index("state")
    before, count = float(last.loc["skipped", "value"]), int(last.loc["skipped", "count"])
    scale = f"squared MMD over {count} held-out tokens, 0 = the same distribution"
    if "healed" not in last.index:
        sentence = f"The last layer's states differ from the original's by {before:.2e} ({scale}), not healed."
        return Finding(before, "1", sentence)
    after = float(last.loc["healed", "value"])
    sentence = (
        f"The last layer's states differ from the original's by {before:.2e} before and {after:.2e} after healing "
        f"({scale})."
    )
    if plan.healed_loss is not None and after > before and plan.healed_loss < plan.losses[-1]:
        sentence += " (They may scale the whole stream, which the final norm takes away and this measure does not.)"
    return Finding(after, "1", sentence)

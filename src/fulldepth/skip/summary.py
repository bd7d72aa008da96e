"""Summary of a plan in a few lines, for the command line."""

from __future__ import annotations

from fulldepth.skip.in_sample import decided
from fulldepth.skip.plan import Plan


def stopped_rounds(plan: Plan) -> list[str]:
    """`round 2: stopped by budget after 48 of 160 sequences`, for each round of the search that its time ended."""
    rounds = plan.cost.get("stopped_by_budget")
    return [line for line in rounds if isinstance(line, str) and ": " in line] if isinstance(rounds, list) else []


def _kept(plan: Plan, fit: str) -> str:
    """A remark if no epoch of a fit lowered the held-out loss, so that the scalars are 1."""
    fits = plan.cost.get("fit")
    record = fits.get(fit) if isinstance(fits, dict) else None
    untrained = isinstance(record, dict) and record.get("epoch") == 0
    return "no epoch lowered the loss, the scalars stay 1" if untrained else ""


def lines(plan: Plan) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the losses in the order of removal, of the healed model, and of the control."""
    rows = [("unmodified", f"{plan.losses[0]:.4f} nats", "")]
    for number, (layer, loss) in enumerate(zip(plan.blocks, plan.losses[1:], strict=True), start=1):
        rows.append((f"{number}. layer {layer}", f"{loss:.4f} nats", ""))
    if plan.healed_loss is not None:
        rows.append(("healing: scalars fitted", f"{plan.healed_loss:.4f} nats", _kept(plan, "healed")))
    if plan.control_loss is not None:
        control = plan.control_loss.scalars_only
        rows.append(("control: scalars, nothing skipped", f"{control:.4f} nats", _kept(plan, "control")))
    if decision := decided(plan):
        rows.append(("in-sample", f"these rows {decision}", "skip bench --heldout reads others"))
    share = plan.cost.get("share_of_plain")
    if isinstance(share, float):
        rows.append(("forward FLOPs", f"{plan.cost['flops']:.3g}", f"{share:.0%} of the plain loop's"))
    if plan.unsure_rounds:
        rounds = ", ".join(map(str, plan.unsure_rounds))
        rows.append(("unsure", f"round {rounds}", "the data seen do not tell the best two apart; more would"))
    rows += [("budget", *line.partition(": ")[::2]) for line in stopped_rounds(plan)]
    return rows

"""What is said of a plan: its losses in a few lines, and whether held-out data are in-sample.

Losses on the held-out rows that chose the blocks of a plan are in-sample. A plan lists these rows in
`data.heldout_rows`: 16 hexadecimal digits for each distinct row, a hash of its token ids. Plans of earlier versions
have no such entry.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.skip.plan import Plan
from fulldepth.uncertainty import identity

ENTRY = "heldout_rows"
DIGITS = 16
UNSEEING = ("given", "random", "last")
"""Searches that choose blocks without data."""


def lines(plan: Plan) -> list[tuple[str, str, str]]:
    """(name, value, remark) of the losses in the order of removal, of the healed model, and of the control."""
    fits = plan.cost.get("fit")

    def kept(fit: str) -> str:
        record = fits.get(fit) if isinstance(fits, dict) else None
        untrained = isinstance(record, dict) and record.get("epoch") == 0
        return "no epoch lowered the loss, the scalars stay 1" if untrained else ""

    rows = [("unmodified", f"{plan.losses[0]:.4f} nats", "")]
    for number, (layer, loss) in enumerate(zip(plan.blocks, plan.losses[1:], strict=True), start=1):
        rows.append((f"{number}. layer {layer}", f"{loss:.4f} nats", ""))
    if plan.healed_loss is not None:
        rows.append(("healing: scalars fitted", f"{plan.healed_loss:.4f} nats", kept("healed")))
    if plan.control_loss is not None:
        control = plan.control_loss.scalars_only
        rows.append(("control: scalars, nothing skipped", f"{control:.4f} nats", kept("control")))
    if decision := decided(plan):
        rows.append(("in-sample", f"these rows {decision}", "skip bench --heldout reads others"))
    share = plan.cost.get("share_of_plain")
    if isinstance(share, float):
        rows.append(("forward FLOPs", f"{plan.cost['flops']:.3g}", f"{share:.0%} of the plain loop's"))
    if plan.unsure_rounds:
        rounds = ", ".join(map(str, plan.unsure_rounds))
        rows.append(("unsure", f"round {rounds}", "the data seen do not tell the best two apart; more would"))
    return rows + [("budget", *line.partition(": ")[::2]) for line in stopped_rounds(plan)]


def stopped_rounds(plan: Plan) -> list[str]:
    """`round 2: stopped by budget after 48 of 160 sequences`, for each round of the search that its time ended."""
    rounds = plan.cost.get("stopped_by_budget")
    return [line for line in rounds if isinstance(line, str) and ": " in line] if isinstance(rounds, list) else []


def decided(plan: Plan) -> str | None:
    """What the held-out rows of a plan decided, such as `chose the blocks`; None if nothing."""
    decisions = [] if plan.search in UNSEEING else ["chose the blocks"]
    if plan.healed_loss is not None:
        decisions.append("stopped the training of scalars")
    return " and ".join(decisions) or None


def in_sample(plan: Plan) -> str | None:
    """The sentence for a plan's own losses; None if its held-out rows decided nothing."""
    decision = decided(plan)
    return decision and f"Measured on the text that {decision}; expect slightly more loss on other text."


def overlap(plan: Plan, examples: Examples) -> str | None:
    """The sentence for losses of a plan's model on the held-out rows of `examples`; None if none of them decided it."""
    decision, sentence, rows = decided(plan), in_sample(plan), [_row(example) for example in examples.heldout]
    if decision is None or plan.data["hash"] == examples.meta.get("hash"):
        return sentence
    listed = plan.data.get(ENTRY)
    if not isinstance(listed, str) or not re.fullmatch(r"[0-9a-f]*", listed):
        return f"It is not known whether the held-out rows also {decision}: the plan does not list its rows."
    known = {listed[start : start + DIGITS] for start in range(0, len(listed), DIGITS)}
    shared = sum(row in known for row in rows)
    if shared == len(rows):
        return sentence
    return f"{shared} of {len(rows)} held-out rows also {decision}." if shared else None


def rows_of(examples: Iterable[Example]) -> str:
    """The entry `heldout_rows` of a plan: sorted hashes of the distinct rows, without separators."""
    return "".join(sorted({_row(example) for example in examples}))


def _row(example: Example) -> str:
    return f"{identity(example.input_ids.numpy().astype('<i8').tobytes()):0{DIGITS}x}"

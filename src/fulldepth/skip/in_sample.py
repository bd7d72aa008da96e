"""Losses on the held-out rows that chose the blocks of a plan are in-sample: how such rows are recognised and named.

A plan lists its held-out rows in `data.heldout_rows`: 16 hexadecimal digits for each distinct row, a hash of its token
ids. Plans of earlier versions have no such entry.
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


def rows_of(examples: Iterable[Example]) -> str:
    """The entry `heldout_rows` of a plan: sorted hashes of the distinct rows, without separators."""
    return "".join(sorted({_row(example) for example in examples}))


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


def _row(example: Example) -> str:
    return f"{identity(example.input_ids.numpy().astype('<i8').tobytes()):0{DIGITS}x}"

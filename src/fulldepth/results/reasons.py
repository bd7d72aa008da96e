"""Differences between the entries of two models in a comparison, as clauses of a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Entry = dict[str, Any]
"""Entry of a model in a comparison's document."""


def unlike(model: Entry, baseline: Entry, causes: Sequence[tuple[str, ...]], where_stated: bool = False) -> str:
    """Names the causes in which two models differ, with both values if they print differently; empty if there are none.

    Args:
        model: a model.
        baseline: the model that it is compared with.
        causes: for each cause its text, the part of the entry (empty = the entry itself), the key to compare, and
            optionally another key whose values are shown.
        where_stated: compare a value only if both entries state it.
    """
    reasons = []
    for text, part, *keys in causes:
        parts = [(entry.get(part) or {}) if part else entry for entry in (model, baseline)]
        values, printed = ([entry.get(key) for entry in parts] for key in (keys[0], keys[-1]))
        if values[0] != values[1] and not (where_stated and None in values):
            stated = f" ({model['label']}: {printed[0]}, {baseline['label']}: {printed[1]})"
            reasons.append(text + (stated if printed[0] != printed[1] else ""))
    return "; ".join(reasons)

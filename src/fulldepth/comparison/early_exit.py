"""Comparisons of early-exit sweeps and of evaluations: what their documents hold besides that of measurements."""

from __future__ import annotations

from typing import Any

from fulldepth.comparison import speedups
from fulldepth.results import Results

KINDS = {"exit": ("exits", "full", "stopping", "generation"), "evaluation": ("tasks", "exits", "full")}
"""Kind of results -> entries of their documents that the comparison holds for each model."""


def entries(kind: str, compared: list[Results], comparison: dict[str, Any]) -> dict[str, Any]:
    """The entries `of`, `models` and `warnings` of the comparison's document, and `speedups` where time was measured.

    Args:
        kind: of the results.
        compared: the results.
        comparison: the entries of a comparison of measurements, with those results in the same order.
    """
    models = [
        {**entry, **{key: results.meta[key] for key in KINDS[kind] if results.meta.get(key) is not None}}
        for entry, results in zip(comparison["models"], compared, strict=True)
    ]
    warnings = [*comparison["warnings"], *_warnings(kind, models)]
    rows = speedups.compared(models)
    if not rows:
        return {"of": kind, "models": models, "warnings": warnings}
    headline = {**comparison["headline"], **speedups.findings(models, rows)}
    return {"of": kind, "models": models, "warnings": warnings, "speedups": rows, "headline": headline}


def _warnings(kind: str, models: list[dict[str, Any]]) -> list[str]:
    """Reasons why scores of the same task are not comparable."""
    if kind != "evaluation":
        return []
    lines = []
    for task in dict.fromkeys(name for model in models for name in model.get("tasks") or {}):
        stated = {model["label"]: (model.get("tasks") or {}).get(task) for model in models}
        for key, what in (("count", "numbers of examples"), ("metric", "metrics")):
            values = {label: entry.get(key) for label, entry in stated.items() if entry is not None}
            if len({value for value in values.values() if value is not None}) > 1:
                listed = ", ".join(f"{label}: {value}" for label, value in values.items())
                lines.append(f"{task}: the {what} differ ({listed}), so its scores are not comparable.")
    return lines

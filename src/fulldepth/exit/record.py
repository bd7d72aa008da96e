"""The headline of a sweep: findings with their sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fulldepth.early_exit import QUALITIES, Readings, Row, Subject
from fulldepth.metrics.effective_depth import effective_depth
from fulldepth.results import Finding
from fulldepth.settings.exit import ExitSettings

RELATIVE = 0.05
"""Tolerance of the headline's effective depth, relative to the last layer's accuracy."""


def headline(
    subject: Subject, readings: Readings, rows: Sequence[Row], settings: ExitSettings
) -> dict[str, dict[str, Any]]:
    """The findings: depth that the accuracy needs, the chosen thresholds, and the fastest exit."""
    layers = subject.num_layers
    quality, name = qualities(readings), QUALITIES[readings.quality]
    depth = effective_depth(quality, RELATIVE, relative=True)
    what = "samples" if subject.timed else "tokens"
    findings = {
        "effective_depth": Finding(
            depth,
            "layers",
            f"Stopping every sample after layer {depth} of {layers} keeps {quality[depth - 1]:.1%} {name}; the full "
            f"model has {quality[-1]:.1%}. It is the first layer with at least {1 - RELATIVE:.0%} of that.",
        )
    }
    for row in rows:
        if row.split == "report" and row.calibrated:
            findings |= _chosen(row, rows, what, settings)
    if settings.target_accuracy_drop is None:
        findings |= _fastest(rows, what)
    return {name: finding.document() for name, finding in findings.items()}


def _chosen(row: Row, rows: Sequence[Row], what: str, settings: ExitSettings) -> dict[str, Finding]:
    """The threshold that was chosen for a target accuracy, and its speed on the reported part."""
    found, target = row.outcome, settings.target_accuracy_drop
    quality = QUALITIES[found.quality_name]
    rule = found.exit.rule
    suffix = "" if len(settings.rule) == 1 else f"_{rule}"
    if found.exit.threshold >= 1:
        sentence = (
            f"No threshold below 1 of the rule {rule} keeps the {quality} within {100 * (target or 0):g} points of the "
            "full model's on the calibration part; only the full model does."
        )
        return {f"chosen_threshold{suffix}": Finding(1.0, "1", sentence)}
    error = "" if found.drop.error is None else f" ± {100 * found.drop.error:.2g}"
    sentence = (
        f"{rule.capitalize()} threshold {found.exit.threshold:.4g}, chosen for at most {100 * (target or 0):g} points: "
        f"on other data the {quality} changes by {0 - 100 * found.drop.value:+.2g}{error} points to "
        f"{found.quality.value:.1%}, and {what} run through {found.layers_run:.1f} of {len(found.exits)} layers on "
        f"average. {_speed(row)}"
    )
    findings = {f"chosen_threshold{suffix}": Finding(found.exit.threshold, "1", sentence)}
    return findings | {f"speedup{suffix}": _speedup(row)}


def _fastest(rows: Sequence[Row], what: str) -> dict[str, Finding]:
    """The given threshold below 1 with the highest speed-up among those that lose at most a point, else the best."""
    below = [row for row in rows if row.outcome.exit.threshold < 1]
    if not below:
        return {}
    good = [row for row in below if row.outcome.drop.value <= 0.01]
    row = max(good, key=lambda row: row.outcome.speedup) if good else max(below, key=lambda r: r.outcome.quality.value)
    found, quality = row.outcome, QUALITIES[row.outcome.quality_name]
    same = found.scores["agreement"].value
    lead = "The fastest of the given thresholds that loses at most one point" if good else "The most accurate threshold"
    sentence = (
        f"{lead}: {found.exit.rule} {found.exit.threshold:g}. {quality.capitalize()} {found.quality.value:.1%}, "
        f"{0 - 100 * found.drop.value:+.2g} points to the full model; {same:.1%} of its predictions; {what} "
        f"run through {found.layers_run:.1f} of {len(found.exits)} layers on average. {_speed(row)}"
    )
    return {"best_threshold": Finding(found.exit.threshold, "1", sentence), "speedup": _speedup(row)}


def _speedup(row: Row) -> Finding:
    if row.timed is not None and row.timed.speedup is not None:
        return Finding(row.timed.speedup, "1", f"Measured: {_speed(row)}")
    theory = row.theory or 1.0
    return Finding(theory, "1", f"By the {_counted(row)}: {theory:.2f} times.")


def _speed(row: Row) -> str:
    """A sentence on the speed."""
    theory = row.theory or 1.0
    if row.timed is None or row.timed.speedup is None:
        return f"That is {theory:.2f} times fewer {'layers' if row.saves_all else 'operations'}."
    share = row.timed.speedup / theory
    return (
        f"It is {row.timed.speedup:.2f} times as fast as the full model, {share:.0%} of the {theory:.2f} that the "
        f"{_counted(row)} allows."
    )


def _counted(row: Row) -> str:
    return "number of layers" if row.saves_all else "number of operations"


def qualities(readings: Readings) -> list[float]:
    """[L] quality of a model that stops all samples after layers 1..L."""
    return [readings.value(readings.all_at(layer)) for layer in range(1, readings.num_layers + 1)]

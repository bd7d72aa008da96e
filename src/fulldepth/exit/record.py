"""The headline of a sweep: findings with their sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fulldepth.early_exit import Readings, Row, Subject, drop_sentence, no_advice
from fulldepth.results import Finding
from fulldepth.settings.exit import ExitSettings

RELATIVE = 0.05
"""Tolerance of the headline's effective depth, relative to the last layer's accuracy."""
CHEAP = 0.01
"""Loss of quality up to which a given threshold is advised."""


def headline(
    subject: Subject, readings: Readings, rows: Sequence[Row], settings: ExitSettings
) -> dict[str, dict[str, Any]]:
    """The findings: depth that the accuracy needs, the chosen thresholds, and the fastest exit."""
    if reason := no_advice(subject, readings):
        full = readings.full["accuracy"]
        return {"accuracy": Finding(full.value, "1", reason, standard_error=full.error).document()}
    what = "samples" if subject.classifies else "tokens"
    findings = {"effective_depth": _depth(readings)}
    for row in rows:
        if row.split == "report" and row.calibrated:
            findings |= _chosen(row, what, settings)
    if settings.target_accuracy_drop is None:
        findings |= _fastest(rows, what)
    return {name: finding.document() for name, finding in findings.items()}


def _depth(readings: Readings) -> Finding:
    """The first layer after which all samples can stop."""
    plain, low, depth = readings.depth(1 - RELATIVE)
    layers, quality = readings.num_layers, qualities(readings)
    share = f"{1 - RELATIVE:.0%} of the full model's {quality[-1]:.1%} accuracy"
    drop = drop_sentence(readings.shortfall(depth))
    sentence = (
        f"No layer before the last is shown to keep {share}."
        if depth == layers
        else f"Stopping every sample after layer {depth} of {layers} keeps at least {share}: {drop}."
    )
    if plain != depth:
        sentence += f" By the estimates alone layer {plain} does."
    return Finding(depth, "layers", f"{sentence} 95 % interval: layers {low} to {depth}.")


def _chosen(row: Row, what: str, settings: ExitSettings) -> dict[str, Finding]:
    """The threshold that was chosen for a target accuracy, and its speed on the reported part."""
    found, target = row.outcome, settings.target_accuracy_drop
    rule = found.exit.rule
    suffix = "" if len(settings.rule) == 1 else f"_{rule}"
    if found.exit.threshold >= 1:
        sentence = (
            f"No threshold below 1 of the rule {rule} keeps the accuracy within {100 * (target or 0):g} points of the "
            "full model's on the calibration part; only the full model does."
        )
        return {f"chosen_threshold{suffix}": Finding(1.0, "1", sentence)}
    sentence = (
        f"{rule.capitalize()} threshold {found.exit.threshold:.4g}, chosen for at most {100 * (target or 0):g} points "
        f"on other data. {drop_sentence(found.drop)}, to {found.accuracy.value:.1%}; {what} leave after "
        f"{found.layers_run:.1f} of {len(found.exits)} layers on average. {_speed(row)}"
    )
    findings = {f"chosen_threshold{suffix}": Finding(found.exit.threshold, "1", sentence)}
    return findings | {f"speedup{suffix}": _speedup(row)}


def _fastest(rows: Sequence[Row], what: str) -> dict[str, Finding]:
    """The given threshold below 1 with the fewest layers among those shown to lose at most `CHEAP`; if there is none,
    what the one with the most layers does.
    """
    below = [row for row in rows if row.outcome.exit.threshold < 1]
    if not below:
        return {}
    good = [row for row in below if (ends := row.outcome.drop.interval) is not None and ends[1] <= CHEAP]
    row = max(good or below, key=lambda row: row.outcome.speedup if good else -row.outcome.speedup)
    found = row.outcome
    same = found.scores["agreement"].value
    lead = "The given threshold with the fewest layers among those shown to lose at most one point"
    if not good:
        lead = "No given threshold is shown to lose at most one point; the one with the most layers"
    sentence = (
        f"{lead}: {found.exit.rule} {found.exit.threshold:g}. {drop_sentence(found.drop, CHEAP)}, to "
        f"{found.accuracy.value:.1%}; {same:.1%} of the full model's predictions; {what} leave after "
        f"{found.layers_run:.1f} of {len(found.exits)} layers on average. {_speed(row)}"
    )
    return {"best_threshold": Finding(found.exit.threshold if good else None, "1", sentence), "speedup": _speedup(row)}


def _speedup(row: Row) -> Finding:
    if (measured := row.speedup) is not None:
        return Finding(measured.ratio.value if measured.verdict == "differs" else None, "1", measured.sentence())
    return Finding(row.theory, "1", _speed(row))


def _speed(row: Row) -> str:
    """A sentence on the speed."""
    theory = row.theory
    if (measured := row.speedup) is None:
        bound = "" if row.classifies else ", if later tokens needed none of the layers that were left out"
        return f"That is {theory:.2f} times fewer layers{bound}."
    allows = f" The number of layers allows {theory:.2f}."
    return measured.sentence() + (allows if measured.verdict == "differs" else "")


def qualities(readings: Readings) -> list[float]:
    """[L] accuracy of a model that stops all samples after layers 1..L."""
    return [readings.value(readings.all_at(layer)) for layer in range(1, readings.num_layers + 1)]

"""The document of a sweep: its rows, the full model, and the findings with their sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulldepth.exit.outcome import Mean, Outcome
from fulldepth.exit.reading import Readings
from fulldepth.exit.subject import Subject
from fulldepth.exit.timing import Timed
from fulldepth.metrics.effective_depth import effective_depth
from fulldepth.results import Finding
from fulldepth.settings.exit import ExitSettings

RELATIVE = 0.05
"""Tolerance of the headline's effective depth, relative to the last layer's accuracy."""
POLICY = {"causal-lm": "recompute"}
"""Task -> policy of the missing states, where there is one: with the true tokens read by all layers, the states are
those of `recompute`."""


@dataclass(frozen=True)
class Row:
    """One rule and threshold on one part of the data."""

    outcome: Outcome
    split: str
    """`calibration` or `report`."""
    calibrated: bool = False
    """Whether the threshold was chosen for a target accuracy."""
    timed: Timed | None = None

    def document(self, policy: str | None) -> dict[str, Any]:
        """The entry in `results.json`."""
        found = self.outcome
        means = {name: getattr(found, name) for name in ("accuracy", "loss", "agreement", "drop")}
        entry: dict[str, Any] = {
            "rule": found.exit.rule,
            "threshold": found.exit.threshold,
            "policy": policy,
            "min_layer": found.exit.min_layer,
            "split": self.split,
            "calibrated": self.calibrated,
            "samples": len(found.layers),
            "exits": found.exits.tolist(),
        }
        for name, mean in means.items():
            entry |= {name: mean.value, f"{name}_stderr": mean.error}
        speeds = {
            "theoretical_speedup": found.speedup,
            "measured_speedup": None if self.timed is None else self.timed.speedup,
        }
        return entry | speeds | {"seconds": None if self.timed is None else self.timed.seconds}


def document(
    subject: Subject,
    parts: Mapping[str, Readings],
    rows: Sequence[Row],
    seconds: float | None,
) -> dict[str, Any]:
    """The entries of `results.json` about model, data and exits."""
    sequences, report = subject.sequences, parts["report"]
    correct = Mean.of(report.correct[-1], report.sequence)
    loss = Mean.of(report.loss[-1], report.sequence)
    policy = POLICY.get(subject.anatomy.task)
    return {
        "model": subject.describe(),
        "data": {
            "name": sequences.name,
            "kind": sequences.kind,
            "hash": sequences.hash,
            "text_hash": sequences.text_hash,
            "sequences": len(sequences),
            "tokens": sum(sequences.lengths),
            "num_classes": sequences.num_classes,
            "samples": {name: len(part.target) for name, part in parts.items()},
        },
        "batch_size": subject.batch_size,
        "full": {
            "accuracy": correct.value,
            "accuracy_stderr": correct.error,
            "loss": loss.value,
            "loss_stderr": loss.error,
            "seconds": seconds,
        },
        "exits": [row.document(policy) for row in rows],
        "warnings": list(subject.warnings),
    }


def headline(
    subject: Subject, readings: Readings, rows: Sequence[Row], settings: ExitSettings
) -> dict[str, dict[str, Any]]:
    """The findings: depth that the accuracy needs, the chosen thresholds, and the fastest exit."""
    layers = subject.num_layers
    accuracy = [Mean.of(correct, readings.sequence).value for correct in readings.correct[1:]]
    depth = effective_depth(accuracy, RELATIVE, relative=True)
    what = "samples" if subject.classifies else "tokens"
    findings = {
        "effective_depth": Finding(
            depth,
            "layers",
            f"Stopping every sample after layer {depth} of {layers} keeps {accuracy[depth - 1]:.1%} accuracy; the full "
            f"model has {accuracy[-1]:.1%}. It is the first layer with at least {1 - RELATIVE:.0%} of that.",
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
    rule = found.exit.rule
    suffix = "" if len(settings.rule) == 1 else f"_{rule}"
    if found.exit.threshold >= 1:
        sentence = (
            f"No threshold below 1 of the rule {rule} keeps the accuracy within {100 * (target or 0):g} points of the "
            "full model's on the calibration part; only the full model does."
        )
        return {f"chosen_threshold{suffix}": Finding(1.0, "1", sentence)}
    error = "" if found.drop.error is None else f" ± {100 * found.drop.error:.2g}"
    sentence = (
        f"{rule.capitalize()} threshold {found.exit.threshold:.4g}, chosen for at most {100 * (target or 0):g} points: "
        f"on other data accuracy changes by {-100 * found.drop.value:+.2g}{error} points to "
        f"{found.accuracy.value:.1%}, and {what} run through {found.layers_run:.1f} of {len(found.exits)} layers on "
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
    row = max(good, key=lambda row: row.outcome.speedup) if good else max(below, key=lambda r: r.outcome.accuracy.value)
    found = row.outcome
    lead = "The fastest of the given thresholds that loses at most one point" if good else "The most accurate threshold"
    sentence = (
        f"{lead}: {found.exit.rule} {found.exit.threshold:g}. Accuracy {found.accuracy.value:.1%}, "
        f"{-100 * found.drop.value:+.2g} points to the full model; {found.agreement.value:.1%} of its predictions; "
        f"{what} run through {found.layers_run:.1f} of {len(found.exits)} layers on average. {_speed(row)}"
    )
    return {"best_threshold": Finding(found.exit.threshold, "1", sentence), "speedup": _speedup(row)}


def _speedup(row: Row) -> Finding:
    if row.timed is not None:
        return Finding(row.timed.speedup, "1", f"Measured: {_speed(row)}")
    return Finding(row.outcome.speedup, "1", f"By the number of layers: {row.outcome.speedup:.2f} times.")


def _speed(row: Row) -> str:
    """A sentence on the speed."""
    theory = row.outcome.speedup
    if row.timed is None:
        return f"That is {theory:.2f} times fewer layers."
    share = row.timed.speedup / theory
    return (
        f"It is {row.timed.speedup:.2f} times as fast as the full model, {share:.0%} of the {theory:.2f} that the "
        "number of layers allows."
    )

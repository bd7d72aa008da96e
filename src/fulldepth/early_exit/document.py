"""Entries of `results.json` about early exit: one rule and threshold, the full model, the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fulldepth.early_exit.mean import Mean
from fulldepth.early_exit.outcome import Outcome
from fulldepth.early_exit.readings import Readings
from fulldepth.early_exit.rules import Exit
from fulldepth.early_exit.subject import Subject
from fulldepth.early_exit.timing import SpeedUp, Timed, timed
from fulldepth.uncertainty import advisable

POLICY = {"causal-lm": "recompute"}
"""Task -> policy of the missing states, where there is one: with the true tokens read by all layers, the states are
those of `recompute`."""
UNTIMED = {"measured_speedup": None, "measured_speedup_interval": None, "timing": None}


@dataclass(frozen=True)
class Row:
    """One rule and threshold on one part of the data."""

    outcome: Outcome
    split: str
    """`calibration` or `report`."""
    calibrated: bool = False
    """Whether the threshold was chosen for a target quality."""
    timed: Timed | None = None
    classifies: bool = True
    """False for positions of a text, where later positions need the layers that earlier ones left out."""

    @property
    def speedup(self) -> SpeedUp | None:
        """The measured speed-up; None where it was not timed."""
        return None if self.timed is None else self.timed.speedup

    @property
    def theory(self) -> float:
        """Speed-up if time were proportional to the layers."""
        return self.outcome.speedup

    def document(self, policy: str | None) -> dict[str, Any]:
        """The entry in `results.json`."""
        found, clock, speedup = self.outcome, self.timed, self.speedup
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
        for name, mean in found.scores.items():
            entry |= {name: mean.value, f"{name}_stderr": mean.error}
        return entry | {
            "drop_interval": found.drop.interval,
            "theoretical_speedup": self.theory,
            **(UNTIMED if speedup is None else speedup.document()),
            "flops_share": None if clock is None else clock.flops_share,
            "seconds": None if clock is None else clock.seconds,
        }


def with_times(
    subject: Subject, rows: Sequence[Row], report: Readings, rounds: int, seed: int, advance: Callable[[int], None]
) -> tuple[list[Row], float | None]:
    """The rows with times and operations where they are on the reported samples, and the seconds of the full model.

    Args:
        subject: a classifier.
        rows: all of them.
        report: the reported samples.
        rounds: passes over the samples; 0 = nothing is timed.
        seed: of the order.
        advance: called with the number of batches completed.
    """
    chosen: dict[Exit, Outcome] = {row.outcome.exit: row.outcome for row in rows if row.split == "report"}
    found = timed(subject, list(chosen.values()), report, rounds=rounds, seed=seed, advance=advance)
    by_exit: dict[Exit, Timed] = dict(zip(chosen, found.exits, strict=True))
    done = [replace(row, timed=by_exit[row.outcome.exit]) if row.split == "report" else row for row in rows]
    return done, found.seconds


def document(
    subject: Subject, parts: Mapping[str, Readings], rows: Sequence[Row], seconds: float | None
) -> dict[str, Any]:
    """The entries of `results.json` about model, data and exits.

    Args:
        subject: model and data.
        parts: `report`, and perhaps `calibration`.
        rows: of both parts.
        seconds: of the full model.
    """
    report = parts["report"]
    full = {name: mean for name, mean in report.full.items() if name not in ("agreement", "drop")}
    return {
        "model": subject.describe(),
        "data": subject.sequences.describe() | {"samples": {name: len(p.sequence) for name, p in parts.items()}},
        "batch_size": subject.batch_size,
        "full": {
            key: value
            for name, mean in full.items()
            for key, value in ((name, mean.value), (f"{name}_stderr", mean.error))
        }
        | {"seconds": seconds, "chance": report.chance.value, "no_advice": no_advice(subject, report)},
        "stopping": [
            {"layer": layer, "drop": mean.value, "drop_interval": mean.interval}
            for layer in range(1, report.num_layers + 1)
            for mean in [report.shortfall(layer)]
        ],
        "exits": [row.document(POLICY.get(subject.anatomy.task)) for row in rows],
        "warnings": list(subject.warnings),
    }


def no_advice(subject: Subject, readings: Readings) -> str | None:
    """Why nothing is advised: the full model is not measurably better than a constant prediction; None if it is."""
    lead, full = readings.lead, readings.full["accuracy"]
    if advisable(lead.value, lead.error):
        return None
    error = "" if full.error is None else f" ± {100 * full.error:.1f}"
    what = ("answering", "class") if subject.classifies else ("predicting", "token")
    stated = f"The full model is right on {100 * full.value:.1f}{error} %"
    constant = f"not measurably more than always {what[0]} the most frequent {what[1]} ({readings.chance.value:.1%})"
    if lead.error is None:
        constant = "and the data give no standard error"
    return f"{stated}, {constant}: nothing is advised."


def drop_sentence(drop: Mean, tolerance: float = 0.0) -> str:
    """How much accuracy is lost, with its 95 % interval.

    "No measurable drop" needs an interval that holds 0; "costs no accuracy" one that ends below the tolerance.

    Args:
        drop: of the full model's accuracy, paired.
        tolerance: above 0, the loss up to which early exit is said to cost nothing.
    """
    points = 100 * drop.value
    if drop.interval is None:
        return f"Accuracy drop {points:+.2g} points (the data give no interval)"
    low, high = (100 * end for end in drop.interval)
    ends = f"95 % interval {low:.1f} to {high:.1f}"
    if drop.interval[1] <= tolerance:
        return f"No drop of accuracy above {100 * tolerance:g} points ({ends})"
    if low <= 0 <= high:
        return f"No measurable drop of accuracy ({points:.1f} points, {ends})"
    return f"Accuracy drop {points:.1f} points ({ends})"

"""Entries of `results.json` about early exit: one rule and threshold, the full model, the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fulldepth.early_exit.outcome import Outcome
from fulldepth.early_exit.readings import Readings
from fulldepth.early_exit.rules import Exit
from fulldepth.early_exit.subject import Subject
from fulldepth.early_exit.timing import Timed, timed

POLICY = {"causal-lm": "recompute"}
"""Task -> policy of the missing states, where there is one: with the true tokens read by all layers, the states are
those of `recompute`."""
QUALITIES = {"accuracy": "accuracy", "average_precision": "average precision"}
"""Name of a quality -> in words."""


@dataclass(frozen=True)
class Row:
    """One rule and threshold on one part of the data."""

    outcome: Outcome
    split: str
    """`calibration` or `report`."""
    calibrated: bool = False
    """Whether the threshold was chosen for a target quality."""
    timed: Timed | None = None
    saves_all: bool = True
    """Whether layers are all that the model computes for a sample beside embeddings and head; not so for a detector."""

    @property
    def theory(self) -> float | None:
        """Speed-up if time were proportional to the layers; of a detector to the operations. None if unknown."""
        if self.saves_all:
            return self.outcome.speedup
        return None if self.timed is None else 1 / self.timed.flops_share

    def document(self, policy: str | None) -> dict[str, Any]:
        """The entry in `results.json`."""
        found, clock = self.outcome, self.timed
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
            "theoretical_speedup": self.theory,
            "measured_speedup": None if clock is None else clock.speedup,
            "flops_share": None if clock is None else clock.flops_share,
            "seconds": None if clock is None else clock.seconds,
        }


def with_times(
    subject: Subject, rows: Sequence[Row], report: Readings, rounds: int, seed: int, advance: Callable[[int], None]
) -> tuple[list[Row], float | None]:
    """The rows with times and operations where they are on the reported samples, and the seconds of the full model.

    Args:
        subject: a classifier or a detector.
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
    full = {name: mean for name, mean in parts["report"].full.items() if name not in ("agreement", "drop")}
    return {
        "model": subject.describe(),
        "data": subject.sequences.describe() | {"samples": {name: len(p.sequence) for name, p in parts.items()}},
        "batch_size": subject.batch_size,
        "full": {
            key: value
            for name, mean in full.items()
            for key, value in ((name, mean.value), (f"{name}_stderr", mean.error))
        }
        | {"seconds": seconds},
        "exits": [row.document(POLICY.get(subject.anatomy.task)) for row in rows],
        "warnings": list(subject.warnings),
    }

"""Points of an early-exit sweep: a rule, a threshold, the layers after which samples leave, cost and speed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fulldepth.figures.curves import number
from fulldepth.figures.style import label

REPORT, CALIBRATION = "report", "calibration"
"""Splits of the data: on the second one a threshold is chosen, on the first one its numbers are reported."""
ERROR = "_stderr"
"""Suffix of the standard error of a number."""
QUALITIES = {"accuracy": "accuracy", "average_precision": "average precision"}
"""Key of the number that early exit may cost -> its name."""


@dataclass(frozen=True)
class Point:
    """Early exit at one threshold: when it stops, what that costs, and the time that it saves."""

    rule: str
    threshold: float | None
    policy: str
    """How the cache is filled; empty for models without one."""
    calibrated: bool
    counts: tuple[int, ...]
    """Number of samples or tokens that leave after each of the layers 1..L; empty if unknown."""
    values: Mapping[str, float | None]
    """Name -> number of the entry in the document."""
    theory: float | None
    """Speed-up if layers were all that takes time."""
    measured: float | None
    timing: str
    """What the times say: `differs`, `no-difference`, `few-rounds` or `busy`; empty if nothing was timed."""
    drop_interval: tuple[float, float] | None
    """95 % interval of the drop of quality."""

    @property
    def differs(self) -> bool:
        """Whether its time is measurably another than the full model's."""
        return self.timing == "differs" and self.measured is not None

    @property
    def quality(self) -> float | None:
        """Accuracy, or average precision."""
        return next((value for key in QUALITIES if (value := self.values.get(key)) is not None), None)

    @property
    def name(self) -> str:
        """Rule and threshold: `confidence 0.9`."""
        return self.rule if self.threshold is None else f"{self.rule} {self.threshold:.4g}"

    @property
    def series(self) -> str:
        """What all its thresholds have in common: rule and policy."""
        return ", ".join(filter(None, (self.rule, self.policy)))

    @property
    def speedup(self) -> float | None:
        """The measured speed-up, in theory where it was not measured."""
        return self.theory if self.measured is None else self.measured

    @property
    def early(self) -> float | None:
        """Share that leaves before the last layer."""
        total = sum(self.counts)
        return 1 - self.counts[-1] / total if total else None

    @property
    def mean_layer(self) -> float | None:
        """Mean layer after which samples or tokens leave."""
        total = sum(self.counts)
        return sum(at * count for at, count in enumerate(self.counts, start=1)) / total if total else None

    @property
    def half_by(self) -> int | None:
        """First layer by which half of those that leave early have left."""
        early, so_far = sum(self.counts[:-1]), 0
        for layer, count in enumerate(self.counts[:-1], start=1):
            so_far += count
            if early and 2 * so_far >= early:
                return layer
        return None


def quality_of(full: Mapping[str, Any]) -> float | None:
    """Accuracy or average precision of the model without early exit."""
    return next((value for key in QUALITIES if (value := number(full.get(key))) is not None), None)


def named_quality(full: Mapping[str, Any]) -> str:
    """`accuracy` or `average precision`, whichever the entry `full` states."""
    return next((name for key, name in QUALITIES.items() if full.get(key) is not None), "accuracy")


def points(entries: Iterable[Mapping[str, Any]] | None, split: str | None = REPORT) -> list[Point]:
    """The points of a split, or all that belong to no other split if none states it; by rule, policy and threshold."""
    every = list(entries or [])
    if split is not None:
        chosen = [entry for entry in every if entry.get("split") == split]
        every = chosen or [entry for entry in every if entry.get("split") is None]
    made = [_point(entry) for entry in every]
    return sorted(made, key=lambda point: (point.rule, point.policy, point.threshold or 0.0))


def _point(entry: Mapping[str, Any]) -> Point:
    counts = tuple(int(count) for count in entry.get("exits") or ())
    layers = sum(at * count for at, count in enumerate(counts, start=1))
    theory = number(entry.get("theoretical_speedup"))
    if "tokens" in entry:
        layers = 0  # generated tokens need layers that earlier ones left out
    ends = [number(end) for end in entry.get("drop_interval") or ()]
    means = [name + suffix for name in (*QUALITIES, "loss", "agreement", "drop") for suffix in ("", ERROR)]
    return Point(
        rule=label(entry.get("rule") or "threshold", 24),
        threshold=number(entry.get("threshold")),
        policy=label(entry.get("policy") or "", 24),
        calibrated=bool(entry.get("calibrated")),
        counts=counts,
        values={name: number(entry.get(name)) for name in (*means, "tokens", "flops_share", "layers_computed")},
        theory=len(counts) * sum(counts) / layers if theory is None and layers else theory,
        measured=number(entry.get("measured_speedup")),
        timing=str(entry.get("timing") or ""),
        drop_interval=None if len(ends) != 2 or ends[0] is None or ends[1] is None else (ends[0], ends[1]),
    )


def by_series(every: Sequence[Point]) -> dict[str, list[Point]]:
    """Rule and policy -> points by threshold."""
    return {name: list(group) for name, group in groupby(every, key=lambda point: point.series)}

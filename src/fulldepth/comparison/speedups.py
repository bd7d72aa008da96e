"""Quality at equal speed, and speed at equal quality, of several models with early exit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from fulldepth.results import Finding

AT = (1.1, 1.25, 1.36, 1.5)
"""Speed-ups at which quality is stated; 1.36 is that of the aligned DeiT of the paper (77.96 % on ImageNet)."""
QUALITIES = {"accuracy": "accuracy", "average_precision": "average precision"}
"""Key of the quality in `full` and `exits` -> its name."""
SHOWN = ("measured_speedup", "measured_speedup_interval", "timing", "drop", "drop_interval")
"""Entries of a chosen threshold that a sentence states."""
Entry = Mapping[str, Any]


class Curve(NamedTuple):
    """What was measured of one model."""

    quality: str
    """Key of its quality."""
    full: float
    """Quality of the full model on the reported samples."""
    lines: list[list[Entry]]
    """The timed entries of each rule on the reported samples, by threshold; the rule of the first settings first."""
    calibration: list[Entry]
    """Entries on the calibration part; empty for a model that was read without one."""

    @property
    def full_there(self) -> float | None:
        """Quality of the full model on the calibration part."""
        return self.calibration[0][self.quality] + self.calibration[0]["drop"] if self.calibration else None


def curve_of(model: Entry) -> Curve | None:
    """The measured points of a model; None if it was not timed, or its quality is unknown.

    Args:
        model: with the entries `full` and `exits` of its results.
    """
    full, every = model.get("full") or {}, model.get("exits") or []
    quality = next((key for key in QUALITIES if full.get(key) is not None), None)
    timed = [one for one in every if one.get("measured_speedup") and one.get("split", "report") == "report"]
    if quality is None or not timed:
        return None
    known = [
        one for one in every if one.get("split") == "calibration" and None not in (one.get(quality), one.get("drop"))
    ]
    rules = list(dict.fromkeys(one["rule"] for one in timed))
    lines = [sorted((one for one in timed if one["rule"] == rule), key=lambda one: one["threshold"]) for rule in rules]
    return Curve(quality, full[quality], lines, known)


def chosen(curve: Curve, level: float | None = None) -> Entry | None:
    """The reported entry of the threshold with the fewest layers that keeps the quality on the calibration part.

    Neither the quality nor the time that is reported takes part in the choice. None if no threshold below 1 does.

    Args:
        curve: of a model with a calibration part.
        level: quality to be kept on the calibration part; None = the model's own.
    """
    allowed = [
        one
        for one in curve.calibration
        if one["threshold"] < 1
        and sum(one.get("exits") or [])
        and (one["drop"] <= 1e-12 if level is None else one[curve.quality] >= level - 1e-12)
    ]
    reported = {(one["rule"], one["threshold"]): one for line in curve.lines for one in line}
    ranked = sorted(allowed, key=lambda one: (_mean_layer(one), -one[curve.quality]))
    found = (reported.get((one["rule"], one["threshold"])) for one in ranked)
    return next((one for one in found if one is not None), None)


def _mean_layer(entry: Entry) -> float:
    counts = entry["exits"]
    return float(sum(layer * count for layer, count in enumerate(counts, start=1)) / sum(counts))


def speed_at(curve: Curve, level: float | None = None) -> float | None:
    """The measured speed-up of the `chosen` threshold, on the reported samples; 1, the full model's, if none is.

    None without a calibration part, and if not even the full model has the `level` there.
    """
    if curve.full_there is None or (
        level is not None and curve.full_there < level - 1e-12 and not chosen(curve, level)
    ):
        return None
    entry = chosen(curve, level)
    return 1.0 if entry is None else float(entry["measured_speedup"])


def quality_at(curve: Curve, speedup: float) -> float | None:
    r"""Quality at a speed-up s: on the straight line between two neighbouring thresholds of a rule.

    With speed-ups s_1, s_2 and qualities q_1, q_2 of two neighbours, and s between them, a share p of the samples at
    the first threshold and the rest at the second take the time of s:

    .. math:: \frac{p}{s_1} + \frac{1 - p}{s_2} = \frac{1}{s}, \quad q = p q_1 + (1 - p) q_2

    The full model, s = 1, stands beside the highest threshold below 1. Nothing is chosen by its quality: the rule is
    the first of the settings, and of several pairs around s (times have noise) the one with the highest thresholds
    counts. None if the model never is as fast.

    Args:
        curve: of a model.
        speedup: s, above 1.
    """
    points = [(1 / one["measured_speedup"], one[curve.quality]) for one in curve.lines[0] if one["threshold"] < 1]
    for (time, value), (other, after) in reversed(list(pairwise([*points, (1.0, curve.full)]))):
        if min(time, other) <= 1 / speedup <= max(time, other):
            share = 1.0 if time == other else (1 / speedup - other) / (time - other)
            return float(share * value + (1 - share) * after)
    return None


def compared(models: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Label -> what a table of speed and quality states of a model; empty where a model was not timed.

    Args:
        models: the entries of a comparison, the baseline marked.
    """
    curves = {model["label"]: curve_of(model) for model in models}
    baseline = next((curves[model["label"]] for model in models if model.get("baseline")), None)
    rows: dict[str, dict[str, Any]] = {}
    for label, curve in curves.items():
        if curve is None:
            continue
        same = baseline is not None and baseline.quality == curve.quality
        level = None if baseline is None else baseline.full_there
        entry = None if level is None or not same or not curve.calibration else chosen(curve, level)
        rows[label] = {
            "quality": curve.quality,
            "full": curve.full,
            "speedup": speed_at(curve),
            "speedup_at_baseline": speed_at(curve, level) if same and level is not None else None,
            "at": {f"{speedup:g}": quality_at(curve, speedup) for speedup in AT},
            "has_calibration": bool(curve.calibration),
            "at_baseline": None
            if entry is None
            else {name: entry.get(name) for name in ("rule", "threshold", *SHOWN)} | {"quality": entry[curve.quality]},
        }
    return rows


def findings(models: Sequence[Entry], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Finding]:
    """One finding for each model: the speed-up at which it is as good as the full baseline."""
    baseline = next((model["label"] for model in models if model.get("baseline")), None)
    if baseline is None or baseline not in rows:
        return {}
    found = {}
    for label, row in rows.items():
        if row["quality"] != rows[baseline]["quality"]:
            continue
        name, level = QUALITIES[row["quality"]], rows[baseline]["full"]
        reach, sentence = _reach(label, baseline, row, f"the {level:.1%} {name} of {baseline} without early exit")
        found[f"speedup_at_baseline:{label}"] = Finding(reach, "1", sentence)
    return found


def _reach(label: str, baseline: str, row: Entry, level: str) -> tuple[float | None, str]:
    """The speed-up at the baseline's quality, and a sentence on it."""
    reach, entry = row["speedup_at_baseline"], row["at_baseline"]
    if not row["has_calibration"]:
        return None, f"No threshold was chosen for {label}: its data have one part (run with --target-accuracy-drop)."
    if reach is None:
        return None, f"{label} does not reach {level} on the calibration part (or {baseline} has none)."
    if entry is None:
        return reach, f"No threshold makes {label} faster at {level} on the calibration part."
    ends = entry["measured_speedup_interval"]
    interval = "" if not ends else f" (95 % interval {ends[0]:.2f} to {ends[1]:.2f})"
    at = f"at {entry['rule']} {entry['threshold']:g}, chosen on the calibration part for {level}"
    there = f"On the other part it has {entry['quality']:.1%}."
    if entry["timing"] != "differs":
        return None, f"No measurable difference in time of {label} {at}{interval}. {there}"
    return reach, f"{label} is {reach:.2f} times as fast{interval} {at}. {there}"

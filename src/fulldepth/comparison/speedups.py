"""Quality at equal speed, and speed at equal quality, of several models with early exit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from fulldepth.results import Finding

AT = (1.1, 1.25, 1.36, 1.5)
"""Speed-ups at which quality is stated; 1.36 is that of the aligned DeiT of the paper (77.96 % on ImageNet)."""
QUALITIES = {"accuracy": "accuracy", "average_precision": "average precision"}
"""Key of the quality in `full` and `exits` -> its name."""
Entry = Mapping[str, Any]


class Curve(NamedTuple):
    """What was measured of one model."""

    quality: str
    """Key of its quality."""
    full: float
    """Quality of the full model."""
    lines: list[list[Entry]]
    """The timed entries of each rule on the reported samples, by threshold."""


def curve_of(model: Entry) -> Curve | None:
    """The measured points of a model; None if it was not timed, or its quality is unknown.

    Args:
        model: with the entries `full` and `exits` of its results.
    """
    full = model.get("full") or {}
    quality = next((key for key in QUALITIES if full.get(key) is not None), None)
    timed = [
        entry
        for entry in model.get("exits") or []
        if entry.get("measured_speedup") and entry.get("split", "report") == "report"
    ]
    if quality is None or not timed:
        return None
    timed.sort(key=lambda entry: (entry["rule"], entry["threshold"]))
    return Curve(quality, full[quality], [list(line) for _, line in groupby(timed, lambda entry: entry["rule"])])


def speed_at(curve: Curve, level: float | None = None) -> float:
    """The highest measured speed-up without loss of quality; 1, the full model's, if no threshold is faster.

    0 if neither a threshold nor the full model has the `level`.

    Args:
        curve: of a model.
        level: quality to be kept; None = the model's own, up to the standard error of the paired difference.
    """
    own = 0.0 if level is not None and curve.full < level - 1e-12 else 1.0
    fast = [
        entry["measured_speedup"]
        for line in curve.lines
        for entry in line
        if (_lost(entry) <= 1e-12 if level is None else entry[curve.quality] >= level - 1e-12)
    ]
    return max([own, *fast])


def _lost(entry: Entry) -> float:
    """Loss of quality beyond its standard error."""
    return float(entry["drop"]) - float(entry.get("drop_stderr") or 0.0)


def quality_at(curve: Curve, speedup: float) -> float | None:
    r"""Quality at a speed-up s: the best of the straight lines between neighbouring thresholds of a rule.

    With speed-ups s_1, s_2 and qualities q_1, q_2 of two neighbours, and s between them, a share p of the samples at
    the first threshold and the rest at the second take the time of s:

    .. math:: \frac{p}{s_1} + \frac{1 - p}{s_2} = \frac{1}{s}, \quad q = p q_1 + (1 - p) q_2

    The full model, s = 1, stands beside the highest threshold below 1. None if the model never is as fast.

    Args:
        curve: of a model.
        speedup: s, above 1.
    """
    found = []
    for line in curve.lines:
        points = [(1 / entry["measured_speedup"], entry[curve.quality]) for entry in line if entry["threshold"] < 1]
        for (time, value), (other, after) in pairwise([*points, (1.0, curve.full)]):
            low, high = min(time, other), max(time, other)
            if low <= 1 / speedup <= high:
                share = 1.0 if time == other else (1 / speedup - other) / (time - other)
                found.append(share * value + (1 - share) * after)
    return max(found, default=None)


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
        rows[label] = {
            "quality": curve.quality,
            "full": curve.full,
            "speedup": speed_at(curve),
            "speedup_at_baseline": speed_at(curve, baseline.full) or None if same and baseline else None,
            "at": {f"{speedup:g}": quality_at(curve, speedup) for speedup in AT},
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
        reach = row["speedup_at_baseline"]
        if reach is None:
            sentence = f"{label} does not reach the {level:.1%} {name} of {baseline} without early exit."
        elif reach <= 1:
            sentence = f"No threshold makes {label} faster at the {level:.1%} {name} of {baseline} without early exit."
        else:
            sentence = f"{label} is {reach:.2f} times as fast at the {level:.1%} {name} of {baseline} or more."
        found[f"speedup_at_baseline:{label}"] = Finding(reach, "1", sentence)
    return found

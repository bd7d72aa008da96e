"""Comparisons of early-exit sweeps and of evaluations: speed at equal accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fulldepth.results.document import Finding
from fulldepth.results.folder import Results

KINDS = {"exit": ("exits", "full", "generation"), "evaluation": ("tasks", "exits", "full")}
"""Kind of results -> entries of their documents that the comparison holds for each model."""
Entry = Mapping[str, Any]


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
    warnings = [*comparison["warnings"], *(_warnings(models) if kind == "evaluation" else [])]
    found: dict[str, Any] = {"of": kind, "models": models, "warnings": warnings}
    if rows := speedups(models):
        found |= {"speedups": rows, "headline": {**comparison["headline"], **findings(models, rows)}}
    return found


def _warnings(models: list[dict[str, Any]]) -> list[str]:
    """Reasons why scores of the same task are not comparable."""
    lines = []
    for task in dict.fromkeys(name for model in models for name in model.get("tasks") or {}):
        stated = {model["label"]: (model.get("tasks") or {}).get(task) for model in models}
        for key, what in (("count", "numbers of examples"), ("metric", "metrics")):
            values = {label: entry.get(key) for label, entry in stated.items() if entry is not None}
            if len({value for value in values.values() if value is not None}) > 1:
                listed = ", ".join(f"{label}: {value}" for label, value in values.items())
                lines.append(f"{task}: the {what} differ ({listed}), so its scores are not comparable.")
    return lines


class SpeedCurve(NamedTuple):
    """What was measured of one model."""

    full: float
    """Accuracy of the full model on the reported samples."""
    timed: list[Entry]
    """The timed entries on the reported samples, by threshold."""
    calibration: list[Entry]
    """Entries on the calibration part; empty for a model that was read without one."""

    @property
    def full_there(self) -> float | None:
        """Accuracy of the full model on the calibration part."""
        return self.calibration[0]["accuracy"] + self.calibration[0]["drop"] if self.calibration else None


def curve_of(model: Entry) -> SpeedCurve | None:
    """The measured points of a model with the entries `full` and `exits`; None if it was not timed."""
    full, needed = (model.get("full") or {}).get("accuracy"), ("rule", "threshold", "accuracy", "exits")
    every = [one for one in model.get("exits") or [] if all(one.get(name) is not None for name in needed)]
    timed = [one for one in every if one.get("measured_speedup") and one.get("split", "report") == "report"]
    known = [one for one in every if one.get("split") == "calibration" and one.get("drop") is not None]
    if full is None or not timed:
        return None
    return SpeedCurve(full, sorted(timed, key=lambda one: one["threshold"]), known)


def chosen(curve: SpeedCurve, level: float) -> Entry | None:
    """The reported entry of the threshold with the fewest layers that keeps an accuracy on the calibration part.

    Neither the accuracy nor the time that is reported takes part in the choice. None if no threshold below 1 does.

    Args:
        curve: of a model with a calibration part.
        level: accuracy to be kept on the calibration part.
    """
    timed = {(one["rule"], one["threshold"]): one for one in curve.timed}
    kept = []  # (mean exit layer, -accuracy, place, reported entry)
    for place, one in enumerate(curve.calibration):
        entry, counts = timed.get((one["rule"], one["threshold"])), one["exits"]
        if entry is not None and one["threshold"] < 1 and one["accuracy"] >= level - 1e-12:
            mean_layer = sum(layer * count for layer, count in enumerate(counts, start=1)) / max(1, sum(counts))
            kept.append((mean_layer, -one["accuracy"], place, entry))
    return min(kept)[-1] if kept else None


def speedups(models: Sequence[Entry]) -> dict[str, dict[str, Any]]:
    """Label -> what a table of speed and accuracy states of a model; empty where no model was timed.

    `speedup` is that of the threshold `chosen` for the model's own full accuracy, `speedup_at_baseline` for the
    baseline's: 1 if none below the full model is, None without a calibration part, and if not even the full model is
    as accurate.

    Args:
        models: the entries of a comparison, the baseline marked.
    """
    curves = {model["label"]: curve for model in models if (curve := curve_of(model)) is not None}
    level = next(
        (curves[one["label"]].full_there for one in models if one.get("baseline") and one["label"] in curves), None
    )
    rows: dict[str, dict[str, Any]] = {}
    for label, curve in curves.items():
        own = curve.full_there
        entry = None if own is None else chosen(curve, own)
        best = None if own is None or level is None else chosen(curve, level)
        reaches = best is not None or (own is not None and level is not None and own >= level - 1e-12)
        rows[label] = {
            "full": curve.full,
            "speedup": None if own is None else entry["measured_speedup"] if entry else 1.0,
            "speedup_at_baseline": None if not reaches else best["measured_speedup"] if best else 1.0,
            "has_calibration": own is not None,
            "at_baseline": best,
        }
    return rows


def findings(models: Sequence[Entry], rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Finding]:
    """One finding for each model: the speed-up at which it is as accurate as the full baseline."""
    baseline = next((one["label"] for one in models if one.get("baseline") and one["label"] in rows), "")
    found = {}
    for label, row in rows.items() if baseline else ():
        level = f"the {rows[baseline]['full']:.1%} accuracy of {baseline} without early exit"
        reach, entry = row["speedup_at_baseline"], row["at_baseline"]
        if not row["has_calibration"]:
            sentence = f"No threshold was chosen for {label}: its data have one part (run with --target-accuracy-drop)."
        elif reach is None:
            sentence = f"{label} does not reach {level} on the calibration part (or {baseline} has none)."
        elif entry is None:
            sentence = f"No threshold makes {label} faster at {level} on the calibration part."
        else:
            ends = entry.get("measured_speedup_interval")
            interval = "" if not ends else f" (95 % interval {ends[0]:.2f} to {ends[1]:.2f})"
            faster = f"{label} is {reach:.2f} times as fast{interval}"
            if entry.get("timing") != "differs":
                reach, faster = None, f"No measurable difference in time of {label}{interval}"
            at = f"at {entry['rule']} {entry['threshold']:g}, chosen on the calibration part for {level}"
            sentence = f"{faster} {at}. On the other part it has {entry['accuracy']:.1%}."
        found[f"speedup_at_baseline:{label}"] = Finding(reach, "1", sentence)
    return found

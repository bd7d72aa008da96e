"""Headline differences of a comparison, one sentence each, and reasons to distrust them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd

from fulldepth.results import Finding

NUMBERS = {
    "zeta_L": "Jump of the last layer (zeta_L)",
    "zeta_L-1": "Jump of the last two layers (zeta_L-1)",
    "zeta_L-2": "Jump of the last three layers (zeta_L-2)",
    "last_layer_displacement": "Displacement of the last layer",
    "mean_coherence": "Mean coherence",
    "median_saturation": "Median saturation layer",
    "effective_depth": "Effective depth",
}
"""Headline number of a measurement -> its name in sentences."""


SIGNIFICANT = 2.0
"""Standard errors that a difference must exceed to be called one."""
PRINTED = 0.005
"""Smallest change, times 10^-2, that does not print as zero."""

NOT_COMPARABLE = (
    ("the token policies differ", "token_policy", "name"),
    ("the numbers of sequences that begin with the BOS token differ", "token_policy", "begin_with_bos"),
    ("the sequence lengths differ", "data", "sequence_length"),
    ("the numbers of sequences differ", "data", "sequences"),
)
"""Differences that make two measurements incomparable, see `unlike`."""
DATA = ("the data differ", "data", "hash", "name")
"""The data of two results, in the terms of `unlike`."""
OTHER_REASONS = (
    ("the precisions differ", "model", "dtype"),
    ("the seeds differ", "run", "seed"),
    ("the numbers of counted tokens differ", "sampling", "counted_tokens"),
    ("the token samples differ in size", "sampling", "reservoir_tokens"),
    ("the lens reads different numbers of positions", "sampling", "lens_positions"),
    ("the lens multiplies in different precisions", "sampling", "lens_precision"),
    ("different numbers of sequences enter the entropies", "sampling", "entropy_sequences"),
    ("the versions of fulldepth differ", "versions", "fulldepth"),
)
"""Other differences that affect the numbers of a measurement."""
Entry = dict[str, Any]
"""Entry of a model in a comparison's document."""


def headline(table: pd.DataFrame, models: list[Entry]) -> dict[str, Finding]:
    """Differences of every model from the baseline, by `name:label`.

    Args:
        table: the comparison's table.
        models: the entries of `meta["models"]`.
    """
    baseline, others = baseline_of(models)
    return {
        f"{name}:{model['label']}": finding
        for model in others
        for name, finding in (*_redundancy(table, model, baseline), *_numbers(model, baseline))
    }


def _redundancy(table: pd.DataFrame, model: Entry, baseline: Entry) -> Iterator[tuple[str, Finding]]:
    """The redundancy change (JREG, Eq. 7): in how many layers displacement differs, by which median, and where most.

    A layer counts where the difference is larger than `SIGNIFICANT` standard errors and than the printed precision.
    The errors of both models are taken as independent, which overstates them where both read the same text.
    """
    change = 100 * _displacements(table, model, "mean", "difference")
    change = change[np.isfinite(change.to_numpy(np.float64))]
    if change.empty:
        return
    error = 100 * np.hypot(*(_errors(table, model, entry, change.index) for entry in (model, baseline)))
    limit = np.maximum(SIGNIFICANT * error, PRINTED)
    larger, smaller = int((change > limit).sum()), int((change < -limit).sum())
    layers, median = len(change), float(change.median())
    labels = f"{model['label']} than in {baseline['label']}"
    if not larger + smaller:
        sentence = (
            f"No measurable difference: at none of {layers} layers do the displacements of {model['label']} and "
            f"{baseline['label']} differ by more than their noise."
        )
        yield "redundancy_change", Finding(median, "x 10^-2", sentence)
        return
    rest = layers - larger - smaller
    counts = f"at {larger} of {layers} layers and smaller at {smaller}"
    counts += f", with no measurable difference at {rest}" if rest else ""
    sentence = f"Displacement is larger in {labels} {counts}; the median change is {signed(median)} x 10^-2."
    yield "redundancy_change", Finding(median, "x 10^-2", sentence)
    peaks = change[change.abs() > limit]
    layer = int(peaks.index[int(peaks.abs().argmax())])
    peak = float(change[layer])
    sentence = (
        f"Displacement changes most at layer {layer} of {model['model']['num_layers']}: it is {abs(peak):.2f} x 10^-2 "
        f"{'larger' if peak > 0 else 'smaller'} in {labels}."
    )
    yield "greatest_redundancy_change", Finding(peak, "x 10^-2", sentence, float(error[change.index.get_loc(layer)]))


def _displacements(table: pd.DataFrame, model: Entry, statistic: str, column: str) -> pd.Series:
    """A statistic of a model's displacement by layer."""
    rows = table[(table.model == model["label"]) & (table.measure == "displacement") & (table.site == "residual")]
    return rows[rows.statistic == statistic].set_index("layer")[column].astype("float64")


def _errors(table: pd.DataFrame, model: Entry, entry: Entry, layers: pd.Index) -> np.ndarray[Any, Any]:
    """Standard errors of the mean displacement of `entry` at the depths of the layers of `model`; 0 if unknown."""
    errors = _displacements(table, entry, "standard_error", "value")
    depth, depth_of_entry = (one["model"]["num_layers"] for one in (model, entry))
    same = depth == depth_of_entry
    at = [int(layer) if same else max(1, round(layer * depth_of_entry / depth)) for layer in layers]
    return errors.reindex(at).fillna(0.0).to_numpy(np.float64)


def _numbers(model: Entry, baseline: Entry) -> Iterator[tuple[str, Finding]]:
    """Differences of the headline numbers that both measurements have."""
    for name, title in NUMBERS.items():
        finding, base = (entry["headline"].get(name) or {} for entry in (model, baseline))
        if finding.get("value") is None or base.get("value") is None:
            continue
        difference = float(finding["value"]) - float(base["value"])
        errors = [float(e) for one in (finding, base) if (e := one.get("standard_error")) is not None]
        error = math.hypot(*errors) if len(errors) == 2 else None
        sentence = (
            f"{title}: {_amount(finding, model)} in {model['label']} against {_amount(base, baseline)} in "
            f"{baseline['label']} ({_difference(difference, finding['value'], error)})."
        )
        yield name, Finding(difference, finding.get("unit", "1"), sentence, error)


def _amount(entry: Entry, model: Entry) -> str:
    number, unit = f"{entry['value']:.3g}", entry.get("unit", "1")
    if entry.get("standard_error") is not None:
        number += f" ± {entry['standard_error']:.2g}"
    if unit == "layers":
        return f"{number} of {model['model']['num_layers']} layers"
    return number if unit == "1" else f"{number} {unit}"


def _difference(value: float, of: float, error: float | None) -> str:
    """A difference with its sign, if it is larger than its noise and than rounding errors."""
    if abs(value) <= 1e-9 * abs(of):
        return "no difference"
    return "no measurable difference" if error is not None and abs(value) <= SIGNIFICANT * error else f"{value:+.3g}"


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign; no sign if it rounds to zero."""
    return f"{value:+.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"


def baseline_of(models: list[Entry]) -> tuple[Entry, list[Entry]]:
    """The baseline, and the other models."""
    return next(model for model in models if model["baseline"]), [model for model in models if not model["baseline"]]


def warnings(table: pd.DataFrame, models: list[Entry]) -> list[str]:
    """One line for each reason to distrust a difference."""
    baseline, others = baseline_of(models)
    measures = {model["label"]: set(table.measure[table.model == model["label"]]) for model in models}
    lines = []
    for model in others:
        pair = f"{model['label']} and {baseline['label']}"
        if reasons := [*other_text(model, baseline), *unlike(model, baseline, NOT_COMPARABLE)]:
            lines.append(f"{pair}: the numbers are not comparable because {'; '.join(reasons)}.")
        if reasons := list(unlike(model, baseline, OTHER_REASONS, where_stated=True)):
            lines.append(f"{pair}: a small difference may have other reasons than the models: {'; '.join(reasons)}.")
        lines += depth_warning(model, baseline)
        for label, other in ((model["label"], baseline["label"]), (baseline["label"], model["label"])):
            if lacking := sorted(measures[other] - measures[label]):
                lines.append(f"{label} has no {', '.join(lacking)}; {other} has.")
    return lines


def depth_warning(model: Entry, baseline: Entry) -> list[str]:
    """A line on models of unequal depth; no line if the depths are equal."""
    layers = [entry["model"]["num_layers"] for entry in (model, baseline)]
    if layers[0] == layers[1]:
        return []
    return [
        f"{model['label']} and {baseline['label']} have {layers[0]} and {layers[1]} layers: what one "
        "layer does (displacement, norm_ratio, saturation counts) shrinks as layers are added."
    ]


def other_text(model: Entry, baseline: Entry) -> Iterator[str]:
    """A reason if two models read different text; tokens may differ where the text is the same.

    Results that do not state the hash of their text are compared by the hash of their data.
    """
    hashes = [(entry.get("data") or {}).get("text_hash") for entry in (model, baseline)]
    if None in hashes:
        yield from unlike(model, baseline, [DATA])
    elif hashes[0] != hashes[1]:
        yield from unlike(model, baseline, [("the data differ", "data", "text_hash", "name")])


def unlike(
    model: Entry, baseline: Entry, causes: Sequence[tuple[str, ...]], where_stated: bool = False
) -> Iterator[str]:
    """Text of each cause in which two models differ, with both values if these can be told apart.

    Args:
        model: a model.
        baseline: the model that it is compared with.
        causes: text, part of the entry (empty = the entry itself), key, and the key to show if it is a different one.
        where_stated: whether to compare a value only if both entries state it.
    """
    for text, part, *keys in causes:
        parts = [(entry.get(part) or {}) if part else entry for entry in (model, baseline)]
        values, shown = ([entry.get(key) for entry in parts] for key in (keys[0], keys[-1]))
        if values[0] != values[1] and not (where_stated and None in values):
            stated = f" ({model['label']}: {shown[0]}, {baseline['label']}: {shown[1]})"
            yield text + (stated if shown[0] != shown[1] else "")

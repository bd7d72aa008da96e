"""Headline differences of a comparison, one sentence each, and reasons to distrust them."""

from __future__ import annotations

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


NOT_COMPARABLE = (
    ("the data differ", "data", "hash", "name"),
    ("the token policies differ", "token_policy", "name"),
    ("the numbers of sequences that begin with the BOS token differ", "token_policy", "begin_with_bos"),
    ("the sequence lengths differ", "data", "sequence_length"),
    ("the numbers of sequences differ", "data", "sequences"),
)
"""Differences that make two measurements incomparable, see `unlike`."""
OTHER_REASONS = (
    ("the precisions differ", "model", "dtype"),
    ("the seeds differ", "run", "seed"),
    ("the numbers of counted tokens differ", "sampling", "counted_tokens"),
    ("the token samples differ in size", "sampling", "reservoir_tokens"),
    ("the lens reads different numbers of positions", "sampling", "lens_positions"),
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
    """The redundancy change (JREG, Eq. 7): difference of the mean displacements, its mean over layers and maximum."""
    rows = table[(table.model == model["label"]) & (table.measure == "displacement") & (table.site == "residual")]
    change = 100 * rows[rows.statistic == "mean"].set_index("layer")["difference"]
    change = change[np.isfinite(change.to_numpy(np.float64))]
    if change.empty:
        return
    greatest = int(change.abs().argmax())
    mean, layer, peak = float(change.mean()), int(change.index[greatest]), float(change.iloc[greatest])
    names = f"{model['label']} than in {baseline['label']}"
    higher = _word(-mean, "higher", "lower", "neither higher nor lower")
    sentence = (
        f"Redundancy is {higher} in {names}: displacement changes by {signed(mean)} x 10^-2, averaged over the layers."
    )
    yield "redundancy_change", Finding(mean, "x 10^-2", sentence)
    layers = model["model"]["num_layers"]
    if size := _word(peak, "larger", "smaller", ""):
        sentence = (
            f"Displacement changes most at layer {layer} of {layers}: it is {abs(peak):.2f} x 10^-2 {size} in {names}."
        )
    else:
        labels = f"{model['label']} and {baseline['label']}"
        sentence = f"At no layer of {layers} do the displacements of {labels} differ by 0.01 x 10^-2 or more."
    yield "greatest_redundancy_change", Finding(peak, "x 10^-2", sentence)


def _numbers(model: Entry, baseline: Entry) -> Iterator[tuple[str, Finding]]:
    """Differences of the headline numbers that both measurements have."""
    for name, title in NUMBERS.items():
        finding, base = (entry["headline"].get(name) or {} for entry in (model, baseline))
        if finding.get("value") is None or base.get("value") is None:
            continue
        difference = float(finding["value"]) - float(base["value"])
        sentence = (
            f"{title}: {_amount(finding, model)} in {model['label']} against {_amount(base, baseline)} in "
            f"{baseline['label']} ({_difference(difference, finding['value'])})."
        )
        yield name, Finding(difference, finding.get("unit", "1"), sentence)


def _amount(entry: Entry, model: Entry) -> str:
    number, unit = f"{entry['value']:.3g}", entry.get("unit", "1")
    if entry.get("standard_error") is not None:
        number += f" ± {entry['standard_error']:.2g}"
    if unit == "layers":
        return f"{number} of {model['model']['num_layers']} layers"
    return number if unit == "1" else f"{number} {unit}"


def _difference(value: float, of: float) -> str:
    """A difference with its sign; differences of the size of rounding errors count as zero."""
    return f"{value:+.3g}" if abs(value) > 1e-9 * abs(of) else "no difference"


def signed(value: float, digits: int = 2) -> str:
    """A number with its sign; no sign if it rounds to zero."""
    return f"{value:+.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"


def _word(value: float, positive: str, negative: str, zero: str) -> str:
    """The word for the sign of a number at its printed precision."""
    rounded = round(value, 2)
    return positive if rounded > 0 else negative if rounded < 0 else zero


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
        if reasons := list(unlike(model, baseline, NOT_COMPARABLE)):
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

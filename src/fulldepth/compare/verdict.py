"""What a comparison says first: a few differences with one plain sentence each, and what makes them unfair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from fulldepth.results import finite

NUMBERS = {
    "zeta_L": "Jump of the last layer (zeta_L)",
    "zeta_L-1": "Jump of the last two layers (zeta_L-1)",
    "zeta_L-2": "Jump of the last three layers (zeta_L-2)",
    "last_layer_displacement": "Displacement of the last layer",
    "mean_coherence": "Mean coherence",
    "median_saturation": "Median saturation layer",
    "effective_depth": "Effective depth",
}
"""Headline numbers of a measurement -> how a sentence calls them."""


def headline(table: pd.DataFrame, models: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Differences of every model from the baseline, by `name:label`, each {value, unit, sentence}.

    Args:
        table: the comparison's table.
        models: the entries of `meta["models"]`.
    """
    baseline = next(model for model in models if model["baseline"])
    found = {}
    for model in models:
        if not model["baseline"]:
            found.update({f"{name}:{model['label']}": entry for name, entry in _redundancy(table, model, baseline)})
            found.update({f"{name}:{model['label']}": entry for name, entry in _numbers(model, baseline)})
    return found


def _redundancy(
    table: pd.DataFrame, model: dict[str, Any], baseline: dict[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The redundancy change (JREG, Eq. 7): difference of the mean displacements, mean over layers and greatest."""
    rows = table[(table.model == model["label"]) & (table.measure == "displacement") & (table.site == "residual")]
    change = 100 * rows[rows.statistic == "mean"].set_index("layer")["difference"]
    change = change[np.isfinite(change)]
    if change.empty:
        return
    greatest = int(change.abs().argmax())
    mean, layer, peak = float(change.mean()), int(change.index[greatest]), float(change.iloc[greatest])
    names = f"{model['label']} than in {baseline['label']}"
    yield (
        "redundancy_change",
        {
            "value": mean,
            "unit": "x 10^-2",
            "sentence": f"Redundancy is {_word(-mean, 'higher', 'lower', 'neither higher nor lower')} in {names}: "
            f"displacement changes by {mean:+.2f} x 10^-2, averaged over the layers.",
        },
    )
    yield (
        "greatest_redundancy_change",
        {
            "value": peak,
            "unit": "x 10^-2",
            "sentence": f"Displacement changes most at layer {layer} of {model['model']['num_layers']}: it is "
            f"{abs(peak):.2f} x 10^-2 {_word(peak, 'larger', 'smaller', 'larger')} in {names}.",
        },
    )


def _numbers(model: dict[str, Any], baseline: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Differences of the headline numbers that both measurements have."""
    for name, title in NUMBERS.items():
        ours, theirs = model["headline"].get(name), baseline["headline"].get(name)
        if not ours or not theirs or ours.get("value") is None or theirs.get("value") is None:
            continue
        difference = float(ours["value"]) - float(theirs["value"])
        sentence = (
            f"{title}: {_amount(ours, model)} in {model['label']} against {_amount(theirs, baseline)} in "
            f"{baseline['label']} ({difference:+.3g})."
        )
        yield name, finite({"value": difference, "unit": ours.get("unit", "1"), "sentence": sentence})


def _amount(entry: dict[str, Any], model: dict[str, Any]) -> str:
    number, unit = f"{entry['value']:.3g}", entry.get("unit", "1")
    if unit == "layers":
        return f"{number} of {model['model']['num_layers']} layers"
    return number if unit == "1" else f"{number} {unit}"


def _word(value: float, positive: str, negative: str, zero: str) -> str:
    """The word for a sign, at the precision at which the number is printed."""
    rounded = round(value, 2)
    return positive if rounded > 0 else negative if rounded < 0 else zero


def warnings(table: pd.DataFrame, models: list[dict[str, Any]]) -> list[str]:
    """One line for each reason to distrust a difference."""
    baseline = next(model for model in models if model["baseline"])
    measured = {model["label"]: set(table.measure[table.model == model["label"]]) for model in models}
    lines = []
    for model in models:
        if model["baseline"]:
            continue
        pair = f"{model['label']} and {baseline['label']}"
        if reasons := list(_unlike(model, baseline)):
            lines.append(f"{pair}: the numbers are not comparable because {'; '.join(reasons)}.")
        lines += depth_warning(model, baseline)
        for one, other in ((model, baseline), (baseline, model)):
            if lacking := sorted(measured[other["label"]] - measured[one["label"]]):
                lines.append(f"{one['label']} has no {', '.join(lacking)}; {other['label']} has.")
    return lines


def depth_warning(model: dict[str, Any], baseline: dict[str, Any]) -> list[str]:
    """The line on models of unequal depth; none where they are equal."""
    layers = [entry["model"]["num_layers"] for entry in (model, baseline)]
    if layers[0] == layers[1]:
        return []
    return [
        f"{model['label']} and {baseline['label']} have {layers[0]} and {layers[1]} layers: what one "
        "layer does (displacement, norm_ratio, saturation counts) shrinks as layers are added."
    ]


def _unlike(model: dict[str, Any], baseline: dict[str, Any]) -> Iterator[str]:
    labels = (model["label"], baseline["label"])
    for what, part, key, shown in (
        ("the data differ", "data", "hash", "name"),
        ("the token policies differ", "token_policy", "name", "name"),
        ("the sequence lengths differ", "data", "sequence_length", "sequence_length"),
        ("the numbers of sequences differ", "data", "sequences", "sequences"),
    ):
        values = [entry[part].get(key) for entry in (model, baseline)]
        if values[0] != values[1]:
            seen = [entry[part].get(shown) for entry in (model, baseline)]
            details = ", ".join(f"{label}: {value}" for label, value in zip(labels, seen, strict=True))
            yield f"{what} ({details})" if seen[0] != seen[1] else what

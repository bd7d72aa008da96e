"""Headline differences of a comparison, one sentence each, and reasons to distrust them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fulldepth.results.finding import Finding
from fulldepth.results.paired import Interval
from fulldepth.uncertainty import SIGNIFICANT, measurable


class Number(NamedTuple):
    """A headline number of a measurement that is compared."""

    title: str
    measure: str
    statistic: str
    back: int | None = 0
    """Layers from the last one to its row of the table; None for rows without a layer."""


NUMBERS = {
    "zeta_L": Number("Jump of the last layer (zeta_L)", "jump_rate", "value"),
    "zeta_L-1": Number("Jump of the last two layers (zeta_L-1)", "jump_rate", "value", 1),
    "zeta_L-2": Number("Jump of the last three layers (zeta_L-2)", "jump_rate", "value", 2),
    "last_layer_displacement": Number("Displacement of the last layer", "displacement", "mean"),
    "mean_coherence": Number("Mean coherence", "coherence", "mean_corrected_of_layers", None),
    "last_layer_accuracy": Number("Accuracy of the last layer", "lens_accuracy", "mean"),
    "last_layer_loss": Number("Loss of the last layer", "lens_loss", "mean"),
    "median_saturation": Number("Median saturation layer", "saturation", "median", None),
    "effective_depth": Number("Effective depth", "effective_depth", "relative_eps=0.05", None),
}
"""Name -> number of a measurement's headline, or of its last layer's predictions."""
PREDICTIONS = ("lens_accuracy", "lens_loss")
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
    ("different numbers of sequences enter the entropies", "sampling", "entropy_sequences"),
    ("the versions of fulldepth differ", "versions", "fulldepth"),
)
"""Other differences that affect the numbers of a measurement."""
Entry = dict[str, Any]
"""Entry of a model in a comparison's document."""
Intervals = Mapping[tuple[str, str], Interval | None]
"""(name, label) -> interval of the difference of a number that has no standard error; None = not known."""


def headline(table: pd.DataFrame, models: list[Entry], intervals: Intervals | None = None) -> dict[str, Finding]:
    """Differences of every model from the baseline, by `name:label`.

    Args:
        table: the comparison's table.
        models: the entries of `meta["models"]`.
        intervals: of steps.
    """
    baseline, others = baseline_of(models)
    return {
        f"{name}:{model['label']}": finding
        for model in others
        for name, finding in (*_redundancy(table, model, baseline), *_numbers(table, model, baseline, intervals or {}))
    }


def _redundancy(table: pd.DataFrame, model: Entry, baseline: Entry) -> Iterator[tuple[str, Finding]]:
    """The redundancy change (JREG, Eq. 7): at how many layers displacement differs, by which median, and one of them.

    A layer counts where the difference is measurable (`uncertainty.measurable`, over all layers) and larger than the
    printed precision. Without standard errors no layer is called different.
    """
    rows = _rows(table, model, "displacement", "mean")
    rows = rows[np.isfinite(rows["difference"].to_numpy(np.float64))]
    if rows.empty:
        return
    change, error = (
        100 * rows[column].to_numpy(np.float64) if column in rows.columns else np.full(len(rows), np.nan)
        for column in ("difference", "difference_error")  # training runs state no errors
    )
    median = float(np.median(change))
    pair, test = f"{model['label']} than in {baseline['label']}", "paired" if model.get("paired") else "unpaired"
    both = f"Displacement in {model['label']} and {baseline['label']}"
    known, differs = bool(np.isfinite(error).any()), measurable(change, error) & (np.abs(change) > PRINTED)
    if not known and np.abs(change).max() > PRINTED:
        sentence = f"{both}: the median change is {signed(median)} x 10^-2 (no standard error is known)."
        yield "redundancy_change", Finding(median, "x 10^-2", sentence)
        return
    if not differs.any():
        bound = f"no difference at any of {len(change)} layers"
        if known and change.any():
            most = float(np.nanmax(np.abs(change) + SIGNIFICANT * error))
            bound = f"no measurable difference at any of {len(change)} layers ({test}, at most {most:.2g} x 10^-2)"
        yield "redundancy_change", Finding(median, "x 10^-2", f"{both}: {bound}.")
        return
    larger, smaller = int((differs & (change > 0)).sum()), int((differs & (change < 0)).sum())
    rest = len(change) - larger - smaller
    sentence = (
        f"Displacement is larger in {pair} at {larger} of {len(change)} layers and smaller at {smaller}"
        f"{f', with no measurable difference at {rest}' if rest else ''} ({test}). The median change is "
        f"{signed(median)} x 10^-2."
    )
    yield "redundancy_change", Finding(median, "x 10^-2", sentence)
    greatest = int(np.where(differs, np.abs(change), 0).argmax())
    peak, its_error, layer = float(change[greatest]), float(error[greatest]), rows["layer"].iloc[greatest]
    sentence = (
        f"At layer {layer} of {model['model']['num_layers']} displacement is {abs(peak):.2f} ± {its_error:.2g} x 10^-2 "
        f"{'larger' if peak > 0 else 'smaller'} in {pair} ({test})."
    )
    yield "greatest_redundancy_change", Finding(peak, "x 10^-2", sentence, its_error)


def _rows(table: pd.DataFrame, model: Entry, measure: str, statistic: str) -> pd.DataFrame:
    """The rows of a model's statistic of the residual stream, by layer."""
    rows = table[(table.model == model["label"]) & (table.measure == measure) & (table.statistic == statistic)]
    return rows[rows.site == "residual"]


def _numbers(table: pd.DataFrame, model: Entry, baseline: Entry, intervals: Intervals) -> Iterator[tuple[str, Finding]]:
    """Differences of the headline numbers that both measurements have, and of the last layer's predictions."""
    for name, number in NUMBERS.items():
        own, base = (_entry(table, entry, name, number) for entry in (model, baseline))
        if own.get("value") is None or base.get("value") is None:
            continue
        difference = float(own["value"]) - float(base["value"])
        row, paired = _row(table, model, number, number.statistic), bool(model.get("paired"))
        stated = math.nan if row is None else row.get("difference_error", math.nan)
        error = float(stated) if math.isfinite(stated) else None
        interval = intervals.get((name, model["label"]))
        if error is None and interval is None:
            errors = [float(e) for one in (own, base) if (e := one.get("standard_error")) is not None]
            error, paired = math.hypot(*errors) if len(errors) == 2 else None, False
        said = _bounded(difference, own["value"], error, paired) if interval is None else _between(difference, interval)
        sentence = (
            f"{number.title}: {_amount(own, model)} in {model['label']} against {_amount(base, baseline)} in "
            f"{baseline['label']}; {said}."
        )
        ends = (interval.low, interval.high) if interval else None
        yield name, Finding(difference, own.get("unit", "1"), sentence, error, interval=ends)


def _row(table: pd.DataFrame, model: Entry, number: Number, statistic: str) -> pd.Series | None:
    """The row of a statistic at a number's layer; None if there is none."""
    rows = _rows(table, model, number.measure, statistic)
    if number.back is None:
        rows = rows[rows["layer"].isna()]
    else:
        rows = rows[(rows["layer"] == model["model"]["num_layers"] - number.back).fillna(False).astype(bool)]
    return rows.iloc[0] if len(rows) else None


def _entry(table: pd.DataFrame, model: Entry, name: str, number: Number) -> Entry:
    """A headline number of a model; where its headline has none, the row of the last layer's predictions."""
    if name in model["headline"] or number.measure not in PREDICTIONS:
        return model["headline"].get(name) or {}
    row, error = (_row(table, model, number, statistic) for statistic in (number.statistic, "standard_error"))
    if row is None or error is None or not math.isfinite(row["value"]):
        return {}
    return {"value": row["value"], "unit": row["unit"], "standard_error": float(error["value"])}


def _amount(entry: Entry, model: Entry) -> str:
    number, unit = f"{entry['value']:.3g}", entry.get("unit", "1")
    if entry.get("standard_error") is not None:
        number += f" ± {entry['standard_error']:.2g}"
    if entry.get("interval"):
        number += " ({:g} to {:g})".format(*entry["interval"])
    if unit == "layers":
        return f"{number} of {model['model']['num_layers']} layers"
    return number if unit == "1" else f"{number} {unit}"


def _bounded(difference: float, of: float, error: float | None, paired: bool) -> str:
    """A difference with its error, or its bound where it is not measurable."""
    test = "paired" if paired else "unpaired"
    if abs(difference) <= 1e-9 * abs(of):
        return "no difference"
    if error is None:
        return f"difference {difference:+.3g} (no standard error is known)"
    if not measurable([difference], [error])[0]:
        return f"no measurable difference ({test}, at most {abs(difference) + SIGNIFICANT * error:.2g})"
    return f"{test} difference {difference:+.3g} ± {error:.2g}"


def _between(difference: float, interval: Interval) -> str:
    """A difference of steps with its interval."""
    test = "paired" if interval.paired else "unpaired"
    low, high = (f"{end:+.3g}" if end else "0" for end in interval[:2])
    if not any((difference, interval.low, interval.high)):
        return "no difference"
    if interval.low <= 0 <= interval.high:
        return f"no measurable difference ({test}, 95 % interval {low} to {high})"
    return f"{test} difference {difference:+.3g} (95 % interval {low} to {high})"


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

"""Headline differences of a comparison, one sentence each, and reasons to distrust them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from fulldepth.core.number_format import plus_minus, rounded
from fulldepth.core.uncertainty import (
    FEWEST_CLUSTERS,
    FEWEST_EFFECTIVE,
    GROUPS,
    SIGNIFICANT,
    Difference,
    measurable,
    reach,
    stated_groups,
)
from fulldepth.results import tasks
from fulldepth.results.differences import TASK_SCORE, Interval
from fulldepth.results.document import Finding
from fulldepth.results.reasons import Entry, unlike


class Number(NamedTuple):
    """A number of a measurement that is compared in a sentence."""

    title: str
    measure: str
    statistic: str
    back: int | None = 0
    """Distance of its layer from the last one; None for rows without a layer."""
    site: str = "residual"
    """Site of its rows."""


REMOVED_PARTS = {"layer": "one layer", "attention": "the attention of one layer", "mlp": "the MLP of one layer"}
"""Part that `layer_effect` removes, the site of its rows -> what a sentence says is removed."""
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
    **{
        name if part == "layer" else f"{name}_{part}": Number(
            f"{title} without {removed}", "layer_effect", statistic, None, part
        )
        for part, removed in REMOVED_PARTS.items()
        for name, title, statistic in (
            ("effect_on_later", "Change of later layers at later tokens", "later_future_of_layers"),
            ("effect_on_prediction", "Change of predictions", "divergence_all_of_layers"),
        )
    },
}
NO_SPREAD = "it is the same for all of the data, which says nothing of other data"
"""Reason for a difference without an error."""
PRINTED = 5e-5
"""Smallest change of a displacement that does not round to zero in a sentence."""
ROUNDING = 2**-23
"""Relative rounding error of float32: another order of the batches changes numbers by about as much."""

NOT_COMPARABLE = (
    ("the token policies differ", "token_policy", "name"),
    ("the numbers of sequences that begin with the BOS token differ", "token_policy", "begin_with_bos"),
    ("the sequence lengths differ", "data", "sequence_length"),
    ("the numbers of sequences differ", "data", "sequences"),
)
"""Differences that make two measurements incomparable, see `unlike`."""
DATA = ("the data differ", "data", "hash", "name")
"""The data of two results, in the terms of `unlike`."""
TEXT = ("the data differ", "data", "text_hash", "name")
"""The text of two results, which may be the same although the tokens differ."""
OTHER_REASONS = (
    ("the precisions differ", "model", "dtype"),
    ("the seeds differ", "run", "seed"),
    ("the numbers of counted tokens differ", "sampling", "counted_tokens"),
    ("the token samples differ in size", "sampling", "reservoir_tokens"),
    ("the lens reads different numbers of positions", "sampling", "lens_positions"),
    ("different numbers of sequences enter the entropies", "sampling", "entropy_sequences"),
    ("different tokens of the responses or prompts are predicted", "read", "score"),
    ("only one of them removes parts at the first token", "read", "effect_first"),
    ("parts are removed before different numbers of positions", "read", "effect_positions"),
    ("the linear lenses are fitted on different text", "read", "fit", "fit_name"),
    ("the versions of fulldepth differ", "versions", "fulldepth"),
    ("the versions of lm-eval differ", "versions", "lm-eval"),
)
"""Other differences that affect the numbers of a measurement."""
Intervals = Mapping[tuple[str, str], Interval | None]
"""(name, label) -> interval of the difference of a number that has no standard error; None = not known."""


def comparison_headline(
    table: pd.DataFrame, models: list[Entry], intervals: Intervals | None = None
) -> dict[str, Finding]:
    """Differences of every model from the baseline, by `name:label`.

    A model that is not comparable with the baseline has a single finding, the reason; so has a task of an
    evaluation. Such findings come first.

    Args:
        table: the comparison's table, with the errors of differences that align last layers as `error_at_last`, and
            whether rows are compared by cluster as `is_paired`.
        models: the entries of `meta["models"]`.
        intervals: intervals of the numbers without a standard error.
    """
    baseline, compared = baseline_of(models)
    refused = {
        f"comparable:{model['label']}": reason for model in compared if (reason := incomparable(model, baseline))
    }
    for model in compared:
        for test in tasks.refused(model, baseline):
            pair = f"{model['label']} and {baseline['label']}"
            sentence = f"{test.title}: {pair} are not comparable because {test.reasons}."
            refused[f"comparable {test.title}:{model['label']}"] = Finding(None, "1", sentence)
    return refused | {
        f"{name}:{model['label']}": finding
        for model in compared
        if f"comparable:{model['label']}" not in refused
        for name, finding in (
            *_redundancy(table, model, baseline),
            *_numbers(table, model, baseline, intervals or {}),
        )
    }


def incomparable(model: Entry, baseline: Entry) -> Finding | None:
    """The finding that two models are not comparable, with the reason; None if they are.

    The same model may be compared on different data: then the differences are due to the data.
    """
    texts = [entry["data"].get("text_hash") for entry in (model, baseline)]
    is_same_model = tasks.is_one_model(model, baseline)
    causes = NOT_COMPARABLE if is_same_model else (TEXT if all(texts) else DATA, *NOT_COMPARABLE)
    return not_comparable(model, baseline, causes)


def not_comparable(model: Entry, baseline: Entry, causes: Sequence[tuple[str, ...]]) -> Finding | None:
    """The finding "not comparable" if two models differ in one of the causes (see `unlike`), else None."""
    reasons = unlike(model, baseline, causes)
    pair = f"{model['label']} and {baseline['label']}"
    return Finding(None, "1", f"{pair} are not comparable because {reasons}.") if reasons else None


def _redundancy(table: pd.DataFrame, model: Entry, baseline: Entry) -> Iterator[tuple[str, Finding]]:
    """The redundancy change (JREG, Eq. 7): at how many layers displacement differs, and by which median.

    A layer counts where the difference is measurable (`uncertainty.measurable`, over all layers) and larger than the
    printed precision. Without standard errors no layer is called different.
    """
    rows = _rows(table, model, "displacement", "mean")
    rows = rows[np.isfinite(rows["difference"].to_numpy(np.float64))]
    if rows.empty:
        return
    change, error = rows[["difference", "difference_error"]].to_numpy(np.float64).T
    label = model["label"]
    other = baseline["label"]
    layers = len(change)
    test = _test(bool(rows["is_paired"].all()))
    median = float(np.median(change))
    groups = min(stated_groups(entry["data"]) for entry in (model, baseline))
    differs = measurable(change, error, groups) & (np.abs(change) > PRINTED)
    summary = f"the median change is {signed_number(median, 4)}"
    if not np.isfinite(error).any():
        sentence = f"Displacement in {label} and {other}: {summary} (no standard error is known)."
    elif not differs.any():
        largest = float(np.nanmax(np.abs(change) + reach(groups) * error))
        bound = f"no measurable difference at any of {layers} layers ({test}, at most {largest:.2g})"
        sentence = f"Displacement in {label} and {other}: {bound}."
    else:
        larger, smaller = (int((differs & side).sum()) for side in (change > 0, change < 0))
        counts = f"at {larger} of {layers} layers and smaller at {smaller}"
        sentence = f"Displacement is larger in {label} than in {other} {counts} ({test}); {summary}."
    yield "redundancy_change", Finding(median, "1", sentence)


def _rows(table: pd.DataFrame, model: Entry, measure: str, statistic: str, site: str = "residual") -> pd.DataFrame:
    """The rows of a model's statistic at a site, by layer."""
    rows = table[(table.model == model["label"]) & (table.measure == measure) & (table.statistic == statistic)]
    return rows[rows.site == site]


def _numbers(table: pd.DataFrame, model: Entry, baseline: Entry, intervals: Intervals) -> Iterator[tuple[str, Finding]]:
    """Differences of the numbers that both models have, and of the main scores of their tasks."""
    refused = {test.site for test in tasks.refused(model, baseline)}
    scores = {
        f"score {task}": Number(f"{task} ({entry['metric']})", TASK_SCORE, entry["metric"], site=task)
        for task, entry, _ in tasks.shared(model, baseline)
        if task not in refused and entry.get("metric")
    }
    for name, number in (NUMBERS | scores).items():
        values = []
        for entry in (model, baseline):
            rows = _rows(table, entry, number.measure, number.statistic, number.site)
            layer = -1 if number.back is None else entry["model"]["num_layers"] - number.back
            rows = rows[(rows["layer"].fillna(-1) == layer) & np.isfinite(rows["value"])]
            values.append(rows.iloc[0] if len(rows) else None)
        row, base_row = values
        if row is None or base_row is None:
            continue
        difference = float(row["value"] - base_row["value"])
        error = float(row["error_at_last"]) or math.nan  # an error of 0 says nothing of other data
        interval = intervals.get((name, model["label"]))
        groups = min(stated_groups(entry["data"]) for entry in (model, baseline))
        if name in scores and pd.notna(row["count"]):  # of examples; the score of a group of tasks has none
            groups = float(min(row["count"], GROUPS) if row["is_paired"] else row["count"])
        spread = reach(groups) * error
        low, high = (interval.low, interval.high) if interval else (difference - spread, difference + spread)
        change = rounded(difference, "+.3g")
        ends = f"95 % interval {rounded(low, '+.3g')} to {rounded(high, '+.3g')}"
        test = _test(interval.paired if interval else bool(row["is_paired"]))
        farthest = abs(difference) + (0.0 if math.isnan(spread) else spread)
        if farthest <= ROUNDING * abs(row["value"]) and not (interval and (low or high)):
            verdict = "no difference"
        elif interval and low <= 0 <= high:
            verdict = f"no measurable difference ({test}, {ends})"
        elif interval:
            verdict = f"{test} difference {change} ({ends})"
        elif math.isnan(error):
            verdict = f"difference {change} (no standard error is known)"
        elif not measurable([difference], [error], groups)[0]:
            verdict = f"no measurable difference ({test}, at most {rounded(abs(difference) + spread, '.2g')})"
        else:
            verdict = f"{test} difference {change} {plus_minus(error)}"
        unit = "" if row["unit"] == "1" else f" {row['unit']}"
        sentence = (
            f"{number.title}: {rounded(row['value'], '.3g')}{unit} in {model['label']} against "
            f"{rounded(base_row['value'], '.3g')}{unit} in {baseline['label']}; {verdict}."
        )
        stated = None if math.isnan(error) else error
        reason = NO_SPREAD if row["error_at_last"] == 0 else None
        ends_of = (low, high) if interval else None
        yield name, Finding(difference, row["unit"], sentence, stated, interval=ends_of, no_standard_error=reason)


def _test(paired: bool) -> str:
    return "paired" if paired else "unpaired"


def signed_number(value: float, digits: int = 2) -> str:
    """A number with its sign; no sign if it rounds to zero."""
    return f"{value:+.{digits}f}" if round(value, digits) else f"{0:.{digits}f}"


def baseline_of(models: list[Entry]) -> tuple[Entry, list[Entry]]:
    """The baseline, and the other models."""
    return next(model for model in models if model["baseline"]), [model for model in models if not model["baseline"]]


def comparison_warnings(table: pd.DataFrame, models: list[Entry]) -> list[str]:
    """Warnings about the differences: one line for each reason to distrust them."""
    baseline, compared = baseline_of(models)
    measures = {model["label"]: set(table.measure[table.model == model["label"]]) for model in models}
    lines = []
    for model in compared:
        pair = f"{model['label']} and {baseline['label']}"
        if reasons := unlike(model, baseline, OTHER_REASONS, where_stated=True):
            lines.append(f"{pair}: a small difference may have other reasons than the models: {reasons}.")
        lines += tasks.notes(model, baseline)
        lines += depth_warning(model, baseline)
        for label, other in ((model["label"], baseline["label"]), (baseline["label"], model["label"])):
            if lacking := sorted(measures[other] - measures[label]):
                lines.append(f"{label} has no {', '.join(lacking)}; {other} has.")
    return lines


def depth_warning(model: Entry, baseline: Entry) -> list[str]:
    """A list with one warning if two models differ in depth, else an empty list."""
    layers = [entry["model"]["num_layers"] for entry in (model, baseline)]
    if layers[0] == layers[1]:
        return []
    return [
        f"{model['label']} and {baseline['label']} have {layers[0]} and {layers[1]} layers: numbers "
        "per layer (displacement, norm_ratio, saturation counts) shrink as a model gets more layers."
    ]


def difference_in_words(gap: Difference, other: str, units: str) -> str:
    """A difference of losses to another model on a number of `units`, as a part of a sentence."""
    if not math.isfinite(gap.standard_error):
        too_few = f"an error takes {FEWEST_CLUSTERS} {units}, these are {gap.documents}"
        return f"{gap.mean:+.4f} against {other} ({too_few})"
    if gap.groups < FEWEST_EFFECTIVE:
        no_error = f"one of {gap.documents} {units} has nearly all tokens: no error is stated"
        return f"{gap.mean:+.4f} against {other} ({no_error})"
    if gap.mean == gap.reach == 0:
        return f"no difference from {other}, in none of {gap.documents} {units}"
    if not gap.measurable:
        return f"no measurable difference from {other} (at most {abs(gap.mean) + gap.reach:.4f} nats)"
    error = f"standard error {gap.standard_error:.4f}, {gap.documents} {units}"
    if (errors := round(gap.reach / gap.standard_error, 1)) > SIGNIFICANT:
        error += f", measurable from {errors} standard errors"
    return f"{gap.mean:+.4f} against {other} ({error})"


def difference_finding(gap: Difference, sentence: str, units: str) -> Finding:
    """A difference of losses on a number of `units` with its error, explained by a sentence."""
    if not math.isfinite(gap.standard_error):
        return Finding(gap.mean, "nats", sentence, no_standard_error=f"too few {units}")
    if gap.groups < FEWEST_EFFECTIVE:
        return Finding(gap.mean, "nats", sentence, no_standard_error="one has nearly all tokens")
    return Finding(gap.mean, "nats", sentence, standard_error=gap.standard_error)

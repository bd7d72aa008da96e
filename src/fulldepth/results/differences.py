r"""Differences between two results: their tables joined at the same depth, and the errors of the differences.

Two results of the same text have the same clusters in the same groups, and what makes a document easy for one model
makes it easy for the other. With the influences :math:`e_g` of the groups on both values, the difference has the error

.. math:: \mathrm{SE}^2 = \frac{G}{G - 1} \sum_g (e_g - e_g^{\text{baseline}})^2 .

Layers that a step depends on (a depth, a median) are drawn together, with the same groups for both models. Results of
different text are independent: :math:`\mathrm{SE}^2 = s^2 + s_0^2`.

Source: Miller, "Adding Error Bars to Evals" (2024), 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from fulldepth.core.uncertainty import bootstrap, error_of
from fulldepth.results.folder import Results
from fulldepth.results.influences import KEYS, groups_of

Depth = Literal["layer", "relative"]
Array = NDArray[np.float64]

DIRECTED = ("layer_effect", "retrieval_weight")
"""Measures of pairs of two different layers, of which the first acts on, or reads, the second."""
FROM_THE_END = "jump_rate"
"""Measure whose layers are counted from the last one: zeta_L is compared with zeta_L at any depth."""
ERROR = "standard_error"
ERROR_OF = "standard_error_of_"
TASK_SCORE = "task_score"
"""Measure of the scores of tasks, whose site is the task."""
EVALUATED = (TASK_SCORE, "generation_quality")
"""Measures of an evaluation: the standard error of METRIC is the statistic METRIC_stderr."""
ERROR_SUFFIX = "_stderr"
TARGET = 0.95
"""Share of the last layer's accuracy that defines the effective depth of the headline."""


class Interval(NamedTuple):
    """95 % interval of a difference."""

    low: float
    high: float
    paired: bool


class Step(NamedTuple):
    """A headline number that is a step function of the values of layers 1..L."""

    measure: str
    statistic: str
    reached: Callable[[Array], NDArray[np.bool_]]
    """Values `[..., L]` -> True where a layer reaches the target, `[..., L]`; the number is the first such layer."""
    number: tuple[str, str]
    """Measure and statistic of the row that states the number; its interval is in `low_of_` and `high_of_` rows."""


STEPS = {
    "effective_depth": Step(
        "lens_accuracy",
        "mean",
        lambda values: values >= TARGET * values[..., -1:],
        ("effective_depth", "relative_eps=0.05"),
    ),
    "median_saturation": Step("saturation", "cumulative", lambda values: values >= 0.5, ("saturation", "median")),
}


def depth_of_results(results: Results) -> int:
    """Number of layers of the model."""
    return int(results.meta["model"]["num_layers"])


def counterparts(
    table: pd.DataFrame,
    layers: int,
    baseline: pd.DataFrame,
    baseline_layers: int,
    depth: Depth,
    columns: Sequence[str] = ("value",),
) -> Array:
    r"""The baseline's numbers at the depth of every row of `table`.

    With `depth="layer"`, layer l is compared with layer l. With `depth="relative"`, layer l of L corresponds to
    position :math:`l L_0 / L` of the baseline's :math:`L_0` layers: linear interpolation between layers, bilinear for
    pairs of layers (linear along the diagonal, so that a layer's similarity to itself stays 1); positions before
    the first layer use the first layer. Pairs of two different layers by definition (`DIRECTED`) that are less than one
    layer of the baseline apart use its pairs of neighbours. `jump_rate` is counted from the last layer. Rows without a
    layer are compared directly.

    Args:
        table: rows of one model, with the key columns of a table.
        layers: its number of layers L.
        baseline: rows of the baseline.
        baseline_layers: the baseline's number of layers.
        depth: how layers are aligned.
        columns: numbers of the baseline's rows.

    Returns:
        `[len(table), len(columns)]`; NaN where the baseline has no number at that depth.
    """
    rows = _keyed(table)
    base = _keyed(baseline, *columns)
    # measures of pairs are symmetric and may be stored once per pair, except DIRECTED ones and across two towers
    pairs = base[(base["other"] >= 0) & (base["site"] != "cross") & ~base["measure"].isin(DIRECTED)]
    base = pd.concat([base, pairs.rename(columns={"layer": "other", "other": "layer"})])
    base = base.drop_duplicates(KEYS)
    first, second = (rows[name].to_numpy(np.float64) for name in ("layer", "other"))
    if depth == "relative":
        series = ["measure", "site", "statistic"]
        known = base[base[list(columns)].notna().any(axis=1)].groupby(series)[["layer", "other"]].agg(["min", "max"])
        known.columns = ["first", "last", "first_other", "last_other"]
        ends = rows[series].merge(known, how="left", on=series)
        scaled = [
            (place * baseline_layers / layers).clip(ends[low].to_numpy(np.float64), ends[high].to_numpy(np.float64))
            for place, low, high in ((first, "first", "last"), (second, "first_other", "last_other"))
        ]
        from_the_end = (rows["measure"] == FROM_THE_END).to_numpy()
        first = np.where(first < 0, first, np.where(from_the_end, first - layers + baseline_layers, scaled[0]))
        second = np.where(second < 0, second, scaled[1])
        directed = rows["measure"].isin(DIRECTED).to_numpy() & (second >= 0)
        first, second = _apart(first, second, directed, np.sign((rows["other"] - rows["layer"]).to_numpy(np.float64)))
    result = np.zeros((len(rows), len(columns)))
    for (below, beside), weight in _corner_weights(first, second, rows["measure"].isin(DIRECTED).to_numpy()).items():
        if np.isnan(weight).any() or weight.any():
            corner = rows.assign(layer=np.floor(first) + below, other=np.floor(second) + beside)
            values = corner.merge(base, how="left", on=KEYS)[list(columns)].to_numpy(np.float64)
            result += np.where(weight[:, None] == 0, 0.0, weight[:, None] * values)
    return result


def _apart(first: Array, second: Array, directed: NDArray[np.bool_], sign: Array) -> tuple[Array, Array]:
    """Positions `[rows]` of pairs of layers; `directed` ones that are less than 1 apart are moved apart to 1.

    Args:
        first: position of the first layer of every row.
        second: position of the other one.
        directed: the rows that are moved.
        sign: of the other layer less the first one, in the row's own model.
    """
    middle = (first + second) / 2
    close = directed & (np.abs(second - first) < 1)
    moved = [np.where(close, middle + side * sign / 2, place) for side, place in ((-1, first), (1, second))]
    first, second = (  # without rounding errors, which would reach for a pair beyond the diagonal
        np.where(directed, np.round(after, 9), before) for before, after in zip((first, second), moved, strict=True)
    )
    return first, second


def _corner_weights(first: Array, second: Array, directed: NDArray[np.bool_]) -> dict[tuple[int, int], Array]:
    """Weights `[rows]` of the four pairs of layers around a pair of positions, by (after the first, after the other).

    The weights are bilinear, except on the diagonal, and for `directed` rows in squares of which the diagonal cuts off
    a corner: there they are linear in the triangle of the other three corners.
    """
    down = first - np.floor(first)
    right = second - np.floor(second)
    steps = np.floor(second) - np.floor(first)
    kinds = [(first == second) & (second >= 0), directed & (steps == 1), directed & (steps == -1)]
    far, near = np.maximum(right - down, 0.0), np.maximum(down - right, 0.0)
    none = np.zeros_like(down)
    return {
        (0, 0): np.select(kinds, [1 - down, 1 - right, 1 - down], (1 - down) * (1 - right)),
        (0, 1): np.select(kinds, [none, far, none], (1 - down) * right),
        (1, 0): np.select(kinds, [none, none, near], down * (1 - right)),
        (1, 1): np.select(kinds, [down, down, right], down * right),
    }


def _keyed(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The key columns, with missing values filled so that they match, and further columns."""
    keys = rows[[*KEYS, *columns]].fillna({"site": "", "layer": -1, "other": -1})
    return keys.astype({"layer": np.float64, "other": np.float64})


def is_paired(results: Results, baseline: Results, task: str | None = None) -> bool:
    """Return True if both results have influences of the same groups of the same clusters.

    Args:
        results: some results.
        baseline: those that they are compared with.
        task: of an evaluation: its examples alone must be the same, if both results state them.
    """
    if results.influences is None or baseline.influences is None:
        return False
    if task is not None:
        examples = {
            ((result.meta.get("tasks") or {}).get(task) or {}).get("examples") for result in (results, baseline)
        }
        if None not in examples:
            return len(examples) == 1
    hashes = {(result.meta.get("groups") or {}).get("hash") for result in (results, baseline)}
    return len(hashes) == 1 and None not in hashes


def paired_rows(results: Results, baseline: Results) -> NDArray[np.bool_]:
    """`[rows]` which rows of the table are compared by cluster; the others are compared as independent numbers.

    The tasks of an evaluation are paired one by one. A number without influences is not paired: a score that is no mean
    over examples (perplexity), or the diversity of generated text.
    """
    rows = _keyed(results.table)
    if results.influences is None or baseline.influences is None:
        return np.zeros(len(rows), bool)
    is_score = (rows["measure"] == TASK_SCORE).to_numpy()
    by_task = {str(task): is_paired(results, baseline, str(task)) for task in rows["site"][is_score].unique()}
    of_same_clusters = np.where(is_score, rows["site"].map(by_task).eq(True), is_paired(results, baseline))
    series = ["measure", "site", "statistic"]  # in the baseline, whose layers may be others
    for influences, keys in ((results.influences, KEYS), (baseline.influences, series)):
        known = _keyed(influences)[keys].drop_duplicates()
        of_same_clusters &= (rows.merge(known, how="left", on=keys, indicator=True)["_merge"] == "both").to_numpy()
    return of_same_clusters


def difference_errors(results: Results, baseline: Results, depth: Depth) -> Array:
    """Standard error of every row's difference from the baseline at the same depth.

    Influences, and the standard errors of rows that are not paired (`paired_rows`), are interpolated between layers
    like the values.

    Returns:
        `[rows]`, in each row's unit; NaN where it is not known.
    """
    paired = paired_rows(results, baseline)
    errors = np.full(len(paired), np.nan)
    for rows, base, columns, selected_rows in (
        (results.influences, baseline.influences, None, paired),
        (_errors(results.table), _errors(baseline.table), ["value"], ~paired),
    ):
        if not selected_rows.any() or rows is None or base is None:
            continue
        groups = columns or max(groups_of(rows), groups_of(base), key=len)  # of a task, groups beyond its own are NaN
        values, base = rows.reindex(columns=[*KEYS, *groups]), base.reindex(columns=[*KEYS, *groups])
        base_values = counterparts(values, depth_of_results(results), base, depth_of_results(baseline), depth, groups)
        own_values = values[groups].to_numpy(np.float64)
        row_errors = np.hypot(own_values, base_values)[:, 0] if columns else error_of((own_values - base_values).T)
        known = _keyed(rows).assign(error=row_errors).drop_duplicates(KEYS)
        every = _keyed(results.table).merge(known, how="left", on=KEYS)["error"].to_numpy(np.float64)
        errors = np.where(selected_rows, every, errors)
    return errors


def _errors(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of standard errors, each under the statistic whose error it is."""
    is_evaluated = table["measure"].isin(EVALUATED) & table["statistic"].str.endswith(ERROR_SUFFIX)
    scores = table[is_evaluated].copy()
    scores["statistic"] = scores["statistic"].str.removesuffix(ERROR_SUFFIX)
    rows = table[table["statistic"].str.startswith(ERROR) & ~is_evaluated].copy()
    plain = ["value" if measure == "jump_rate" else "mean" for measure in rows["measure"]]
    rows["statistic"] = [
        name.removeprefix(ERROR_OF) if name.startswith(ERROR_OF) else mean + name.removeprefix(ERROR)
        for name, mean in zip(rows["statistic"], plain, strict=True)
    ]
    return pd.concat([rows, scores])


def step_interval(name: str, results: Results, baseline: Results) -> Interval | None:
    r"""95 % interval of the difference of a number of `STEPS`, in layers; None if it is not known.

    Paired results: a bootstrap (`uncertainty.bootstrap`) with the same drawn groups for both models. With :math:`k_g`
    times group g, the value of a layer is :math:`\theta + \sum_g (k_g - 1) e_g`. Unpaired results: computed from both
    intervals, by the square-root rule

    .. math:: d - \sqrt{(\theta - l)^2 + (u_0 - \theta_0)^2}, \quad d + \sqrt{(u - \theta)^2 + (\theta_0 - l_0)^2}.

    Source: Zou and Donner, "Construction of confidence limits about effect measures" (2008), for the latter.
    """
    step = STEPS[name]
    sums, base_sums = (_sums(result, step) if is_paired(results, baseline) else None for result in (results, baseline))
    if sums is not None and base_sums is not None:
        ends = bootstrap(
            lambda values, base: 1.0 * step.reached(values).argmax(-1) - step.reached(base).argmax(-1), sums, base_sums
        )
        return None if ends is None else Interval(float(ends[0]), float(ends[1]), True)
    measure, statistic = step.number
    (low, value, high), (base_low, base, base_high) = (
        result.table[result.table["measure"] == measure]
        .drop_duplicates("statistic")
        .set_index("statistic")["value"]
        .reindex([f"low_of_{statistic}", statistic, f"high_of_{statistic}"])  # NaN where it does not state its interval
        .astype(float)
        for result in (results, baseline)
    )
    below = math.hypot(value - low, base_high - base)
    above = math.hypot(high - value, base - base_low)
    difference = value - base
    return Interval(difference - below, difference + above, False) if math.isfinite(below + above) else None


def _sums(results: Results, step: Step) -> Array | None:
    """`[G, L]`: each group's additive share of the values of layers 1..L; None if a layer has none."""
    assert results.influences is not None
    theta, influences = (
        frame[
            (frame["measure"] == step.measure) & (frame["statistic"] == step.statistic) & (frame["site"] == "residual")
        ]
        .drop_duplicates("layer")
        .set_index("layer")
        .reindex(range(1, depth_of_results(results) + 1))[columns]
        .to_numpy(np.float64)
        .T
        for frame, columns in ((results.table, "value"), (results.influences, groups_of(results.influences)))
    )
    if not np.isfinite(theta).all() or not np.isfinite(influences).any(0).all():
        return None
    return np.nan_to_num(influences) + theta / len(influences)

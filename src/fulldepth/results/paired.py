r"""Errors of differences between two results, paired where both are of the same clusters.

Two results of the same text have the same clusters in the same groups, and what makes a document easy for one model
makes it easy for the other. With the influences :math:`e_g` of the groups on both values, the difference has the error

.. math:: \mathrm{SE}^2 = \frac{G}{G - 1} \sum_g (e_g - e_g^{\text{baseline}})^2 .

Layers that a step depends on (a depth, a median) are drawn together, with the same groups for both models. Results of
different text are independent: :math:`\mathrm{SE}^2 = s^2 + s_0^2`.

Source: Miller, "Adding Error Bars to Evals" (2024), 4.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fulldepth.results.align import Array, Depth, counterparts
from fulldepth.results.folder import Results
from fulldepth.results.influences import groups_of
from fulldepth.uncertainty import bootstrap, error_of

KEYS = ["measure", "site", "layer", "other", "statistic"]
ERROR, ERROR_OF = "standard_error", "standard_error_of_"
TARGET = 0.95
"""Share of the last layer's accuracy that the effective depth of a headline reaches."""


class Interval(NamedTuple):
    """95 % interval of a difference."""

    low: float
    high: float
    paired: bool


class Step(NamedTuple):
    """A headline number that is a step function of the values of layers 1..L."""

    measure: str
    statistic: str
    layer: Callable[[Array], Array]
    """Values `[..., L]` -> the first layer that reaches the target, `[...]`."""
    number: tuple[str, str]
    """Measure and statistic of its own row, beside those of its interval (`low_of_`, `high_of_`)."""


def _first(reached: Any) -> Array:
    return np.asarray(reached.argmax(-1) + 1, np.float64)


STEPS = {
    "effective_depth": Step(
        "lens_accuracy",
        "mean",
        lambda values: _first(values >= TARGET * values[..., -1:]),
        ("effective_depth", "relative_eps=0.05"),
    ),
    "median_saturation": Step(
        "saturation", "cumulative", lambda values: _first(values >= 0.5), ("saturation", "median")
    ),
}


def is_paired(results: Results, baseline: Results) -> bool:
    """Whether both results have influences of the same groups of the same clusters."""
    hashes = {(one.meta.get("groups") or {}).get("hash") for one in (results, baseline)}
    known = results.influences is not None and baseline.influences is not None
    return known and len(hashes) == 1 and None not in hashes


def difference_errors(results: Results, baseline: Results, depth: Depth) -> Array:
    """Standard error of every row's difference from the baseline at the same depth.

    Influences, and the standard errors of unpaired results, are interpolated between layers like the values.

    Returns:
        `[rows]`, in each row's unit; NaN where it is not known.
    """
    layers, base_layers = (int(one.meta["model"]["num_layers"]) for one in (results, baseline))
    paired = is_paired(results, baseline)
    rows, base = (one.influences if paired else _errors(one.table) for one in (results, baseline))
    assert rows is not None
    assert base is not None
    columns = groups_of(rows) if paired else ["value"]
    own = rows[columns].to_numpy(np.float64)
    other = counterparts(rows, layers, base, base_layers, depth, columns)
    errors = error_of((own - other).T) if paired else np.hypot(own, other)[:, 0]
    known = _keyed(rows).assign(error=errors).drop_duplicates(KEYS)
    return _keyed(results.table).merge(known, how="left", on=KEYS)["error"].to_numpy(np.float64)


def _keyed(rows: pd.DataFrame) -> pd.DataFrame:
    """The key columns without missing values, which would not match."""
    return rows[KEYS].fillna({"site": "", "layer": -1, "other": -1}).astype({"layer": "int64", "other": "int64"})


def _errors(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of standard errors, each under the statistic whose error it is."""
    rows = table[table["statistic"].str.startswith(ERROR)].copy()
    plain = ["value" if measure == "jump_rate" else "mean" for measure in rows["measure"]]
    rows["statistic"] = [
        name.removeprefix(ERROR_OF) if name.startswith(ERROR_OF) else mean + name.removeprefix(ERROR)
        for name, mean in zip(rows["statistic"], plain, strict=True)
    ]
    return rows


def step_interval(name: str, results: Results, baseline: Results) -> Interval | None:
    r"""95 % interval of the difference of a number of `STEPS`, in layers; None if it is not known.

    Paired: of draws of the same groups for both models, `uncertainty.bootstrap`. With :math:`k_g` times group g, the
    value of a layer is :math:`\theta + \sum_g (k_g - 1) e_g`. Unpaired: from both intervals, by the square-root rule

    .. math:: d - \sqrt{(\theta - l)^2 + (u_0 - \theta_0)^2}, \quad d + \sqrt{(u - \theta)^2 + (\theta_0 - l_0)^2}.

    Source: Zou and Donner, "Construction of confidence limits about effect measures" (2008), for the latter.
    """
    step = STEPS[name]
    own, other = (_sums(one, step) if is_paired(results, baseline) else None for one in (results, baseline))
    if own is not None and other is not None:
        ends = bootstrap(lambda values, base: step.layer(values) - step.layer(base), own, other)
        return None if ends is None else Interval(float(ends[0]), float(ends[1]), True)
    measure, statistic = step.number
    (low, value, high), (base_low, base, base_high) = (
        one.table[one.table["measure"] == measure]
        .drop_duplicates("statistic")
        .set_index("statistic")["value"]
        .reindex([f"low_of_{statistic}", statistic, f"high_of_{statistic}"])  # NaN where it does not state its interval
        .astype(float)
        for one in (results, baseline)
    )
    below, above = math.hypot(value - low, base_high - base), math.hypot(high - value, base - base_low)
    difference = value - base
    return Interval(difference - below, difference + above, False) if math.isfinite(below + above) else None


def _sums(results: Results, step: Step) -> Array | None:
    """`[G, L]`: parts of the groups in the values of layers 1..L, which add up to them; None if a layer lacks them."""
    frames = results.table, results.influences
    values, influences = (
        frame[
            (frame["measure"] == step.measure) & (frame["statistic"] == step.statistic) & (frame["site"] == "residual")
        ]
        .drop_duplicates("layer")
        .set_index("layer")
        .reindex(range(1, int(results.meta["model"]["num_layers"]) + 1))
        for frame in frames
        if frame is not None
    )
    theta = values["value"].to_numpy(np.float64)  # [L]
    parts = influences[groups_of(influences)].to_numpy(np.float64).T  # [G, L]
    if not np.isfinite(theta).all() or not np.isfinite(parts).any(0).all():
        return None
    return np.nan_to_num(parts) + theta / len(parts)

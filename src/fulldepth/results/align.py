"""Aligns layers of models of different depth and computes differences from the baseline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

Depth = Literal["layer", "relative"]
Array = NDArray[np.float64]

KEYS = ["measure", "site", "statistic"]
PAIR = ("layer", "other")
FROM_THE_END = frozenset({"jump_rate"})
"""Measures whose layers are counted from the last one: zeta_L is compared with zeta_L at any depth."""


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
    the first layer use the first layer. `jump_rate` is counted from the last layer. Rows without a layer are compared
    directly.

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
    grids = {key: _grid(rows, baseline_layers, columns) for key, rows in _series(baseline)}
    result = np.full((len(table), len(columns)), np.nan)
    for key, rows in _series(table.reset_index(drop=True)):
        if key not in grids:
            continue
        grid, from_the_end = grids[key], key[0] in FROM_THE_END
        places = [rows[column].fillna(0).to_numpy(np.float64) for column in PAIR]
        if depth == "relative" and from_the_end:
            places[0] = places[0] - layers + baseline_layers
        elif depth == "relative":
            places = [_clamp(grid, axis, place * baseline_layers / layers) for axis, place in enumerate(places)]
        result[rows.index] = _interpolate(grid, *places)
    return result


def differences(table: pd.DataFrame, layers: int, baseline: pd.DataFrame, baseline_layers: int, depth: Depth) -> Array:
    """Value minus the baseline's value at the same depth, for every row of `table`; see `counterparts`.

    Returns:
        `[len(table)]`, in each row's unit; NaN where the baseline has no value at that depth.
    """
    base = counterparts(table, layers, baseline, baseline_layers, depth)
    return table["value"].to_numpy(np.float64) - base[:, 0]


def _series(table: pd.DataFrame) -> list[tuple[tuple[str, ...], pd.DataFrame]]:
    """The rows of each statistic of each measure at each site."""
    groups = table.assign(site=table["site"].fillna("")).groupby(KEYS, sort=False)
    return [(tuple(str(part) for part in key), rows) for key, rows in groups]


def _grid(rows: pd.DataFrame, layers: int, columns: Sequence[str]) -> Array:
    """[layer, other, column] numbers of one series, NaN where missing; an axis without such layers has size 1."""
    places = [rows[column].fillna(0).to_numpy(np.int64) for column in PAIR]
    shape = [
        max(layers, int(at.max())) + 1 if rows[column].notna().any() else 1
        for column, at in zip(PAIR, places, strict=True)
    ]
    grid = np.full((*shape, len(columns)), np.nan)
    grid[places[0], places[1]] = rows[list(columns)].to_numpy(np.float64)
    if shape[0] == shape[1]:  # measures of pairs are symmetric and may be stored once per pair
        grid = np.where(np.isnan(grid), grid.swapaxes(0, 1), grid)
    return grid


def _clamp(grid: Array, axis: int, position: Array) -> Array:
    """Positions clamped to the layers of the series."""
    present = np.flatnonzero(np.isfinite(grid).any(axis=(1 - axis, 2)))
    return position.clip(present[0], present[-1]) if len(present) else position


def _interpolate(grid: Array, first: Array, second: Array) -> Array:
    """[N, column] bilinear numbers of `grid` at N positions; NaN outside, and beside NaN of non-zero weight."""
    padded = np.pad(grid, ((0, 1), (0, 1), (0, 0)), constant_values=np.nan)
    t, u = first - np.floor(first), second - np.floor(second)
    diagonal = (first == second) & (grid.shape[0] == grid.shape[1])
    value = np.zeros((len(first), grid.shape[2]))
    for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
        weight = (t if down else 1 - t) * (u if right else 1 - u)
        weight = np.where(diagonal, ((t if down else 1 - t) if down == right else 0.0), weight)[:, None]
        combination = padded[_index(first, down, grid.shape[0]), _index(second, right, grid.shape[1])]
        value += np.where(weight > 0, weight * combination, 0.0)
    return value


def _index(position: Array, step: int, size: int) -> NDArray[np.int64]:
    """Index of the layer below (with `step` 1, above) each position; `size`, the padding, if there is none."""
    index = np.floor(position).astype(np.int64) + step
    return np.where((index >= 0) & (index < size), index, size)

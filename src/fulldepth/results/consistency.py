"""Checks that the document and the table of a result folder are consistent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from fulldepth.errors import FulldepthError, one_line
from fulldepth.reporting.source import TOGETHER
from fulldepth.results import influences

NEEDED = {"training": ("step",), "comparison": ("model", "difference")}
"""Kind of results -> required columns beside those of every table."""
EXITS = ("exit", "generation", "evaluation")
"""Kinds of results about a model that stops early."""


def check(folder: Path, meta: Mapping[str, Any], table: pd.DataFrame, groups: pd.DataFrame | None = None) -> None:
    """Refuse a folder whose document and tables contradict each other.

    Raises:
        FulldepthError: if the kind is not that of a result folder, a required column or entry is missing, the table
            has more layers than the model, or the influences `groups` are of another number of groups.
    """
    kind = str(meta.get("kind"))
    stated = (meta.get("groups") or {}).get("count")
    if groups is not None and len(influences.groups_of(groups)) != stated:
        raise FulldepthError(
            f"Cannot read {folder}: the influences are of {len(influences.groups_of(groups))} groups, the document "
            f"states {stated}."
        )
    if kind == TOGETHER:
        raise FulldepthError(f"Cannot read {folder}: {TOGETHER!r} is the kind of a page, not of a result folder.")
    if missing := [name for name in NEEDED.get(kind, ()) if name not in table.columns]:
        raise FulldepthError(f"Cannot read {folder}: results of kind {kind} lack the columns {', '.join(missing)}.")
    if kind == "comparison":
        if not meta.get("models"):
            raise FulldepthError(f"Cannot read {folder}: a comparison lacks the entry `models`.")
        if meta.get("of") == "training" and (meta.get("step") is None or "step" not in table.columns):
            raise FulldepthError(f"Cannot read {folder}: a comparison of training runs lacks their common step.")
    elif meta.get("models") and kind != "bench":
        raise FulldepthError(f"Cannot read {folder}: results of kind {one_line(kind, 60)} have the entry `models`.")
    elif kind in ("measure", "training", *EXITS):
        layers = (meta.get("model") or {}).get("num_layers")
        places = [frame[["layer", "other"]] for frame in (table, groups) if frame is not None]
        deepest = pd.concat(places).max().max()
        if layers is not None and not pd.isna(deepest) and deepest > layers:
            raise FulldepthError(f"Cannot read {folder}: the table has layer {deepest} of a model of {layers} layers.")
        if kind in EXITS:
            _check_exits(folder, kind, meta, layers)


def _check_exits(folder: Path, kind: str, meta: Mapping[str, Any], layers: int | None) -> None:
    """Refuse counts by layer of another depth than the model's, and entries of another kind of results."""
    generation = meta.get("generation")
    if generation is not None and isinstance(generation, list) is not (kind == "exit"):
        raise FulldepthError(f"Cannot read {folder}: the entry `generation` is not that of results of kind {kind}.")
    runs = [*(meta.get("exits") or []), *(generation if isinstance(generation, list) else [])]
    stats = (generation.get("stats") or {}) if isinstance(generation, Mapping) else {}
    counts = [run.get("exits") for run in (*runs, stats)]
    counts += [stats.get(name) for name in ("layer_positions", "prompt_positions")]
    depths = {len(count) for count in counts if count is not None} | ({layers} if layers is not None else set())
    if len(depths) > 1:
        listed = ", ".join(map(str, sorted(depths)[:4]))
        raise FulldepthError(f"Cannot read {folder}: counts by layer for {listed} layers in one document.")

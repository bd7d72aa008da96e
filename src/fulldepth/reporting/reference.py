"""Reference values of published and measured models, and how unusual a number is among them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from statistics import median
from typing import Any

FEWEST = 3
"""Number of reference values below which no number is called unusual."""
NORMAL = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
MEASURES = {
    "zeta_L": "jump rate of the last layer in per cent",
    "zeta_L-1": "jump rate of the last two layers in per cent",
    "zeta_L-2": "jump rate of the last three layers in per cent",
    "idle_share": "share of the layers whose mean displacement is below 0.02 by two standard errors",
    "last_over_median": "displacement of the last layer over the median of the layers before it",
    "late_share": "share of the predictions that settle in the last two layers",
    "mean_coherence": "mean coherence of whole layers, corrected for bias",
    "median_saturation": "median saturation layer over the number of layers",
    "effective_depth": "first layer with 95 % of the last layer's accuracy over the number of layers",
}
"""Measures of `parts/reference.json`."""


@dataclass(frozen=True)
class Reference:
    """A value of a known model."""

    model: str
    layers: int | None
    measure: str
    value: float
    data: str
    source: str
    """Paper and table, or the command that measured it."""
    checkpoint: str = ""
    """Name under which the model is measured; a measurement of it is not compared with itself."""


@cache
def references() -> tuple[Reference, ...]:
    """All rows of `parts/reference.json`."""
    text = files("fulldepth.reporting").joinpath("parts", "reference.json").read_text(encoding="utf-8")
    return tuple(Reference(**row) for row in json.loads(text)["values"])


def of_measure(measure: str, besides: str = "") -> list[float]:
    """The reference values of a measure, ascending, without those of the checkpoint `besides`."""
    return sorted(
        row.value for row in references() if row.measure == measure and not (besides and row.checkpoint == besides)
    )


def unusual(measure: str, value: float, besides: str = "") -> float:
    r"""Distance from the median of the reference values, in robust standard deviations; 0 with too few of them.

    .. math:: |v - m| / (1.4826 \, \mathrm{median}_i |r_i - m|), \quad m = \mathrm{median}_i r_i

    The denominator is at least a tenth of `m`, so that nearly equal references make nothing unusual.
    """
    known = of_measure(measure, besides)
    if len(known) < FEWEST:
        return 0.0
    middle = median(known)
    spread = max(NORMAL * median(abs(one - middle) for one in known), abs(middle) / 10)
    return abs(value - middle) / spread if spread else 0.0


def rows_of(meta: Mapping[str, Any], facts: Mapping[str, float], model: str, source: str) -> list[dict[str, Any]]:
    """Rows of `parts/reference.json` for a measured model.

    Args:
        meta: the document of its measurement.
        facts: measure -> value, see `fulldepth.reporting.story.numbers`.
        model: name of the model, as people know it.
        source: where the numbers come from, such as the command.
    """
    described = meta.get("model") or {}
    shared = {"model": model, "layers": described.get("num_layers"), "data": (meta.get("data") or {}).get("name")}
    ending = {"source": source, "checkpoint": described.get("name")}
    return [
        {**shared, "measure": measure, "value": float(f"{facts[measure]:.4g}"), **ending}
        for measure in MEASURES
        if measure in facts
    ]

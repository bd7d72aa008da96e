"""The promised rows, written out by hand from the documentation: (measure, site, layer, other, statistic, unit)."""

from __future__ import annotations

import re

import pandas as pd

LM = {"lens_accuracy", "lens_loss", "saturation", "effective_depth"}
BOTH_VIEWS = {"displacement", "cosine", "cka", "norm_ratio"}
"""Measures that give every number once more without the first tokens, where first tokens count."""
ERROR = "standard_error"
BINS = [f"bin_{i}" for i in range(10)]


def rows(layers, measures, *, projections=(), attention=True, value=True, normed=True, first=True):
    """Every promised row, apart from those whose statistics may be chosen freely: see `free`."""
    inner, all_layers = range(1, layers + 1), range(layers + 1)
    pairs = [(a, b) for a in all_layers for b in all_layers]
    promised = {
        "displacement": [
            (site, layer, None, statistic, "1")
            for site, layer in [*(("residual", n) for n in inner), *([("final_normed", layers)] if normed else [])]
            for statistic in ("mean", "standard_error", "std", "p05", "p50", "p95")
        ],
        "jump_rate": [
            ("residual", n, None, statistic, "%") for n in range(2, layers + 1) for statistic in ("value", ERROR)
        ],
        "coherence": [
            (site, n, None, statistic, "1")
            for site in (("residual", "attention") if attention else ("residual",))
            for n in inner
            for statistic in ("mean", "mean_corrected", "share_0.3_0.7", *BINS)
        ]
        + [("residual", n, None, "standard_error_of_mean_corrected", "1") for n in inner]
        + [
            ("residual", None, None, statistic, "1")
            for statistic in ("mean_corrected_of_layers", "standard_error_of_mean_corrected_of_layers")
        ],
        "cosine": [("residual", a, b, s, "1") for a, b in pairs for s in ("mean", "mean_raw")]
        + [("residual", n, layers, s, "1") for n in all_layers for s in ("p05", "p25", "p50", "p75", "p95")],
        "cka": [("residual", a, b, s, "1") for a, b in pairs for s in ("debiased", "biased")],
        "norm_ratio": [("residual", n, None, s, "1") for n in inner for s in ("mean", ERROR)],
        "lens_accuracy": [("residual", n, None, s, "1") for n in all_layers for s in ("mean", ERROR)],
        "lens_loss": [("residual", n, None, s, "nats") for n in all_layers for s in ("mean", ERROR)],
        "saturation": [
            ("residual", n, None, s, unit)
            for n in inner
            for s, unit in (("count", "tokens"), ("share", "1"), ("cumulative", "1"), (f"{ERROR}_of_cumulative", "1"))
        ]
        + [("residual", None, None, s, "layers") for s in ("median", "low_of_median", "high_of_median")],
        "effective_depth": [("residual", None, None, s, "layers") for s in ("eps=0.05", "relative_eps=0.05")],
        "nc1": [("residual", n, None, "value", "1") for n in all_layers],
        "renyi_entropy": [
            (site, n, None, f"{s}:plain:1", "nats")
            for site, where in (("residual", all_layers), ("value", inner if value else ()))
            for n in where
            for s in ("mean", ERROR)
        ],
        "separability": [
            (site, n, None, s, "1")
            for site, where in (("residual", all_layers), ("value", inner if value else ()))
            for n in where
            for s in ("mean", "std")
        ],
        "spectral_norm": [(site, n, None, "value", "1") for site in projections for n in inner],
        "mmd": [("residual", n, None, "value", "1") for n in all_layers],
    }
    found = {(measure, *row) for measure in measures for row in promised[measure]}
    if first:
        found |= {(m, *where, s + ":no-first", unit) for m, *where, s, unit in found if m in BOTH_VIEWS}
    return found


def free(row):
    """Whether the documentation leaves it open which thresholds, presets and orders there are besides the named one, or
    whether an error is known (of CKA it is not where leaving sequences out leaves too few tokens).
    """
    measure, _, _, _, statistic, _ = row
    if measure == "cka":
        return statistic.startswith("standard_error_of_debiased")
    if measure == "effective_depth":
        return re.fullmatch(r"(low_of_|high_of_)?(relative_)?eps=0\.\d+", statistic) is not None
    return measure == "renyi_entropy" and re.fullmatch(r"(mean|standard_error):\w+:[\d.]+", statistic) is not None


def check(table, promised):
    """The table holds what was promised, nothing twice and nothing else."""
    columns = ["measure", "site", "layer", "other", "statistic", "unit"]
    plain = table[columns].astype(object).where(table[columns].notna(), None)
    got = [tuple(row) for row in plain.itertuples(index=False)]
    assert len(set(got)) == len(got), "a row stands there twice"
    assert promised - set(got) == set(), "promised, but missing"
    assert {row for row in set(got) - promised if not free(row)} == set(), "nobody promised these"
    assert list(table.columns[:8]) == ["measure", "site", "layer", "other", "statistic", "value", "count", "unit"]
    assert pd.api.types.is_integer_dtype(table["layer"])
    assert pd.api.types.is_float_dtype(table["value"])
    assert (table["count"] >= 0).all()

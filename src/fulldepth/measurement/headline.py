"""Headline numbers of a measurement, each with its standard error and one sentence."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import scipy.stats

from fulldepth.metrics.jump_rate import describe_jump, growth, size_of_jump
from fulldepth.results import Finding
from fulldepth.thresholds import COPY, NOISE

ERROR = "standard_error"
MONOTONE = 0.8
"""Kendall's tau from which two orders are called the same: at most one pair in ten is exchanged."""
FEWEST_PAIRS = 3
"""Fewest pairs of layers whose order is stated."""
SIGNIFICANT = 2.0
"""Standard errors that a jump must exceed to be called one."""


def headline(table: pd.DataFrame, num_layers: int, sequences: int) -> dict[str, Finding]:
    """The findings of a measurement by name, for measures with a finite value.

    `standard_error` is over sequences, in the unit of the value (see `fulldepth.metrics.jackknife`). If it cannot be
    estimated it is None, and `no_standard_error` states the reason.

    Args:
        table: rows of one model.
        num_layers: L.
        sequences: number of sequences measured.
    """
    findings = {
        **_jumps(table, num_layers),
        "last_layer_displacement": _displacement(table, num_layers),
        "mean_coherence": _coherence(table, sequences),
        "median_saturation": _saturation(table, num_layers),
        "effective_depth": _effective_depth(table, num_layers),
        "average_precision": _average_precision(table, num_layers),
        "cosine_cka_order": _order(table),
    }
    return {
        name: _explained(name, finding, sequences)
        for name, finding in findings.items()
        if finding.value is not None and math.isfinite(finding.value)
    }


def _explained(name: str, finding: Finding, sequences: int) -> Finding:
    """The finding, with the reason if it has no standard error."""
    if finding.no_standard_error:
        return finding
    if finding.standard_error is not None and math.isfinite(finding.standard_error):
        return finding
    fewest = 3 if name == "mean_coherence" else 2
    reason = f"it takes {fewest} sequences or more, there {'is' if sequences == 1 else 'are'} {sequences}"
    if sequences >= fewest:
        reason = "without one group of sequences the number is not defined"
    return replace(finding, standard_error=None, no_standard_error=reason)


def _value(
    table: pd.DataFrame, measure: str, statistic: str, layer: int | None = None, site: str | None = None
) -> float:
    """One value of the table; NaN if it was not measured."""
    rows = table[(table.measure == measure) & (table.statistic == statistic)]
    if layer is not None:
        rows = rows[rows.layer == layer]
    if site is not None:
        rows = rows[rows.site == site]
    return float(rows.value.iloc[0]) if len(rows) else math.nan


def _jumps(table: pd.DataFrame, num_layers: int) -> dict[str, Finding]:
    findings = {}
    for back, name in enumerate(("zeta_L", "zeta_L-1", "zeta_L-2")):
        layer = num_layers - back
        value, error = (_value(table, "jump_rate", statistic, layer) for statistic in ("value", ERROR))
        noise = error if math.isfinite(error) else 0.0
        if 0 < value <= SIGNIFICANT * noise:
            sentence = _no_measurable_jump(value, noise, layer, back)
        else:
            sentence = describe_jump(value, noise) if back == 0 else _growth(value, noise, layer)
        findings[name] = Finding(value, "%", sentence, error)
    return findings


def _no_measurable_jump(value: float, error: float, layer: int, back: int) -> str:
    """A sentence on a jump rate that is not larger than its noise."""
    subject = "The last layer displaces" if back == 0 else f"From layer {layer} on, no layer displaces"
    return f"{subject} no more than the one before by any measurable amount (jump rate {value:.2g} ± {error:.2g} %)."


def _growth(value: float, error: float, layer: int) -> str:
    """A sentence on the jump rate of several layers, correct at the printed precision."""
    if value <= 0:
        return f"From layer {layer} on, no layer displaces more than the one before: {size_of_jump(value)}."
    return f"From layer {layer} on, displacement grows in all by {growth(value, error)}."


def _displacement(table: pd.DataFrame, num_layers: int) -> Finding:
    value, error = (_value(table, "displacement", name, num_layers, "residual") for name in ("mean", ERROR))
    means = table[(table.measure == "displacement") & (table.statistic == "mean") & (table.site == "residual")]
    middle = float(means[means.layer < num_layers].value.median()) if len(means) > 1 else math.nan
    sentence = f"The last layer's displacement is {value:.3f} (0 = copies its input, 0.5 = turns it to a right angle)"
    sentence += f"; the layers before it have a median of {middle:.3f}." if math.isfinite(middle) else "."
    return Finding(value, "1", sentence, error)


def _coherence(table: pd.DataFrame, sequences: int) -> Finding:
    """Finding on the bias-corrected mean; the raw mean of n sequences is biased upwards by about 1/n."""
    name = "mean_corrected_of_layers"
    value, error = (_value(table, "coherence", statistic) for statistic in (name, f"standard_error_of_{name}"))
    printed = round(value, 2)
    kind = "mostly copies" if printed >= COPY else "little is kept" if printed <= NOISE else "effective work in between"
    sentence = (
        f"A layer's output coheres with its input at {value:.2f} on average (1 = copy, 0 = noise; corrected for the "
        f"bias of {sequences} sequences): {kind}."
    )
    return Finding(value, "1", sentence, error)


def _saturation(table: pd.DataFrame, num_layers: int) -> Finding:
    value, error = (_value(table, "saturation", name) for name in ("median", "standard_error_of_median"))
    sentence = f"Half of the predictions are settled by layer {value:.0f} of {num_layers} and change no more."
    return Finding(value, "layers", sentence, error)


def _of_pairs(table: pd.DataFrame, measure: str, statistic: str) -> pd.Series:
    """The values of a statistic by pair of different layers."""
    rows = table[(table.measure == measure) & (table.statistic == statistic) & (table.site == "residual")]
    rows = rows[(rows.layer < rows.other).fillna(False).astype(bool)]
    return rows.set_index(["layer", "other"]).value.astype("float64")


def _order(table: pd.DataFrame) -> Finding:
    """Finding on the order in which cosine and CKA put the pairs of layers."""
    pairs = pd.DataFrame(
        {"cosine": _of_pairs(table, "cosine", "mean"), "cka": _of_pairs(table, "cka", "debiased")}
    ).dropna()
    reason = "pairs of layers share layers, so they are no independent observations"
    if len(pairs) < FEWEST_PAIRS or pairs["cosine"].nunique() < 2 or pairs["cka"].nunique() < 2:
        return Finding(None)
    spearman = float(scipy.stats.spearmanr(pairs["cosine"], pairs["cka"]).statistic)
    kendall = float(scipy.stats.kendalltau(pairs["cosine"], pairs["cka"]).statistic)
    verdict = "the same order up to few exchanges" if kendall >= MONOTONE else "different orders"
    sentence = (
        f"Cosine and CKA put the {len(pairs)} pairs of layers in {verdict} (Spearman {spearman:.2f}, Kendall "
        f"{kendall:.2f}; 1 = each is a monotone function of the other)."
    )
    return Finding(spearman, "1", sentence, None, reason)


def _effective_depth(table: pd.DataFrame, num_layers: int) -> Finding:
    name = "relative_eps=0.05"
    value, error = (_value(table, "effective_depth", statistic) for statistic in (name, f"standard_error_of_{name}"))
    absolute = _value(table, "effective_depth", "eps=0.05")
    sentence = f"Layer {value:.0f} of {num_layers} already reaches 95 % of the last layer's accuracy"
    if value >= num_layers:
        sentence = f"No layer before the last (layer {num_layers}) reaches 95 % of its accuracy"
    if absolute < num_layers:
        sentence += f"; an accuracy of 95 % is reached at layer {absolute:.0f}"
    elif math.isfinite(absolute):
        sentence += "; none before the last reaches an accuracy of 95 %" if value < num_layers else ""
    return Finding(value, "layers", f"{sentence}.", error)


def _average_precision(table: pd.DataFrame, num_layers: int) -> Finding:
    """Finding on AP50 of the last decoder layer, and the first layer that reaches 95 % of it."""
    values = [_value(table, "average_precision", "ap50", layer) for layer in range(1, num_layers + 1)]
    last, name = values[-1], "average_precision"
    sentence = f"The last of {num_layers} decoder layers has an average precision of {last:.1%} at an IoU of 0.5"
    enough = next((layer for layer, value in enumerate(values, start=1) if value >= 0.95 * last), num_layers)
    if last > 0:
        sentence += (
            f"; layer {enough} already reaches 95 % of that"
            if enough < num_layers
            else "; no layer before it reaches 95 % of that"
        )
    whole = _value(table, name, "ap", num_layers)
    return Finding(last, "1", f"{sentence} (over IoUs of 0.5 to 0.95: {whole:.1%}).")

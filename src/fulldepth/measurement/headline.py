"""Headline numbers of a measurement, each with its standard error and one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pandas as pd

from fulldepth.data.sequences import Sequences
from fulldepth.metrics.jump_rate import describe_jump, growth, size_of_jump
from fulldepth.results import Finding
from fulldepth.thresholds import COPY, NOISE
from fulldepth.uncertainty import FEWEST_CLUSTERS, SIGNIFICANT

ERROR = "standard_error"
FALLS = "every layer in the sum displaces less than the one before by more than the error, so the sum is 0"


@dataclass(frozen=True)
class Clusters:
    """What the standard errors of a sample rest on."""

    sequences: int
    """Sequences that were measured."""
    number: int
    """Independent units: documents, rows, images."""
    unit: str = "sequence"
    no_error: str | None = None
    """Reason of the data for stating no standard error."""

    @classmethod
    def of(cls, sequences: Sequences) -> Clusters:
        """Those of a data set."""
        number = len(set(sequences.clusters)) or len(sequences)
        return cls(len(sequences), number, sequences.unit, sequences.no_error)

    @property
    def no_standard_error(self) -> str | None:
        """Reason why no number can have an error; None if it can."""
        if self.no_error or self.number >= FEWEST_CLUSTERS:
            return self.no_error
        verb = "is" if self.number == 1 else "are"
        return f"it takes {FEWEST_CLUSTERS} {plural(self.unit)} or more, there {verb} {self.number}"


def plural(unit: str) -> str:
    """`document` -> `documents`, `block of 4,096 tokens` -> `blocks of 4,096 tokens`."""
    noun, _, rest = unit.partition(" ")
    return f"{noun}s {rest}".strip()


def headline(table: pd.DataFrame, num_layers: int, clusters: Clusters) -> dict[str, Finding]:
    """The findings of a measurement by name, for measures with a finite value.

    `standard_error` is in the unit of the value (see `fulldepth.uncertainty`); layers have an `interval` instead. If
    neither can be estimated, `no_standard_error` states the reason.

    Args:
        table: rows of one model.
        num_layers: L.
        clusters: of the sequences measured.
    """
    median, median_interval = _step(table, "saturation", "median")
    settled = f"Half of the predictions are settled by layer {median:.0f} of {num_layers}{_within(median_interval)}."
    findings = {
        **{name: _jump(table, num_layers, back) for back, name in enumerate(("zeta_L", "zeta_L-1", "zeta_L-2"))},
        "last_layer_displacement": _displacement(table, num_layers),
        "mean_coherence": _coherence(table, clusters.sequences),
        "median_saturation": Finding(median, "layers", settled, interval=median_interval),
        "effective_depth": _effective_depth(table, num_layers),
        "average_precision": _average_precision(table, num_layers),
    }
    return {
        name: _explained(finding, clusters)
        for name, finding in findings.items()
        if finding.value is not None and math.isfinite(finding.value)
    }


def _explained(finding: Finding, clusters: Clusters) -> Finding:
    """The finding, with the reason if it has no error."""
    error = finding.standard_error
    if finding.no_standard_error or finding.interval or (error is not None and math.isfinite(error)):
        return finding
    reason = clusters.no_standard_error or "without one group of the data the number is not defined"
    return replace(finding, standard_error=None, no_standard_error=reason)


def _value(
    table: pd.DataFrame, measure: str, statistic: str, layer: int | None = None, site: str | None = None
) -> float:
    """One value of the table; NaN if it was not measured."""
    rows = table[(table.measure == measure) & (table.statistic == statistic)]
    rows = rows if layer is None else rows[rows.layer == layer]
    rows = rows if site is None else rows[rows.site == site]
    return float(rows.value.iloc[0]) if len(rows) else math.nan


def _step(table: pd.DataFrame, measure: str, statistic: str) -> tuple[float, tuple[float, float] | None]:
    """A layer of the table, and its 95 % interval if it has one."""
    value, low, high = (_value(table, measure, kind + statistic) for kind in ("", "low_of_", "high_of_"))
    return value, (low, high) if math.isfinite(low) and math.isfinite(high) else None


def _within(interval: tuple[float, float] | None) -> str:
    """` (95 % interval 24 to 30)`; empty if it is not known."""
    return " (95 % interval {:.0f} to {:.0f})".format(*interval) if interval else ""


def _jump(table: pd.DataFrame, num_layers: int, back: int) -> Finding:
    """Finding on the jump rate over the last layers, from layer L - `back` on."""
    layer = num_layers - back
    value, error = (_value(table, "jump_rate", statistic, layer) for statistic in ("value", ERROR))
    noise = error if math.isfinite(error) else 0.0
    if 0 < value <= SIGNIFICANT * noise:
        subject = "The last layer displaces" if back == 0 else f"From layer {layer} on, no layer displaces"
        amount = f"(jump rate {value:.2g} ± {error:.2g} %)"
        sentence = f"{subject} no more than the one before by any measurable amount {amount}."
    elif back == 0:
        sentence = describe_jump(value, noise)
    elif value <= 0:
        sentence = f"From layer {layer} on, no layer displaces more than the one before: {size_of_jump(value)}."
    else:
        sentence = f"From layer {layer} on, displacement grows in all by {growth(value, noise)}."
    reason = FALLS if value == error == 0 else None
    return Finding(value, "%", sentence, None if reason else error, reason)


def _displacement(table: pd.DataFrame, num_layers: int) -> Finding:
    value, error = (_value(table, "displacement", name, num_layers, "residual") for name in ("mean", ERROR))
    means = table[(table.measure == "displacement") & (table.statistic == "mean") & (table.site == "residual")]
    middle = float(means[means.layer < num_layers].value.median())
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


def _effective_depth(table: pd.DataFrame, num_layers: int) -> Finding:
    """Finding on the first layer with 95 % of the last one's accuracy, by its estimate and by more than its error."""
    value, interval = _step(table, "effective_depth", "relative_eps=0.05")
    if value < num_layers:
        sentence = f"Layer {value:.0f} of {num_layers} already reaches 95 % of the last layer's accuracy"
    else:
        sentence = f"No layer before the last (layer {num_layers}) reaches 95 % of its accuracy"
    sentence += _within(interval)
    if interval and value < num_layers:
        sure = f"layer {interval[1]:.0f} is the first" if interval[1] < num_layers else "none before the last is"
        sentence += f"; {sure} above it by more than the error"
    absolute = _value(table, "effective_depth", "eps=0.05")
    if absolute < num_layers:
        sentence += f"; an accuracy of 95 % is reached at layer {absolute:.0f}"
    elif math.isfinite(absolute) and value < num_layers:
        sentence += "; none before the last reaches an accuracy of 95 %"
    return Finding(value, "layers", f"{sentence}.", interval=interval)


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
    whole, error = (_value(table, name, statistic, num_layers) for statistic in ("ap", "standard_error_of_ap50"))
    return Finding(last, "1", f"{sentence} (over IoUs of 0.5 to 0.95: {whole:.1%}).", error)

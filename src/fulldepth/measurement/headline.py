"""Headline numbers of a measurement, each with its standard error and one sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pandas as pd

from fulldepth.core.number_format import in_percent_with_error, plus_minus, rounded, to_decimals
from fulldepth.core.thresholds import COPY, NOISE
from fulldepth.core.uncertainty import FEWEST_CLUSTERS, measurable, plural, reach
from fulldepth.data.batches import Sequences
from fulldepth.metrics.jump_rate import describe_jump, growth, size_of_jump
from fulldepth.metrics.layer_effect import OVER_LAYERS
from fulldepth.metrics.linear_lens import EARLY_GAIN, ERROR_OF
from fulldepth.results import Finding
from fulldepth.results.verdict import REMOVED_PARTS

ERROR = "standard_error"
FALLS = "every layer in the sum displaces less than the one before by more than the error, so the sum is 0"


@dataclass(frozen=True)
class Clusters:
    """Independent units of a sample, on which its standard errors rest."""

    sequences: int
    """Sequences that were measured."""
    number: int
    """Independent units: documents, rows, images."""
    unit: str = "sequence"
    no_error: str | None = None
    """Reason of the data for stating no standard error."""
    independent: float = math.inf
    """The number of groups of units for Student's t (`Sequences.independent`)."""

    @classmethod
    def of(cls, sequences: Sequences) -> Clusters:
        """Count the units of a data set."""
        number = len(set(sequences.clusters)) or len(sequences)
        return cls(len(sequences), number, sequences.unit, sequences.no_error, sequences.independent)

    @property
    def no_standard_error(self) -> str | None:
        """Reason why no number can have an error; None if it can."""
        if self.no_error or self.number >= FEWEST_CLUSTERS:
            return self.no_error
        verb = "is" if self.number == 1 else "are"
        return f"it takes {FEWEST_CLUSTERS} {plural(self.unit)} or more, there {verb} {self.number}"


def headline(table: pd.DataFrame, num_layers: int, clusters: Clusters) -> dict[str, Finding]:
    """The findings of a measurement by name, for measures with a finite value.

    `standard_error` is in the unit of the value (see `fulldepth.core.uncertainty`); layers have an `interval` instead.
    If neither can be estimated, `no_standard_error` states the reason.

    Args:
        table: rows of one model.
        num_layers: L.
        clusters: of the sequences measured.
    """

    def value(measure: str, statistic: str, layer: int | None = None, site: str | None = None) -> float:
        """One value of the table; NaN if it was not measured."""
        rows = table[(table.measure == measure) & (table.statistic == statistic)]
        rows = rows if layer is None else rows[(rows.layer == layer) & (rows.site == "residual")]
        rows = rows if site is None else rows[rows.site == site]
        return float(rows.value.iloc[0]) if len(rows) else math.nan

    def step(measure: str, statistic: str, sentence: str) -> Finding:
        """A layer, with its 95 % interval if it has one."""
        layer, *ends = (value(measure, kind + statistic) for kind in ("", "low_of_", "high_of_"))
        interval = None if math.isnan(sum(ends)) else (ends[0], ends[1])
        within = " (95 % interval {:.0f} to {:.0f})".format(*interval) if interval else ""
        return Finding(
            layer, "layers", f"{sentence.format(f'{layer:.0f} of {num_layers}')}{within}.", interval=interval
        )

    findings = {}
    for back, name in enumerate(("zeta_L", "zeta_L-1", "zeta_L-2")):
        layer = num_layers - back
        findings[name] = _jump(
            value("jump_rate", "value", layer), value("jump_rate", ERROR, layer), clusters.independent, layer, back == 0
        )
    last, error = (value("displacement", name, num_layers) for name in ("mean", ERROR))
    middle = pd.Series(
        [value("displacement", "mean", layer) for layer in range(1, num_layers)], dtype="float64"
    ).median()
    sentence = (
        f"The last layer's displacement is {to_decimals(last)} (0 = copies its input, 0.5 = turns it to a right angle)"
    )
    sentence += "." if math.isnan(middle) else f"; the layers before it have a median of {to_decimals(middle)}."
    findings["last_layer_displacement"] = Finding(last, "1", sentence, error)

    name = "mean_corrected_of_layers"
    mean, error = (value("coherence", statistic) for statistic in (name, f"{ERROR}_of_{name}"))
    printed = round(mean, 2)
    kind = "mostly copies" if printed >= COPY else "little is kept" if printed <= NOISE else "effective work in between"
    sentence = (
        f"A layer's output coheres with its input at {mean:.2f} on average (1 = copy, 0 = noise; corrected for the "
        f"bias of {clusters.sequences} sequences): {kind}."
    )
    findings["mean_coherence"] = Finding(mean, "1", sentence, error)
    settled = "Half of the predictions are settled by layer {}"
    enough = "Layer {} reaches 95 % of the last accuracy"
    findings["median_saturation"] = step("saturation", "median", settled)
    findings["effective_depth"] = step("effective_depth", "relative_eps=0.05", enough)
    gain, error = (value("linear_lens_accuracy", prefix + EARLY_GAIN) for prefix in ("", ERROR_OF))
    findings["linear_lens_gain"] = _linear_gain(gain, error, clusters.independent, num_layers // 2)
    for part, removed in REMOVED_PARTS.items():
        suffix = "" if part == "layer" else f"_{part}"
        change_of_later = "the updates of later layers at later tokens change by {} of their length"
        for name, unit, statistic, sentence in (
            ("effect_on_later", "1", "later_future", change_of_later),
            ("effect_on_prediction", "nats", "divergence_all", "predictions diverge by {} nats"),
        ):
            of_layers = statistic + OVER_LAYERS
            change, error = (value("layer_effect", prefix + of_layers, site=part) for prefix in ("", ERROR_OF))
            amount = f"{rounded(change, '.3g')} {plus_minus(error)}".rstrip()
            sentence = f"Without {removed}, {sentence.format(amount)}, on average over the layers."
            findings[name + suffix] = Finding(change, unit, sentence, error)

    name = "average_precision"
    layers = range(1, num_layers + 1)
    reached = [value(name, "ap50", layer) for layer in layers]
    best, whole, error = (value(name, kind, num_layers) for kind in ("ap50", "ap", f"{ERROR}_of_ap50"))
    first = next((layer for layer in layers if reached[layer - 1] >= 0.95 * best), num_layers)
    sentence = (
        f"The last of {num_layers} decoder layers has an average precision of {best:.1%} at an IoU of 0.5 (over IoUs "
        f"of 0.5 to 0.95: {whole:.1%})"
    )
    sentence += f"; layer {first} is the first with 95 % of that." if best > 0 else "."
    findings[name] = Finding(best, "1", sentence, error)
    reason = clusters.no_standard_error or "without one group of the data the number is not defined"
    return {
        name: finding
        if finding.no_standard_error or finding.interval or math.isfinite(finding.standard_error or math.nan)
        else replace(finding, standard_error=None, no_standard_error=reason)
        for name, finding in findings.items()
        if finding.value is not None and math.isfinite(finding.value)
    }


def _linear_gain(gain: float, error: float, groups: float, last: int) -> Finding:
    """Finding on the accuracy of the linear lens in layers 1 to `last`, less that of the plain lens."""
    layers = f"1 to {last}" if last > 1 else "1"
    amount = in_percent_with_error(gain, error)
    if gain == error == 0:
        sentence = f"Linear and plain lens are equally accurate in early layers ({layers}), in all of the data."
    elif math.isnan(error):
        sentence = (
            f"Accuracy of the linear lens in early layers ({layers}), less that of the plain lens: {amount} (no "
            "standard error is known)."
        )
    elif not measurable(gain, error, groups)[0]:
        sentence = f"No measurable difference between linear and plain lens in early layers ({layers}): {amount}."
    elif gain > 0:
        sentence = (
            f"Early layers ({layers}) know more than the plain lens sees: the linear lens predicts {amount} more of "
            "the tokens right, mean over these layers."
        )
    else:
        sentence = f"In early layers ({layers}) the linear lens is less accurate than the plain lens, by {amount}."
    if error == 0:
        return Finding(gain, "1", sentence, no_standard_error="the lenses differ by the same in all of the data")
    return Finding(gain, "1", sentence, error)


def _jump(value: float, error: float, groups: float, layer: int, is_last: bool) -> Finding:
    """Finding on the jump rate from a layer on, in per cent."""
    noise = reach(groups) * error if math.isfinite(error) else 0.0
    if 0 < value <= noise:
        subject = "The last layer displaces no more" if is_last else f"From layer {layer} on, no layer displaces more"
        amount = f"(jump rate {value:.2g} {plus_minus(error)} %)"
        sentence = f"{subject} than the one before by any measurable amount {amount}."
    elif is_last:
        sentence = describe_jump(value, noise)
    elif value <= 0:
        sentence = f"From layer {layer} on, no layer displaces more than the one before: {size_of_jump(value)}."
    else:
        sentence = f"From layer {layer} on, displacement grows in all by {growth(value, noise)}."
    reason = FALLS if value == error == 0 else None
    return Finding(value, "%", sentence, None if reason else error, reason)

"""Warnings of a measurement, one sentence each, and what it sampled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from torch import nn

from fulldepth.core.uncertainty import FEW_CLUSTERS, plural, quantile
from fulldepth.hf.surgery import skipped_in_place
from fulldepth.measurement.headline import Clusters
from fulldepth.measurement.lens_reader import MOST_POSITIONS, PASSES, lens_limit
from fulldepth.measurement.tokens import Counting
from fulldepth.metrics import METRICS, Setup
from fulldepth.metrics.base import NO_FIRST
from fulldepth.settings.measure import LINEAR_LENS, PLAIN_LENS, MeasureSettings
from fulldepth.subject import Subject

RESERVOIR = {
    "cosine": "centred cosine",
    "nc1": "NC1",
    "mmd": "MMD",
    "layer_effect": "the 90 % quantile of layer_effect",
}
"""Measures on the sample of tokens, in words. CKA has tokens of its own."""
NO_DIRECTION = "every state there, or in the layer before, is exactly zero and has no direction"
REASONS = {
    "displacement": NO_DIRECTION,
    "jump_rate": NO_DIRECTION,
    "cosine": "the states there are zero, or equal for all tokens",
    "cka": "the states there are equal for all tokens, or too few to estimate their similarity",
    "coherence": "the states there do not vary along the sequence",
    "norm_ratio": "the layer adds exactly nothing to any state, or the states are zero",
    "contribution": "the states there are zero",
    "nc1": "the means of the classes coincide there",
    "renyi_entropy": "the states there are zero",
    "effective_depth": "the last layer is never right",
}
"""Measure -> why it has no finite value at a layer."""

NO_TARGET = "no position has a target"
EMPTY = {"coherence": "the states do not vary along the sequence at any layer"}
"""Measure -> why it has no rows; for all others the reason is too few tokens or occurrences."""


def caveats(subject: Subject, counting: Counting, setup: Setup, table: pd.DataFrame) -> list[str]:
    """Return all warnings of a measurement; those of the checkpoint and the data come first."""
    lines = [*subject.warnings, *counting.warnings, zero_weights(subject.model)]
    clusters = Clusters.of(subject.sequences)
    if reason := clusters.no_standard_error:
        lines.append(f"No standard errors: {reason}.")
    elif clusters.independent < FEW_CLUSTERS:
        fewer = clusters.independent < clusters.number
        worth = f", worth {clusters.independent:.1f} of equal weight" if fewer else ""
        lines.append(
            f"Standard errors rest on {clusters.number} {plural(clusters.unit)}{worth}: a 95 % interval is "
            f"{quantile(clusters.independent):.1f} standard errors to either side (Student's t)."
        )
    tokens = table["count"][table.measure == "cka"].max()
    if pd.notna(tokens) and tokens < 10 * setup.width:
        lines.append(
            f"Biased CKA rests on {tokens} tokens, fewer than ten times the width ({setup.width}), and "
            "is inflated: read the debiased one."
        )
    if skipped := skipped_in_place(subject.anatomy):
        blocks = ", ".join(
            f"the {part} of layer {layer}" if part != "layer" else f"layer {layer}" for layer, part in sorted(skipped)
        )
        lines.append(f"Measured with blocks skipped in place: {blocks}.")
    scaled = {"residual": "the model", "reference": "the reference"}
    for site, scale in setup.stream_scale.items():
        if any(factor != 1 for factor in scale):
            lines.append(
                f"MMD compares states on the original's scale: those of {scaled[site]} are multiplied by the factors "
                f"({min(scale):.3g} to {max(scale):.3g}) by which folding its scalars divided them."
            )
    return [line for line in lines if line] + gaps(table, setup.num_layers)


def sampling(subject: Subject, settings: MeasureSettings, setup: Setup, table: pd.DataFrame) -> dict[str, Any]:
    """The entry `sampling` of `results.json`: sizes of the samples and of the populations that they were drawn from;
    `sentence`, None if nothing was sampled.
    """
    targets = subject.sequences.num_targets
    measured = set(table.measure)
    sizes = {
        "reservoir_tokens": setup.reservoir_tokens,
        "counted_tokens": setup.num_tokens,
        "lens_positions": min(targets, lens_limit(subject, settings) or targets),
        "lens_targets": targets,
        "entropy_sequences": min(setup.entropy_sequences, setup.num_sequences),
    }
    of_tokens = f"of {setup.num_tokens:,} tokens"
    parts = []
    if measured & {*PLAIN_LENS, *LINEAR_LENS} and sizes["lens_positions"] < targets:
        by_cost = settings.lens_tokens == "auto" and sizes["lens_positions"] < MOST_POSITIONS
        why = f", because more would cost over {PASSES} forward passes (lens_tokens sets the number)" if by_cost else ""
        parts.append(f"the lens reads {sizes['lens_positions']:,} of {targets:,} positions{why}")
    if "renyi_entropy" in measured and sizes["entropy_sequences"] < setup.num_sequences:
        parts.append(f"the entropies {sizes['entropy_sequences']} of {setup.num_sequences:,} sequences")
    samples: dict[tuple[int, int], list[str]] = {}  # tokens kept, tokens in the data -> measures, in words
    for name, text in RESERVOIR.items():
        size = (setup.reservoir_tokens, setup.num_tokens)
        if name == "layer_effect":
            size = (setup.effect_tokens, setup.effect_population)
        if name in measured and size[0] < size[1]:
            samples.setdefault(size, []).append(text)
    for (kept, population), names in samples.items():
        verb = "read" if len(names) > 1 else "reads"
        parts.append(f"{' and '.join(names)} {verb} {kept:,} of {population:,} tokens")
    if "cka" in measured and (read := int(table["count"][table.measure == "cka"].max())) < setup.num_tokens:
        sizes["cka_tokens"] = read
        parts.append(f"CKA reads {read:,} {of_tokens}")
    return {**sizes, "sentence": f"Sampled: {'; '.join(parts)}. --exact samples nothing." if parts else None}


def gaps(table: pd.DataFrame, num_layers: int) -> list[str]:
    """One line for each measure without a finite value at some layer, with the layers and the reason."""
    lines = []
    for name, rows in table.groupby("measure", sort=False):
        missing = rows[~np.isfinite(rows.value.to_numpy(np.float64))]
        if name == "coherence":  # it has no rows at layers without cells
            present = set(rows[rows.site == "residual"].layer.dropna())
            if layers := [layer for layer in range(1, num_layers + 1) if layer not in present]:
                lines.append(f"coherence has no number at {spans(layers)}: {REASONS['coherence']}.")
        elif not missing.empty:
            alone = missing[(missing.layer == missing.other).fillna(False).astype(bool)]  # of pairs, the layer at fault
            layers = sorted({int(layer) for layer in (missing if alone.empty else alone).layer.dropna()})
            statistics = list(dict.fromkeys(missing.statistic))
            named = "" if set(rows.statistic) <= set(statistics) else f" ({', '.join(statistics[:3])})"
            reason = REASONS.get(str(name), "nothing finite came out there")
            if (known := METRICS.get(str(name))) and "targets" in known.needs and not missing["count"].any():
                reason = NO_TARGET
            if all(statistic.endswith(NO_FIRST) for statistic in statistics):
                reason = "no sequence has a second token that counts, or only such as have no number"
            lines.append(f"{name}{named} is not a number{f' at {spans(layers)}' if layers else ''}: {reason}.")
    return lines


def spans(layers: list[int]) -> str:
    """Ascending layers as text: `layer 3`, `layers 0-4, 7`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1][1:] = [layer]
        else:
            runs.append([layer])
    return f"layer{'' if len(layers) == 1 else 's'} {', '.join('-'.join(map(str, run)) for run in runs)}"


def zero_weights(model: nn.Module) -> str:
    """A sentence on weight matrices that are all zeros; empty if there are none."""
    matrices = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and parameter.device.type != "meta" and parameter.is_floating_point()
    }
    zero = [
        name
        for name, matrix in matrices.items()
        if type(matrix) is nn.Parameter and not bool(matrix[:1].any()) and not bool(matrix.any())
    ]
    if not zero:
        return ""
    verb = "holds" if len(zero) == 1 else "hold"
    return f"{len(zero)} of {len(matrices)} weight matrices {verb} only zeros (first: {zero[0]})."

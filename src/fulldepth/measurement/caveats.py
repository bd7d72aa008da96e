"""Warnings of a measurement, one sentence each."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from torch import nn

from fulldepth.errors import FulldepthError
from fulldepth.measurement.headline import FEW_CLUSTERS, Clusters
from fulldepth.measurement.subject import Subject
from fulldepth.metrics import Setup
from fulldepth.metrics.cka import few_samples
from fulldepth.uncertainty import quantile

FEW_TOKENS = 1000
"""Number of counted tokens below which a warning is given."""
FEW_KINDS = 10
"""Number of distinct tokens below which the data are not considered natural language."""
NO_DIRECTION = "every state there, or in the layer before, is exactly zero and has no direction"
REASONS = {
    "displacement": NO_DIRECTION,
    "jump_rate": NO_DIRECTION,
    "cosine": "the states there are zero, or equal for all tokens",
    "cka": "the states there are equal for all tokens, or too few to estimate their similarity",
    "coherence": "the states there do not vary along the sequence",
    "norm_ratio": "the layer adds exactly nothing to any state, or the states are zero",
    "nc1": "the means of the classes coincide there",
    "renyi_entropy": "the states there are zero",
    "effective_depth": "the last layer is never right",
}
"""Measure -> why it has no finite value at a layer."""

EMPTY = {"coherence": "the states do not vary along the sequence at any layer"}
"""Measure -> why it has no rows; for all others the reason is too few tokens or occurrences."""


def caveats(subject: Subject, setup: Setup, table: pd.DataFrame) -> list[str]:
    """All warnings, those of the checkpoint and the data first."""
    lines = [*subject.checkpoint.warnings, *subject.sequences.warnings, *subject.warnings]
    lines += [line for line in (zero_weights(subject.checkpoint.model), _few_kinds(subject)) if line]
    measured = set(table.measure)
    if setup.num_tokens < FEW_TOKENS:
        counted = "Only one token counts" if setup.num_tokens == 1 else f"Only {setup.num_tokens} tokens count"
        lines.append(f"{counted}, fewer than {FEW_TOKENS:,}: read every number with its standard error, if it has one.")
    lines += [line for line in (few_clusters(Clusters.of(subject.sequences)),) if line]
    tokens = int(table["count"][table.measure == "cka"].max()) if "cka" in measured else 0
    if tokens and few_samples(tokens, setup.width):
        lines.append(
            f"Biased CKA rests on {tokens} tokens, fewer than ten times the width ({setup.width}), and "
            "is inflated: read the debiased one."
        )
    if "coherence" in measured and setup.num_sequences < 20:
        lines.append(
            f"Coherence over only {setup.num_sequences} sequences is biased up by about 1/{setup.num_sequences}: read "
            "mean_corrected."
        )
    return lines + gaps(table, setup.num_layers)


def few_clusters(clusters: Clusters) -> str:
    """A sentence on data of so few documents that errors are uncertain or unknown; empty otherwise."""
    if reason := clusters.no_standard_error:
        return f"No standard errors: {reason}."
    if clusters.number >= FEW_CLUSTERS:
        return ""
    return (
        f"Standard errors rest on {clusters.counted}: a 95 % interval is {quantile(clusters.number):.1f} standard "
        "errors to either side (Student's t)."
    )


def refuse_nothing(table: pd.DataFrame, subject: Subject, setup: Setup) -> None:
    """Raise unless the table holds at least one finite number.

    Raises:
        FulldepthError: if there is none; lists the problems of the weights, the data and each measure.
    """
    if np.isfinite(table.value.to_numpy(np.float64)).any():
        return
    lines = [zero_weights(subject.checkpoint.model), _few_kinds(subject), *gaps(table, setup.num_layers)]
    why = " ".join(line for line in lines if line)
    raise FulldepthError(
        f"Nothing that was measured of {subject.checkpoint.name} is a finite number. {why}".strip()[:950]
    )


def gaps(table: pd.DataFrame, num_layers: int) -> list[str]:
    """One line for each measure without a finite value at some layer, with the layers and the reason."""
    groups = table.groupby("measure", sort=False)
    lines = (
        _coherence_gap(rows, num_layers) if measure == "coherence" else _gap(str(measure), rows)
        for measure, rows in groups
    )
    return [line for line in lines if line]


def _gap(measure: str, rows: pd.DataFrame) -> str:
    """The line of one measure; empty if every value is finite."""
    missing = rows[~np.isfinite(rows.value.to_numpy(np.float64))]
    if missing.empty:
        return ""
    alone = missing[(missing.layer == missing.other).fillna(False).astype(bool)]  # of pairs, the layer at fault
    layers = sorted({int(layer) for layer in (missing if alone.empty else alone).layer.dropna()})
    statistics = list(dict.fromkeys(missing.statistic))
    named = "" if set(rows.statistic) <= set(statistics) else f" ({', '.join(statistics[:3])})"
    reason = REASONS.get(measure, "nothing finite came out there")
    if all(statistic.endswith(":no-first") for statistic in statistics):
        reason = "no sequence has a second token that counts, or only such as have no number"
    return f"{measure}{named} is not a number{f' at {spans(layers)}' if layers else ''}: {reason}."


def _coherence_gap(rows: pd.DataFrame, num_layers: int) -> str:
    """The line of coherence, which has no rows at layers without cells."""
    present = set(rows[rows.site == "residual"].layer.dropna())
    layers = [layer for layer in range(1, num_layers + 1) if layer not in present]
    return f"coherence has no number at {spans(layers)}: {REASONS['coherence']}." if layers else ""


def spans(layers: list[int]) -> str:
    """Ascending layers as text: `layer 3`, `layers 0-4, 7`."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'' if len(layers) == 1 else 's'} {text}"


def zero_weights(model: nn.Module) -> str:
    """A sentence on weight matrices that are all zeros; empty if there are none."""
    matrices = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and parameter.device.type != "meta" and parameter.is_floating_point()
    }
    with torch.no_grad():
        plain = {name: matrix for name, matrix in matrices.items() if type(matrix) is nn.Parameter}
        zero = [name for name, matrix in plain.items() if not bool(matrix[:1].any()) and not bool(matrix.any())]
    if not zero:
        return ""
    verb = "holds" if len(zero) == 1 else "hold"
    return f"{len(zero)} of {len(matrices)} weight matrices {verb} only zeros (first: {zero[0]})."


def _few_kinds(subject: Subject) -> str:
    """A sentence on data with few distinct tokens; empty otherwise."""
    kinds = subject.kinds_of_tokens
    if kinds is None or kinds >= FEW_KINDS:
        return ""
    amount = "a single token, repeated" if kinds == 1 else f"only {kinds} different tokens"
    return f"The data hold {amount}: numbers about them say little about language."

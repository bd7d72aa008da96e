"""What a run sampled: sizes, populations, standard errors, and one sentence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from fulldepth.measurement.subject import Subject
from fulldepth.metrics import Setup
from fulldepth.settings.measure import MeasureSettings

RESERVOIR = {"cosine": "centred cosine", "nc1": "NC1", "mmd": "MMD"}
"""Measures on the sample of tokens, in words; they have no standard errors. CKA has tokens of its own."""


def sampling(
    subject: Subject,
    settings: MeasureSettings,
    setup: Setup,
    table: pd.DataFrame,
    lens_error: dict[str, float] | None = None,
) -> dict[str, Any]:
    """The entry `sampling` of `results.json`.

    Args:
        subject: model and data.
        settings: sizes of the samples.
        setup: sizes of model and data.
        table: rows of the measurement, with standard errors.
        lens_error: error of the lens's products, if their precision is not the model's.

    Returns:
        Sizes of the samples and of the populations that they were drawn from; standard errors of the lens at the last
        layer, and of the entropies the largest over layers; `sentence`, None if nothing was sampled and the lens has
        the model's precision.
    """
    targets, measured = subject.sequences.num_targets, set(table.measure)
    sizes = {
        "reservoir_tokens": setup.reservoir_tokens,
        "counted_tokens": setup.num_tokens,
        "lens_positions": min(targets, settings.lens_tokens or targets),
        "lens_targets": targets,
        "entropy_sequences": min(setup.entropy_sequences, setup.num_sequences),
    }
    precision = {"lens_precision": "bfloat16" if lens_error else "model"}
    parts: list[str] = []
    errors: dict[str, float | None] = {}
    if measured & {"lens_accuracy", "lens_loss", "saturation", "effective_depth"} and sizes["lens_positions"] < targets:
        last = table[(table.layer == setup.num_layers) & (table.site == "residual")]
        errors |= {f"{name}_standard_error": _largest(last, name) for name in ("lens_accuracy", "lens_loss")}
        stated = _stated(
            errors, {"lens_accuracy": "{:.2g} (accuracy)", "lens_loss": "{:.2g} nats (loss)"}, "at the last layer"
        )
        parts.append(f"the lens reads {sizes['lens_positions']:,} of {targets:,} positions{stated}")
    if "renyi_entropy" in measured and sizes["entropy_sequences"] < setup.num_sequences:
        errors["renyi_entropy_standard_error"] = _largest(table, "renyi_entropy")
        stated = _stated(errors, {"renyi_entropy": "{:.2g} nats"})
        parts.append(f"the entropies {sizes['entropy_sequences']} of {setup.num_sequences:,} sequences{stated}")
    if (rests := [text for name, text in RESERVOIR.items() if name in measured]) and (
        setup.reservoir_tokens < setup.num_tokens
    ):
        verb = "read" if len(rests) > 1 else "reads"
        parts.append(f"{' and '.join(rests)} {verb} {setup.reservoir_tokens:,} of {setup.num_tokens:,} tokens")
    read = int(table["count"][table.measure == "cka"].max()) if "cka" in measured else setup.num_tokens
    if read < setup.num_tokens:
        sizes["cka_tokens"] = read
        parts.append(f"CKA reads {read:,} of {setup.num_tokens:,} tokens")
    sentence = f"Sampled: {'; '.join(parts)}. --exact samples nothing." if parts else None
    if lens_error:
        sentence = " ".join(filter(None, (sentence, _precision(lens_error))))
    errors = {name: error for name, error in errors.items() if error is not None}
    return {**sizes, **errors, **precision, **(lens_error or {}), "sentence": sentence}


def _largest(table: pd.DataFrame, measure: str) -> float | None:
    """Largest standard error of a measure over its layers; None if it has none."""
    rows = table[(table.measure == measure) & table.statistic.str.startswith("standard_error")]
    values = rows.value.to_numpy(np.float64)
    values = values[np.isfinite(values)]
    return float(f"{values.max():.4g}") if len(values) else None  # without the rounding of sums over processes


def _stated(errors: dict[str, float | None], formats: dict[str, str], where: str = "at most") -> str:
    """Standard errors in words; empty if none is known."""
    known = [text.format(error) for name, text in formats.items() if (error := errors[f"{name}_standard_error"])]
    return f" (standard error {where} {' and '.join(known)})" if known else ""


def _precision(error: dict[str, float]) -> str:
    """A sentence on the error of the lens's products."""
    return (
        f"The lens multiplies in bfloat16: over {error['lens_precision_positions']} positions that were also read in "
        f"full precision, a layer's mean loss is off by at most {error['lens_precision_mean_loss_error']:.2g} nats, "
        f"and at most {100 * error['lens_precision_changed_predictions']:.2g} % of its top predictions change."
    )

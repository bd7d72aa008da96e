"""The few numbers of a run to look at first, by the names that the page and `compare` know."""

from __future__ import annotations

import math

import pandas as pd

from fulldepth.metrics.jump_rate import describe_jump
from fulldepth.results import Finding


def headline(table: pd.DataFrame) -> dict[str, Finding]:
    """The findings of a run by name, as of the last evaluation."""
    if table.empty:
        return {}
    step = int(table.step.max())
    found: dict[str, Finding] = {}
    for name, measure, unit, sentence in (
        ("validation_loss", "validation_loss", "nats", _loss(table, step)),
        ("train_loss", "train_loss", "nats", ""),
        ("zeta_L", "jump_rate", "%", _jump(table, step)),
        ("throughput", "throughput", "tokens/s", _pace(table, step)),
        ("elapsed", "elapsed", "s", ""),
        ("peak_memory", "peak_memory", "MiB", ""),
    ):
        value = _value(table, measure, step)
        if value is not None:
            found[name] = Finding(value, unit, sentence)
    return found


def _value(table: pd.DataFrame, measure: str, step: int) -> float | None:
    """A measure at a step: of the whole model, or of the deepest layer that has it."""
    rows = table[(table.measure == measure) & (table.step == step)].sort_values("layer")
    return None if rows.empty or not math.isfinite(rows.value.iloc[-1]) else float(rows.value.iloc[-1])


def _loss(table: pd.DataFrame, step: int) -> str:
    now, before = _value(table, "validation_loss", step), _value(table, "validation_loss", 0)
    if now is None:
        return ""
    sentence = f"The validation loss is {now:.3f} nats at step {step:,}"
    if before is not None and step:
        sentence += f", {before:.3f} before training"
    losses = table[table.measure == "validation_loss"].set_index("step")["value"].dropna()
    best = int(losses.index[int(losses.argmin())])
    return sentence + (f"; it was lowest at step {best:,} ({losses[best]:.3f})." if best != step else ".")


def _jump(table: pd.DataFrame, step: int) -> str:
    value = _value(table, "jump_rate", step)
    return "" if value is None else describe_jump(value)


def _pace(table: pd.DataFrame, step: int) -> str:
    speed = _value(table, "throughput", step)
    return "" if speed is None else f"Training runs at {speed:,.0f} tokens/s."

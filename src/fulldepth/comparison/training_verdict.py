"""Findings of a comparison of training runs (losses at equal steps, ratios of costs) and reasons to distrust them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from fulldepth.comparison import verdict
from fulldepth.comparison.verdict import Entry
from fulldepth.results import Finding
from fulldepth.thresholds import BUSY
from fulldepth.uncertainty import FEWEST_ROUNDS, Ratio

MULTIPLES = {"peak_memory": "Peak memory", "parameters": "Parameters"}
"""Costs without noise, compared as ratios."""

NOT_COMPARABLE = (
    verdict.DATA,
    ("the tokenizers differ", "settings", "tokenizer"),
    ("the sequence lengths differ", "settings", "sequence_length"),
    ("the numbers of validation targets differ", "", "targets"),
)
"""Differences that make two validation losses incomparable, see `verdict.unlike`."""
UNEQUAL_STEPS = (
    ("the batch sizes differ", "settings", "global_batch_size"),
    ("the learning-rate schedules are of different length", "settings", "steps"),
)
"""Settings whose differences make equal steps unequal training."""


def headline(models: list[Entry], step: int, times: Mapping[str, Ratio]) -> dict[str, Finding]:
    """Every run's loss and costs compared with the baseline's. No run is called the best: of one run each, the effect
    of another seed is not known.

    Args:
        models: the entries of the runs.
        step: the last common step.
        times: label -> time over the baseline's.
    """
    baseline, others = verdict.baseline_of(models)
    return {
        f"{name}:{model['label']}": entry
        for model in others
        for name, entry in _against(model, baseline, step, times.get(model["label"]))
    }


def _value(model: Entry, name: str) -> float | None:
    value = (model["headline"].get(name) or {}).get("value")
    return None if value is None else float(value)


def _ratio(model: Entry, baseline: Entry, name: str) -> float | None:
    value, base = _value(model, name), _value(baseline, name)
    return value / base if value is not None and base else None


def _busy(model: Entry) -> str:
    """Why the costs of a run cannot be compared; empty if other programs hardly used the machine."""
    load = _value(model, "other_load")
    if load is None:
        return f"it is not recorded how busy the machine of {model['label']} was"
    return f"other programs used {load:.0%} of its CPU during {model['label']}" if load > BUSY else ""


def _against(model: Entry, baseline: Entry, step: int, time: Ratio | None) -> Iterator[tuple[str, Finding]]:
    """Name and finding of one run: difference of the loss, ratios of the costs.

    Costs are compared if both runs are known to have had the machine to themselves.
    """
    loss, base = (_value(entry, "validation_loss") for entry in (model, baseline))
    pair = f"{model['label']} against {baseline['label']}"
    if loss is not None and base is not None:
        sentence = (
            f"Validation loss at step {step:,}: {loss:.3f} nats in {model['label']} against {base:.3f} in "
            f"{baseline['label']} ({verdict.signed(loss - base, 3)}, of one run each)."
        )
        yield "validation_loss", Finding(loss - base, "nats", sentence)
    alone = not _busy(model) and not _busy(baseline)
    if alone and time is not None:
        yield "time_per_step", _time(time, pair)
    for name, title in MULTIPLES.items():
        ratio = _ratio(model, baseline, name) if alone or name == "parameters" else None
        if ratio is not None:
            sentence = f"{title}: {ratio:.2f} times {baseline['label']}'s in {model['label']}."
            yield name, Finding(ratio, "x", sentence)


def _time(time: Ratio, pair: str) -> Finding:
    """The ratio of the times per step where it is measurable."""
    title = f"Time per step, {pair}"
    if math.isnan(time.low):
        return Finding(None, "x", f"{title}: not compared; an interval takes {FEWEST_ROUNDS} common evaluations.")
    ends = f"95 % interval {time.low:.2f} to {time.high:.2f}"
    if not time.differs:
        return Finding(None, "x", f"{title}: no measurable difference ({ends}).")
    return Finding(time.value, "x", f"{title}: {time.value:.2f} times ({ends}).", interval=(time.low, time.high))


def warnings(models: list[Entry], step: int) -> list[str]:
    """One line for each reason to distrust a difference, and for runs trained past the common step."""
    baseline, others = verdict.baseline_of(models)
    lines = []
    if step == 0:
        lines.append("The only evaluated step that all runs have is 0, before training.")
    if further := [model["label"] for model in models if model["last_step"] > step]:
        was = "was" if len(further) == 1 else "were"
        lines.append(f"{', '.join(further)} {was} trained past step {step:,}, the last that all runs have.")
    if busy := [reason for reason in map(_busy, models) if reason]:
        lines.append(f"Time and memory are not compared, because {'; '.join(busy)}.")
    for model in others:
        pair = f"{model['label']} and {baseline['label']}"
        if reasons := list(verdict.unlike(model, baseline, NOT_COMPARABLE)):
            lines.append(f"{pair}: the losses are not comparable because {'; '.join(reasons)}.")
        if reasons := list(verdict.unlike(model, baseline, UNEQUAL_STEPS)):
            lines.append(f"{pair}: equal steps are not equal training because {'; '.join(reasons)}.")
        lines += verdict.depth_warning(model, baseline)
    return lines

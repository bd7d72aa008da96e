"""Findings of a comparison of training runs (losses at equal steps, ratios of costs) and reasons to distrust them."""

from __future__ import annotations

from collections.abc import Iterator

from fulldepth.comparison import verdict
from fulldepth.comparison.verdict import Entry
from fulldepth.results import Finding
from fulldepth.thresholds import BUSY

LEVEL = {"nats": 0.0005, "%": 0.05}
"""Differences below this are omitted because they would print as zero."""
COSTS = {"time_per_step": "Time per step", "peak_memory": "Peak memory"}

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


def headline(models: list[Entry], step: int) -> dict[str, Finding]:
    """The best run in one sentence, then every run's loss and costs compared with the baseline's."""
    baseline, others = verdict.baseline_of(models)
    each = {f"{name}:{model['label']}": entry for model in others for name, entry in _against(model, baseline, step)}
    return {**_best(models, baseline, step), **_calmest(models, baseline), **_cost(others, baseline), **each}


def _value(model: Entry, name: str) -> float | None:
    value = (model["headline"].get(name) or {}).get("value")
    return None if value is None else float(value)


def _best(models: list[Entry], baseline: Entry, step: int) -> dict[str, Finding]:
    losses = [(value, model) for model in models if (value := _value(model, "validation_loss")) is not None]
    loss, best = min(losses, key=lambda pair: pair[0])
    base, rivals = _value(baseline, "validation_loss"), [pair for pair in losses if pair[1] is not baseline]
    assert base is not None  # every run has a validation loss at the common step
    rival_loss, rival = min(rivals, key=lambda pair: pair[0])
    name, other = f"the baseline, {baseline['label']}", rival["label"]
    if abs(base - rival_loss) < LEVEL["nats"]:
        both = f"{name}, and {other}" if best is baseline else f"{other} and {name},"
        text = f"{both} have the lowest validation loss: {base:.3f} nats."
    elif best is baseline:
        text = (
            f"{name}, has the lowest validation loss: {loss:.3f} nats; {other} comes next, {rival_loss - loss:.3f} "
            "above it."
        )
    else:
        text = f"{other} has the lowest validation loss: {loss:.3f} nats, {base - loss:.3f} below {name} ({base:.3f})."
    return {"lowest_validation_loss": Finding(loss, "nats", f"At step {step:,} {text}")}


def _calmest(models: list[Entry], baseline: Entry) -> dict[str, Finding]:
    """Finding on the run with the smallest jump of the last layer."""
    rates = [(value, model["label"]) for model in models if (value := _value(model, "zeta_L")) is not None]
    base = _value(baseline, "zeta_L")
    if base is None:
        return {}
    rate, label = min(rates)
    if rate >= base:
        sentence = f"No run’s last layer jumps less than the baseline’s: {base:.1f} %."
    elif base - rate < LEVEL["%"]:
        sentence = f"The last layer jumps least in {label}, by less than 0.1 % below the baseline’s {base:.1f} %."
    else:
        sentence = f"The last layer jumps least in {label}: {rate:.1f} % against {base:.1f} % in the baseline."
    return {"lowest_zeta_L": Finding(rate, "%", sentence)}


def _cost(others: list[Entry], baseline: Entry) -> dict[str, Finding]:
    """One finding each for time and memory: the range of the ratios to the baseline."""
    findings = {}
    for name, title in COSTS.items():
        ratios = [(ratio, model["label"]) for model in others if (ratio := _cost_of(model, baseline, name)) is not None]
        if not ratios:
            continue
        (low, _), (high, label) = min(ratios), max(ratios)
        amount = f"{high:.2f} times that of the baseline"
        if f"{low:.2f}" != f"{high:.2f}":
            amount = f"{low:.2f} to {amount}, most in {label}"
        findings[f"greatest_{name}"] = Finding(high, "x", f"{title} is {amount}.")
    return findings


def _ratio(model: Entry, baseline: Entry, name: str) -> float | None:
    value, base = _value(model, name), _value(baseline, name)
    return value / base if value is not None and base else None


def _cost_of(model: Entry, baseline: Entry, name: str) -> float | None:
    """The ratio of a cost; None unless both runs are known to have had the machine to themselves."""
    return None if _busy(model) or _busy(baseline) else _ratio(model, baseline, name)


def _busy(model: Entry) -> str:
    """Why the costs of a run cannot be compared; empty if other programs hardly used the machine."""
    load = _value(model, "other_load")
    if load is None:
        return f"it is not recorded how busy the machine of {model['label']} was"
    return f"other programs used {load:.0%} of its CPU during {model['label']}" if load > BUSY else ""


def _against(model: Entry, baseline: Entry, step: int) -> Iterator[tuple[str, Finding]]:
    """Name and finding of one run: difference of the loss, ratios of the costs."""
    loss, base = (_value(entry, "validation_loss") for entry in (model, baseline))
    if loss is not None and base is not None:
        sentence = (
            f"Validation loss at step {step:,}: {loss:.3f} nats in {model['label']} against {base:.3f} in "
            f"{baseline['label']} ({verdict.signed(loss - base, 3)})."
        )
        yield "validation_loss", Finding(loss - base, "nats", sentence)
    for name, title in {**COSTS, "parameters": "Parameters"}.items():
        ratio = _cost_of(model, baseline, name) if name in COSTS else _ratio(model, baseline, name)
        if ratio is not None:
            sentence = f"{title}: {ratio:.2f} times {baseline['label']}'s in {model['label']}."
            yield name, Finding(ratio, "x", sentence)


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

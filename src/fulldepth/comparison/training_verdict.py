"""What a comparison of training runs says first: losses at equal steps, costs as ratios, and what makes them unfair."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fulldepth.comparison import verdict
from fulldepth.results import Finding

LEVEL = {"nats": 0.0005, "%": 0.05}
"""Differences below this are not shown: they would print as zero."""
COSTS = {"time_per_step": "Time per step", "peak_memory": "Peak memory"}

Entry = dict[str, Any]


def headline(models: list[Entry], step: int) -> dict[str, Finding]:
    """The best run in one sentence, then how every run's loss and costs stand to the baseline's."""
    baseline = next(model for model in models if model["baseline"])
    others = [model for model in models if not model["baseline"]]
    found = {f"{name}:{model['label']}": entry for model in others for name, entry in _against(model, baseline, step)}
    return {**_best(models, baseline, step), **_calmest(models, baseline), **_cost(others, baseline), **found}


def _value(model: Entry, name: str) -> float | None:
    value = (model["headline"].get(name) or {}).get("value")
    return None if value is None else float(value)


def _best(models: list[Entry], baseline: Entry, step: int) -> dict[str, Finding]:
    losses = [(value, model) for model in models if (value := _value(model, "validation_loss")) is not None]
    loss, best = min(losses, key=lambda pair: pair[0])
    base = _value(baseline, "validation_loss")
    assert base is not None  # the common step is one at which every run has it
    if best is baseline:
        second, next_best = min(
            ((value, model) for value, model in losses if model is not baseline), key=lambda pair: pair[0]
        )
        sentence = (
            f"At step {step:,} the baseline, {baseline['label']}, has the lowest validation loss: {loss:.3f} nats; "
            f"{next_best['label']} comes next, {second - loss:.3f} above it."
        )
        if second - loss < LEVEL["nats"]:
            sentence = (
                f"At step {step:,} the baseline, {baseline['label']}, and {next_best['label']} have the lowest "
                f"validation loss: {loss:.3f} nats."
            )
    elif base - loss < LEVEL["nats"]:
        sentence = (
            f"At step {step:,} {best['label']} and the baseline, {baseline['label']}, have the lowest validation loss: "
            f"{base:.3f} nats."
        )
    else:
        sentence = (
            f"At step {step:,} {best['label']} has the lowest validation loss: {loss:.3f} nats, {base - loss:.3f} "
            f"below the baseline, {baseline['label']} ({base:.3f})."
        )
    return {"lowest_validation_loss": Finding(loss, "nats", sentence)}


def _calmest(models: list[Entry], baseline: Entry) -> dict[str, Finding]:
    """The run whose last layer jumps least."""
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
    """For time and memory, the range of the ratios to the baseline in one sentence."""
    found = {}
    for name, what in COSTS.items():
        ratios = [(ratio, model["label"]) for model in others if (ratio := _ratio(model, baseline, name)) is not None]
        if not ratios:
            continue
        (low, _), (high, most) = min(ratios), max(ratios)
        amount = f"{high:.2f} times that of the baseline"
        if f"{low:.2f}" != f"{high:.2f}":
            amount = f"{low:.2f} to {amount}, most in {most}"
        found[f"greatest_{name}"] = Finding(high, "x", f"{what} is {amount}.")
    return found


def _ratio(model: Entry, baseline: Entry, name: str) -> float | None:
    ours, theirs = _value(model, name), _value(baseline, name)
    return ours / theirs if ours is not None and theirs else None


def _against(model: Entry, baseline: Entry, step: int) -> Iterator[tuple[str, Finding]]:
    """Name and finding of one run: difference of the loss, ratios of the costs."""
    ours, theirs = _value(model, "validation_loss"), _value(baseline, "validation_loss")
    if ours is not None and theirs is not None:
        sentence = (
            f"Validation loss at step {step:,}: {ours:.3f} nats in {model['label']} against {theirs:.3f} in "
            f"{baseline['label']} ({verdict.signed(ours - theirs, 3)})."
        )
        yield "validation_loss", Finding(ours - theirs, "nats", sentence)
    for name, what in {**COSTS, "parameters": "Parameters"}.items():
        if (ratio := _ratio(model, baseline, name)) is not None:
            sentence = f"{what}: {ratio:.2f} times {baseline['label']}'s in {model['label']}."
            yield name, Finding(ratio, "x", sentence)


def warnings(models: list[Entry], step: int) -> list[str]:
    """One line for each reason to distrust a difference, and for runs that went on past the common step."""
    baseline = next(model for model in models if model["baseline"])
    lines = []
    if step == 0:
        lines.append("The only evaluated step that all runs have is 0, before training.")
    if further := [model["label"] for model in models if model["last_step"] > step]:
        was = "was" if len(further) == 1 else "were"
        lines.append(f"{', '.join(further)} {was} trained past step {step:,}, the last that all runs have.")
    for model in models:
        if model["baseline"]:
            continue
        pair = f"{model['label']} and {baseline['label']}"
        if reasons := list(_unlike(model, baseline)):
            lines.append(f"{pair}: the losses are not comparable because {'; '.join(reasons)}.")
        if reasons := list(_unequal(model, baseline)):
            lines.append(f"{pair}: equal steps are not equal training because {'; '.join(reasons)}.")
        lines += verdict.depth_warning(model, baseline)
    return lines


def _unlike(model: Entry, baseline: Entry) -> Iterator[str]:
    """Why two validation losses are not of the same text in the same units."""
    labels = (model["label"], baseline["label"])
    if model["data"].get("hash") != baseline["data"].get("hash"):
        yield _told("the data differ", labels, [entry["data"].get("name") for entry in (model, baseline)])
    for key, what in (("tokenizer", "the tokenizers differ"), ("sequence_length", "the sequence lengths differ")):
        seen = [entry["settings"].get(key) for entry in (model, baseline)]
        if seen[0] != seen[1]:
            yield _told(what, labels, seen)
    targets = [entry["targets"] for entry in (model, baseline)]
    if targets[0] != targets[1]:
        yield _told("the numbers of validation targets differ", labels, targets)


def _unequal(model: Entry, baseline: Entry) -> Iterator[str]:
    """Settings that give a step another weight."""
    labels = (model["label"], baseline["label"])
    for key, what in (
        ("global_batch_size", "the batch sizes differ"),
        ("steps", "the learning-rate schedules are of different length"),
    ):
        seen = [entry["settings"].get(key) for entry in (model, baseline)]
        if seen[0] != seen[1]:
            yield _told(what, labels, seen)


def _told(what: str, labels: tuple[str, str], seen: list[Any]) -> str:
    if seen[0] == seen[1]:
        return what
    return f"{what} ({', '.join(f'{label}: {value}' for label, value in zip(labels, seen, strict=True))})"

"""Pages of `fulldepth skip`: a search, a curve, a benchmark, a quantisation, or several of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fulldepth.figures.benchmark import agree
from fulldepth.figures.record import Source
from fulldepth.figures.skip_results import PARTS, Part, Removal, plans, removals
from fulldepth.figures.style import minus
from fulldepth.reporting import measured, skipping_tables
from fulldepth.reporting.findings import Entry, Shown
from fulldepth.reporting.measured import Meta, Pairs
from fulldepth.reporting.phrases import dotted, figure_of, listed, model_line, quantity, seconds, short, stated
from fulldepth.reporting.tables import Table

CARDS = {
    "loss_added": "Loss added",
    "loss_healed": "Held-out loss, healed",
    "break_point": "Break point",
    "mmd": "Distance from the original",
    "prefill_time_ratio": "Prefill time",
    "decode_time_ratio": "Decode time",
}
"""Name in `results.json` (for benchmarks, followed by the model) -> title of the card."""
QUANTISED = "quantised"
"""Placeholder for the name of a model of a quantisation."""
TIMES = ("prefill_time_ratio", "decode_time_ratio")
BUSY = "times"
"""Finding in place of comparisons of times if the machine was busy."""
LATER = ("mmd", QUANTISED)
"""Findings whose sentences are marked as later."""
ORDER = (
    "Model", "Search", "Curve", "Healing", "Data", "Benchmark", "Quantisation", "Machine", "Fingerprints", "Seed",
    "Versions", "Measured",
)  # fmt: skip
"""Order of the pairs under “What was measured”."""


def title(source: Source) -> str:
    """Name of the model."""
    return measured.title({"model": model(source)})


def model(source: Source) -> dict[str, Any]:
    """Entry of the model, merged from all folders."""
    merged: dict[str, Any] = {}
    for part in source.parts:
        models = [entry.get("model") for entry in part.meta.get("models") or []][:1]
        for entry in (part.meta.get("model"), *models, *(plan.get("model") for _, plan in plans(part))):
            merged = {**{key: value for key, value in (entry or {}).items() if value is not None}, **merged}
    return merged


def byline(source: Source) -> str:
    """The model and the data of its losses in one line."""
    heldout = [(part.meta.get("data") or {}).get("heldout") or {} for part in source.parts]
    names = list(dict.fromkeys(short(data["name"], 60) for data in heldout if data.get("name")))
    return dotted(model_line(model(source)), f"judged by {' and by '.join(names)}" if names else "")


def findings(_: Meta, source: Source) -> list[Shown]:
    """The findings of all folders; of a benchmark, exports that skip blocks and whose time differs have cards."""
    return [
        Shown(
            entry,
            _card(source, part, name, model_label, entry),
            name in LATER or (name in TIMES and not _lacks_blocks(part, model_label)),
            f"{several}: " if (several := _if_several(part, source.parts)) else "",
        )
        for part, name, model_label, entry in _headlines(source.parts)
    ]


def _same_time(source: Source, part: Part, name: str, label: str) -> bool:
    """Whether a finding is a time without a measurable difference from the original's."""
    models = (model for model in source.benchmarked if model.part is part and model.entry.get("label") == label)
    ratios = (model.relative(name.partition("_")[0]) for model in models if name in TIMES)
    return any(ratio is not None and ratio.decided == 1 for ratio in ratios)


def _headlines(parts: Sequence[Part]) -> Iterator[tuple[Part, str, str, Entry]]:
    """(folder, name, model, entry) of every finding; the name of a quantised model is `QUANTISED`."""
    for part in parts:
        for name, entry in (part.meta.get("headline") or {}).items():
            base, _, model_label = str(name).partition(" ") if part.kind == "bench" else (str(name), "", "")
            if part.kind == "quantise" and base not in ("order", BUSY):
                base, model_label = QUANTISED, base
            yield part, base, model_label, entry


def _card(source: Source, part: Part, name: str, model_label: str, entry: Entry) -> tuple[str, str, str, str] | None:
    """Name, symbol, digits and unit of a finding; None if the table of models or another card shows it."""
    parts = source.parts
    if name in TIMES and (not _lacks_blocks(part, model_label) or _same_time(source, part, name, model_label)):
        return None
    if name == "loss_added" and part.kind == "curve" and any(other.kind == "skip" for other in parts):
        return None  # the plan's loss has a card; the curve shows the cost of removing more
    if name == "order" or (name == QUANTISED and len(parts) > 1):
        return None
    value = entry.get("value")
    if isinstance(value, int | float) and math.isfinite(value):
        digits, unit = _digits(name, float(value), entry)
    elif name == "break_point":
        digits, unit = "none", ""
    else:
        return None
    caption = short(model_label, 60).capitalize() if name == QUANTISED else CARDS.get(name, short(name, 60))
    return caption, dotted(_symbol(part, name, model_label), _if_several(part, parts)), digits, unit


def _digits(name: str, value: float, entry: Entry) -> tuple[str, str]:
    if name in TIMES:
        return f"{value:.3f}", "×"
    if name == "break_point":
        return f"{value:.0f}", "blocks"
    if name == "mmd":
        return f"{value:.2g}", ""
    if entry.get("unit") == "nats":
        return minus(value, "+.3f" if name in ("loss_added", QUANTISED) else ".3f"), ""
    return figure_of(entry)


def _symbol(part: Part, name: str, model_label: str) -> str:
    if model_label:
        return "nats added" if name == QUANTISED else short(model_label, 40)
    plan = part.meta.get("plan") or {}
    count = len(plan.get("blocks") or [])
    healed = plan.get("healed_loss") is not None
    return {
        "loss_added": f"nats; {count} removed, not healed",
        "loss_healed": f"nats; {count} removed",
        "break_point": f"of {count} tried",
        "mmd": f"MMD² of the last layer{', healed' if healed else ''}",
    }.get(name, "")


def _if_several(part: Part, parts: Sequence[Part]) -> str:
    """The folder's name if others on the page are of the same kind."""
    return short(part.label, 40) if sum(other.kind == part.kind for other in parts) > 1 else ""


def _lacks_blocks(part: Part, label: str) -> bool:
    """Whether a model of a benchmark skips blocks."""
    return any(
        entry.get("label") == label and entry.get("not_computed") != [] for entry in part.meta.get("models") or []
    )


def about(source: Source) -> Pairs:
    """Pairs on the model, the plans, the data, the machine and the run; equal texts are given once."""
    described, parts = model(source), source.parts
    hashes = [(kind, (part.meta.get(kind) or {}).get("hash")) for kind in ("model", "data") for part in parts]
    texts: dict[str, dict[str, list[str]]] = {name: {} for name in ORDER}
    texts["Model"] = {dotted(stated(described, ("name", "{}")), model_line(described)): [""]}
    texts["Fingerprints"] = {measured.fingerprints(hashes): [""]}
    for part in parts:
        for name, text in [*_pairs(part), *measured.run(part.meta)]:
            if text:
                texts.setdefault(name, {}).setdefault(text, []).append(part.label)
    if len(texts["Measured"]) > 1:
        times = sorted(texts["Measured"])
        texts["Measured"] = {f"{times[0]} to {times[-1]}": [""]}
    return [
        (name if len(labelled) == 1 else f"{name} ({', '.join(short(label, 40) for label in labels)})", text)
        for name, labelled in texts.items()
        for text, labels in labelled.items()
    ]


def _pairs(part: Part) -> Pairs:
    meta, plan, settings = part.meta, part.meta.get("plan") or {}, part.meta.get("settings") or {}
    machine, threads = meta.get("machine") or {}, (meta.get("machine") or {}).get("threads")
    pairs = {
        "skip": [("Search", _search(plan)), ("Healing", _healing(plan, settings))],
        "curve": [("Curve", _search(plan))],
        "bench": [("Benchmark", _grid(settings))],
        "quantise": [("Quantisation", _method(meta.get("method")))],
    }
    counted = f"{threads} thread{'' if threads == 1 else 's'}" if isinstance(threads, int) else ""
    return [
        *pairs.get(part.kind, []),
        ("Data", _data(meta.get("data") or {})),
        ("Machine", dotted(stated(machine, ("device", "{}"), ("name", "{}")), counted)),
    ]


def _search(plan: Meta) -> str:
    """The search method and its cost."""
    if not plan.get("blocks"):
        return ""
    cost = plan.get("cost") or {}
    search, criterion, granularity = (short(plan.get(key, "?"), 20) for key in ("search", "criterion", "granularity"))
    flops = ""
    if isinstance(cost.get("flops"), int | float):
        share = cost.get("share_of_plain")
        of_plain = f" ({share:.0%} of the plain loop’s)" if isinstance(share, int | float) else ""
        flops = f"{cost['flops']:.3g} FLOPs{of_plain}"
    return dotted(
        f"{search}, by {criterion}, {granularity} granularity",
        stated(cost, ("forwards", "{} forward passes")),
        flops,
        stated(cost, ("seconds", "{}"), written=seconds),
    )


def _healing(plan: Meta, settings: Meta) -> str:
    if plan.get("healed_loss") is None:
        return "no scalars fitted"
    fit = ((plan.get("cost") or {}).get("fit") or {}).get("healed") or {}
    rate = settings.get("learning_rate")
    return dotted(
        "a factor per channel" if settings.get("per_channel") else "four factors a layer, two where a block is gone",
        f"Adam, learning rate {rate:g}" if isinstance(rate, int | float) else "",
        f"best after epoch {fit['epoch']}" if isinstance(fit.get("epoch"), int) else "",
    )


def _data(data: Meta) -> str:
    texts = [stated(data, ("name", "{}"))]
    for key, purpose in (("train", "to fit on"), ("heldout", "held out")):
        split = data.get(key)
        if isinstance(split, Mapping) and isinstance(split.get("examples"), int):
            tokens = f" ({split['predicted']:,} predicted tokens)" if isinstance(split.get("predicted"), int) else ""
            texts.append(f"{split['examples']:,} examples {purpose}{tokens}")
    return dotted(*texts)


def _grid(settings: Meta) -> str:
    texts = [
        f"{unit} {', '.join(short(number, 12) for number in settings[key])}"
        for key, unit in (("batches", "batch"), ("contexts", "context"))
        if isinstance(settings.get(key), list)
    ]
    for key, unit in (("new_tokens", "new tokens"), ("repeats", "rounds"), ("warmup", "warm-up rounds")):
        if isinstance(settings.get(key), int):
            texts.append(f"{settings[key]:,} {unit.removesuffix('s') if settings[key] == 1 else unit}")
    return dotted(*texts)


def _method(method: Any) -> str:
    return listed(method) if isinstance(method, Mapping) else short(method or "", 160)


def warnings(source: Source) -> list[str]:
    """Warnings of the folders without repetition, and reasons why their numbers are not comparable."""
    texts = dict.fromkeys(text for part in source.parts for text in measured.warnings({**part.meta, "models": None}))
    return [*texts, *_not_comparable(source)]


def left_out(source: Source) -> list[list[str]]:
    """[measure, reason] of every measure that was left out."""
    return [pair for part in source.parts for pair in measured.left_out(part.meta)]


def _not_comparable(source: Source) -> Iterator[str]:
    """Warnings on losses that were measured on different data or could not be checked."""
    hashes = {part.label: str((part.meta.get("data") or {}).get("hash") or "") for part in source.parts}
    hashes = {label: digest for label, digest in hashes.items() if digest}
    if len(set(hashes.values())) > 1:
        names = ", ".join(short(label, 40) for label in hashes)
        yield f"The losses of {names} were read on different data: compare each with its own original only."
    if not agree(source.benchmarked):
        yield (
            "The original’s loss is not the same for all models that were timed: they were judged by different data. "
            "Quality is shown as the loss added to the original’s."
        )
    unknown = [short(model.name, 40) for model in source.benchmarked if model.loss is None and not model.baseline]
    if unknown:
        yield f"The held-out loss of {', '.join(unknown)} is not known, so quality against time leaves it out."


def tables(source: Source) -> dict[str, Sequence[Table | dict[str, Any]]]:
    """Id of a section -> its tables and strips of layers."""
    return {**skipping_tables.tables(source), "blocks": _strips(source)}


def _strips(source: Source) -> list[dict[str, Any]]:
    """A strip of layers for each set of removed blocks: which, in what order, and the loss that each added."""
    sets_removed = removals(source.parts)
    has_depth = isinstance(model(source).get("num_layers"), int)
    return [_strip(removal, source.layers, has_depth, len(sets_removed) > 1) for removal in sets_removed]


def _strip(removal: Removal, layers: int, has_depth: bool, several: bool) -> dict[str, Any]:
    cells = [
        [block, order, "" if added is None else minus(added, "+.3f"), "" if added is None else minus(added, "+.6f")]
        for order, (block, added) in enumerate(zip(removal.blocks, removal.added, strict=True), start=1)
    ]
    thing = PARTS.get(removal.granularity, "block")
    count = f"{len(removal.blocks)} {thing}{'' if len(removal.blocks) == 1 else 's'} removed"
    loss = ""
    if None not in removal.added:
        before, after = (quantity(removal.losses[at], "nats") for at in (0, -1))
        healed = "" if removal.healed is None else f", {quantity(removal.healed, 'nats')} healed"
        loss = f"held-out loss {before} before, {after} after{healed}"
    depth = "the model’s depth is not stated: drawn to the deepest layer that went"
    return {
        "strip": True,
        "title": f"{short(removal.name, 60)}: {count}" if several and removal.name else count,
        "note": dotted(f"of {layers} layers" if has_depth else depth, loss),
        "granularity": removal.granularity,
        "layers": layers,
        "cells": cells,
    }

"""The pages of `fulldepth skip`: what is said of a search, a curve, a benchmark, a quantisation, or several of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from fulldepth.figures.benchmark import agree, benchmarked_models
from fulldepth.figures.record import SKIP
from fulldepth.figures.skip_results import KINDS, TOGETHER, Part, Removal, layers_of, parts, plans, removals
from fulldepth.figures.style import minus
from fulldepth.report import skipping_tables, verdict
from fulldepth.report.phrases import figure_of, model_line, quantity, seconds, short
from fulldepth.report.sections import arrange

PAGES = (*KINDS, TOGETHER)
"""Kinds of pages that are made here."""
CARDS = {
    "loss_added": "Loss added",
    "loss_healed": "Loss taken back by scalars",
    "break_point": "Break point",
    "mmd": "Distance from the original",
    "spectral_norm": "Weights, removed over kept",
    "prefill_time_saved": "Prefill time saved",
    "decode_time_saved": "Decode time saved",
}
"""Name in `results.json` (for benchmarks, followed by the model) -> what it is called."""
LEAD = 6
"""Sentences that the page opens with at most; the others are folded."""
CORNER = "corner"
"""Stands for the name of one of the models of a quantisation."""
TIMES = ("prefill_time_saved", "decode_time_saved")
LATER = ("mmd", "spectral_norm", CORNER)
"""Headlines whose sentences are the first to be folded."""
ORDER = (
    "Model", "Search", "Curve", "Healing", "Data", "Benchmark", "Quantisation", "Machine", "Fingerprints", "Seed",
    "Versions", "Measured",
)  # fmt: skip
"""Of what is said under “What was measured”."""
WORK = {"skip": "Search", "curve": "Curve"}


def head(table: pd.DataFrame, meta: Mapping[str, Any], shown: Iterable[str]) -> dict[str, Any]:
    """Everything on the page but its figures and its table of rows.

    Args:
        table: rows of one folder, or of several with the column `folder`.
        meta: the document, or the documents in `parts`.
        shown: names of the figures.
    """
    found = parts(table, meta)
    tables = skipping_tables.tables(found)
    tables["blocks"] = strips(found)
    models = skipping_tables.side_by_side(found)
    said, more = sentences(found)
    return {
        "title": verdict.title({"model": model(found)}),
        "byline": byline(found),
        "models": models,
        "about": about(found),
        "remarks": remarks(found),
        "sections": arrange(shown, SKIP, tables),
        "in_words": "More in words",
        "views": [
            {
                "step": None,
                "cards": cards(found),
                "sentences": said,
                "more_sentences": more,
                "left_out": [],
                "lens": [],
                "patches": {},
            }
        ],
    }


def model(found: Sequence[Part]) -> dict[str, Any]:
    """What all folders together say of the model."""
    known: dict[str, Any] = {}
    for part in found:
        first = [entry.get("model") for entry in part.meta.get("models") or [] if isinstance(entry, Mapping)][:1]
        for stated in (part.meta.get("model"), *first, *(plan.get("model") for _, plan in plans(part))):
            if isinstance(stated, Mapping):
                known = {**{key: value for key, value in stated.items() if value is not None}, **known}
    return known


def byline(found: Sequence[Part]) -> str:
    """The model, and what it was judged by, in one line."""
    held = [(part.meta.get("data") or {}).get("heldout") or {} for part in found]
    names = list(dict.fromkeys(short(data["name"], 60) for data in held if data.get("name")))
    judged = f"judged by {' and by '.join(names)}" if names else ""
    return " · ".join(filter(None, [model_line(model(found)), judged]))


def cards(found: Sequence[Part]) -> list[dict[str, str]]:
    """The few numbers; of benchmarks, those of exports that do not compute everything."""
    made = []
    for part, base, whose, entry in _headlines(found):
        if base in TIMES and not _lacks(part, whose):
            continue
        if base == "loss_added" and part.kind == "curve" and any(other.kind == "skip" for other in found):
            continue  # that of the plan stands here; the curve says what more would cost
        if base == "order" or (base == CORNER and len(found) > 1):
            continue  # the table of models says it
        value = entry.get("value")
        if not isinstance(value, int | float) or not math.isfinite(value):
            if base != "break_point":
                continue
            digits, unit = "none", ""
        else:
            digits, unit = _digits(base, float(value), entry)
        symbol = " · ".join(filter(None, [_symbol(part, base, whose), _if_several(part, found)]))
        name = short(whose, 60).capitalize() if base == CORNER else CARDS.get(base, short(base, 60))
        made.append({"name": name, "symbol": symbol, "digits": digits, "unit": unit})
    return made


def _digits(base: str, value: float, entry: Mapping[str, Any]) -> tuple[str, str]:
    if base in TIMES:
        return minus(100 * value, ".1f"), "%"
    if base == "break_point":
        return f"{value:.0f}", "blocks"
    if base == "mmd":
        return f"{value:.2g}", ""
    if base == "spectral_norm":
        return f"{value:.2f}", "×"
    if entry.get("unit") == "nats":
        return minus(value, "+.3f" if base in ("loss_added", CORNER) else ".3f"), ""
    return figure_of(entry)


def _symbol(part: Part, base: str, whose: str) -> str:
    if whose:
        return "nats added" if base == CORNER else short(whose, 40)
    plan = part.meta.get("plan") or {}
    count = len(plan.get("blocks") or [])
    healed = plan.get("healed_loss") is not None
    return {
        "loss_added": f"nats; {count} removed, not healed",
        "loss_healed": f"nats; {count} removed",
        "break_point": f"of {count} tried",
        "mmd": f"MMD² of the last layer{', healed' if healed else ''}",
        "spectral_norm": "mean spectral norm",
    }.get(base, "")


def _if_several(part: Part, found: Sequence[Part]) -> str:
    """The folder's name where others on the page are of the same kind."""
    return short(part.label, 40) if sum(other.kind == part.kind for other in found) > 1 else ""


def _lacks(part: Part, label: str) -> bool:
    entries = [entry for entry in part.meta.get("models") or [] if isinstance(entry, Mapping)]
    return any(entry.get("label") == label and entry.get("not_computed") != [] for entry in entries)


def _headlines(found: Sequence[Part]) -> list[tuple[Part, str, str, Mapping[str, Any]]]:
    """(folder, name, model, entry) of every headline; the name of a corner is `CORNER`."""
    made = []
    for part in found:
        for name, entry in (part.meta.get("headline") or {}).items():
            base, whose = str(name), ""
            if part.kind == "bench":
                base, _, whose = base.partition(" ")
            elif part.kind == "quantise" and base != "order":
                base, whose = CORNER, base
            if isinstance(entry, Mapping):
                made.append((part, base, whose, entry))
    return made


def sentences(found: Sequence[Part]) -> tuple[list[str], list[str]]:
    """What the page opens with, and what is folded: at most `LEAD` to begin with, the others behind a title."""
    every = []
    for part, base, whose, entry in _headlines(found):
        if entry.get("sentence"):
            several = _if_several(part, found)
            late = base in LATER or (base in TIMES and not _lacks(part, whose))
            every.append((late, f"{several}: " * bool(several) + short(entry["sentence"], 600)))
    if len(every) <= LEAD:
        return [text for _, text in every], []
    first = [text for late, text in every if not late][:LEAD]
    return first, [text for _, text in every if text not in first]


def about(found: Sequence[Part]) -> list[list[str]]:
    """[what, text] pairs on the model, the plans, the data, the machine and the run; the same text once."""
    texts: dict[str, dict[str, list[str]]] = {what: {} for what in ORDER}
    known = model(found)
    name = [short(known["name"], 160)] if known.get("name") else []
    texts["Model"] = {" · ".join([*name, model_line(known)]): [""]}
    texts["Fingerprints"] = {_fingerprints(found): [""]}
    for part in found:
        for what, text in [*_pairs(part), *verdict.run(part.meta)]:
            if text:
                texts.setdefault(what, {}).setdefault(text, []).append(part.label)
    if len(texts["Measured"]) > 1:
        times = sorted(texts["Measured"])
        texts["Measured"] = {f"{times[0]} to {times[-1]}": [""]}
    return [
        [what if len(stated) == 1 else f"{what} ({', '.join(short(one, 40) for one in labels)})", text]
        for what, stated in texts.items()
        for text, labels in stated.items()
        if text
    ]


def _fingerprints(found: Sequence[Part]) -> str:
    hashes = [("model", (part.meta.get("model") or {}).get("hash")) for part in found]
    hashes += [("data", (part.meta.get("data") or {}).get("hash")) for part in found]
    return " · ".join(dict.fromkeys(f"{what} {short(value, 23)}" for what, value in hashes if value))


def _pairs(part: Part) -> list[tuple[str, str]]:
    meta, plan = part.meta, part.meta.get("plan") or {}
    data = meta.get("data") or {}
    return [
        (WORK.get(part.kind, "Search"), _search(plan) if part.kind in WORK else ""),
        ("Healing", _healing(plan, meta.get("settings") or {}) if part.kind == "skip" else ""),
        ("Data", _data(data)),
        ("Benchmark", _grid(meta.get("settings") or {}) if part.kind == "bench" else ""),
        ("Quantisation", _method(meta.get("method")) if part.kind == "quantise" else ""),
        ("Machine", _machine(meta.get("machine") or {})),
    ]


def _search(plan: Mapping[str, Any]) -> str:
    """How the blocks were found, and what that took."""
    if not plan.get("blocks"):
        return ""
    cost = plan.get("cost") or {}
    how = f"{short(plan.get('search', '?'), 20)}, by {short(plan.get('criterion', '?'), 20)}"
    parts_of = [f"{how}, {short(plan.get('granularity', '?'), 20)} granularity"]
    if isinstance(cost.get("forwards"), int):
        parts_of.append(f"{cost['forwards']:,} forward passes")
    if isinstance(cost.get("flops"), int | float):
        share = cost.get("share_of_plain")
        beside = f" ({share:.0%} of the plain loop’s)" if isinstance(share, int | float) else ""
        parts_of.append(f"{cost['flops']:.3g} FLOPs{beside}")
    if isinstance(cost.get("seconds"), int | float):
        parts_of.append(seconds(cost["seconds"]))
    return " · ".join(parts_of)


def _healing(plan: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    if plan.get("healed_loss") is None:
        return "no scalars fitted"
    fit = ((plan.get("cost") or {}).get("fit") or {}).get("healed") or {}
    said = [
        "a factor per channel" if settings.get("per_channel") else "four factors a layer, two where a block is gone"
    ]
    if isinstance(settings.get("learning_rate"), int | float):
        said.append(f"Adam, learning rate {settings['learning_rate']:g}")
    if isinstance(fit.get("epoch"), int):
        said.append(f"best after epoch {fit['epoch']}")
    return " · ".join(said)


def _data(data: Mapping[str, Any]) -> str:
    said = [short(data["name"], 160)] if data.get("name") else []
    for part, what in ((data.get("train"), "to fit on"), (data.get("heldout"), "held out")):
        if isinstance(part, Mapping) and isinstance(part.get("examples"), int):
            tokens = part.get("predicted")
            beside = f" ({tokens:,} predicted tokens)" if isinstance(tokens, int) else ""
            said.append(f"{part['examples']:,} examples {what}{beside}")
    return " · ".join(said)


def _grid(settings: Mapping[str, Any]) -> str:
    said = []
    for key, what in (("batches", "batch"), ("contexts", "context")):
        if isinstance(settings.get(key), list):
            said.append(f"{what} {', '.join(short(one, 12) for one in settings[key])}")
    for key, what in (("new_tokens", "new tokens"), ("repeats", "rounds"), ("warmup", "warm-up rounds")):
        if isinstance(settings.get(key), int):
            said.append(f"{settings[key]:,} {what.removesuffix('s') if settings[key] == 1 else what}")
    return " · ".join(said)


def _method(method: Any) -> str:
    if isinstance(method, Mapping):
        return " · ".join(f"{short(key, 30)} {short(value, 60)}" for key, value in method.items() if value is not None)
    return short(method, 160) if method else ""


def _machine(machine: Mapping[str, Any]) -> str:
    said = [short(machine[key], 80) for key in ("device", "name") if machine.get(key)]
    threads = machine.get("threads")
    if isinstance(threads, int):
        said.append(f"{threads} thread{'' if threads == 1 else 's'}")
    return " · ".join(said)


def remarks(found: Sequence[Part]) -> dict[str, list[Any]]:
    """Warnings of the folders, each once, and what keeps their numbers from being compared."""
    warnings: list[str] = []
    left_out: list[list[str]] = []
    for part in found:
        own = verdict.remarks({**part.meta, "models": None})
        warnings += [text for text in own["warnings"] if text not in warnings]
        left_out += own["left_out"]
    return {"left_out": left_out, "warnings": [*warnings, *_unlike(found)]}


def _unlike(found: Sequence[Part]) -> list[str]:
    """What of the page was read on different data, or could not be checked."""
    said = []
    hashes = {part.label: str((part.meta.get("data") or {}).get("hash") or "") for part in found}
    if len({one for one in hashes.values() if one}) > 1:
        names = ", ".join(short(label, 40) for label, one in hashes.items() if one)
        said.append(f"The losses of {names} were read on different data: compare each with its own original only.")
    every = benchmarked_models(found)
    if not agree(every):
        said.append(
            "The original’s loss is not the same for all models that were timed: they were judged by different data. "
            "Quality is shown as the loss added to the original’s."
        )
    unknown = [short(one.name, 40) for one in every if one.loss is None and not one.baseline]
    if unknown:
        said.append(f"The held-out loss of {', '.join(unknown)} is not known, so quality against time leaves it out.")
    return said


def strips(found: Sequence[Part]) -> list[dict[str, Any]]:
    """The model's depth for each set of blocks that went: which, in what order, and the loss that each added."""
    layers = layers_of(found)
    every = removals(found)
    stated = isinstance(model(found).get("num_layers"), int)
    return [_strip(one, layers, stated, len(every) > 1) for one in every]


def _strip(one: Removal, layers: int, stated: bool, several: bool) -> dict[str, Any]:
    cells = [
        [block, order, "" if added is None else minus(added, "+.3f"), "" if added is None else minus(added, "+.6f")]
        for order, (block, added) in enumerate(zip(one.blocks, one.added, strict=True), start=1)
    ]
    what = {"attention": "attention block", "mlp": "MLP", "layer": "layer"}.get(one.granularity, "block")
    count = f"{len(one.blocks)} {what}{'' if len(one.blocks) == 1 else 's'} removed"
    loss = ""
    if len(one.losses) == len(one.blocks) + 1:
        loss = f"held-out loss {quantity(one.losses[0], 'nats')} before, {quantity(one.losses[-1], 'nats')} after"
        if one.healed is not None:
            loss += f", {quantity(one.healed, 'nats')} healed"
    depth = f"of {layers} layers" if stated else "the model’s depth is not stated: drawn to the deepest layer that went"
    return {
        "strip": True,
        "title": f"{short(one.name, 60)}: {count}" if several and one.name else count,
        "note": " · ".join(filter(None, [depth, loss])),
        "granularity": one.granularity,
        "layers": layers,
        "cells": cells,
    }

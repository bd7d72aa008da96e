"""Pages of `fulldepth skip`: a search, a curve, a benchmark, a quantisation, or several of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from fulldepth.figures.record import Source
from fulldepth.figures.skip_results import PARTS, PHASES, Removal, TimedModel, plans, removals
from fulldepth.figures.style import minus
from fulldepth.reporting import measured
from fulldepth.reporting.findings import Shown
from fulldepth.reporting.measured import Meta, Pairs
from fulldepth.reporting.phrases import (
    NOTHING,
    dotted,
    figure_of,
    model_line,
    plus_minus,
    quantity,
    seconds,
    short,
    size,
    stated,
)
from fulldepth.reporting.tables import Table, by_subject, settings_table

CARDS = {
    "loss_added": "Loss added",
    "loss_healed": "Held-out loss, healed",
    "break_point": "Break point",
    "mmd": "Distance from the original",
}
"""Name in `results.json` (for benchmarks, followed by the model) -> title of the card; the table has the times."""
SIZES = {"parameter_bytes": "Weights", "kv_bytes_per_token": "Cache per token", "peak_memory": "Peak memory"}


def model(source: Source) -> dict[str, Any]:
    """Entry of the model, merged from all folders."""
    merged: dict[str, Any] = {}
    for part in source.parts:
        for described in (part.meta.get("model"), *(plan.get("model") for _, plan in plans(part))):
            merged = {**{key: value for key, value in (described or {}).items() if value is not None}, **merged}
    return merged


def byline(source: Source) -> str:
    """The model and the data of its losses in one line."""
    heldout = [(part.meta.get("data") or {}).get("heldout") or {} for part in source.parts]
    names = list(dict.fromkeys(short(data["name"], 60) for data in heldout if data.get("name")))
    return dotted(model_line(model(source)), f"judged by {' and by '.join(names)}" if names else "")


def findings(_: Meta, source: Source) -> list[Shown]:
    """The findings of all folders."""
    shown = []
    for part in source.parts:
        several = sum(other.kind == part.kind for other in source.parts) > 1
        label = short(part.label, 40) if several else ""
        headline = part.meta.get("headline") or {}
        for key, entry in headline.items():
            name, of = str(key).partition(" ")[::2] if part.kind == "bench" else (str(key), "")
            card = None
            if name in CARDS and entry.get("value") is not None:
                card = (CARDS[name], dotted(short(of, 40), label), *figure_of(entry, source.layers))
            shown.append(Shown(entry, card, prefix=f"{label}: " if label else ""))
    return shown


def opening(source: Source) -> dict[str, Any] | None:
    """The first finding as the page's first sentence."""
    sentences = [shown.prefix + short(shown.entry["sentence"], 600) for shown in findings({}, source)[:1]]
    return {"sentences": sentences} if sentences else None


def about(source: Source) -> Pairs:
    """Pairs on the model, the plans, the data, the machine and the run; equal texts are given once."""
    described, parts = model(source), source.parts
    hashes = [(kind, (part.meta.get(kind) or {}).get("hash")) for kind in ("model", "data") for part in parts]
    texts: dict[str, dict[str, list[str]]] = {}
    for part in parts:
        machine = part.meta.get("machine") or {}
        threads = f"{machine['threads']} threads" if isinstance(machine.get("threads"), int) else ""
        pairs = [
            ("Search", _search(part.meta.get("plan") or {})),
            ("Data", _data(part.meta.get("data") or {})),
            ("Machine", dotted(stated(machine, ("device", "{}"), ("name", "{}")), threads)),
            *measured.run(part.meta),
        ]
        for name, text in pairs:
            if text:
                texts.setdefault(name, {}).setdefault(text, []).append(part.label)
    labelled = [
        (name if len(by_text) == 1 else f"{name} ({', '.join(short(label, 40) for label in labels)})", text)
        for name, by_text in texts.items()
        for text, labels in by_text.items()
    ]
    subject = ("Model", dotted(stated(described, ("name", "{}")), model_line(described)))
    return [subject, *labelled, ("Fingerprints", measured.fingerprints(hashes))]


def _search(plan: Meta) -> str:
    """The search method and its cost."""
    if not plan.get("blocks"):
        return ""
    cost = plan.get("cost") or {}
    search, criterion, granularity = (short(plan.get(key, "?"), 20) for key in ("search", "criterion", "granularity"))
    share = cost.get("share_of_plain")
    return dotted(
        f"{search}, by {criterion}, {granularity} granularity",
        stated(cost, ("forwards", "{} forward passes")),
        f"{share:.0%} of the plain loop’s FLOPs" if isinstance(share, int | float) else "",
        stated(cost, ("seconds", "{}"), written=seconds),
    )


def _data(data: Meta) -> str:
    texts = [stated(data, ("name", "{}"))]
    for key, purpose in (("train", "to fit on"), ("heldout", "held out")):
        split = data.get(key)
        if isinstance(split, Mapping) and isinstance(split.get("examples"), int):
            tokens = f" ({split['predicted']:,} predicted tokens)" if isinstance(split.get("predicted"), int) else ""
            texts.append(f"{split['examples']:,} examples {purpose}{tokens}")
    return dotted(*texts)


def warnings(source: Source) -> list[str]:
    """Warnings of the folders without repetition, and a reason why their numbers are not comparable."""
    texts = dict.fromkeys(text for part in source.parts for text in measured.warnings({**part.meta, "models": None}))
    hashes = {part.label: str((part.meta.get("data") or {}).get("hash") or "") for part in source.parts}
    labels = [short(label, 40) for label, digest in hashes.items() if digest]
    if len(set(filter(None, hashes.values()))) > 1:
        names = ", ".join(labels)
        return [*texts, f"The losses of {names} were read on different data: compare each with its own original only."]
    return list(texts)


def tables(source: Source) -> dict[str, Sequence[Table | dict[str, Any]]]:
    """Id of a section -> its tables and strips of layers."""
    return {
        "blocks": [_strip(removal, source) for removal in removals(source.parts)],
        "settings": [
            settings_table(f"Settings of {short(part.label, 60)}" if part.label else "All settings", settings)
            for part in source.parts
            if (settings := part.meta.get("settings"))
        ],
    }


def _strip(removal: Removal, source: Source) -> dict[str, Any]:
    """A strip of layers for a set of removed blocks: which, in what order, and the loss that each added."""
    losses = removal.losses
    steps: list[float | None] = [after - before for before, after in pairwise(losses)]
    steps = steps or [None] * len(removal.blocks)
    cells = [
        [block, order, *("" if step is None else minus(step, form) for form in ("+.3f", "+.6f"))]
        for order, (block, step) in enumerate(zip(removal.blocks, steps, strict=True), start=1)
    ]
    count = f"{len(removal.blocks)} {PARTS.get(removal.granularity, 'block')}{'s' * (len(removal.blocks) > 1)} removed"
    loss = ""
    if losses:
        healed = "" if removal.healed is None else f", {quantity(removal.healed, 'nats')} healed"
        loss = f"held-out loss {quantity(losses[0], 'nats')} before, {quantity(losses[-1], 'nats')} after{healed}"
    return {
        "strip": True,
        "title": f"{short(removal.name, 60)}: {count}" if removal.name else count,
        "note": dotted(f"of {source.layers} layers", loss),
        "granularity": removal.granularity,
        "layers": source.layers,
        "cells": cells,
    }


def side_by_side(source: Source) -> Table | None:
    """All timed models: loss, time and size; sizes are multiples of the original's."""
    if not source.timed:
        return None
    columns: dict[str, Callable[[TimedModel], str]] = {
        "Held-out loss": lambda one: NOTHING if one.loss is None else minus(one.loss, ".4f"),
        "Added": _added,
        **{f"{phase.capitalize()} time": partial(_ratio, phase) for phase in PHASES},
        **{title: partial(_multiple, source, key) for key, title in SIZES.items()},
    }
    from_plans = [short(one.name, 40) for one in source.timed if one.stated and not one.baseline]
    note = f"Not measured here, but stated by the plan: the loss of {', '.join(from_plans)}. " if from_plans else ""
    note += (
        "Times over the original’s are medians of the rounds’ ratios, in brackets the 95 % interval (from 9 rounds "
        "on); ≈ 1×: no measurable difference. ± is the standard error over documents. Sizes are multiples of the "
        "original’s bytes."
    )
    named = [(f"{short(one.name, 60)}{' (original)' * one.baseline}", one) for one in source.timed]
    return by_subject("Models side by side", "Model", named, columns, note)


def _added(timed: TimedModel) -> str:
    if timed.baseline or timed.loss is None or timed.base is None:
        return NOTHING
    return f"{minus(timed.loss - timed.base, '+.4f')} {plus_minus({'standard_error': timed.error})}".strip()


def _ratio(phase: str, timed: TimedModel) -> str:
    """The time over the original's, with its interval."""
    if (ratio := timed.times.get(phase)) is None or timed.baseline:
        return NOTHING if ratio is None else "1×"
    if ratio.low == ratio.high:
        return f"{ratio.value:.3f}× (no interval)"
    text = f"{ratio.low:.3f} to {ratio.high:.3f}"
    return f"≈ 1× ({text})" if ratio.decided == 1 else f"{ratio.value:.3f}× ({text})"


def _multiple(source: Source, measure: str, timed: TimedModel) -> str:
    """Bytes as a multiple of the original's; bytes of the original."""
    own = timed.bytes.get(measure)
    base = next((one.bytes.get(measure) for one in source.timed if one.part is timed.part and one.baseline), None)
    if own is None or not base:
        return NOTHING
    if not timed.baseline:
        return f"{own / base:.2f}×"
    return f"{own:,.0f} B" if own < 2**14 else f"{own / 2**10:,.0f} KiB" if own < 2**20 else size(own)

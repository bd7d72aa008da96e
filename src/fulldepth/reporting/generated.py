"""Pages of `fulldepth generate`: opening paragraph, texts, statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fulldepth.figures.curves import number
from fulldepth.figures.generation import chosen, speculation
from fulldepth.figures.record import Source
from fulldepth.reporting import measured
from fulldepth.reporting.measured import Meta, Pairs
from fulldepth.reporting.phrases import listed, model_line, scaled, seconds, short, visible
from fulldepth.reporting.tables import Table, flatten, settings_table

MOST_TEXTS, MOST_CHARACTERS = 40, 6000
"""Largest number of texts on a page, and of characters of each."""
EVEN = 0.02
"""Relative difference in time that is not called one."""

Story = dict[str, Any]


def byline(source: Source) -> str:
    """The model in one line."""
    return model_line(source.meta.get("model") or {})


def about(source: Source) -> Pairs:
    """Pairs on the model, the machine and the run."""
    subjects = measured.about(source.meta)
    return [subjects[0], ("Machine", listed(source.meta.get("machine") or {})), *subjects[3:]]


def stats(meta: Meta) -> Mapping[str, Any]:
    """The statistics of the generation; empty if the document has none."""
    return (meta.get("generation") or {}).get("stats") or {}


def tables(source: Source) -> dict[str, list[Any]]:
    """Id of a section -> texts and tables."""
    meta = source.meta
    rows = [
        [short(name, 60).replace("_", " ").capitalize(), short(text, 200)] for name, text in _flat(stats(meta)).items()
    ]
    return {
        "texts": _texts(meta.get("generation") or {}),
        "statistics": [Table("Counts and times", [""], rows, text=True)],
        "settings": [settings_table("All settings", meta.get("settings"))],
    }


def _flat(statistics: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text; lists, which figures show, and unknown numbers are left out."""
    shown = (
        name for name, value in statistics.items() if not isinstance(value, list | Mapping) and name != "num_layers"
    )
    scalar = {name: statistics[name] for name in shown}
    return {name: _written(name, text) for name, text in flatten(scalar).items()}


def _written(name: str, text: str) -> str:
    """A number in few digits, with the unit that its name states."""
    try:
        value = float(text)
    except ValueError:
        return text
    if not math.isfinite(value) or text in ("true", "false"):
        return text
    if name.endswith("seconds"):
        return seconds(value)
    if value.is_integer():
        return scaled(value)
    return f"{100 * value:.1f} %" if name.endswith(("acceptance", "share", "agreement")) else f"{value:.4g}"


def _texts(generation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The block of texts, each after its prompt."""
    prompts, texts = generation.get("prompts") or [], generation.get("texts") or []
    items = []
    for index, text in enumerate(texts[:MOST_TEXTS]):
        prompt = str(prompts[index] or "") if index < len(prompts) else ""
        whole = str(text or "")
        items.append([_shown(prompt), _shown(whole[len(prompt) :] if prompt and whole.startswith(prompt) else whole)])
    cut = f"The first {MOST_TEXTS} of {len(texts):,}; results.json has all." if len(texts) > MOST_TEXTS else ""
    return [{"texts": True, "title": "", "items": items, "note": cut}] if items else []


def _shown(text: str) -> str:
    cut = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
    return visible(cut, keep=" \n\t")


def story(source: Source) -> Story | None:
    """The opening paragraph: how many tokens in what time, whether speculation paid, how early tokens left."""
    meta = source.meta
    sentences = [*_speculated(meta, source.layers), *_exits(meta, source.layers), *_speed(stats(meta))]
    return {"sentences": sentences, "next": None} if sentences else None


def _speculated(meta: Meta, layers: int) -> list[str]:
    """Whether speculation paid, and how good its drafts were."""
    stated = speculation(meta)
    if not stated:
        return []
    entry = chosen(meta)
    if stated.get("paid") is False:
        decoded = "" if stated.get("speculate_from") else ", so the text was decoded plainly"
        return [f"Speculation did not pay{decoded}{_at_best(entry, layers)}."]
    if entry is None:
        return []
    drafts = _drafts(entry, layers)
    by = " They were chosen by measurement." if stated.get("chosen_by") == "measured" else ""
    return [f"{drafts[:1].upper()}{drafts[1:]}.{by}"]


def _first_layers(entry: Mapping[str, Any], layers: int) -> str:
    """The layers that draft."""
    return f"the first of {layers} layers" if entry["layer"] == 1 else f"the first {entry['layer']} of {layers} layers"


def _at_best(entry: Mapping[str, Any] | None, layers: int) -> str:
    """What the most promising drafts would have given."""
    if entry is None:
        return ""
    accepted, faster = number(entry.get("acceptance")), number(entry.get("predicted_speedup"))
    clauses = (
        []
        if accepted is None
        else [f"{100 * accepted:.0f} % of the drafts of {_first_layers(entry, layers)} are accepted"]
    )
    clauses += [] if faster is None else [f"{faster:.2f} times plain decoding’s speed is predicted"]
    return f": at best, {' and '.join(clauses)}" if clauses else ""


def _drafts(entry: Mapping[str, Any], layers: int) -> str:
    """What the first layers draft, in one clause."""
    accepted, tokens, faster = (
        number(entry.get(key)) for key in ("acceptance", "tokens_per_round", "predicted_speedup")
    )
    length = entry.get("draft_length")
    drafted = f" {length} token{'' if length == 1 else 's'} at a time" if length else ""
    opening = f"{_first_layers(entry, layers)} draft{'s' if entry['layer'] == 1 else ''}{drafted}"
    clauses = []
    if accepted is not None:
        clauses.append(f"{100 * accepted:.0f} % of the drafts are accepted")
    if tokens is not None:
        clauses.append(f"a round gives {tokens:.1f} tokens")
    if faster is not None:
        clauses.append(f"the predicted speed-up is {faster:.2f}")
    told = " and ".join(filter(None, [", ".join(clauses[:-1]), *clauses[-1:]]))
    return f"{opening}: {told}" if told else opening


def _exits(meta: Meta, layers: int) -> list[str]:
    """How early tokens left: of all of them, or else of those in the lens grid."""
    counts = stats(meta).get("exits")
    if counts and sum(counts):
        pairs = list(enumerate(counts, start=1))
    else:
        samples = (meta.get("lens_grid") or {}).get("samples") or []
        pairs = [(layer, 1) for sample in samples for layer in sample.get("exits") or [] if layer is not None]
    total = sum(count for _, count in pairs)
    early = sum(count for layer, count in pairs if layer < layers)
    if not early:
        return ["No token leaves before the last layer."] if counts else []
    mean = sum(layer * count for layer, count in pairs) / total
    computed = number(stats(meta).get("layers_computed"))
    return [
        f"{100 * early / total:.0f} % of {total:,} tokens leave before the last layer; on average a token leaves after "
        f"{mean:.1f} of {layers} layers.",
        *(
            [f"{computed:.1f} of {layers} layers were computed for a position on average, prompts included."]
            if computed is not None
            else []
        ),
    ]


def _speed(statistics: Mapping[str, Any]) -> list[str]:
    """Tokens and time, where the statistics have them."""
    tokens, time, rate = (statistics.get(name) for name in ("tokens", "seconds", "tokens_per_second"))
    if tokens is None:
        return []
    took = f" in {seconds(time)}" if time is not None else ""
    return [f"{tokens:,} tokens{took}{f', {rate:.1f} a second' if rate is not None else ''}."]

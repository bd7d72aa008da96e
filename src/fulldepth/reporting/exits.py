"""Pages of `fulldepth exit` and `fulldepth generate`: opening paragraph, tables of thresholds, texts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from html import unescape
from typing import Any

from fulldepth.figures.curves import number
from fulldepth.figures.early_exit import Point, points
from fulldepth.figures.record import Source
from fulldepth.figures.style import minus
from fulldepth.reporting import measured
from fulldepth.reporting.measured import Pairs
from fulldepth.reporting.phrases import NOTHING, dotted, listed, short, visible
from fulldepth.reporting.tables import Table, by_subject, flatten, settings_table

MOST_TEXTS, MOST_CHARACTERS = 40, 6000
"""Largest number of texts on a page, and of characters of each."""


def about(source: Source) -> Pairs:
    """Pairs on the model, the data, the machine and the run."""
    pairs, accuracy = measured.about(source.meta), number((source.meta.get("full") or {}).get("accuracy"))
    whole = "" if accuracy is None else f"accuracy {_percent(accuracy, '.2f')}"
    return [*pairs[:2], ("Full model", whole), ("Machine", listed(source.meta.get("machine") or {})), *pairs[2:]]


def story(source: Source) -> dict[str, Any] | None:
    """The opening paragraph: the sentences of the findings, and the export of the layers that are enough."""
    meta = source.meta
    headline = meta.get("headline") or {}
    told = [str(entry["sentence"]) for entry in headline.values() if entry.get("sentence")]
    sentences = [one for one in told if not any(one != other and one in other for other in told)]
    depth = number((headline.get("effective_depth") or {}).get("value"))
    name, after = (meta.get("model") or {}).get("name"), None
    if name and depth is not None and depth < source.layers:
        count = f"{depth:.0f}"
        command = f"fulldepth exit export {shlex.quote(short(name, 160))} --layers {count} --output first-{count}/"
        after = {"why": f"export the first {count} layers as a checkpoint:", "command": command}
    return {"sentences": sentences, "next": after} if sentences else None


def tables(source: Source) -> dict[str, list[Table]]:
    """Id of a section -> its tables."""
    meta = source.meta
    generation = meta.get("generation")
    return {
        "thresholds": [thresholds("Every threshold", points(meta.get("exits")))],
        "generating": [thresholds("Every run", points(generation if isinstance(generation, list) else None))],
        "settings": [settings_table("All settings", meta.get("settings"))],
    }


def thresholds(title: str, every: Sequence[Point]) -> Table:
    """One row for each threshold."""

    def decimals(key: str, form: str) -> Callable[[Point], str]:
        return lambda point: NOTHING if (value := point.values.get(key)) is None else minus(value, form)

    columns: dict[str, Callable[[Point], str]] = {
        "Leave early": lambda point: _percent(point.early),
        "Exit layer, mean": lambda point: NOTHING if point.mean_layer is None else f"{point.mean_layer:.1f}",
        "Layers computed": decimals("layers_computed", ".1f"),
        "Accuracy": lambda point: _percent(point.values.get("accuracy")),
        "Change": _changed,
        "Loss": decimals("loss", ".3f"),
        "Same as full": lambda point: _percent(point.values.get("agreement")),
        "Speed-up": _timed,
        "In theory": lambda point: _times(point.theory),
    }
    named = [
        (unescape(dotted(one.name, one.policy, "chosen" if one.calibrated else "")), one) for one in every
    ]  # names were made safe for plotly
    note = (
        "Change: of accuracy in points, with its 95 % interval where it is known. Speed-up: measured beside the full "
        "model in interleaved rounds; ≈ where its 95 % interval holds 1. In theory, only layers take time. Layers "
        "computed: for a position of a generated text on average, prompts included. Chosen: for a target accuracy, on "
        "other data."
    )
    return by_subject(title, "Threshold", named, columns, note)


def _percent(share: float | None, form: str = ".1f") -> str:
    return NOTHING if share is None else f"{minus(100 * share, form)} %"


def _times(factor: float | None) -> str:
    return NOTHING if factor is None else f"{factor:.2f}×"


def _timed(point: Point) -> str:
    """The measured speed-up, or why there is none."""
    if point.timing in ("busy", "few-rounds"):
        return point.timing.replace("-", " ")
    return f"{'≈ ' if point.timing == 'no-difference' else ''}{_times(point.measured)}"


def _changed(point: Point) -> str:
    """Points of accuracy gained, with the 95 % interval of the difference."""
    drop, ends = point.values.get("drop"), point.drop_interval
    if drop is None:
        return NOTHING
    interval = "" if ends is None else f" ({minus(-100 * ends[1], '+.1f')} to {minus(-100 * ends[0], '+.1f')})"
    return minus(-100 * drop, "+.1f") + interval


def tables_of_models(source: Source) -> dict[str, list[Table]]:
    """Accuracy at equal speed, and speed at equal accuracy; empty where nothing was timed."""
    speeds = source.meta.get("speedups") or {}
    rows = [
        (measured.labelled(entry), speeds[label])
        for entry in source.meta.get("models") or []
        if (label := str(entry.get("label"))) in speeds
    ]
    at = dict.fromkeys(speedup for _, row in rows for speedup in row.get("at") or {})
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "Full accuracy": lambda row: _percent(number(row.get("full"))),
        "Equal accuracy": lambda row: _times(number(row.get("speedup"))),
        "As the baseline": lambda row: _times(number(row.get("speedup_at_baseline"))),
        **{f"At {one}×": lambda row, at=one: _percent(number((row.get("at") or {}).get(at))) for one in at},  # type: ignore[misc]
    }
    note = (
        "Equal accuracy: the measured speed-up of the threshold that was chosen for no loss of accuracy on the "
        "calibration part, on the other part. As the baseline: the same for at least the full baseline’s accuracy. "
        "At a speed-up: the accuracy there, on the straight line, by time, between two thresholds. 1.36× is the "
        "speed-up of the paper’s aligned DeiT. A model that was read without --target-accuracy-drop has one part: no "
        "threshold is chosen for it."
    )
    table = by_subject("Equal accuracy, and equal speed", "Model", rows, columns, note)
    return {"thresholds": [table]} if rows else {}


def tables_of_generation(source: Source) -> dict[str, list[Any]]:
    """Id of a section -> texts and tables."""
    meta = source.meta
    generation = meta.get("generation") or {}
    numbers = {
        name: one for name, one in (generation.get("stats") or {}).items() if not isinstance(one, list | Mapping)
    }
    rows = [
        [short(name, 60).replace("_", " ").capitalize(), short(text, 200)] for name, text in flatten(numbers).items()
    ]
    prompts, texts = generation.get("prompts") or [], generation.get("texts") or []
    items = []
    for index, text in enumerate(texts[:MOST_TEXTS]):
        prompt = str(prompts[index] or "") if index < len(prompts) else ""
        items.append([_shown(prompt), _shown(str(text or "").removeprefix(prompt))])
    cut = f"The first {MOST_TEXTS} of {len(texts):,}; results.json has all." if len(texts) > MOST_TEXTS else ""
    return {
        "texts": [{"texts": True, "title": "", "items": items, "note": cut}] if items else [],
        "statistics": [Table("Counts and times", [""], rows, text=True)],
        "settings": [settings_table("All settings", meta.get("settings"))],
    }


def _shown(text: str) -> str:
    cut = text if len(text) <= MOST_CHARACTERS else text[: MOST_CHARACTERS - 1] + "…"
    return visible(cut, keep=" \n\t")

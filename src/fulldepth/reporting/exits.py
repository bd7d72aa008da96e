"""Pages of `fulldepth exit`: opening paragraph, tables of thresholds, several models side by side."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from html import unescape
from typing import Any

from fulldepth.figures.curves import number
from fulldepth.figures.exit_points import CALIBRATION, QUALITIES, Point, named_quality, points, quality_of
from fulldepth.figures.record import Source
from fulldepth.figures.style import minus
from fulldepth.reporting import measured
from fulldepth.reporting.measured import Meta, Pairs
from fulldepth.reporting.phrases import NOTHING, dotted, listed, seconds, short
from fulldepth.reporting.tables import Table, by_subject, settings_table

CHEAP = 0.01
"""Drop in accuracy up to which a threshold or a layer is called cheap: the upper end of its 95 % interval."""
FREE = 0.001
"""Upper end of the interval of a drop up to which accuracy is said not to be lost."""
CLOSE = 0.9
"""Share of the theoretical speed-up below which the measured one is called lower."""
LITTLE = 1.1
"""Speed-up up to which one is called small."""
LEAVING = {"text-classification": "samples", "image-classification": "samples", "detection": "images"}
"""Task -> what leaves early; tokens of a text in all others."""

Story = dict[str, Any]


def plain(text: str) -> str:
    """A text that was made safe for plotly, as plain text."""
    return unescape(text)


def subject(meta: Meta) -> str:
    """What leaves early: samples of a classifier, images of a detector, tokens of a text."""
    return LEAVING.get(str((meta.get("model") or {}).get("task")), "tokens")


def byline(source: Source) -> str:
    """The model and its data in one line."""
    return measured.byline(source.meta, "judged")


def about(source: Source) -> Pairs:
    """Pairs on the model, the data, the machine and the run."""
    meta = source.meta
    machine, full = meta.get("machine") or {}, meta.get("full") or {}
    whole = dotted(
        f"{named_quality(full)} {quality:.2%}".replace("%", " %") if (quality := quality_of(full)) is not None else "",
        f"loss {full['loss']:.4f} nats" if full.get("loss") is not None else "",
        seconds(full["seconds"]) if full.get("seconds") is not None else "",
    )
    subjects = measured.about(meta)
    return [*subjects[:2], ("Full model", whole), ("Machine", listed(machine)), *subjects[2:]]


def tables(source: Source) -> dict[str, list[Table]]:
    """Id of a section -> its tables."""
    meta = source.meta
    generation = meta.get("generation")
    runs = points(generation if isinstance(generation, list) else None)
    calibration = points(meta.get("exits"), CALIBRATION) if _splits(meta) else []
    return {
        "thresholds": [
            thresholds("Every threshold", points(meta.get("exits")), meta.get("full") or {}),
            thresholds("The split on which the threshold was chosen", calibration, {}, folded=True),
        ],
        "generating": [thresholds("Every run", runs, {})],
        "settings": [settings_table("All settings", meta.get("settings"))],
    }


def _splits(meta: Meta) -> bool:
    return any(entry.get("split") == CALIBRATION for entry in meta.get("exits") or [])


def thresholds(title: str, every: Sequence[Point], full: Mapping[str, Any], folded: bool = False) -> Table:
    """One row for each threshold."""
    base, quality = quality_of(full), named_quality(full)
    columns: dict[str, Callable[[Point], str]] = {
        "Leave early": lambda point: _percent(point.early),
        "Exit layer, mean": lambda point: NOTHING if point.mean_layer is None else f"{point.mean_layer:.1f}",
        "Layers computed": lambda point: (
            NOTHING if (count := point.values.get("layers_computed")) is None else f"{count:.1f}"
        ),
        quality.capitalize(): lambda point: _percent(point.quality),
        "Change": lambda point: _changed(point, base),
        "Loss": lambda point: NOTHING if (loss := point.values.get("loss")) is None else minus(loss, ".3f"),
        "Same as full": lambda point: _percent(point.values.get("agreement")),
        "Tokens": lambda point: NOTHING if (count := point.values.get("tokens")) is None else f"{count:,.0f}",
        "Speed-up": _timed,
        "In theory": lambda point: _times(point.theory),
        "Of theory": lambda point: _percent(_of_theory(point), ".0f"),
        "Operations": lambda point: _percent(point.values.get("flops_share"), ".0f"),
    }
    several = len({point.policy for point in every}) > 1
    named = [(plain(_name(point, several)), point) for point in every]
    note = (
        f"Change: of {quality} in points, with its 95 % interval where it is known. Speed-up: measured beside the "
        "full model in interleaved rounds; ≈ where its 95 % interval holds 1. In theory, only layers take time (of a "
        "detector, operations). Layers computed: for a position of a generated text on average, prompts included. "
        "Operations: floating-point operations, in per cent of the full model’s."
    )
    if any(point.calibrated for point in every):
        note += " Chosen: for a target accuracy, on other data."
    table = by_subject(title, "Threshold", named, columns, note)
    return Table(table.title, table.columns, table.rows, table.corner, table.note, folded=folded)


def _name(point: Point, several_policies: bool) -> str:
    return dotted(point.name, point.policy if several_policies else "", "chosen" if point.calibrated else "")


def _percent(share: float | None, form: str = ".1f") -> str:
    return NOTHING if share is None else f"{minus(100 * share, form)} %"


def _times(factor: float | None) -> str:
    return NOTHING if factor is None else f"{factor:.2f}×"


def _timed(point: Point) -> str:
    """The measured speed-up, or why there is none."""
    if point.timing in ("busy", "few-rounds"):
        return point.timing.replace("-", " ")
    return _times(point.measured) if point.differs or point.measured is None else f"≈ {_times(point.measured)}"


def _changed(point: Point, base: float | None) -> str:
    """Points of quality gained, with the 95 % interval of the difference."""
    drop, ends = _drop(point, base), point.drop_interval
    if drop is None:
        return NOTHING
    interval = "" if ends is None else f" ({minus(-100 * ends[1], '+.1f')} to {minus(-100 * ends[0], '+.1f')})"
    return minus(-100 * drop, "+.1f") + interval


def _of_theory(point: Point) -> float | None:
    return point.measured / point.theory if point.differs and point.measured and point.theory else None


def best(every: Sequence[Point], calibration: Sequence[Point] = ()) -> Point | None:
    """The calibrated threshold, or else that with the fewest layers among those shown to lose at most `CHEAP`.

    Of several calibrated ones (one for each rule), the one with the fewest layers on the calibration part: nothing is
    chosen by the numbers that are reported.
    """
    chosen = [point for point in every if point.calibrated]
    if chosen:
        layers = {(one.rule, one.threshold): one.mean_layer for one in calibration if one.calibrated}
        return min(chosen, key=lambda point: layers.get((point.rule, point.threshold)) or point.mean_layer or 0.0)
    cheap = [point for point in every if point.early and point.drop_interval and point.drop_interval[1] <= CHEAP]
    return min(cheap, key=lambda point: point.mean_layer or 0.0, default=None)


def _drop(point: Point, base: float | None) -> float | None:
    """Quality that is lost, as stated or against the full model's."""
    if point.values.get("drop") is not None:
        return point.values["drop"]
    value = point.quality
    return None if value is None or base is None else base - value


def story(source: Source) -> Story | None:
    """The opening paragraph: what leaves early and what it costs, whether time falls, where all could stop."""
    meta = source.meta
    full = meta.get("full") or {}
    if full.get("no_advice"):
        return {"sentences": [str(full["no_advice"])], "next": None}
    layer = cheap_layer(meta)
    sentences = [
        *_threshold_sentences(points(meta.get("exits")), meta),
        *_layer_sentences(layer, source.layers, meta),
        *_generation_sentences(meta),
    ]
    return {"sentences": sentences, "next": _next(meta, layer, source.layers)} if sentences else None


def _threshold_sentences(every: Sequence[Point], meta: Meta) -> list[str]:
    """What the best threshold does; if none is cheap, what the one with the most layers costs."""
    if not every:
        return []
    full, what = meta.get("full") or {}, subject(meta)
    point = best(every, points(meta.get("exits"), CALIBRATION) if _splits(meta) else ())
    if point is None:
        careful = max(every, key=lambda one: (bool(one.early), one.mean_layer or 0.0, one.threshold or 0.0))
        if _drop(careful, quality_of(full)) is None:
            return [_did(careful, full, what)]
        return [
            f"No threshold is shown to keep {named_quality(full)} within {100 * CHEAP:.0f} point of the full model’s.",
            _did(careful, full, what),
        ]
    sentences = [_did(point, full, what)]
    share = _of_theory(point)
    if share is not None and share < CLOSE and (point.measured or 0) > 1:
        sentences.append(f"Measured is {100 * share:.0f} % of theory.")
    if point.timing in ("differs", "no-difference") and not any(
        one.differs and (one.measured or 0) > 1 for one in every
    ):
        sentences.append("No threshold makes it measurably faster.")
    return sentences


def _did(point: Point, full: Mapping[str, Any], what: str) -> str:
    """One sentence on a threshold."""
    name = plain(point.name)
    opening = f"At {name}, chosen on other data, " if point.calibrated else f"At {name}, "
    if not point.early:
        leaves = f"no {what.removesuffix('s')} leaves early" if point.early == 0 else "early exit"
    else:
        by = f", half of them by layer {point.half_by} of {len(point.counts)}" if point.half_by else ""
        leaves = f"{100 * point.early:.0f} % of the {what} leave early{by}"
    return f"{opening}{leaves}: {_speed(point)}{_cost(point, full)}."


def _speed(point: Point) -> str:
    theory = f" ({point.theory:.2f} in theory)" if point.theory is not None else ""
    if point.measured is None:
        only = "only " if (point.theory or 0) < LITTLE else ""
        return (
            f"a speed-up of {only}{point.theory:.2f} in theory (not timed)" if point.theory is not None else "not timed"
        )
    if point.timing == "busy":
        return "the machine was busy, so times are not compared"
    if not point.differs:
        return f"no measurable speed-up{theory}"
    if point.measured < 1:
        return f"slower, at {point.measured:.2f} times the full model’s speed{theory},"
    return f"a speed-up of {'only ' if point.measured < LITTLE else ''}{point.measured:.2f}{theory}"


def _cost(point: Point, full: Mapping[str, Any]) -> str:
    drop, name = _drop(point, quality_of(full)), named_quality(full)
    if drop is not None:
        return f", {lost(drop, point.drop_interval, name)}"
    loss, base = point.values.get("loss"), number(full.get("loss"))
    if loss is not None and base is not None:
        return f" for {minus(loss - base, '+.3f')} nats of loss"
    agreement = point.values.get("agreement")
    return "" if agreement is None else f", {100 * agreement:.1f} % as the full model says"


def lost(drop: float, interval: tuple[float, float] | None, name: str) -> str:
    """A drop of quality with its 95 % interval, in words."""
    if interval is None:
        return f"{minus(100 * drop, '.1f')} points less {name}, without an interval"
    low, high = (100 * end for end in interval)
    ends = f"95 % interval {minus(low, '.1f')} to {minus(high, '.1f')}"
    if interval[1] <= FREE:
        return f"no loss of {name} ({ends})"
    if low <= 0 <= high:
        return f"no measurable loss of {name} (at most {high:.1f} points)"
    return f"{minus(abs(100 * drop), '.1f')} points {'less' if drop > 0 else 'more'} {name} ({ends})"


def cheap_layer(entry: Meta) -> Mapping[str, Any] | None:
    """The first layer from which on stopping is shown to cost at most `CHEAP`; the last one if there is no other."""
    found = None
    for at in reversed(entry.get("stopping") or []):
        ends = at.get("drop_interval")
        if found is not None and (ends is None or ends[1] > CHEAP):
            break
        found = at
    return found


def _layer_sentences(layer: Mapping[str, Any] | None, layers: int, meta: Meta) -> list[str]:
    if layer is None:
        return []
    quality = named_quality(meta.get("full") or {})
    if layer["layer"] == layers:
        return [f"No one layer before the last is shown to lose at most {100 * CHEAP:.0f} point of {quality}."]
    drop, (low, high) = layer["drop"], layer["drop_interval"]
    return [f"Stopping everything after layer {layer['layer']} of {layers}: {lost(drop, (low, high), quality)}."]


def _generation_sentences(meta: Meta) -> list[str]:
    """The run of the highest threshold among the faster ones, or else among all."""
    generation = meta.get("generation")
    runs = [one for one in points(generation if isinstance(generation, list) else None) if one.values.get("agreement")]
    runs = [one for one in runs if one.early] or runs  # one at which nothing leaves says nothing
    if not runs:
        return []
    fast = [one for one in runs if one.differs and (one.measured or 0) > 1]
    run = max(fast or runs, key=lambda one: one.threshold or 0.0)
    same = 100 * (run.values["agreement"] or 0.0)
    policy = f" ({plain(run.policy)})" if run.policy else ""
    faster = _speed(run).rstrip(",")
    return [f"While generating at {plain(run.name)}{policy}, {same:.0f} % of the tokens are plain greedy’s: {faster}."]


def _next(meta: Meta, layer: Mapping[str, Any] | None, layers: int) -> dict[str, str] | None:
    """The export of the first layers, if few layers are shown to be enough of a model that is better than chance."""
    name, full = (meta.get("model") or {}).get("name"), meta.get("full") or {}
    if not name or layer is None or layer["layer"] >= layers or full.get("chance") is None or full.get("no_advice"):
        return None
    model, count = shlex.quote(short(name, 160)), layer["layer"]
    command = f"fulldepth exit {model} --export-layers {count} --output first-{count}/"
    return {
        "why": f"export the first {f'{count} layers' if count > 1 else 'layer'} as a checkpoint:",
        "command": command,
    }


def story_of_models(source: Source) -> Story | None:
    """The best threshold of each model in one sentence."""
    texts = []
    for entry in source.meta.get("models") or []:
        label = short(entry.get("label", "?"), 60)
        point = best(points(entry.get("exits")), points(entry.get("exits"), CALIBRATION) if _splits(entry) else ())
        if (entry.get("full") or {}).get("no_advice"):
            texts.append(f"{label}: not measurably better than a constant prediction")
        elif point is None:
            texts.append(
                f"{label}: no threshold is shown to keep {named_quality(entry.get('full') or {})} within "
                f"{100 * CHEAP:.0f} point"
            )
        else:
            texts.append(
                f"{label}: {_speed(point).rstrip(',')}{_cost(point, entry.get('full') or {})}, at {plain(point.name)}"
            )
    return {"sentences": [f"{'; '.join(texts)}."], "next": None} if texts else None


def side_by_side(source: Source) -> Table | None:
    """One row for each model: the full model, its best threshold, and the layer at which all could stop."""
    models = source.meta.get("models") or []
    rows = [(measured.labelled(entry), _summary(entry)) for entry in models]
    names = dict.fromkeys(name for _, cells in rows for name in cells)
    columns = {name: (lambda cells, name=name: cells.get(name, NOTHING)) for name in names}
    note = (
        "Best: the threshold chosen on other data, or else that with the fewest layers which is shown to lose at most "
        f"{100 * CHEAP:.0f} point (95 % interval). One layer: the first at which all may stop at that price."
    )
    return by_subject("Models side by side", "Model", rows, columns, note) if rows else None


def tables_of_models(source: Source) -> dict[str, list[Table]]:
    """Quality at equal speed, and speed at equal quality; empty where nothing was timed."""
    speeds: Mapping[str, Mapping[str, Any]] = source.meta.get("speedups") or {}
    rows = [
        (measured.labelled(entry), row) for entry in source.meta.get("models") or [] if (row := _speeds(entry, speeds))
    ]
    names = dict.fromkeys(name for _, cells in rows for name in cells)
    columns = {name: (lambda cells, name=name: cells.get(name, NOTHING)) for name in names}
    note = (
        "Equal quality: the measured speed-up of the threshold that was chosen for no loss of quality on the "
        "calibration part, on the other part. As the baseline: the same for at least the full baseline’s quality. "
        "At a speed-up: the quality there, on the straight line, by time, between two thresholds. 1.36× is the "
        "speed-up of the paper’s aligned DeiT. A model that was read without --target-accuracy-drop has one part: no "
        "threshold is chosen for it."
    )
    table = by_subject("Equal quality, and equal speed", "Model", rows, columns, note)
    return {"thresholds": [table]} if rows else {}


def _speeds(entry: Meta, speeds: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    row = speeds.get(str(entry.get("label")))
    if row is None:
        return {}
    cells = {
        f"Full {QUALITIES.get(str(row.get('quality')), 'quality')}": _percent(number(row.get("full"))),
        "Equal quality": _times(number(row.get("speedup"))),
        "As the baseline": _times(number(row.get("speedup_at_baseline"))),
    }
    return cells | {f"At {speedup}×": _percent(number(value)) for speedup, value in (row.get("at") or {}).items()}


def _summary(entry: Meta) -> dict[str, str]:
    full = entry.get("full") or {}
    point = best(points(entry.get("exits")), points(entry.get("exits"), CALIBRATION) if _splits(entry) else ())
    layer = cheap_layer(entry)
    layers = (entry.get("model") or {}).get("num_layers")
    return {
        named_quality(full).capitalize(): _percent(quality_of(full)),
        "Loss": NOTHING if full.get("loss") is None else f"{full['loss']:.4f}",
        "Best threshold": NOTHING if point is None else plain(point.name),
        "Leave early": NOTHING if point is None else _percent(point.early),
        "Speed-up": NOTHING if point is None else _timed(point),
        "In theory": NOTHING if point is None else _times(point.theory),
        "Change": NOTHING if point is None else _changed(point, quality_of(full)),
        "One layer": NOTHING if layer is None else f"{layer['layer']} of {layers}",
    }

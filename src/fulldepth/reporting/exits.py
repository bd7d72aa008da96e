"""Pages of `fulldepth exit`: opening paragraph, tables of thresholds, several models side by side."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from html import unescape
from typing import Any

from fulldepth.figures.curves import curve, number
from fulldepth.figures.exit_points import CALIBRATION, ERROR, QUALITIES, Point, named_quality, points, quality_of
from fulldepth.figures.record import Source
from fulldepth.figures.style import minus
from fulldepth.reporting import measured
from fulldepth.reporting.measured import Meta, Pairs
from fulldepth.reporting.phrases import NOTHING, dotted, listed, seconds, short
from fulldepth.reporting.tables import Table, by_subject, settings_table

CHEAP = 0.01
"""Drop in accuracy up to which a threshold or a layer is called cheap."""
CLOSE = 0.9
"""Share of the theoretical speed-up below which the measured one is called lower."""
FASTER = 1.02
"""Speed-up from which a model is called faster."""
LITTLE = 1.1
"""Speed-up up to which one is called small."""
LEAVING = {"text-classification": "samples", "image-classification": "samples", "detection": "images"}
"""Task -> what leaves early; tokens of a text in all others."""
BY_LAYER = (("lens_accuracy", "mean"), ("average_precision", "ap"))
"""Measure and statistic of the quality of a model that stops at a layer."""

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
        "Layers, mean": lambda point: NOTHING if point.mean_layer is None else f"{point.mean_layer:.1f}",
        quality.capitalize(): lambda point: _percent(point.quality),
        "Change": lambda point: _changed(point, base),
        "Loss": lambda point: NOTHING if (loss := point.values.get("loss")) is None else minus(loss, ".3f"),
        "Same as full": lambda point: _percent(point.values.get("agreement")),
        "Tokens": lambda point: NOTHING if (count := point.values.get("tokens")) is None else f"{count:,.0f}",
        "Speed-up": lambda point: _times(point.measured),
        "In theory": lambda point: _times(point.theory),
        "Of theory": lambda point: _percent(_of_theory(point), ".0f"),
        "Operations": lambda point: _percent(point.values.get("flops_share"), ".0f"),
    }
    several = len({point.policy for point in every}) > 1
    named = [(plain(_name(point, several)), point) for point in every]
    note = (
        f"Change: of {quality} in points, with its standard error where it is known. Speed-up: measured beside the "
        "full model; in theory, only layers take time (of a detector, operations). Operations: floating-point "
        "operations, in per cent of the full model’s."
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


def _changed(point: Point, base: float | None) -> str:
    """Points of quality gained, with the standard error of the difference."""
    drop, error = _drop(point, base), point.values.get("drop" + ERROR)
    if drop is None:
        return NOTHING
    return minus(-100 * drop, "+.1f") + ("" if error is None else f" ± {100 * error:.2g}")


def _of_theory(point: Point) -> float | None:
    return point.measured / point.theory if point.measured is not None and point.theory else None


def best(every: Sequence[Point], full: Mapping[str, Any], target: float | None = None) -> Point | None:
    """The calibrated threshold, or else the fastest one that costs at most `CHEAP`; None if there is none.

    Of several calibrated ones (one for each rule), the fastest that keeps the `target`, or else the cheapest.
    """
    base = quality_of(full)
    timed = [point for point in every if point.speedup is not None]
    chosen = [point for point in timed if point.calibrated]
    allowed = CHEAP if target is None or not chosen else target
    cheap = [point for point in chosen or timed if (lost := _drop(point, base)) is not None and lost <= allowed + 1e-9]
    if chosen and not cheap:
        return min(chosen, key=lambda point: _drop(point, base) or 0.0)
    return max(cheap, key=lambda point: point.speedup or 0.0, default=None)


def _target(meta: Meta) -> float | None:
    """The largest drop of accuracy for which thresholds were chosen."""
    stated = (meta.get("settings") or {}).get("target_accuracy_drop")
    return float(stated) if isinstance(stated, int | float) and not isinstance(stated, bool) else None


def _drop(point: Point, base: float | None) -> float | None:
    """Quality that is lost, as stated or against the full model's."""
    if point.values.get("drop") is not None:
        return point.values["drop"]
    value = point.quality
    return None if value is None or base is None else base - value


def story(source: Source) -> Story | None:
    """The opening paragraph: what leaves early and what it costs, whether time falls, where all could stop."""
    meta = source.meta
    every = points(meta.get("exits"))
    layer, drop = cheap_layer(source)
    sentences = [
        *_threshold_sentences(every, meta),
        *_layer_sentences(layer, drop, source.layers, named_quality(meta.get("full") or {})),
        *_generation_sentences(meta),
    ]
    return {"sentences": sentences, "next": _next(meta, layer, source.layers)} if sentences else None


def _threshold_sentences(every: Sequence[Point], meta: Meta) -> list[str]:
    """What the best threshold does; if none is cheap, what the most careful one costs."""
    if not every:
        return []
    full, what = meta.get("full") or {}, subject(meta)
    point = best(every, full, _target(meta))
    if point is None:
        careful = [point for point in every if _drop(point, quality_of(full)) is not None]
        if not careful:
            return [_did(max(every, key=lambda one: one.threshold or 0.0), full, what)]
        least = min(careful, key=lambda one: _drop(one, quality_of(full)) or 0.0)
        return [
            f"No threshold keeps {named_quality(full)} within {100 * CHEAP:.0f} point of the full model’s.",
            _did(least, full, what),
        ]
    sentences = [_did(point, full, what)]
    share = _of_theory(point)
    if share is not None and share < CLOSE and (point.measured or 0) >= FASTER:
        sentences.append(f"Measured is {100 * share:.0f} % of theory.")
    if point.measured is not None and point.measured < FASTER:
        faster = [one for one in every if (one.measured or 0) >= FASTER]
        if not faster:
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
    if point.measured < FASTER and point.measured > 1 / FASTER:
        return f"no measurable speed-up{theory}"
    if point.measured < 1:
        return f"slower, at {point.measured:.2f} times the full model’s speed{theory},"
    return f"a speed-up of {'only ' if point.measured < LITTLE else ''}{point.measured:.2f}{theory}"


def _cost(point: Point, full: Mapping[str, Any]) -> str:
    drop, error = _drop(point, quality_of(full)), point.values.get("drop" + ERROR)
    if drop is not None:
        points_lost, name = 100 * drop, named_quality(full)
        if abs(points_lost) < 0.05 or (error is not None and abs(drop) <= error):
            return f" at no {'measurable ' if abs(points_lost) >= 0.05 else ''}loss of {name}"
        return (
            f" for {points_lost:.1f} points of {name}" if drop > 0 else f", and {-points_lost:.1f} points more {name}"
        )
    loss, base = point.values.get("loss"), number(full.get("loss"))
    if loss is not None and base is not None:
        return f" for {minus(loss - base, '+.3f')} nats of loss"
    agreement = point.values.get("agreement")
    return "" if agreement is None else f", {100 * agreement:.1f} % as the full model says"


def cheap_layer(source: Source) -> tuple[int | None, float | None]:
    """The first layer with a quality of at most `CHEAP` below the last layer's, and the drop there."""
    every = [curve(source.table, *measure) for measure in BY_LAYER]
    pairs = [pair for values in every for pair in zip(values.layers, values.values, strict=True)]
    by_layer = {at: value for at, value in pairs if value is not None and at}
    last = by_layer.get(source.layers)
    if last is None:
        return None, None
    layer = min(at for at, value in by_layer.items() if last - value <= CHEAP)
    return layer, last - by_layer[layer]


def _layer_sentences(layer: int | None, drop: float | None, layers: int, quality: str) -> list[str]:
    if layer is None or drop is None:
        return []
    if layer == layers:
        return [f"Stopping at any one layer before the last costs more than {100 * CHEAP:.0f} point of {quality}."]
    cost = f"no {quality}" if drop < 5e-4 else f"{100 * drop:.1f} points of {quality}"
    return [f"Stopping everything after layer {layer} of {layers} costs {cost}."]


def _generation_sentences(meta: Meta) -> list[str]:
    """The run that is most like plain generation among the faster ones, or else among all."""
    generation = meta.get("generation")
    runs = [one for one in points(generation if isinstance(generation, list) else None) if one.values.get("agreement")]
    runs = [one for one in runs if one.early] or runs  # one at which nothing leaves says nothing
    if not runs:
        return []
    fast = [one for one in runs if (one.measured or 0) >= FASTER]
    run = max(fast or runs, key=lambda one: (one.values["agreement"] or 0.0, one.speedup or 0.0))
    same = 100 * (run.values["agreement"] or 0.0)
    policy = f" ({plain(run.policy)})" if run.policy else ""
    faster = _speed(run).rstrip(",")
    return [f"While generating at {plain(run.name)}{policy}, {same:.0f} % of the tokens are plain greedy’s: {faster}."]


def _next(meta: Meta, layer: int | None, layers: int) -> dict[str, str] | None:
    """The export of the first layers, if few layers are enough; else training that aligns them, for a decoder."""
    name = (meta.get("model") or {}).get("name")
    if not name:
        return None
    model = shlex.quote(short(name, 160))
    if layer is not None and layer < layers:
        command = f"fulldepth exit {model} --export-layers {layer} --output first-{layer}/"
        return {
            "why": f"export the first {f'{layer} layers' if layer > 1 else 'layer'} as a checkpoint:",
            "command": command,
        }
    return None


def story_of_models(source: Source) -> Story | None:
    """The best threshold of each model in one sentence."""
    texts = []
    for entry in source.meta.get("models") or []:
        label = short(entry.get("label", "?"), 60)
        point = best(points(entry.get("exits")), entry.get("full") or {})
        if point is None:
            texts.append(
                f"{label}: no threshold keeps {named_quality(entry.get('full') or {})} within {100 * CHEAP:.0f} point"
            )
        else:
            texts.append(
                f"{label}: {_speed(point).rstrip(',')}{_cost(point, entry.get('full') or {})}, at {plain(point.name)}"
            )
    return {"sentences": [f"{'; '.join(texts)}."], "next": None} if texts else None


def side_by_side(source: Source) -> Table | None:
    """One row for each model: the full model, its best threshold, and the layer at which all could stop."""
    models = source.meta.get("models") or []
    runs = {str(entry.get("label")): run for entry, run in zip(models, source.runs, strict=False)}
    rows = [(measured.labelled(entry), _summary(entry, source, runs.get(str(entry.get("label"))))) for entry in models]
    names = dict.fromkeys(name for _, cells in rows for name in cells)
    columns = {name: (lambda cells, name=name: cells.get(name, NOTHING)) for name in names}
    note = (
        f"Best: the threshold chosen on other data, or else the fastest whose accuracy is at most {100 * CHEAP:.0f} "
        "point below the full model’s. One layer: the first at which all may stop at that price."
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
        "Equal quality: the highest measured speed-up without a loss beyond its standard error. As the baseline: the "
        "highest with at least the full baseline’s quality. At a speed-up: the quality there, on the straight line, by "
        "time, between two thresholds. 1.36× is the speed-up of the paper’s aligned DeiT."
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


def _summary(entry: Meta, source: Source, run: Any) -> dict[str, str]:
    full = entry.get("full") or {}
    point = best(points(entry.get("exits")), full)
    layer, _ = cheap_layer(Source(run.table, {"model": entry.get("model")})) if run is not None else (None, None)
    layers = (entry.get("model") or {}).get("num_layers")
    return {
        named_quality(full).capitalize(): _percent(quality_of(full)),
        "Loss": NOTHING if full.get("loss") is None else f"{full['loss']:.4f}",
        "Best threshold": NOTHING if point is None else plain(point.name),
        "Leave early": NOTHING if point is None else _percent(point.early),
        "Speed-up": NOTHING if point is None else _times(point.measured),
        "In theory": NOTHING if point is None else _times(point.theory),
        "Change": NOTHING if point is None else _changed(point, quality_of(full)),
        "One layer": NOTHING if layer is None else f"{layer} of {layers}",
    }

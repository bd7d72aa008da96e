"""The tables of the pages of `fulldepth skip`: models side by side, the grid, the weights, the settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from fulldepth.figures.benchmark import PHASES, WHOLE, BenchmarkedModel, Cell, Spread, agree
from fulldepth.figures.curves import curve
from fulldepth.figures.healing import groups, removed
from fulldepth.figures.pareto import model_name
from fulldepth.figures.record import Source
from fulldepth.figures.skip_results import Part, planned
from fulldepth.figures.style import minus
from fulldepth.reporting.phrases import NOTHING, scaled, seconds, short, size
from fulldepth.reporting.tables import Table, by_subject, settings_table

RATIOS = (
    "Times over the original’s are medians of the rounds’ ratios, in brackets the 95 % interval (from 9 rounds on). "
    "≈ 1×: no measurable difference."
)
UNITS = (" %", "×", " ms", " s")
"""Units written once if all numbers of a cell have them."""
Columns = dict[str, Callable[[BenchmarkedModel], str]]


def _added(model: BenchmarkedModel) -> str:
    if model.baseline or model.loss is None or model.base is None:
        return NOTHING
    error = None if model.stated else model.in_cell("loss", "difference_stderr", "model", WHOLE)
    return minus(model.loss - model.base, "+.4f") + ("" if error is None else f" ± {error:.4f}")


LOSSES: Columns = {
    "Held-out loss": lambda model: NOTHING if model.loss is None else minus(model.loss, ".4f"),
    "Added": _added,
}


def tables(source: Source) -> dict[str, Sequence[Table]]:
    """Id of a section -> its tables."""
    models, parts = source.benchmarked, source.parts
    timed, quantised = ([model for model in models if model.part.kind == kind] for kind in ("bench", "quantise"))
    return {
        "states": [_norms(part, parts) for part in parts if part.kind == "skip"],
        "cost": [_memory(timed), _grid(timed)],
        "quantise": [_orders(quantised)],
        "settings": [_settings(part) for part in parts],
    }


def side_by_side(source: Source) -> Table | None:
    """All timed models: loss, time and size."""
    models = source.benchmarked
    if not models:
        return None
    if agree(models):  # show one original for all
        first = next((model for model in models if model.baseline), None)
        models = [model for model in models if not model.baseline or model is first]
    columns: Columns = {
        **LOSSES,
        "Prefill time": lambda model: _ratio(model, "prefill"),
        "Decode time": lambda model: _ratio(model, "decode"),
        "Weights": lambda model: _multiple(model, "parameter_bytes"),
        "Cache per token": lambda model: _multiple(model, "kv_bytes_per_token"),
    }
    note = (
        f"{_source(models)}{RATIOS} ± is the standard error over documents. Weights and cache per token are multiples "
        "of the original’s bytes."
    )
    return _by_model("Models side by side", columns, models, note)


def _source(models: Sequence[BenchmarkedModel]) -> str:
    """The beginning of a note: the source of the exports' losses."""
    stated = [short(model.name, 40) for model in models if model.stated and not model.baseline]
    if not stated:
        return ""
    return f"Not measured here: the loss of {', '.join(stated)} is the plan’s, healed if the plan is. "


def _by_model(title: str, columns: Columns, models: Sequence[BenchmarkedModel], note: str = "") -> Table:
    return by_subject(title, "Model", [(model_name(model, short, 60), model) for model in models], columns, note)


def _memory(models: Sequence[BenchmarkedModel]) -> Table:
    columns: Columns = {
        "Peak memory": _bytes("peak_memory"),
        "Weights": _bytes("parameter_bytes"),
        "Cache per token": _bytes("kv_bytes_per_token"),
        "Parameters": _parameters,
    }
    note = "Peak memory: weights and everything that lives at once, median over the grid. Cache: keys and values."
    return _by_model("Memory and size", columns, models, note)


def _parameters(model: BenchmarkedModel) -> str:
    count = (model.entry.get("model") or {}).get("parameters")
    return scaled(count) if isinstance(count, int) else NOTHING


def _grid(models: Sequence[BenchmarkedModel]) -> Table:
    """All numbers in every cell of the grid."""
    columns = [
        *(f"{phase.capitalize()}" for phase in PHASES),
        *(f"{phase.capitalize()} over the original’s" for phase in PHASES),
        "Peak memory",
        "KV cache per token",
    ]
    rows = []
    places = list(dict.fromkeys(cell for model in models for cell in model.cells))
    for cell in places:
        for model in (model for model in models if cell in model.cells):
            held = [model.in_cell(name, "value", "model", cell) for name in ("peak_memory", "kv_bytes_per_token")]
            rows.append(
                [
                    f"{cell.name[:1].upper()}{cell.name[1:]}: {model_name(model, short, 60)}",
                    *(_spread(model.time(phase, cell), seconds) for phase in PHASES),
                    *(_ratio(model, phase, cell) for phase in PHASES),
                    *(NOTHING if count is None else _size(count) for count in held),
                ]
            )
    note = f"Times are medians over the rounds, in brackets the fastest and the slowest. {RATIOS}"
    return Table("Every place of the grid", columns, rows, "Where", note, folded=True)


def _orders(models: Sequence[BenchmarkedModel]) -> Table:
    """Quality, size and latency of quantising and skipping in both orders."""
    columns: Columns = {
        **LOSSES,
        "Weights": _bytes("parameter_bytes"),
        "Prefill": lambda model: _absolute(model, "prefill"),
        "Prefill over the original’s": lambda model: _ratio(model, "prefill"),
        "Decode of a token": lambda model: _absolute(model, "decode"),
        "Decode over the original’s": lambda model: _ratio(model, "decode"),
    }
    note = f"Times are medians over the rounds, in brackets the fastest and the slowest. {RATIOS}"
    return _by_model("All corners", columns, models, note)


def _norms(part: Part, parts: Sequence[Part]) -> Table:
    """Spectral norms of the original's projections in layers with and without a removed block."""
    removal = planned(part)
    lost = set(removed(removal))
    rows = []
    for site in (site for sites in groups(part, removal).values() for site in sites):
        norms = curve(part.table, "spectral_norm", "value", site)
        finite = [(layer, value) for layer, value in zip(norms.layers, norms.values, strict=True) if value is not None]
        sets = [[v for layer, v in finite if (layer in lost) is which] for which in (True, False)]
        if all(sets):
            middle = [median(values) for values in sets]
            ratio = f"{middle[0] / middle[1]:.2f}×" if middle[1] else NOTHING
            spans = [f"{m:.3f} ({min(v):.3f} to {max(v):.3f})" for m, v in zip(middle, sets, strict=True)]
            rows.append([short(site, 60), *spans, ratio])
    several = sum(other.kind == "skip" for other in parts) > 1
    title = f"Spectral norms by projection: {short(part.label, 40)}" if several else "Spectral norms by projection"
    note = "Of the original’s weights: the median over layers, in brackets the least and the most."
    columns = ["Skipped layers", "Kept layers", "Skipped over kept"]
    return Table(title, columns, rows, "Projection", note, folded=True)


def _settings(part: Part) -> Table:
    title = f"Settings of {short(part.label, 60)}" if part.label else "All settings"
    return settings_table(title, part.meta.get("settings"))


def _spread(spread: Spread | None, written: Callable[[float], str]) -> str:
    if spread is None:
        return NOTHING
    middle, low, high = (written(value) for value in spread)
    if low == high:
        return middle
    unit = next((end for end in UNITS if all(text.endswith(end) for text in (middle, low, high))), "")
    return f"{middle} ({low.removesuffix(unit)} to {high.removesuffix(unit)})"


def _ratio(model: BenchmarkedModel, phase: str, cell: Cell = WHOLE) -> str:
    """The time over the original's, with its interval."""
    ratio = model.relative(phase, cell)
    if ratio is None:
        return NOTHING
    if model.baseline:
        return "1×"
    if ratio.low == ratio.high:
        return f"{ratio.value:.3f}× (no interval)"
    text = f"{ratio.low:.3f} to {ratio.high:.3f}"
    return f"≈ 1× ({text})" if ratio.decided == 1 else f"{ratio.value:.3f}× ({text})"


def _absolute(model: BenchmarkedModel, phase: str) -> str:
    return _spread(model.time(phase, model.cells[0]) if model.cells else None, seconds)


def _bytes(measure: str) -> Callable[[BenchmarkedModel], str]:
    return lambda model: NOTHING if (value := model.single(measure)) is None else _size(value)


def _size(value: float) -> str:
    """Bytes in a suitable unit."""
    return f"{value:,.0f} B" if value < 2**14 else f"{value / 2**10:,.0f} KiB" if value < 2**20 else size(value)


def _multiple(model: BenchmarkedModel, measure: str) -> str:
    """Bytes as a multiple of the original's."""
    own = model.single(measure)
    base = model.of_original(measure)
    if own is None or not base or not math.isfinite(own):
        return NOTHING
    return _size(own) if model.baseline else f"{own / base:.2f}×"

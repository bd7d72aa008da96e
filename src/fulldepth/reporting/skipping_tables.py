"""The tables of the pages of `fulldepth skip`: models side by side, the grid, the weights, the settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from fulldepth.figures.benchmark import PHASES, BenchmarkedModel, Spread, agree, frontier
from fulldepth.figures.curves import curve
from fulldepth.figures.healing import groups, removed
from fulldepth.figures.pareto import model_name, placed
from fulldepth.figures.record import Source
from fulldepth.figures.skip_results import Part, planned
from fulldepth.figures.style import minus
from fulldepth.reporting.phrases import NOTHING, scaled, seconds, short, size
from fulldepth.reporting.tables import Table, by_subject, settings_table

UNITS = (" %", "×", " ms", " s")
"""Units written once if all numbers of a cell have them."""
Columns = dict[str, Callable[[BenchmarkedModel], str]]


def _added(model: BenchmarkedModel) -> str:
    has_losses = not model.baseline and model.loss is not None and model.base is not None
    return minus((model.loss or 0.0) - (model.base or 0.0), "+.4f") if has_losses else NOTHING


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
        "cost": [*(_saved_over_grid(timed, phase) for phase in PHASES), _memory(timed), _grid(timed)],
        "quantise": [_orders(quantised)],
        "settings": [_settings(part) for part in parts],
    }


def side_by_side(source: Source) -> Table | None:
    """All timed models: loss, time, size, and on which frontiers they are."""
    models = source.benchmarked
    if not models:
        return None
    if agree(models):  # show one original for all
        first = next((model for model in models if model.baseline), None)
        models = [model for model in models if not model.baseline or model is first]
    best = {phase: _unbeaten(models, phase) for phase in PHASES}
    columns: Columns = {
        **LOSSES,
        "Prefill time": lambda model: _times(model, "prefill"),
        "Decode time": lambda model: _times(model, "decode"),
        "Weights": lambda model: _multiple(model, "parameter_bytes"),
        "Cache per token": lambda model: _multiple(model, "kv_bytes_per_token"),
        "On the frontier": lambda model: ", ".join(phase for phase in PHASES if model in best[phase]) or NOTHING,
    }
    note = (
        f"{_source(models)}Times are multiples of the original’s, with the least "
        "and the most over the grid (over the rounds where there is one place only); weights and cache per token are "
        "multiples of the original’s bytes. On the frontier: no other model here is as good and faster, or as fast and "
        "better."
    )
    return _by_model("Models side by side", columns, models, note)


def _source(models: Sequence[BenchmarkedModel]) -> str:
    """The beginning of a note: the source of the exports' losses."""
    stated = [short(model.name, 40) for model in models if model.stated and not model.baseline]
    if not stated:
        return ""
    return f"Not measured here: the loss of {', '.join(stated)} is the plan’s, healed if the plan is. "


def _unbeaten(models: Sequence[BenchmarkedModel], phase: str) -> list[BenchmarkedModel]:
    points = placed(models, phase, None)
    return [points[at][0] for at in frontier([(time.value, loss) for _, time, loss in points])]


def _by_model(title: str, columns: Columns, models: Sequence[BenchmarkedModel], note: str = "") -> Table:
    return by_subject(title, "Model", [(model_name(model, short, 60), model) for model in models], columns, note)


def _saved_over_grid(models: Sequence[BenchmarkedModel], phase: str) -> Table:
    """Time saved in a phase, measured and predicted: medians over the grid."""
    columns: Columns = {
        "Time saved": _over("time_saved", "median", phase, _percent),
        "Predicted, in place": _over("predicted_time_saved", "toggled", phase, _percent),
        "Predicted, operations": _over("predicted_time_saved", "flops", phase, _percent),
        "Saved over predicted": _over("time_saved_ratio", "toggled", phase, lambda value: minus(value, ".2f")),
        "Saved by each block": _over("time_saved_per_block", "median", phase, _percent),
    }
    shares = [model.over_grid("attention_share", "median", phase) for model in models if model.baseline]
    attention = (
        f" Attention takes {_spread(shares[0], _percent)} of it in the original." if shares and shares[0] else ""
    )
    note = (
        "Medians over the grid, in brackets the least and the most. In place: the original with the same blocks "
        f"skipped, timed in the same rounds; operations: what both multiply. Saved over predicted: in place.{attention}"
    )
    exports = [model for model in models if not model.baseline]
    return _by_model(f"{phase.capitalize()} time saved", columns, exports, note)


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
        *(f"{phase.capitalize()} saved" for phase in PHASES),
        *(f"{phase.capitalize()} predicted" for phase in PHASES),
        "Peak memory",
        "KV cache per token",
    ]
    rows = []
    places = list(dict.fromkeys(cell for model in models for cell in model.cells))
    for cell in places:
        for model in (model for model in models if cell in model.cells):
            saved = [model.saved(phase, cell) for phase in PHASES]
            guessed = [model.in_cell("predicted_time_saved", "toggled", phase, cell) for phase in PHASES]
            held = [model.in_cell(name, "value", "model", cell) for name in ("peak_memory", "kv_bytes_per_token")]
            rows.append(
                [
                    f"{cell.name[:1].upper()}{cell.name[1:]}: {model_name(model, short, 60)}",
                    *(_spread(model.time(phase, cell), seconds) for phase in PHASES),
                    *(_spread(share, _percent) for share in saved),
                    *(NOTHING if share is None else _percent(share) for share in guessed),
                    *(NOTHING if count is None else _size(count) for count in held),
                ]
            )
    note = "Times are medians over the rounds, in brackets the fastest and the slowest. Predicted: skipped in place."
    return Table("Every place of the grid", columns, rows, "Where", note, folded=True)


def _orders(models: Sequence[BenchmarkedModel]) -> Table:
    """Quality, size and latency of quantising and skipping in both orders."""
    columns: Columns = {
        **LOSSES,
        "Weights": _bytes("parameter_bytes"),
        "Prefill": lambda model: _absolute(model, "prefill"),
        "Decode of a token": lambda model: _absolute(model, "decode"),
    }
    note = "Times are medians over the rounds, in brackets the fastest and the slowest."
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


def _percent(share: float) -> str:
    return f"{minus(100 * share, '.1f')} %"


def _spread(spread: Spread | None, written: Callable[[float], str]) -> str:
    if spread is None:
        return NOTHING
    middle, low, high = (written(value) for value in spread)
    if low == high:
        return middle
    unit = next((end for end in UNITS if all(text.endswith(end) for text in (middle, low, high))), "")
    return f"{middle} ({low.removesuffix(unit)} to {high.removesuffix(unit)})"


def _times(model: BenchmarkedModel, phase: str) -> str:
    """Times as multiples of the original's."""
    if model.baseline:
        return NOTHING if model.relative(phase) is None else "1×"
    return _spread(model.relative(phase), lambda value: f"{value:.2f}×")


def _absolute(model: BenchmarkedModel, phase: str) -> str:
    cells = model.cells
    return _spread(model.time(phase, cells[0]), seconds) if len(cells) == 1 else _times(model, phase)


def _over(
    measure: str, statistic: str, phase: str, written: Callable[[float], str]
) -> Callable[[BenchmarkedModel], str]:
    return lambda model: _spread(model.over_grid(measure, statistic, phase), written)


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

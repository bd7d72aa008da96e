"""Content of result folders of `fulldepth skip`: what was removed, at what loss, and the models that were timed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import pandas as pd

from fulldepth.figures.curves import number, select
from fulldepth.figures.style import label

KINDS = ("skip", "curve", "bench", "quantise")
"""Kinds of result folders that one page can show together, in reading order."""
TOGETHER = "skips"
"""Kind of several of them combined: `meta["parts"]` holds their documents with a `label`, the column `folder` the label
of each row."""
PARTS = {"attention": "attention block", "mlp": "MLP", "layer": "layer"}
"""Granularity -> what is removed, in the singular."""
PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class Part:
    """One result folder."""

    label: str
    """Its name if there are several; empty for a single folder."""
    kind: str
    table: pd.DataFrame
    meta: Mapping[str, Any]

    def named(self, text: str) -> str:
        """`text`, prefixed with the folder's name if it has one."""
        return f"{self.label}: {text}" if self.label else text


def parts(table: pd.DataFrame, meta: Mapping[str, Any]) -> list[Part]:
    """The folders behind a table and its document."""
    if meta.get("kind") != TOGETHER:
        return [Part("", str(meta.get("kind")), table, meta)]
    return [
        Part(str(entry["label"]), str(entry["kind"]), table[table["folder"] == entry["label"]], entry)
        for entry in meta["parts"]
    ]


@dataclass(frozen=True)
class Removal:
    """Removed blocks in the order of removal."""

    names: tuple[str, ...]
    """Names of the folders and models that it comes from; may be empty."""
    granularity: str
    blocks: tuple[int, ...]
    losses: tuple[float, ...]
    """Held-out losses of the unmodified model and after each removal, not healed; empty if unknown."""
    healed: float | None = None
    scalars_only: float | None = None
    curve: Part | None = None
    """The curve that measured it, with intervals."""

    @property
    def name(self) -> str:
        """All its names."""
        return ", ".join(self.names)

    def added(self, loss: float | None) -> float | None:
        """A loss minus that of the unmodified model."""
        return None if loss is None or not self.losses else loss - self.losses[0]


def removals(parts: Iterable[Part]) -> list[Removal]:
    """All sequences of removed blocks in the folders, without repetition."""
    merged: dict[tuple[str, tuple[int, ...], tuple[float, ...]], Removal] = {}
    for part in parts:
        for name, plan in plans(part):
            blocks = tuple(int(block) for block in plan.get("blocks") or [])
            if not blocks:
                continue
            losses = [loss for loss in map(number, plan.get("losses") or []) if loss is not None]
            removal = Removal(
                (name,) if name else (),
                str(plan.get("granularity") or "attention"),
                blocks,
                tuple(losses) if len(losses) == len(blocks) + 1 else (),
                number(plan.get("healed_loss")),
                number((plan.get("control_loss") or {}).get("scalars_only")),
                part if part.kind == "curve" else None,
            )
            key = removal.granularity, blocks, tuple(round(loss, 4) for loss in removal.losses)
            earlier = merged.setdefault(key, removal)
            names, curve = dict.fromkeys((*earlier.names, *removal.names)), earlier.curve or removal.curve
            merged[key] = replace(earlier, names=tuple(names), curve=curve)
    return list(merged.values())


def plans(part: Part) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, plan) of all plans in a folder's document; plans may be incomplete."""
    meta = part.meta
    if part.kind == "bench":
        return [(str(entry.get("label", "?")), entry) for entry in meta.get("models") or []]
    if isinstance(meta.get("plans"), Mapping):
        return [(str(name), plan) for name, plan in meta["plans"].items() if isinstance(plan, Mapping)]
    return [(part.label, meta["plan"])] if isinstance(meta.get("plan"), Mapping) else []


def layers_of(parts: Iterable[Part]) -> int:
    """L, as a document states, or else the deepest known layer."""
    folders = list(parts)
    for part in folders:
        if isinstance(layers := (part.meta.get("model") or {}).get("num_layers"), int) and layers > 0:
            return layers
    deepest = [part.table["layer"].max() for part in folders if len(part.table)]
    blocks = [max(removal.blocks) for removal in removals(folders)]
    return max([int(layer) for layer in deepest if not pd.isna(layer)] + blocks, default=1) or 1


class Spread(NamedTuple):
    """A time over the original's, with its 95 % interval; both ends are the value where there is none."""

    value: float
    low: float
    high: float

    @property
    def decided(self) -> float:
        """The value; 1 if the range holds 1 (no measurable difference)."""
        return 1.0 if self.low <= 1 <= self.high else self.value


@dataclass(frozen=True)
class TimedModel:
    """A model of a benchmark or a quantisation."""

    name: str
    part: Part
    baseline: bool
    loss: float | None
    """Held-out loss in nats: measured, or else of the plan of the export."""
    base: float | None
    """The original's loss on the same data."""
    error: float | None
    """Standard error of their difference."""
    stated: bool
    """Whether the loss is the plan's instead of being measured with the times."""
    times: Mapping[str, Spread]
    """Phase -> time over the original's, over the whole grid."""
    bytes: Mapping[str, float]
    """Measure -> bytes, the median over the grid."""


def timed_models(parts: Sequence[Part]) -> list[TimedModel]:
    """The models of all benchmarks, then of all quantisations; the original of each folder first."""
    found = []
    for part in parts:
        if part.kind not in ("bench", "quantise") or "model" not in part.table.columns:
            continue
        stated = {str(entry.get("label", "?")): entry for entry in part.meta.get("models") or []}
        names = [str(name) for name in part.table["model"].dropna().unique()]
        names.sort(key=lambda name: not (stated.get(name, {}).get("baseline") or name == "original"))
        several = sum(other.kind in ("bench", "quantise") for other in parts) > 1
        for name in names:
            shown = part.named(name) if several else name
            found.append(_timed(part, name, names[0], shown, stated.get(name, {})))
    return found


def _timed(part: Part, name: str, original: str, shown: str, entry: Mapping[str, Any]) -> TimedModel:
    """A model with the numbers of its rows."""
    table = part.table

    def value(model: str, measure: str, statistic: str, site: str = "model") -> float | None:
        """A number of a model over the whole grid; the median over its cells if there is none."""
        rows = select(table[table["model"] == model], measure, statistic, site)
        whole = rows[rows["batch"].isna()] if "batch" in rows.columns else rows
        finite = [real for real in map(number, (whole if len(whole) else rows)["value"]) if real is not None]
        return median(finite) if finite else None

    losses = [number(loss) for loss in entry.get("losses") or []]
    measured, base = (value(model, "loss", "mean") for model in (name, original))
    stated = number(entry.get("healed_loss")) or (losses[-1] if losses else None)
    times = {}
    for phase in PHASES:
        middle, low, high = (value(name, "time_ratio", end, phase) for end in ("median", "low", "high"))
        if name == original and value(name, f"{phase}_time", "median", phase) is not None:
            middle = low = high = 1.0
        if middle is not None:
            times[phase] = Spread(middle, middle if low is None else low, middle if high is None else high)
    measures = ("parameter_bytes", "kv_bytes_per_token", "peak_memory")
    sizes = {measure: size for measure in measures if (size := value(name, measure, "value")) is not None}
    return TimedModel(
        shown,
        part,
        name == original,
        stated if measured is None else measured,
        base if measured is not None else losses[0] if losses else None,
        value(name, "loss", "difference_stderr"),
        measured is None and stated is not None,
        times,
        sizes,
    )


def model_name(model: TimedModel, limit: int = 40) -> str:
    """Name of a model for figures; the original is marked."""
    name = label(model.name, limit)
    return f"{name} (original)" if model.baseline and model.name != "original" else name

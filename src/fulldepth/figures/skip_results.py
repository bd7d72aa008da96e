"""Content of result folders of `fulldepth skip`: their removals, and curves over the number of removed blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from fulldepth.figures.curves import Curve, counted, number, select
from fulldepth.figures.style import axis, label

KINDS = ("skip", "curve", "bench", "quantise")
"""Kinds of result folders that one page can show together, in reading order."""
TOGETHER = "skips"
"""Kind of several of them combined: `meta["parts"]` holds their documents with a `label`, the column `folder` the label
of each row."""
PARTS = {"attention": "attention block", "mlp": "MLP", "layer": "layer"}
"""Granularity -> what is removed, in the singular."""


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
    data: str = ""
    """Hash of the examples; empty if unknown."""

    @property
    def name(self) -> str:
        """All its names."""
        return ", ".join(self.names)

    @property
    def added(self) -> list[float | None]:
        """What each removal added to the loss, in nats."""
        if len(self.losses) != len(self.blocks) + 1:
            return [None] * len(self.blocks)
        return [after - before for before, after in zip(self.losses, self.losses[1:], strict=False)]

    def starts(self, other: Removal) -> bool:
        """Whether `other` has the same data and starts with these removals."""
        alike = (self.granularity, self.data) == (other.granularity, other.data)
        return alike and self.blocks == other.blocks[: len(self.blocks)]


def of_plan(plan: Mapping[str, Any], name: str = "") -> Removal | None:
    """The removal of a plan; None if it has no blocks."""
    blocks = plan.get("blocks") or []
    if not blocks:
        return None
    losses = [number(loss) for loss in plan.get("losses") or []]
    return Removal(
        (name,) if name else (),
        str(plan.get("granularity") or "attention"),
        tuple(int(block) for block in blocks),
        tuple(loss for loss in losses if loss is not None),
        number(plan.get("healed_loss")),
        number((plan.get("control_loss") or {}).get("scalars_only")),
        str((plan.get("data") or {}).get("hash") or ""),
    )


def removals(parts: Iterable[Part]) -> list[Removal]:
    """All sequences of removed blocks in the folders, without repetition."""
    merged: dict[tuple[str, tuple[int, ...]], Removal] = {}
    for removal in (of_plan(plan, name) for part in parts for name, plan in plans(part)):
        if removal is not None:
            key = (removal.granularity, removal.blocks)
            earlier = merged.get(key, removal)
            merged[key] = replace(earlier, names=tuple(dict.fromkeys((*earlier.names, *removal.names))))
    return list(merged.values())


def plans(part: Part) -> list[tuple[str, Mapping[str, Any]]]:
    """(name, plan) of all plans in a folder's document; plans may be incomplete."""
    meta = part.meta
    if part.kind == "bench":
        return [(str(entry.get("label", "?")), entry) for entry in meta.get("models") or []]
    if isinstance(meta.get("plans"), Mapping):
        return [(str(name), plan) for name, plan in meta["plans"].items() if isinstance(plan, Mapping)]
    return [(part.label, meta["plan"])] if isinstance(meta.get("plan"), Mapping) else []


def planned(part: Part) -> Removal | None:
    """The removal of a folder that has one plan."""
    plan = part.meta.get("plan")
    return of_plan(plan, part.label) if isinstance(plan, Mapping) else None


def layers_of(parts: Iterable[Part]) -> int:
    """L, as a document states, or else the deepest known layer."""
    folders = list(parts)
    for part in folders:
        baseline = [entry.get("model") for entry in part.meta.get("models") or []][:1]
        for model in (part.meta.get("model"), *baseline):
            if isinstance(layers := (model or {}).get("num_layers"), int) and layers > 0:
                return layers
    deepest = [part.table["layer"].max() for part in folders if len(part.table)]
    blocks = [max(removal.blocks) for removal in removals(folders)]
    return max([int(layer) for layer in deepest if not pd.isna(layer)] + blocks, default=1) or 1


def by_removed(table: pd.DataFrame, measure: str, statistic: str = "mean", states: Sequence[str] = ()) -> Curve:
    """A statistic by number of removed blocks, ascending; of rows in one of `states`, if rows have states."""
    if "removed" not in table.columns:
        return Curve([], [], [])
    rows = select(table, measure, statistic, "model").dropna(subset=["removed"])
    if states and "state" in rows.columns and rows["state"].notna().any():
        rows = rows[rows["state"].isin(states)]
    rows = rows.drop_duplicates("removed", keep="last").sort_values("removed")
    return Curve(
        [int(count) for count in rows["removed"]],
        [number(value) for value in rows["value"]],
        [counted(count) for count in rows["count"]],
    )


def removed_axis(largest: int) -> dict[str, Any]:
    """The x axis of a figure over the number of removed blocks, 0..`largest`."""
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100, 1000) if largest / s <= 13)
    ticks = list(range(0, largest + 1, step))
    margin = max(0.4, largest * 0.03)
    return axis(
        "Blocks removed",
        unifiedhovertitle={"text": "%{x} removed"},
        range=[-margin, largest + margin],
        tickvals=ticks,
        ticktext=[str(tick) for tick in ticks],
    )


def listed(numbers: Sequence[int], limit: int = 8) -> str:
    """`3, 7 and 8`, shortened after `limit` numbers."""
    shown = [str(number) for number in numbers[:limit]]
    if len(numbers) > limit:
        return f"{', '.join(shown)} and {len(numbers) - limit} more"
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))


def what_went(removal: Removal) -> str:
    """`attention blocks of layers 7, 8 and 3`, in order of removal."""
    several = "s" if len(removal.blocks) > 1 else ""
    if removal.granularity == "layer":
        return f"layer{several} {listed(removal.blocks)}"
    thing = PARTS.get(removal.granularity) or label(removal.granularity, 24)
    return f"{thing}{several} of layer{several} {listed(removal.blocks)}"

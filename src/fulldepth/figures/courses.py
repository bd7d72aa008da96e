"""The lines over the number of removed blocks: what result folders know of held-out losses after each removal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fulldepth.figures.rows import Curve, number, select
from fulldepth.figures.skipped import Part, Removal, by_removed, planned, removals


@dataclass(frozen=True)
class Course:
    """One line over the number of removed blocks, with the points that stand beside it."""

    part: Part | None
    """The folder whose rows it is of; None where only a document knows the losses."""
    removal: Removal
    mean: Curve
    low: Curve
    high: Curve
    healed: float | None
    scalars_only: float | None

    @property
    def base(self) -> float | None:
        """Loss of the model itself."""
        return dict(zip(self.mean.layers, self.mean.values, strict=True)).get(0)


def courses(found: Sequence[Part]) -> list[Course]:
    """The lines of a page: curves first; no line that runs along another one."""
    made: list[Course] = []
    searched = [part for part in found if part.kind in ("curve", "skip")]
    for part in sorted(searched, key=lambda part: part.kind != "curve"):
        one = planned(part)
        if one is None:
            continue
        mean = by_removed(part.table, "loss", states=("original", "skipped"))
        healed, control = _point(part, "healed", one.healed), _point(part, "scalars_only", one.scalars_only)
        farther = next((at for at, other in enumerate(made) if one.starts(other.removal)), None)
        if not mean or (farther is not None and healed is None and control is None):
            continue
        low, high = (by_removed(part.table, "loss", statistic) for statistic in ("low", "high"))
        if farther is not None:
            mean = Curve([], [], [])  # the longer line goes through the same points
        made.append(Course(part, one, mean, low, high, healed, control))
    known = [course.removal for course in made]
    if made:  # a quantised model's losses stand with the other corners
        found = [part for part in found if part.kind != "quantise"]
    for one in removals(part for part in found if part.kind in ("bench", "quantise")):
        losses = [*one.losses]
        if len(losses) == len(one.blocks) + 1 and not any(_same(one, other) for other in known):
            counts = ["?"] * len(losses)
            mean = Curve(list(range(len(losses))), list(losses), counts)
            made.append(Course(None, one, mean, Curve([], [], []), Curve([], [], []), one.healed, one.scalars_only))
    return made


def _same(one: Removal, other: Removal) -> bool:
    """Whether two removals are one as far as it is known (a benchmark does not know the data)."""
    return (one.granularity, one.blocks) == (other.granularity, other.blocks[: len(one.blocks)])


def _point(part: Part, state: str, planned: float | None) -> float | None:
    """A loss in another state, out of the rows, or else out of the plan."""
    if "state" not in part.table.columns:
        return planned
    rows = select(part.table, "loss", "mean", "model")
    rows = rows[(rows["state"] == state).fillna(False).astype(bool)]
    return number(rows["value"].iloc[-1]) if len(rows) else planned


def base_of(course: Course, every: Sequence[Course]) -> float | None:
    """Loss of the unmodified model; that of the line it runs along where it has no line of its own."""
    if course.base is not None:
        return course.base
    longer = [other.base for other in every if course.removal.starts(other.removal)]
    return next((base for base in longer if base is not None), None)

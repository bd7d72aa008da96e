"""`Mixture`: several sources of data in one `--data`, with the share that each has of the rows."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import reading

SHARED = re.compile(r"(?P<name>.+)=(?P<share>[0-9.eE+-]+)")
"""A source with its share, such as `own=0.7`."""


@dataclass(frozen=True)
class Mixture:
    """Sources of data that are read together."""

    sources: tuple[Any, ...]
    """Each as for `fulldepth.data.open_data`."""
    shares: tuple[float, ...] | None = None
    """Of the rows; they add up to 1. None = equal shares of a limited number of rows, or all rows of all sources."""

    @classmethod
    def of(cls, data: Any) -> Mixture:
        """The sources of a data argument: `own,file.jsonl`, `own=0.7,file.jsonl=0.3`, or one source of any kind.

        Args:
            data: a text is split at commas, unless a file of that name exists. Shares are numbers above 0 in any unit:
                `own=7,file.jsonl=3` is the same. A `Mixture` is returned unchanged.

        Raises:
            FulldepthError: for an empty source, a source that is named twice, or a share that is not a number above 0,
                or that only some of the sources have.
        """
        if isinstance(data, Mixture):
            return data
        if not isinstance(data, str) or "," not in data or _exists(data):
            return cls((data,))
        names: list[str] = []
        weights: list[float] = []
        for part in data.split(","):
            text = part.strip()
            match = None if _exists(text) else SHARED.fullmatch(text)
            names.append((text if match is None else match["name"]).strip())
            if match is not None:
                weights.append(_weight(match["share"], text))
        given = one_line(data, 200)
        if not all(names):
            raise FulldepthError(f"{given} has an empty source between its commas. Expected names such as own,a.jsonl.")
        if len(set(names)) < len(names):
            raise FulldepthError(f"{given} names a source twice. Give it once, with a larger share.")
        if weights and len(weights) < len(names):
            raise FulldepthError(f"Only some of the sources in {given} have a share. Give every one a share, or none.")
        total = sum(weights)
        return cls(tuple(names), tuple(weight / total for weight in weights) or None)

    def limits(self, limit: int | None) -> list[int | None]:
        """Most rows of each source, at least 1, from the most rows of all.

        They add up to `limit` if every source has one: the rows that rounding down leaves go to the largest fractions.

        Raises:
            FulldepthError: for shares without a limit, which would have to leave rows out unasked.
        """
        if limit is None:
            if self.shares is not None:
                raise FulldepthError(
                    "Shares of data are shares of a number of rows. Give that number (--max-sequences), or leave out "
                    "the shares: then all rows of all sources are read."
                )
            return [None] * len(self.sources)
        shares = self.shares or (1 / len(self.sources),) * len(self.sources)
        exact = [limit * share for share in shares]
        rows = [math.floor(number) for number in exact]
        by_fraction = sorted(range(len(rows)), key=lambda place: rows[place] - exact[place])
        for place in by_fraction[: limit - sum(rows)]:
            rows[place] += 1
        return [max(1, number) for number in rows]

    def with_source(self, number: int, source: Any) -> Mixture:
        """The mixture with another source at a place, from 0, that keeps the share."""
        sources: Sequence[Any] = [source if place == number else old for place, old in enumerate(self.sources)]
        return replace(self, sources=tuple(sources))


def _weight(text: str, source: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not (math.isfinite(weight) and weight > 0):
        raise FulldepthError(
            f"The share of {one_line(source, 200)} is {one_line(text, 60)}; expected a number above 0."
        )
    return weight


def _exists(name: str) -> bool:
    with reading(one_line(name)):
        return Path(name).expanduser().exists()

"""The tables that the benchmarks of training print."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from meters import spread

MIB = 2**20


@dataclass(frozen=True)
class Goal:
    """One figure that has a goal."""

    what: str
    size: str
    values: list[float]
    """Ratios: one a round for times, a single one for memory."""
    goal: float | None
    """None at a size that no goal speaks of."""
    style: Callable[[Any], str] = spread

    def line(self, judge_times: bool) -> str:
        """Row of a table in Markdown."""
        goal, verdict = "-", "-"
        if self.goal is not None:
            goal = f"{self.goal:.2f}" if self.style is spread else self.style([self.goal])
            if judge_times or self.style is not spread:
                verdict = "met" if statistics.median(self.values) <= self.goal else "missed"
        return f"| {self.what} | {self.size} | {self.style(self.values)} | {goal} | {verdict} |"


@dataclass(frozen=True)
class Cost:
    """What one kind of step costs beside its reference."""

    what: str
    size: str
    times: list[float]
    peak: float
    """Ratio of the peak memory."""
    kept: int
    """Bytes that it keeps for backward beyond the reference."""

    def line(self) -> str:
        """Row of a table in Markdown."""
        memory = f"{percent([self.peak])} | {self.kept / MIB:+.1f} MiB"
        return f"| {self.what} | {self.size} | {spread(self.times)} | {memory} |"


def percent(values: list[float]) -> str:
    """What a ratio adds."""
    return f"{100 * (values[0] - 1):+.2f} %"


def share(values: list[float]) -> str:
    """A ratio as a part of the whole; below 0 where less is kept than without."""
    return f"{100 * values[0]:.1f} %"


def print_goals(rows: Iterable[Goal | Cost], judge_times: bool) -> list[Cost]:
    """Print the rows with a goal as they come; returns the others."""
    print("\n| what | model | figure (times: median and range) | goal | |\n|---|---|---|---|---|", flush=True)
    costs = []
    for row in rows:
        if isinstance(row, Cost):
            costs.append(row)
        else:
            print(row.line(judge_times), flush=True)
    return costs


def print_costs(rows: list[Cost]) -> None:
    """Print what has no goal."""
    head = "| step | model | time (median and range) | peak memory | kept for backward |"
    print(f"\nEverything beside its reference:\n\n{head}\n|---|---|---|---|---|")
    for row in rows:
        print(row.line())

"""Notes on how to read the numbers, and their formulas."""

from __future__ import annotations

from pydantic.dataclasses import dataclass


@dataclass(frozen=True, config={"extra": "forbid"})
class Note:
    """A note under “How to read the numbers”; shown if the table has one of its measures, or if it names none."""

    title: str
    text: str
    """HTML, inside a paragraph."""
    measures: tuple[str, ...] = ()
    """Measures of the table to which the note belongs; empty = all."""
    formula: str = ""
    """HTML."""
    source: str = ""
    """HTML: the source of the formula."""

"""What a comparison can be told."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fulldepth.recipes import Settings

Label = Annotated[str, Field(max_length=1000)]


class CompareSettings(Settings):
    """Settings of `fulldepth compare`."""

    names: list[Label] | None = None
    """One label for each result; null: the folders' names, made unique."""
    baseline: int | str = 0
    """What the others are compared with: a position (from 0) or a label."""
    depth: Literal["layer", "relative"] | None = None
    """Compare at the same `layer`, or at the same `relative` depth l/L; null: relative where the depths differ."""

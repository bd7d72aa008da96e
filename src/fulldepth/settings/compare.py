"""Settings of `fulldepth compare`."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fulldepth.settings.layers import SET, Applies, Settings

Label = Annotated[str, Field(max_length=1000)]


class CompareSettings(Settings):
    """How results are labelled and aligned."""

    options: ClassVar = {"How to compare": ("names", "baseline", "depth")}
    applies: ClassVar = (Applies(("claims",), {"against": SET}),)

    names: list[Label] | None = None
    """Comma-separated labels, one for each result (of groups, one for each group); None = the folders' names, made
    unique."""
    baseline: int | str = 0
    """Label, or position from 0, of the model to compare the others with."""
    depth: Literal["layer", "relative"] | None = None
    """layer: compare layer by layer; relative: at the same relative depth l/L; None = layer if depths are equal."""
    claims: dict[str, Literal["greater", "less"]] = Field(default_factory=dict)
    """Of groups: number of the headline -> sign of its difference that was claimed before the runs, such as
    `claims.validation_loss=less`. These numbers have one-sided tests, with Holm's correction over the claims."""

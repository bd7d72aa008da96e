"""Types of the entries of `results.json`, and the base of its objects."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic import Field

from fulldepth.results.finding import Number

MOST_LAYERS = 1024
"""Most layers of a model."""

Whole = Annotated[int, Field(ge=0, lt=1 << 63)]
Layer = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Ratio = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Counts = Annotated[list[Whole], Field(max_length=MOST_LAYERS)]
"""One count for each of the layers 1..L."""
Interval = Annotated[list[Number], Field(min_length=2, max_length=2)]
"""Lower and upper end of a 95 % interval."""
Mapping = dict[str, Any]


class Part(pydantic.BaseModel):
    """A JSON object whose known entries are checked; others are allowed."""

    model_config = pydantic.ConfigDict(extra="allow")

"""`Finding`: one number of a headline, with its unit and a sentence that explains it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

Number = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is valid JSON."""


@dataclass(frozen=True)
class Finding:
    """One number of the headline, written by every verb and read by pages and comparisons.

    The types are the schema of an entry of `headline` in `results.json`; they are checked when a document is read.
    """

    value: Number | None
    """None if it is not known."""
    unit: str = "1"
    sentence: str | None = None
    """Explanation of the value."""
    standard_error: Number | None = None
    """Standard error, in the unit of the value."""
    no_standard_error: str | None = None
    """Reason for a missing standard error or interval, for numbers that usually have one."""
    interval: tuple[Number, Number] | None = None
    """Ends of the 95 % interval of a step (a layer, a threshold), which has no standard error."""

    def document(self) -> dict[str, Any]:
        """The JSON object: `value`, `unit` and the entries that are not None.

        `standard_error` is null where `no_standard_error` gives the reason.
        """
        entries: dict[str, Any] = {"value": self.value, "unit": self.unit}
        if self.interval is not None:
            entries["interval"] = list(self.interval)
        elif self.standard_error is not None or self.no_standard_error is not None:
            entries["standard_error"] = self.standard_error
        texts = {"sentence": self.sentence, "no_standard_error": self.no_standard_error}
        return entries | {name: text for name, text in texts.items() if text is not None}

"""`Finding`: one number of a headline, with its unit and the sentence that says what it means."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

Number = Annotated[float, Field(allow_inf_nan=False)]
"""A number that is valid JSON."""


@dataclass(frozen=True)
class Finding:
    """One of the few numbers to look at first: written by every verb, read by pages and comparisons.

    The types are the schema of an entry of `headline` in `results.json`. They are checked when a document is read, not
    when a finding is made.
    """

    value: Number | None
    """None where it is not known."""
    unit: str = "1"
    sentence: str | None = None
    """What the value means, in plain words."""
    standard_error: Number | None = None
    """In the unit of the value."""
    no_standard_error: str | None = None
    """Why there is no standard error, for numbers that usually have one."""

    def document(self) -> dict[str, Any]:
        """The JSON object: `value` and `unit`, and what else is known.

        `standard_error` is null where `no_standard_error` gives the reason.
        """
        entries: dict[str, Any] = {"value": self.value, "unit": self.unit}
        if self.standard_error is not None or self.no_standard_error is not None:
            entries["standard_error"] = self.standard_error
        words = {"sentence": self.sentence, "no_standard_error": self.no_standard_error}
        return entries | {name: text for name, text in words.items() if text is not None}

"""Batches of examples for the scorer."""

from __future__ import annotations

from collections.abc import Sequence

from fulldepth.data.batches import Example, batches, grouped
from fulldepth.errors import FulldepthError
from fulldepth.execution.scoring import Batch


def make_batches(examples: Sequence[Example], batch_size: int) -> list[Batch]:
    """Batches of examples, the longest first.

    Raises:
        FulldepthError: if no token of the examples is predicted.
    """
    padded = zip(batches(examples, batch_size), grouped(examples, batch_size), strict=True)
    scored = [Batch.of(tensors, [example.document for example in group]) for tensors, group in padded]
    if not any(len(batch.targets) for batch in scored):
        raise FulldepthError("The data are empty: no token counts.")
    return scored

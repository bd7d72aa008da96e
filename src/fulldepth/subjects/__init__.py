"""A model with data prepared for it, proven on their first sequences: the common beginning of verbs that read both."""

from fulldepth.subjects.preparation import (
    IMAGES,
    open_checkpoint,
    prove,
    read_source,
    sequences_for,
    small_batch,
    tokenizer_for,
)

__all__ = ["IMAGES", "open_checkpoint", "prove", "read_source", "sequences_for", "small_batch", "tokenizer_for"]

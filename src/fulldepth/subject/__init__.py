"""One way in: a checkpoint with its data, opened and proven, for every command that runs a model."""

from fulldepth.subject.open import Subject, chosen_tokenizer, open_checkpoint, stated_depth

__all__ = ["Subject", "chosen_tokenizer", "open_checkpoint", "stated_depth"]

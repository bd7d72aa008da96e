"""Data: text, prompts with responses, labelled text and images, from files, the Hub, Python or the built-in corpus."""

from fulldepth.data.corpus import builtin_texts, train_tokenizer
from fulldepth.data.preparation import prepare
from fulldepth.data.records import Record, Source
from fulldepth.data.sequences import Batch, Sequences
from fulldepth.data.sources import open_source

__all__ = ["Batch", "Record", "Sequences", "Source", "builtin_texts", "open_source", "prepare", "train_tokenizer"]

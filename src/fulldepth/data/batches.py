"""One text as token ids with its labels, and padded batches of such texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from fulldepth.errors import FulldepthError
from fulldepth.targets import IGNORE

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Example:
    """One sequence. Tensors are `[n]` int64."""

    input_ids: Tensor
    labels: Tensor
    """The token itself where it is predicted, -100 elsewhere. Causal: unshifted (the model or `Task` shifts), -100 at
    position 0; masked: the true token at masked positions."""
    document: int = 0
    """Index of the row or document of origin, the example's cluster; a held-out file has its own numbering."""
    masked_ids: Tensor | None = None
    """`input_ids` with the mask token in place of every labelled token; None unless the task is `masked-lm`."""
    types: Tensor | None = None
    """`token_type_ids`; None if the tokenizer gives none."""
    words: Tensor | None = None
    """Index of the word that ends at each position, -1 elsewhere; None if no words are searched for."""
    class_index: int = IGNORE
    """Class of the sequence, -100 if unknown."""

    @classmethod
    def of(cls, ids: Sequence[int], start: int = 0, stop: int = 0, **entries: object) -> Example:
        """An example whose tokens `start` up to `stop` are predicted; `entries` are further fields."""
        input_ids = torch.tensor(ids, dtype=torch.int64)
        labels = torch.full_like(input_ids, IGNORE)
        labels[start:stop] = input_ids[start:stop]
        return cls(input_ids, labels, **entries)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def predicted(self) -> int:
        """Number of predicted tokens."""
        return int((self.labels != IGNORE).sum())


def batches(examples: Sequence[Example], batch_size: int, *, pad_id: int = 0) -> Iterator[dict[str, Tensor]]:
    """Right-padded batches for `model(**batch)`, the longest sequences first; the order of equal lengths is kept.

    Args:
        examples: examples to batch, each once.
        batch_size: sequences in a batch; the last may have fewer.
        pad_id: token id of padding, which must exist in the model; it is masked and has no label.

    Returns:
        `input_ids`, `attention_mask` (1, padding 0) and `labels` (padding -100), each [B, T] int64.

    Raises:
        FulldepthError: if `batch_size` is less than 1.
    """
    return (padded_batch(group, pad_id) for group in grouped(examples, batch_size))


def grouped(examples: Sequence[Example], batch_size: int) -> list[list[Example]]:
    """The examples of each batch of `batches`, in the order of its rows.

    Raises:
        FulldepthError: if `batch_size` is less than 1.
    """
    return in_batches(sorted(examples, key=len, reverse=True), batch_size)  # stable, also in reverse


def in_batches(items: Sequence[T], batch_size: int) -> list[list[T]]:
    """The items in order, in lists of `batch_size`; the last may be shorter.

    Raises:
        FulldepthError: if `batch_size` is less than 1.
    """
    if batch_size < 1:
        raise FulldepthError(f"A batch holds at least one sequence, got the batch size {batch_size}.")
    return [list(items[start : start + batch_size]) for start in range(0, len(items), batch_size)]


def padded_batch(examples: Sequence[Example], pad_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `labels`, each [B, T] int64, padded on the right to the longest example."""
    return {
        "input_ids": padded([example.input_ids for example in examples], pad_id),
        "attention_mask": padded([torch.ones_like(example.input_ids) for example in examples], 0),
        "labels": padded([example.labels for example in examples], IGNORE),
    }


def padded(rows: Sequence[Tensor], value: int) -> Tensor:
    """[B, T] from rows of at most T numbers."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def id_bytes(ids: Tensor) -> bytes:
    """Token ids as bytes, for a hash: little-endian int64 on every machine."""
    return ids.numpy().astype("<i8").tobytes()

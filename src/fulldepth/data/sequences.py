"""What a model is fed: `Sequences`, prepared once, handed out as padded `Batch`es."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fulldepth.data.masking import IGNORE
from fulldepth.errors import FulldepthError
from fulldepth.files import reading

Batching = Literal["padded", "equal", "single"]


@dataclass
class Batch:
    """`B` sequences, right padded to the longest of them, `T`."""

    inputs: dict[str, Tensor]
    """For `model(**inputs)`: `input_ids`, `attention_mask` [B, T] int64 (and `token_type_ids`), or `pixel_values`.
    Nothing is masked."""
    attention_mask: Tensor | None
    """[B, T] bool, False = padding; None for images."""
    sequence: Tensor
    """[B] int64: index of each sequence in the whole data set."""
    labels: Tensor | None = None
    """[B] int64 class, -100 where unknown; None where the data have none."""
    targets: Tensor | None = None
    """[B, T] int64, what the head should say at each position (causal: the next token; masked: the true token, given
    `masked_inputs`), -100 = nothing."""
    words: Tensor | None = None
    """[B, T] int64: index of the word whose last token is here, -1 elsewhere; None if no words are asked for."""
    token_ids: Tensor | None = None
    """[B, T] int64: the tokens, with the padding token where there is padding; None for images."""
    masked_inputs: dict[str, Tensor] | None = None
    """`inputs` with the mask token in place of every token that is a target; None unless the task is `masked-lm`."""

    def __len__(self) -> int:
        return len(self.sequence)


@dataclass
class Example:
    """One prepared text. Arrays are `[T]` int64."""

    token_ids: np.ndarray
    targets: np.ndarray | None = None
    masked_ids: np.ndarray | None = None
    """`token_ids` with the mask token in place of every target; None unless the task is `masked-lm`."""
    types: np.ndarray | None = None
    words: np.ndarray | None = None
    label: int = IGNORE


@dataclass
class Picture:
    """One prepared image: decoded when called."""

    load: Callable[[], Image.Image]
    label: int = IGNORE


@dataclass
class Sequences:
    """Everything that goes through the model, in order. `batches` hands it out."""

    name: str
    kind: str
    """Of the source: `text`, `pairs`, `labelled-text` or `images`."""
    task: str
    hash: str
    """`sha256:...` over what is prepared (tokens, masked tokens, targets, labels; pixels, processor), whatever the
    batching."""
    examples: Sequence[Any]
    collate: Callable[[Sequence[int]], Batch] = field(repr=False)
    lengths: list[int]
    """Tokens of each sequence, special tokens included; 0 for images, whose patches the model makes."""
    num_targets: int
    """Positions with a target; for classification sequences with a label."""
    num_classes: int | None = None
    """Class indices are 0..num_classes-1; None where the data have no labels."""
    class_names: tuple[str, ...] = ()
    batching: Batching = "padded"
    """What a batch may hold without changing the model's numbers: sequences of any length, padded; of `equal` length;
    or a `single` one."""
    warnings: list[str] = field(default_factory=list)
    """What was cut, dropped or not found, one plain sentence each."""
    no_targets: str | None = None
    """Why no position has a target although the task has a head that predicts tokens."""

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def masked(self) -> bool:
        """Whether batches have `masked_inputs`."""
        return self.task == "masked-lm" and self.num_targets > 0

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @property
    def equal_lengths(self) -> bool:
        """Whether all sequences have one length, so that nothing is padded."""
        return len(set(self.lengths)) == 1

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The batches of process `rank` of `world`: batch `i` belongs to rank `i % world`, whoever asks.

        Raises:
            FulldepthError: if `batch_size` is less than 1.
            ValueError: if `rank` is not one of 0..world-1.
        """
        if batch_size < 1:
            raise FulldepthError(f"A batch holds at least one sequence, got the batch size {batch_size}.")
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in 0..{world - 1}, got {rank}")
        return (self.collate(group) for group in self.groups(batch_size)[rank::world])

    def groups(self, batch_size: int) -> list[list[int]]:
        """Indices of the sequences of each batch, as `batching` allows."""
        if self.batching == "single":
            return [[index] for index in range(len(self))]
        order = range(len(self))
        if self.batching == "padded":
            return [list(order[start : start + batch_size]) for start in order[::batch_size]]
        by_length: dict[int, list[int]] = {}
        for index in order:
            by_length.setdefault(self.lengths[index], []).append(index)
        return [
            indices[start : start + batch_size]
            for indices in by_length.values()
            for start in range(0, len(indices), batch_size)
        ]


def collate_texts(examples: Sequence[Example], indices: Sequence[int], pad_id: int) -> Batch:
    """Pad the chosen examples on the right to the longest of them."""
    chosen = [examples[i] for i in indices]
    token_ids = _padded([e.token_ids for e in chosen], pad_id)
    mask = _padded([np.ones_like(e.token_ids) for e in chosen], 0)
    inputs = {"input_ids": token_ids, "attention_mask": mask}
    if types := [e.types for e in chosen if e.types is not None]:
        inputs["token_type_ids"] = _padded(types, 0)
    masked_ids = [e.masked_ids for e in chosen if e.masked_ids is not None]
    targets = [e.targets for e in chosen if e.targets is not None]
    words = [e.words for e in chosen if e.words is not None]
    return Batch(
        inputs=inputs,
        attention_mask=mask.bool(),
        sequence=torch.tensor(list(indices), dtype=torch.int64),
        labels=_labels(examples, chosen),
        targets=_padded(targets, IGNORE) if targets else None,
        words=_padded(words, -1) if words else None,
        token_ids=token_ids,
        masked_inputs={**inputs, "input_ids": _padded(masked_ids, pad_id)} if masked_ids else None,
    )


def collate_images(examples: Sequence[Picture], indices: Sequence[int], processor: Any) -> Batch:
    """Decode the chosen images and run the processor on them.

    Raises:
        FulldepthError: if an image cannot be decoded, or the processor (anyone's) fails or gives no numbers.
    """
    chosen = [examples[i] for i in indices]
    images = [example.load() for example in chosen]
    with reading(f"images with a {type(processor).__name__}"):
        processed = processor(images=images, return_tensors="pt")
        inputs = {name: value for name, value in processed.items() if isinstance(value, Tensor)}
    if not all(value.isfinite().all() for value in inputs.values()):
        raise FulldepthError(f"The {type(processor).__name__} of the model gives pixels that are not finite.")
    return Batch(
        inputs=inputs,
        attention_mask=None,
        sequence=torch.tensor(list(indices), dtype=torch.int64),
        labels=_labels(examples, chosen),
    )


def _labels(examples: Sequence[Any], chosen: Sequence[Any]) -> Tensor | None:
    if all(e.label == IGNORE for e in examples):
        return None
    return torch.tensor([e.label for e in chosen], dtype=torch.int64)


def _padded(rows: Sequence[np.ndarray], value: int) -> Tensor:
    """[B, T] int64 from rows of at most T numbers."""
    padded = torch.full((len(rows), max(map(len, rows))), value, dtype=torch.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = torch.from_numpy(row)
    return padded

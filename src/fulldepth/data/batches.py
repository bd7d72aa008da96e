"""Sequences as tensors (`Example`), prepared data (`Sequences`), and padded batches of them (`Batch`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import reading
from fulldepth.core.targets import IGNORE
from fulldepth.core.uncertainty import deal, independent
from fulldepth.data.drawing import dominance
from fulldepth.data.records import ImageRecord

T = TypeVar("T")
Batching = Literal["padded", "equal", "single"]


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
    encoder_ids: Tensor | None = None
    """What the encoder of an encoder-decoder reads, whose decoder reads the example; else None."""
    class_index: int = IGNORE
    """Class of the sequence, -100 if unknown."""
    cut_from: int | None = None
    """Hash of the document that a window of text was cut from; None if the example is no part of a longer text."""

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


def grouped(examples: Sequence[Example], batch_size: int, apart: int | None = None) -> list[list[Example]]:
    """The examples of each batch of `batches`, in the order of its rows.

    Args:
        examples: examples to batch, each once.
        batch_size: sequences in a batch; the last may have fewer.
        apart: examples of more tokens than this are in other batches than the rest; None = no such length.

    Raises:
        FulldepthError: if `batch_size` is less than 1.
    """
    ordered = sorted(examples, key=len, reverse=True)  # stable, also in reverse
    longer = 0 if apart is None else sum(len(example) > apart for example in ordered)
    return [*in_batches(ordered[:longer], batch_size), *in_batches(ordered[longer:], batch_size)]


def in_batches(items: Sequence[T], batch_size: int) -> list[list[T]]:
    """The items in order, in lists of `batch_size`; the last may be shorter.

    Raises:
        FulldepthError: if `batch_size` is less than 1.
    """
    if batch_size < 1:
        raise FulldepthError(f"A batch holds at least one sequence, got the batch size {batch_size}.")
    return [list(items[start : start + batch_size]) for start in range(0, len(items), batch_size)]


def batches_of_equals(keys: Sequence[Hashable], batch_size: int) -> list[list[int]]:
    """Indices of the items of each batch, which have equal keys; the order of such items is kept.

    Raises:
        FulldepthError: if `batch_size` is less than 1.
    """
    together: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        together.setdefault(key, []).append(index)
    return [group for indices in together.values() for group in in_batches(indices, batch_size)]


def padded_batch(examples: Sequence[Example], pad_id: int) -> dict[str, Tensor]:
    """`input_ids`, `attention_mask` and `labels`, each [B, T] int64, padded on the right to the longest example."""
    inputs = padded_inputs([example.input_ids for example in examples], pad_id)
    return {**inputs, "labels": padded([example.labels for example in examples], IGNORE)}


def padded_inputs(rows: Sequence[Tensor], pad_id: int) -> dict[str, Tensor]:
    """`input_ids` and `attention_mask`, each [B, T] int64, from token ids."""
    return {"input_ids": padded(rows, pad_id), "attention_mask": padded([torch.ones_like(row) for row in rows], 0)}


def padded(rows: Sequence[Tensor], value: int) -> Tensor:
    """[B, T] from rows of at most T numbers."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=value)


def id_bytes(ids: Tensor) -> bytes:
    """Token ids as bytes, for a hash: little-endian int64 on every machine."""
    return ids.numpy().astype("<i8").tobytes()


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
    """[B, T] int64, the head's target at each position (causal: the next token; masked: the true token, given
    `masked_inputs`), -100 = none."""
    words: Tensor | None = None
    """[B, T] int64: index of the word that ends at each position, -1 elsewhere; None if no words are searched for."""
    token_ids: Tensor | None = None
    """[B, T] int64: the tokens, with the padding token where there is padding; None for images."""
    objects: list[dict[str, Tensor]] | None = None
    """For each image its `class_labels` [n] int64, `boxes` [n, 4] (centre x, centre y, width, height, as shares of the
    image) and `crowd` [n] bool; None for data without boxes."""
    masked_inputs: dict[str, Tensor] | None = None
    """`inputs` with the mask token in place of every token that is a target; None unless the task is `masked-lm`."""

    def __len__(self) -> int:
        return len(self.sequence)

    def mask(self, positions: int, device: torch.device | str = "cpu") -> Tensor:
        """[B, positions] bool, False = padding; images have none.

        Raises:
            FulldepthError: if the model works on another number of positions than the batch has tokens.
        """
        mask = self.attention_mask
        if mask is None:
            return torch.ones(len(self), positions, dtype=torch.bool, device=device)
        if mask.shape[1] != positions:
            raise FulldepthError(
                f"The model's layers work on {positions} positions where a batch has sequences of {mask.shape[1]} "
                "tokens, because it pads or rearranges sequences of some lengths (Longformer: to whole windows). Give "
                "sequences of one length that it leaves alone: text, and sequence_length."
            )
        return mask.to(device)


@dataclass
class Sequences:
    """Sequences prepared for a model, in order."""

    name: str
    kind: str
    """Kind of the source: `text`, `pairs`, `chats`, `labelled-text`, `images` or `objects`."""
    task: str
    hash: str
    """`sha256:...` over tokens, masked tokens, targets and labels, or pixels and processor; independent of batching."""
    examples: Sequence[Any]
    """`Example`s, or `ImageRecord`s."""
    collate: Callable[[Sequence[int]], Batch] = field(repr=False)
    lengths: list[int]
    """Tokens of each sequence, special tokens included; 0 for images, whose patches the model makes."""
    num_targets: int
    """Positions with a target; for classification sequences with a label, for detection objects other than crowds."""
    num_classes: int | None = None
    """Class indices are 0..num_classes-1; None where the data have no labels."""
    class_names: tuple[str, ...] = ()
    batching: Batching = "padded"
    """What a batch may hold without changing the model's numbers: sequences of any length, padded; of `equal` length;
    or a `single` one. Images of a batch have one shape, too."""
    shapes: Sequence[Hashable] = field(default=(), repr=False)
    """Shape of each image after processing (`image_shapes`): padding it to another one changes a detector's numbers,
    because convolutions read the padding. Empty if all have one shape, and for texts."""
    warnings: list[str] = field(default_factory=list)
    """One sentence for each kind of data that was cut, dropped or not found."""
    text_hash: str | None = None
    """`sha256:...` over the texts of the source, whatever the tokenizer; None for images."""
    no_targets: str | None = None
    """Reason why no position has a target although the task's head predicts tokens; None otherwise."""
    clusters: list[int] = field(default_factory=list, repr=False)
    """Identity of each sequence's unit of independence (`fulldepth.core.uncertainty`): its document, row or image;
    empty = each sequence is its own."""
    unit: str = "sequence"
    """What a cluster is, for sentences on errors: `document`, `row`, `image`, `block of 4,096 tokens`, ..."""
    too_few_blocks: str | None = None
    """Reason why windows of these documents allow no standard error, whatever counts; None if they do."""
    documents: int | None = None
    """Number of files, novels or rows that the sequences come from; None = one for each cluster."""
    contents: frozenset[int] = field(default=frozenset(), repr=False)
    """`DataRecord.content` of every document or row with tokens in a sequence; empty = not known."""
    weights: Mapping[str, Sequence[int]] = field(default_factory=dict, repr=False)
    """What the numbers of a measurement are means over (`tokens`, `predicted tokens`) -> how many of these each
    sequence holds; empty = all tokens."""

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def masked(self) -> bool:
        """True if batches have `masked_inputs`."""
        return self.task == "masked-lm" and self.num_targets > 0

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.lengths)

    @property
    def equal_lengths(self) -> bool:
        """True if all sequences have one length, so that nothing is padded."""
        return len(set(self.lengths)) == 1

    @property
    def targets(self) -> list[int]:
        """Predicted tokens of each sequence; of classification, 1 for a sequence with a label."""
        if self.task.endswith("-classification"):
            return [int(example.class_index != IGNORE) for example in self.examples]
        return [example.predicted if isinstance(example, Example) else 0 for example in self.examples]

    @property
    def independent(self) -> float:
        """The number of groups of clusters for Student's t (`uncertainty.independent`).

        If some numbers are means over all tokens and others over the predicted ones (`weights`), it is the smaller of
        the two: intervals are then wide enough for both.
        """
        group = deal(self.clusters or range(len(self)))
        return min(independent(np.bincount(group, weights)) for weights in self._weights.values())

    @cached_property
    def no_error(self) -> str | None:
        """Reason why no standard error can be stated for these data; None if it can.

        One cluster with too many of the tokens, or of the predicted ones (`weights`), is such a reason.
        """
        clusters = self.clusters or range(len(self))
        reasons = (dominance(clusters, weights, self.unit, noun) for noun, weights in self._weights.items())
        return self.too_few_blocks or next(filter(None, reasons), None)

    @property
    def _weights(self) -> Mapping[str, Sequence[int]]:
        """`weights`, or all tokens of each sequence; an image counts once."""
        return self.weights or {"tokens": [max(1, length) for length in self.lengths]}

    def describe(self) -> dict[str, Any]:
        """The entry `data` of `results.json`."""
        return {
            "name": self.name,
            "kind": self.kind,
            "hash": self.hash,
            "text_hash": self.text_hash,
            "sequences": len(self),
            "tokens": sum(self.lengths),
            "num_classes": self.num_classes,
            "documents": self.documents or len(set(self.clusters)) or len(self),
            "clusters": len(set(self.clusters)) or len(self),
            "independent": round(self.independent, 4),
            "unit": self.unit,
            "no_error": self.no_error,
        }

    def batches(self, batch_size: int, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """The batches of process `rank` of `world`: batch `i` belongs to rank `i % world`.

        Raises:
            FulldepthError: if `batch_size` is less than 1.
            ValueError: if `rank` is not one of 0..world-1.
        """
        if not 0 <= rank < world:
            raise ValueError(f"rank must be in 0..{world - 1}, got {rank}")
        return (self.collate(group) for group in self.groups(batch_size)[rank::world])

    def groups(self, batch_size: int, among: Sequence[int] | None = None) -> list[list[int]]:
        """Indices of the sequences of each batch, as `batching` and the shapes of images allow.

        Args:
            batch_size: sequences in a batch, at most.
            among: indices of the sequences to batch; None = all.

        Raises:
            FulldepthError: if `batch_size` is less than 1.
        """
        indices = range(len(self)) if among is None else among
        kinds = [{"padded": 0, "equal": self.lengths[i], "single": i}[self.batching] for i in indices]
        shapes = [self.shapes[i] if self.shapes else () for i in indices]
        alike = list(zip(shapes, kinds, strict=True))
        return [[indices[place] for place in group] for group in batches_of_equals(alike, batch_size)]


def collate_texts(
    examples: Sequence[Example],
    indices: Sequence[int],
    *,
    pad_id: int,
    targets: Callable[[Tensor], Tensor] | None = None,
) -> Batch:
    """Pad the chosen examples on the right to the longest of them.

    Args:
        examples: all examples.
        indices: indices of the chosen examples.
        pad_id: token id of padding.
        targets: what the head predicts at each position, from the labels `[B, T]`; None if it predicts no tokens.
    """
    rows = [examples[i] for i in indices]
    inputs = padded_batch(rows, pad_id)
    labels = inputs.pop("labels")
    token_ids = inputs["input_ids"]
    mask = inputs["attention_mask"]
    if encoder_ids := [example.encoder_ids for example in rows if example.encoder_ids is not None]:
        inputs = {f"decoder_{name}": ids for name, ids in inputs.items()} | padded_inputs(encoder_ids, pad_id)
    if types := [example.types for example in rows if example.types is not None]:
        inputs["token_type_ids"] = padded(types, 0)
    masked_ids = [example.masked_ids for example in rows if example.masked_ids is not None]
    words = [example.words for example in rows if example.words is not None]
    return Batch(
        inputs=inputs,
        attention_mask=mask.bool(),
        sequence=torch.tensor(list(indices), dtype=torch.int64),
        labels=_classes(examples, indices),
        targets=None if targets is None else targets(labels),
        words=padded(words, -1) if words else None,
        token_ids=token_ids,
        masked_inputs={**inputs, "input_ids": padded(masked_ids, pad_id)} if masked_ids else None,
    )


def collate_images(examples: Sequence[ImageRecord], indices: Sequence[int], processor: Any) -> Batch:
    """Decode the chosen images and run the (untrusted) processor on them; a `FulldepthError` names what fails."""
    records = [examples[i] for i in indices]
    inputs = _processed([example.image() for example in records], processor)
    if not all(value.isfinite().all() for value in inputs.values()):
        raise FulldepthError(f"The {type(processor).__name__} of the model gives pixels that are not finite.")
    objects = [
        {
            "class_labels": torch.tensor(image_objects.classes, dtype=torch.int64),
            "boxes": torch.tensor(image_objects.relative, dtype=torch.float32).reshape(-1, 4),
            "crowd": torch.tensor(image_objects.crowd, dtype=torch.bool),
        }
        for image_objects in (example.objects for example in records)
        if image_objects is not None
    ]
    return Batch(
        inputs=inputs,
        attention_mask=None,
        sequence=torch.tensor(list(indices), dtype=torch.int64),
        labels=_classes(examples, indices),
        objects=objects or None,
    )


def image_shapes(records: Sequence[ImageRecord], sizes: Sequence[tuple[int, int]], processor: Any) -> list[Hashable]:
    """Shape of each image after processing. Images of one shape are not padded in a batch.

    A shape follows from the size of the stored image. If the smallest, largest, widest and tallest one have one shape,
    as with every processor that makes squares, the others are not processed.

    Args:
        records: the images.
        sizes: width and height of each, in pixels.
        processor: the (untrusted) image processor.

    Returns:
        A key for each image, equal for equal shapes; empty if all have one shape.

    Raises:
        FulldepthError: if the processor fails on one of the images.
    """
    places = {size: index for index, size in enumerate(sizes)}
    keys: dict[tuple[int, int], Hashable] = {}

    def shape(size: tuple[int, int]) -> Hashable:
        if size not in keys:
            inputs = _processed([records[places[size]].image()], processor)
            keys[size] = tuple((name, tuple(value.shape)) for name, value in inputs.items())
        return keys[size]

    def area(size: tuple[int, int]) -> int:
        return size[0] * size[1]

    def ratio(size: tuple[int, int]) -> float:
        return size[0] / size[1]

    extremes = {extreme(places, key=key) for extreme in (min, max) for key in (area, ratio)} if len(places) > 1 else ()
    return [] if len({shape(size) for size in extremes}) < 2 else [shape(size) for size in sizes]


def _processed(images: Sequence[Any], processor: Any) -> dict[str, Tensor]:
    """The tensors that a processor makes from images; a `FulldepthError` names the processor if it fails."""
    with reading(f"images with a {type(processor).__name__}"):
        processed = processor(images=list(images), return_tensors="pt")
        return {name: value for name, value in processed.items() if isinstance(value, Tensor)}


def _classes(examples: Sequence[Any], indices: Sequence[int]) -> Tensor | None:
    """[B] classes of the chosen examples; None if no example has one."""
    if all(example.class_index == IGNORE for example in examples):
        return None
    return torch.tensor([examples[i].class_index for i in indices], dtype=torch.int64)

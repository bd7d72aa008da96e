"""Labels in a model's numbering, and rows to train on: checks, a held-out share, batches."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.uncertainty import sample
from fulldepth.data.batches import collate_images, collate_texts
from fulldepth.data.columns import LABEL_COLUMNS
from fulldepth.data.order import ShuffledSampler
from fulldepth.data.records import DataRecord, ImageRecord, TextRecord
from fulldepth.data.sources import SKIP, Source, identities

MOST_READ = 200_000
"""Images up to which all are decoded before training; of more, damaged ones are found when they are read."""
MOST_NAMED = 3
"""Rows that a warning names."""
KINDS = {"image-classification": "images", "text-classification": "labelled-text", "detection": "objects"}
"""Task -> kind of its sources."""


def number_labels(
    source: Source, classes: Sequence[str], *, required: bool = False, read: bool = False, skip_bad: bool = False
) -> Source:
    """The rows of a source with their labels, or the classes of their boxes, in the numbering of some classes.

    A class of the data is the one spelled alike, else one that differs in case only. If none has a name among the
    classes, names that are numbers of classes (folders `0` to `9`) are matched by these, else all by their order, with
    a warning; a source with `required` labels is refused then.

    Args:
        source: from `open_source`.
        classes: names of the classes; without any, labels stay as they are.
        required: whether every row needs a label.
        read: whether every image is decoded.
        skip_bad: leave rows out that have an unknown label, no text or a damaged image, and boxes of unknown classes,
            and count them in the warnings.

    Returns:
        The rows, each with its `digest`.

    Raises:
        FulldepthError: if no row is valid, and without `skip_bad` for the first bad row, with its file or line.
    """
    exact = {name: index for index, name in enumerate(classes)}
    folded = {name.casefold(): index for index, name in enumerate(classes)}
    by_name: list[int | None] = [exact.get(name, folded.get(name.casefold())) for name in source.class_names]
    boxes = source.kind == "objects"
    warnings = list(source.warnings)
    bad = list[str]()
    named = any(number is not None for number in by_name) or (required and bool(by_name) and not boxes)
    numbers: Sequence[int | None] = by_name if named else list(range(len(classes)))
    if classes and source.class_names and not named:
        numbers, named, how = _match_other_names(source, len(classes), listed(classes))
        ours = listed(source.class_names)
        warnings.append(f"The data's classes ({ours}) are not the model's ({listed(classes)}); they are matched {how}.")
    if boxes and classes and not named and len(source.class_names) > len(classes):
        raise FulldepthError(
            f"{source.name} has {len(source.class_names)} classes ({listed(source.class_names)}), the model has "
            f"{len(classes)} classes: {listed(classes)}."
        )
    records = []
    stranger = f"none of the {len(classes)} classes ({listed(classes)})."
    for record in source.records:
        try:
            label = record.label
            if label is not None and classes:
                label = numbers[label] if 0 <= label < len(numbers) else None
                if label is None:
                    names = source.class_names
                    class_index = record.class_index
                    stated_name = names[class_index] if class_index < len(names) else class_index
                    raise FulldepthError(f"{record.where}: its label ({one_line(stated_name, 60)}) is {stranger}")
            elif label is None and required and not boxes:
                raise FulldepthError(f"{record.where} has no label.")
            numbered = replace(record, label=label, digest=_digest(record, read))
            if isinstance(numbered, ImageRecord) and numbered.objects is not None and classes:
                unknown = [number for number in numbered.objects.classes if numbers[number] is None]
                if unknown:
                    stated_name = one_line(source.class_names[unknown[0]], 60)
                    bad += [f"{record.where}: an object is a {stated_name}, which is {stranger}"] * len(unknown)
                    if not skip_bad:
                        raise FulldepthError(bad[0])
                numbered = replace(numbered, objects=numbered.objects.numbered(numbers))
            records.append(numbered)
        except FulldepthError as error:
            if not skip_bad:
                raise FulldepthError(f"{error} {SKIP}") from error
            bad.append(str(error))
    if not records:
        raise FulldepthError(f"{source.name} has no usable row. The first: {bad[0]}")
    if bad:
        singular, plural = ("row or object is", "rows or objects are") if boxes else ("row is", "rows are")
        what = singular if len(bad) == 1 else plural
        warnings.append(f"{len(bad)} bad {what} left out of {source.name}: {one_line(' '.join(bad[:MOST_NAMED]), 600)}")
    names = tuple(classes) if classes and (named or required or boxes) else source.class_names
    return replace(source, records=records, class_names=names, warnings=tuple(warnings))


def _digest(record: DataRecord, read: bool) -> bytes:
    """SHA-256 of a row's content: of an image that is read, or of its place; of its texts."""
    if isinstance(record, ImageRecord):
        if read:
            record.image()  # finds damaged files before the model runs
        return hashlib.sha256(record.image.content() if read else record.where.encode()).digest()
    assert isinstance(record, TextRecord)
    if record.is_blank:
        raise FulldepthError(f"{record.where} has no text.")
    sha = hashlib.sha256()
    for text in (record.text, record.second):
        part = (text or "").encode("utf-8", "surrogatepass")
        sha.update(len(part).to_bytes(8, "little") + part)
    return sha.digest()


def usable_rows(
    source: Source, classes: Sequence[str] | None = None, *, most: int | None, seed: int = 0, skip_bad: bool = False
) -> Source:
    """The rows of a source that a model can be measured on, which need no labels; other kinds of data as they are.

    Args:
        source: from `open_source`.
        classes: names of a classifier's or detector's classes, see `number_labels`; None = labels stay as they are.
        most: number of rows to read, None = all. Of images, with `skip_bad`, this many are sampled and decoded, and
            bad ones are not replaced.
        seed: of the sample, which is that of `prepare`.
        skip_bad: leave bad rows out. Otherwise damaged images are found by `prepare`.
    """
    pictures = source.kind in ("images", "objects")
    if not pictures and (source.kind != "labelled-text" or classes is None):
        return source
    if pictures and skip_bad:
        source = source.select(sample(identities(source), most, seed))
    return number_labels(source, classes or (), read=pictures and skip_bad, skip_bad=skip_bad)


def _match_other_names(source: Source, count: int, classes: str) -> tuple[list[int], bool, str]:
    """The model's class for each class of the data, none of whose names it has; whether they have the model's names
    then; and how they were matched.
    """
    names = source.class_names
    stated = [int(name) for name in names if name.isascii() and name.isdecimal() and len(name) < 20]
    are_numbers = len(set(stated)) == len(names)
    if are_numbers and max(stated) < count:
        return stated, True, "by these numbers"
    if len(names) != count and source.kind != "objects":
        raise FulldepthError(
            f"{source.name} has {len(names)} classes ({listed(names)}), and the model {count} of other names "
            f"({classes}), so it is not known which is which. Write the model's names or numbers as labels."
        )
    if are_numbers and len(names) == count:  # such as 1 to 10, of which text sorts 10 before 2
        return [sorted(stated).index(number) for number in stated], True, "by their order"
    return list(range(count)), False, "by their order"


def listed(names: Iterable[str]) -> str:
    """The first five of some names, for a message."""
    first = list(islice(names, 6))
    return one_line(", ".join(first[:5]) + (", ..." if len(first) > 5 else ""), 200)


def name_classes(source: Source, declared: int | None = None) -> tuple[str, ...]:
    """Names of the classes of a training source: its own, else `LABEL_0`, `LABEL_1`, ...

    Args:
        source: labelled.
        declared: number of classes; None = as many as the source names, or as its highest label needs.

    Raises:
        FulldepthError: if there are fewer than two classes, or more are named than declared.
    """
    names = source.class_names
    labels = {record.label for record in source.records if record.label is not None}
    count = declared or len(names) or max(labels, default=-1) + 1
    if len(names) > count:
        raise FulldepthError(f"{source.name} names {len(names)} classes; model.num_labels is {count}.")
    if not labels:
        raise FulldepthError(
            f"{source.name} has no labels. A classifier needs them: texts in a .tsv, .jsonl or .parquet file with a "
            f"column {' or '.join(LABEL_COLUMNS)}, images in a folder for each class."
        )
    if count < 2 or len(labels) < 2:
        only = min(labels)
        stated_name = one_line(names[only] if only < len(names) else only, 60)
        raise FulldepthError(
            f"{source.name} has the class {stated_name} only. A classifier needs at least two classes."
        )
    return (*names, *(f"LABEL_{number}" for number in range(len(names), count)))


def check_rows(source: Source, task: str, classes: Sequence[str], *, skip_bad: bool = False) -> Source:
    """The rows of a source with a valid label, or boxes, and content.

    Up to `MOST_READ` images, and with `skip_bad` all, are decoded.

    Args:
        source: from `open_source`.
        task: `image-classification`, `text-classification` or `detection`.
        classes: names of the classes, see `number_labels`.
        skip_bad: leave bad rows out and count them in the warnings.

    Raises:
        FulldepthError: for data of another kind, and as `number_labels`.
    """
    if source.kind != KINDS[task]:
        raise FulldepthError(f"task: {task} trains on {KINDS[task]}; {source.name} holds {source.kind}.")
    read = skip_bad or len(source) <= MOST_READ
    numbered = number_labels(source, classes, required=True, read=read, skip_bad=skip_bad)
    return replace(numbered, class_names=tuple(classes))


def held_out(source: Source, most: int, seed: int) -> np.ndarray:
    """[rows] bool: rows held out for validation, at most `most`, a uniform sample of the contents.

    Rows of equal content are in the same part, so none is in both. Every class keeps a row in the other part. The
    choice depends on content and seed, not on the rows' order.

    Args:
        source: all rows, from `check_rows`.
        most: rows to hold out.
        seed: of the choice.

    Raises:
        FulldepthError: if all rows are equal.
    """
    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for index, record in enumerate(source.records):
        groups[record.digest].append(index)
    labels = [record.class_index for record in source.records]
    remaining = Counter(labels)
    is_held = np.zeros(len(labels), bool)
    key = seed.to_bytes(8, "little", signed=True)
    for digest in sorted(groups, key=lambda digest: hashlib.sha256(key + digest).digest()):
        group = groups[digest]
        counts_in_group = Counter(labels[i] for i in group)
        if is_held.sum() + len(group) <= most and all(
            remaining[label] > count for label, count in counts_in_group.items()
        ):
            is_held[group] = True
            remaining -= counts_in_group
    if not is_held.any():
        reason = "it has one distinct image" if source.kind == "objects" else "every class has one distinct row"
        raise FulldepthError(
            f"No row of {source.name} can be held out for validation: {reason} only. Give "
            "more rows, or others to validate on (data.validation)."
        )
    return is_held


class LabelledRows:
    """Examples as a data set whose keys are `epoch * len + index`, so that random changes can depend on the epoch.

    Args:
        examples: all rows.
        change: changes an example, given its key; None = they stay as they are.
    """

    def __init__(self, examples: Sequence[Any], change: Callable[[Any, int], Any] | None = None) -> None:
        self.examples = examples
        self.change = change

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, key: int) -> Any:
        example = self.examples[key % len(self.examples)]
        return example if self.change is None else self.change(example, key)


@dataclass(frozen=True)
class Collator:
    """Batches of examples, for `model(**batch)`."""

    pad_id: int | None = None
    """Of texts."""
    processor: Any = None
    """Of images."""
    dtype: torch.dtype = torch.float32
    """Of pixel values."""

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        """`pixel_values`, or `input_ids` with `attention_mask`; and `labels: [B]`, or those of `Batch.objects`."""
        everything = range(len(examples))
        if self.processor is None:
            batch = collate_texts(examples, everything, pad_id=self.pad_id or 0)
        else:
            batch = collate_images(examples, everything, processor=self.processor)
        labels = batch.labels if batch.objects is None else batch.objects
        assert labels is not None
        inputs = {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in batch.inputs.items()}
        return {**inputs, "labels": labels}


class EpochSampler(ShuffledSampler):
    """Yields the keys of `LabelledRows`, in the order of `ShuffledSampler`."""

    def __iter__(self) -> Iterator[int]:
        first = self.passes * self.length  # the next line counts the pass
        numbered = enumerate(super().__iter__(), first)
        return (position // self.size * self.size + index for position, index in numbered)

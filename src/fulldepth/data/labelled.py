"""Labels in a model's numbering, balanced samples, and rows to train on: checks, a held-out share, batches."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from fulldepth.data.batches import Example
from fulldepth.data.coco import Objects
from fulldepth.data.columns import LABEL_COLUMNS
from fulldepth.data.images import image_content
from fulldepth.data.sequences import Batch, Picture, collate_images, collate_texts
from fulldepth.data.sources import SKIP, Record, Source, identities
from fulldepth.errors import FulldepthError, one_line
from fulldepth.targets import IGNORE
from fulldepth.uncertainty import distinct, ranks, sample

MOST_READ = 200_000
"""Images up to which all are decoded before training; of more, damaged ones are found when they are read."""
MOST_NAMED = 3
"""Rows that a warning names."""
KINDS = {"image-classification": "images", "text-classification": "labelled-text", "detection": "objects"}
"""Task -> kind of its sources."""


class Labels(NamedTuple):
    """Labels of all records: class indices (-100 = none), number of classes (None = no labels), names, warnings."""

    ids: list[int]
    num_classes: int | None
    class_names: tuple[str, ...]
    warnings: list[str]


def numbering(classes: Mapping[int, str]) -> Callable[[str], int | None]:
    """The class of a name: the one spelled alike, else one that differs in case only, else None.

    Args:
        classes: class -> name.
    """
    exact = {name: index for index, name in classes.items()}
    folded = {name.casefold(): index for index, name in classes.items()}
    return lambda name: exact.get(name, folded.get(name.casefold()))


def align_labels(source: Source, task: str, label2id: Mapping[str, int] | None) -> Labels:
    """The labels of all records; `FulldepthError` if a classifier has fewer classes than the data.

    If all names occur in `label2id`, ignoring case where a name does not occur as it is written, they are numbered as
    there; otherwise labels keep their numbers.
    """
    raw, names, warnings = [record.label for record in source.records], source.class_names, []
    model = {int(index): name for name, index in (label2id or {}).items()}
    classifier = task.endswith("-classification") and bool(model)
    number_of = numbering(model)
    to_id = [index for name in names if (index := number_of(name)) is not None]
    if names and len(to_id) == len(names):
        raw = [None if label is None else to_id[label] for label in raw]
        names = tuple(model.get(index, str(index)) for index in range(max(model) + 1))
    elif names and classifier and not all(name.startswith("LABEL_") for name in model.values()):
        warnings = [
            f"The data's classes ({_listed(names)}) are not the model's ({_listed(model.values())}); taken in order."
        ]
    present = [label for label in raw if label is not None]
    if not present:
        return Labels([IGNORE] * len(raw), None, (), warnings)
    if classifier and max(present) > max(model):
        where = source.records[raw.index(max(present))].where
        raise FulldepthError(
            f"{where}: {source.name} has labels up to {max(present)}, the model has {len(model)} classes: "
            f"{_listed(model.values())}."
        )
    ids = [IGNORE if label is None else label for label in raw]
    return Labels(ids, max(len(names), max(present) + 1), names, warnings)


def align_objects(
    source: Source, label2id: Mapping[str, int] | None, *, skip_bad: bool = False
) -> tuple[list[Objects | None], Labels]:
    """The objects of all records in the model's numbering of classes, and the classes.

    If a class of the data has the name of one of the model's, classes follow the names, and objects of the others are
    unknown; if none has, they are taken in order, with a warning.

    Args:
        source: from `open_source`.
        label2id: the model's classes.
        skip_bad: leave unknown objects out, and count them in the warnings.

    Raises:
        FulldepthError: without `skip_bad` for the first unknown object; if the data have more classes than the model.
    """
    names, model = source.class_names, {int(index): name for name, index in (label2id or {}).items()}
    number_of = numbering(model)
    numbers: list[int | None] = [number_of(name) for name in names]
    if any(index is not None for index in numbers):
        names, warnings = tuple(model.get(index, str(index)) for index in range(max(model) + 1)), []
    else:
        classes = [Record(label=index, where=f"category {name}") for index, name in enumerate(names)]
        found = align_labels(replace(source, records=classes), "detection-classification", label2id)
        numbers, names, warnings = [*found.ids], found.class_names, found.warnings
    unknown = [
        (record, index)
        for record in source.records
        for index in (record.objects.classes if record.objects is not None else ())
        if numbers[index] is None
    ]
    if unknown:
        record, index = unknown[0]
        first = (
            f"{record.where}: an object is a {one_line(source.class_names[index], 60)}, which is none of the "
            f"{len(model)} classes ({_listed(model.values())})."
        )
        if not skip_bad:
            raise FulldepthError(f"{first} --skip-bad leaves such objects out and counts them.")
        count = f"{len(unknown)} object{' is' if len(unknown) == 1 else 's are'}"
        warnings = [*warnings, f"{count} left out of {source.name}. The first: {first}"]
    aligned = [None if record.objects is None else record.objects.numbered(numbers) for record in source.records]
    return aligned, Labels([IGNORE] * len(aligned), None, names, warnings)


def _listed(names: Iterable[str]) -> str:
    """The first five of some names, for a message."""
    first = list(islice(names, 6))
    return one_line(", ".join(first[:5]) + (", ..." if len(first) > 5 else ""), 200)


def balanced_sample(labels: Sequence[int], identities: Sequence[int], limit: int, seed: int) -> list[int]:
    """Indices, ascending, of at most `limit` items: all if there are no more, else a seeded sample of classes in turn.

    A mean over it is a mean over classes.
    """
    if len(labels) <= limit:
        return list(range(len(labels)))
    shuffled = ranks(distinct(identities), seed).argsort(kind="stable").tolist()
    drawn: Counter[int] = Counter()
    turn = {}
    for index in shuffled:
        turn[index] = drawn[labels[index]]
        drawn[labels[index]] += 1
    return sorted(sorted(shuffled, key=turn.__getitem__)[:limit])  # stable: within a turn, the shuffled order


class Rows(NamedTuple):
    """Checked rows of one source, their labels in the numbering of the classes."""

    source: Source
    digests: list[bytes]
    """Of the content of each row, without its label; equal texts or images have equal ones."""
    warnings: list[str]

    @property
    def labels(self) -> list[int]:
        """The class of each row; 0 where rows have boxes in place of a class."""
        return [record.label or 0 for record in self.source.records]

    def select(self, indices: Sequence[int] | np.ndarray) -> Rows:
        """The rows of these indices, without the warnings."""
        source = replace(self.source, records=[self.source.records[i] for i in indices])
        return Rows(source, [self.digests[i] for i in indices], [])


def name_classes(source: Source, declared: int | None = None) -> tuple[str, ...]:
    """Names of the classes of a training source: its own, else `LABEL_0`, `LABEL_1`, ...

    Args:
        source: labelled.
        declared: number of classes; None = as many as the source names, or as its highest label needs.

    Raises:
        FulldepthError: if there are fewer than two classes, or more are named than declared.
    """
    names, labels = source.class_names, {record.label for record in source.records} - {None}
    count = declared or len(names) or max((label + 1 for label in labels if label is not None), default=0)
    if len(names) > count:
        raise FulldepthError(f"{source.name} names {len(names)} classes; model.num_labels is {count}.")
    if not labels:
        raise FulldepthError(
            f"{source.name} has no labels. A classifier needs them: texts in a .tsv, .jsonl or .parquet file with a "
            f"column {' or '.join(LABEL_COLUMNS)}, images in a folder for each class."
        )
    if count < 2 or len(labels) < 2:
        found = _shown(names, min(labels, key=str))
        raise FulldepthError(f"{source.name} has the class {found} only. A classifier needs at least two classes.")
    return (*names, *(f"LABEL_{number}" for number in range(len(names), count)))


def check_kind(source: Source, task: str) -> None:
    """Refuse a source of another kind than the task trains on."""
    if source.kind != KINDS[task]:
        raise FulldepthError(f"task: {task} trains on {KINDS[task]}; {source.name} holds {source.kind}.")


def check_rows(
    source: Source, task: str, classes: Sequence[str], *, skip_bad: bool = False, read: bool | None = None
) -> Rows:
    """The rows of a source with a valid label, or boxes, and content.

    Args:
        source: from `open_source`.
        task: `image-classification`, `text-classification` or `detection`.
        classes: names of the classes. Labels that have names are numbered as here, other labels are indices.
        skip_bad: leave rows out that have no label, no text or a damaged image, and count them in the warnings.
        read: whether every image is decoded; None = up to `MOST_READ` images, and always with `skip_bad`.

    Raises:
        FulldepthError: for data of another kind, and without `skip_bad` for the first bad row, with its file or line.
    """
    check_kind(source, task)
    read = (skip_bad or len(source) <= MOST_READ) if read is None else read
    warnings: list[str] = []
    if source.kind == "objects":
        aligned, labels = align_objects(source, {name: i for i, name in enumerate(classes)}, skip_bad=skip_bad)
        warnings = [*source.warnings, *labels.warnings]
        records = [replace(record, objects=each) for record, each in zip(source.records, aligned, strict=True)]
        source = replace(source, records=records)
    numbers = _numbers(source, classes)

    def label(record: Record) -> int | None:
        if source.kind == "objects":
            return None
        if record.label is None:
            raise FulldepthError(f"{record.where} has no label.")
        return _number(record, source.class_names, numbers, classes)

    records, digests, bad = _checked(source, label, read=read, skip_bad=skip_bad)
    rows = replace(source, records=records, class_names=tuple(classes))
    return Rows(rows, digests, [*warnings, *_summary(source.name, bad)])


def usable_rows(
    source: Source, classes: Sequence[str] | None = None, *, most: int | None, seed: int = 0, skip_bad: bool = False
) -> Source:
    """The rows of a source that a model can be measured on, which need no labels; other kinds of data as they are.

    Args:
        source: from `open_source`.
        classes: names of a classifier's classes; None = neither labels nor texts are checked. If a class of the source
            has one of these names, its labels are numbered as here; otherwise they are indices.
        most: number of rows to read, None = all. Of images, with `skip_bad`, this many are sampled and decoded, and
            bad ones are not replaced.
        seed: of the sample, which is that of `prepare`.
        skip_bad: leave out rows with an unknown label, without text or with a damaged image, and count them in the
            warnings. Otherwise damaged images are found by `prepare`.

    Raises:
        FulldepthError: without `skip_bad` for the first bad row, with its file or line; if no row remains.
    """
    pictures = source.kind in ("images", "objects")
    if not pictures and (source.kind != "labelled-text" or classes is None):
        return source
    bad: list[str] = []
    if classes is not None:
        number_of, given = numbering(dict(enumerate(classes))), source.class_names
        by_name = any(number_of(name) is not None for name in given)
        numbers = _numbers(source, classes) if by_name else None
        number = partial(_number, names=given, numbers=numbers, classes=classes)
        records, _, bad = _checked(source, number, read=False, skip_bad=skip_bad)
        source = replace(source, records=records, class_names=tuple(classes) if by_name else given)
    if pictures and skip_bad:
        chosen = sample(identities(source), most, seed)
        drawn = replace(source, records=[source.records[index] for index in chosen])
        records, _, damaged = _checked(drawn, lambda record: record.label, read=True, skip_bad=True)
        source, bad = replace(source, records=records), bad + damaged
    return replace(source, warnings=(*source.warnings, *_summary(source.name, bad)))


def _checked(
    source: Source, label: Callable[[Record], int | None], *, read: bool, skip_bad: bool
) -> tuple[list[Record], list[bytes], list[str]]:
    """The rows with valid content and the labels of `label`, their digests, and what is wrong with the others.

    Raises:
        FulldepthError: if no row is valid, and without `skip_bad` for the first bad row.
    """
    records, digests, bad = [], [], []
    for record in source.records:
        try:
            number = label(record)
            digests.append(_digest(record, read))
            records.append(replace(record, label=number))
        except FulldepthError as error:
            if not skip_bad:
                raise FulldepthError(f"{error} {SKIP}") from error
            bad.append(str(error))
    if not records:
        raise FulldepthError(f"{source.name} has no usable row. The first: {bad[0]}")
    return records, digests, bad


def check_classes(rows: Rows, *, skip_bad: bool = False) -> list[str]:
    """A warning if classes have no row; without `skip_bad` an error.

    Raises:
        FulldepthError: naming the first such class.
    """
    classes = rows.source.class_names
    missing = [classes[number] for number in sorted(set(range(len(classes))) - set(rows.labels))]
    if not missing:
        return []
    sentence = f"{rows.source.name} has no row of {len(missing)} of the {len(classes)} classes ({_listed(missing)})."
    if not skip_bad:
        raise FulldepthError(f"{sentence} Give rows of every class, or set data.skip_bad.")
    return [sentence]


def held_out(rows: Rows, most: int, seed: int) -> np.ndarray:
    """[rows] bool: rows held out for validation, at most `most`, a uniform sample of the contents.

    Rows of equal content are in the same part, so none is in both. Every class keeps a row in the other part. The
    choice depends on content and seed, not on the rows' order.

    Args:
        rows: all rows.
        most: rows to hold out.
        seed: of the choice.

    Raises:
        FulldepthError: if all rows are equal.
    """

    def drawn(digest: bytes) -> bytes:
        return hashlib.sha256(seed.to_bytes(8, "little", signed=True) + digest).digest()

    groups: defaultdict[bytes, list[int]] = defaultdict(list)
    for index, digest in enumerate(rows.digests):
        groups[digest].append(index)
    labels = rows.labels
    remaining = Counter(labels)
    chosen = np.zeros(len(labels), bool)
    for group in sorted(groups.values(), key=lambda indices: drawn(rows.digests[indices[0]])):
        own = Counter(labels[i] for i in group)
        if chosen.sum() + len(group) <= most and all(remaining[label] > count for label, count in own.items()):
            chosen[group] = True
            remaining -= own
    if not chosen.any():
        one = "it has one image" if rows.source.kind == "objects" else "every class has one row"
        raise FulldepthError(
            f"No row of {rows.source.name} can be held out for validation: {one} only, or equal ones. Give other rows "
            "(data.validation)."
        )
    return chosen


@dataclass(frozen=True)
class Item:
    """One row of a batch."""

    example: Any
    """An `Example` or a `Picture`."""
    epoch: int
    index: int


class LabelledRows:
    """Examples as a data set of `Item`s: key `epoch * len + index`, so that augmentation can depend on the epoch."""

    def __init__(self, examples: Sequence[Example] | Sequence[Picture]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, key: int) -> Item:
        epoch, index = divmod(key, len(self.examples))
        return Item(self.examples[index], epoch, index)


@dataclass(frozen=True)
class Collator:
    """Batches of items, for `model(**batch)`."""

    pad_id: int | None = None
    """Of texts."""
    processor: Any = None
    """Of images."""
    augment: Callable[[Sequence[Item]], Batch] | None = None
    """Makes the batches of images in training, in place of the processor."""
    dtype: torch.dtype = torch.float32
    """Of pixel values."""

    def __call__(self, items: Sequence[Item]) -> dict[str, Any]:
        """`pixel_values`, or `input_ids` with `attention_mask`; and `labels: [B]`, or those of `Batch.objects`."""
        examples, everything = [item.example for item in items], range(len(items))
        if self.augment is not None:
            batch = self.augment(items)
        elif self.processor is None:
            batch = collate_texts(examples, everything, pad_id=self.pad_id or 0, targets=None)
        else:
            batch = collate_images(examples, everything, processor=self.processor)
        labels = batch.labels if batch.objects is None else batch.objects
        assert labels is not None
        inputs = {name: x.to(self.dtype) if x.is_floating_point() else x for name, x in batch.inputs.items()}
        return {**inputs, "labels": labels}


def in_epochs(positions: Iterable[int], size: int) -> Iterator[int]:
    """The keys of `LabelledRows` for item indices that are drawn epoch after epoch."""
    return (index + position // size * size for position, index in enumerate(positions))


def _numbers(source: Source, classes: Sequence[str]) -> list[int | None] | None:
    """Class of each of the source's own numbers, None for an unknown name; None = the numbers are the classes."""
    if not source.class_names or tuple(source.class_names) == tuple(classes[: len(source.class_names)]):
        return None
    number_of = numbering(dict(enumerate(classes)))
    return [number_of(name) for name in source.class_names]


def _number(
    record: Record, names: Sequence[str], numbers: list[int | None] | None, classes: Sequence[str]
) -> int | None:
    """The class of a row, None without a label."""
    label = record.label
    if label is None:
        return None
    number = label if numbers is None else numbers[label] if label < len(numbers) else None
    if number is None or not 0 <= number < len(classes):
        raise FulldepthError(
            f"{record.where}: its label ({_shown(names, label)}) is none of the {len(classes)} classes "
            f"({_listed(classes)})."
        )
    return number


def _digest(record: Record, read: bool) -> bytes:
    sha = hashlib.sha256()
    if record.image is not None:
        if read:
            record.image()  # finds damaged files before the model runs
        sha.update(image_content(record.image) if read else record.where.encode())
        return sha.digest()
    if not (record.text or "").strip():
        raise FulldepthError(f"{record.where} has no text.")
    for text in (record.text, record.second):
        part = (text or "").encode("utf-8", "surrogatepass")
        sha.update(len(part).to_bytes(8, "little") + part)
    return sha.digest()


def _summary(name: str, bad: Sequence[str]) -> list[str]:
    if not bad:
        return []
    rows = "row is" if len(bad) == 1 else "rows are"
    return [f"{len(bad)} bad {rows} left out of {name}: {one_line(' '.join(bad[:MOST_NAMED]), 600)}"]


def _shown(names: Sequence[str], label: Any) -> str:
    return one_line(names[label] if isinstance(label, int) and label < len(names) else label, 60)

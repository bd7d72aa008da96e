"""`open_source`: opens data as records of one kind, for measuring."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import datasets

from fulldepth.data.columns import (
    EXPECTED,
    LABEL_COLUMNS,
    Columns,
    choose_columns,
    clean_text,
    require_columns,
    text_value,
)
from fulldepth.data.images import ImageLoader, image_content, image_value
from fulldepth.data.objects import Objects
from fulldepth.data.opening import Opened, open_data
from fulldepth.data.sequences import Sequences
from fulldepth.errors import FulldepthError, one_line
from fulldepth.fingerprint import Fingerprint

MOST_CLASSES = 10**6
SKIP = "--skip-bad leaves such rows out and counts them."
"""Remedy for a bad row."""


@dataclass(frozen=True, slots=True)
class Record:
    """One example: a text or a pair of texts, a prompt with its response, or an image."""

    text: str | None = None
    second: str | None = None
    """The second text of a pair such as premise and hypothesis."""
    prompt: str | None = None
    response: str | None = None
    image: ImageLoader | None = None
    """Loader that decodes the image to RGB. Its caption, if it has one, is `text`."""
    label: int | None = None
    """Class index, None where unknown."""
    objects: Objects | None = None
    """Classes and boxes of the objects in the image; None for data without boxes."""
    where: str = ""
    """Location in the data, for messages."""


@dataclass(frozen=True)
class Source:
    """Named records of one kind."""

    name: str
    kind: str
    """`text`, `pairs` (prompt and response), `labelled-text`, `images` or `objects` (images with boxes)."""
    records: Sequence[Record]
    class_names: tuple[str, ...] = ()
    """Name of each class index; empty if classes have no names."""
    warnings: tuple[str, ...] = ()
    """Sentences on entries that were skipped."""

    @property
    def captioned(self) -> bool:
        """Whether these are images with a text each."""
        return self.kind == "images" and any(record.text is not None for record in self.records)

    def __len__(self) -> int:
        return len(self.records)


def open_source(
    data: Any,
    *,
    config: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    held_out: bool = True,
    skip_bad: bool = False,
) -> Source:
    """Read data for measuring, or labelled rows for training.

    Args:
        data: as for `open_data`, and a folder or `.zip` of images, with class sub-folders or not, below
            `train|validation|test` or not; a `.json` file in COCO's format; `digits:builtin` and `shapes:builtin`. Rows
            hold `text` or `sentence` and perhaps `label`, two sentences, `prompt` + `response`, or `image`; a `.txt`
            file is one document. A `Source` is returned as it is.
        config: configuration of a Hub data set.
        split: which split of an image folder, of built-in data or of a Hub data set; by default the validation or test
            split where there is one.
        limit: most records to read: the first ones; of images in folders, spread evenly over all.
        held_out: False = by default the training split.
        skip_bad: leave out entries of a file in COCO's format that have defects, and count them in `warnings`.

    Raises:
        FulldepthError: if there is nothing to read, or the data are not of the named kind.
    """
    if isinstance(data, Source):
        return data
    opened = open_data(data, config=config, split=split, limit=limit, held_out=held_out, images=True, skip_bad=skip_bad)
    if isinstance(opened.table, datasets.IterableDataset) and limit is None:
        raise FulldepthError(f"{opened.name} is streamed and may have no end: give a limit.")
    return _source(opened)


def _columns_to_read(names: Iterable[str], where: str) -> list[str]:
    return [name for name in choose_columns(names, where)[1:] if name is not None]


def _source(opened: Opened) -> Source:
    """The records of all rows. The first row determines which columns are read."""
    if opened.items and isinstance(opened.items[0], Mapping) and isinstance(opened.items[0].get("objects"), Objects):
        records = [Record(image=row["image"], objects=row["objects"], where=where) for where, row in opened.rows()]
        return Source(opened.name, "objects", records, opened.labels, opened.warnings)
    columns: Columns | None = None
    values: list[tuple[Any, Any]] = []
    labels: list[tuple[str, Any]] = []
    for where, row in opened.rows(_columns_to_read):
        if columns is None:
            columns = choose_columns(row, where)
        require_columns(row, (columns.first, columns.second, columns.label), where)
        if columns.label is None and columns.kind != "pairs":
            _refuse_late_label(row, where, opened.name)
        read = image_value if columns.kind == "images" else text_value
        first = read(row[columns.first], f"{where}, {columns.first!r}")
        second = None if columns.second is None else row[columns.second]
        if second is not None or (columns.second is not None and columns.kind != "images"):
            second = text_value(second, f"{where}, {columns.second!r}")
        values.append((first, second))
        labels.append((where, row[columns.label] if columns.label else None))
    if columns is None:
        raise FulldepthError(f"{opened.name} is empty. Expected rows with the columns {EXPECTED}.")
    if columns.kind == "pairs":
        return Source(opened.name, "pairs", [Record(prompt=first, response=second) for first, second in values])
    classes, names = _class_indices(labels, opened.class_names(columns.label))
    places = [where for where, _ in labels]
    if columns.kind == "images":
        rows = zip(values, classes, places, strict=True)
        records = [Record(text=text, image=image, label=label, where=where) for (image, text), label, where in rows]
        return Source(opened.name, "images", records, names)
    kind = "text" if all(index is None for index in classes) else "labelled-text"
    records = [
        Record(text=text, second=second, label=index, where=where)
        for (text, second), index, where in zip(values, classes, places, strict=True)
    ]
    return Source(opened.name, kind, records, names)


def _refuse_late_label(row: Mapping[str, Any], where: str, name: str) -> None:
    """Refuse a row with a label in data whose first row has none."""
    late = next((column for column in LABEL_COLUMNS if column in row), None)
    if late is not None:
        raise FulldepthError(
            f"{where} has {late!r}, which the first row of {name} lacks. Give every row one; null = unknown."
        )


def _class_indices(
    labels: Sequence[tuple[str, Any]], class_names: Sequence[str] = ()
) -> tuple[list[int | None], tuple[str, ...]]:
    """Class indices and class names of raw labels (each after its location): integers, digits or names.

    Numbers stay as they are, negative ones (a hidden test label) become None; names are numbered in sorted order. Space
    around a label does not count, and an empty one is None.
    """
    labels = [(at, (clean_text(label).strip() or None) if isinstance(label, str) else label) for at, label in labels]
    present = [(where, label) for where, label in labels if label is not None]
    if all(isinstance(label, str) for _, label in present) and not all(_is_digits(label) for _, label in present):
        names = tuple(sorted({label for _, label in present}))
        index = {label: i for i, label in enumerate(names)}
        return [None if label is None else index[label] for _, label in labels], names
    classes = [None if label is None else _class_index(where, label) for where, label in labels]
    return [None if c is None or c < 0 else c for c in classes], tuple(class_names)


def _is_digits(label: str) -> bool:
    return label.removeprefix("-").isdecimal()


def _class_index(where: str, label: Any) -> int:
    digits = isinstance(label, str) and _is_digits(label) and len(label) < 20
    if digits or isinstance(label, int) or (isinstance(label, float) and label.is_integer()):
        index = int(label)
        if index < MOST_CLASSES:
            return index
    shown = one_line(repr(label), 100)
    raise FulldepthError(
        f"{where}: the label {shown} is not a class. Expected a whole number below {MOST_CLASSES:,} or, throughout, "
        "names."
    )


def content_hash(data: Source | Sequences) -> str:
    """SHA-256 of the content of data: texts, labels, and images as stored, without file names.

    Two sources have equal hashes if and only if their content is equal.

    Args:
        data: from `open_source` or `prepare`.

    Returns:
        `sha256:...`

    Raises:
        FulldepthError: if an image cannot be read.
    """
    if isinstance(data, Sequences):
        return data.hash
    fingerprint = Fingerprint(data.kind, str(len(data.class_names)), *data.class_names)
    for record in data.records:
        for text in (record.text, record.second, record.prompt, record.response):
            fingerprint.add(b"" if text is None else b"=" + text.encode("utf-8", "surrogatepass"))
        fingerprint.add(str(record.label).encode())
        if record.objects is not None:
            fingerprint.add(repr(record.objects).encode())
        fingerprint.add(b"" if record.image is None else b"=" + image_content(record.image))
    return str(fingerprint)

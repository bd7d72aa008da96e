"""`open_source`: opens data as records of one kind, for measuring."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

from fulldepth.data.coco import Objects
from fulldepth.data.columns import (
    EXPECTED,
    LABEL_COLUMNS,
    Columns,
    choose_columns,
    clean_text,
    require_columns,
    text_value,
)
from fulldepth.data.images import ImageLoader, StoredImage, image_content, image_value
from fulldepth.data.opening import Opened, open_data
from fulldepth.data.row_index import Row, sampled_documents, sampled_rows
from fulldepth.data.sequences import Sequences
from fulldepth.errors import FulldepthError, one_line
from fulldepth.fingerprint import Fingerprint
from fulldepth.uncertainty import distinct, identity, sample

Order = Literal["random", "first"]
"""Which rows or windows a limit takes: a uniform sample, or the first ones."""
AnyRow = tuple[int | None, str, Mapping[str, Any]]
"""Identity (None = that of the content), place and content of a row."""
MOST_CLASSES = 10**6
DIGITS = re.compile(r"-?\d+")
"""A label that is a number."""
MOST_CHARACTERS = 16
"""Characters of the first documents that are read for each token of the first windows; far more than text has."""
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
    identity: int | None = None
    """See `fulldepth.uncertainty.identity`; None = that of its content, see `identities`."""


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
    window: int | None = None
    """Tokens of the windows for which these documents were drawn, out of more; None = these are all."""

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
    seed: int = 0,
    order: Order = "random",
    window: int | None = None,
    held_out: bool = True,
    skip_bad: bool = False,
) -> Source:
    """Read data for measuring, or labelled rows for training.

    With a `limit`, little more than the sample is read: lines are hashed, and only drawn ones parsed; of tables only
    the row groups of drawn rows are read; only drawn images are opened. A bad row that is not drawn is not seen. Where
    labels are names, the labels of all rows are read (of `.jsonl`, all rows are parsed), as names are numbered in
    sorted order.

    Args:
        data: as for `open_data`, and a folder or `.zip` of images, with class sub-folders or not, below
            `train|validation|test` or not; a `.json` file in COCO's format; `digits:builtin` and `shapes:builtin`. Rows
            hold `text` or `sentence` and perhaps `label`, two sentences, `prompt` + `response`, or `image`; a `.txt`
            file is one document. A `Source` is returned as it is.
        config: configuration of a Hub data set.
        split: which split of an image folder, of built-in data or of a Hub data set; by default the validation or test
            split where there is one.
        limit: most records to read, a uniform sample: by the content of lines and of items of a list, by the numbers of
            the rows of tables, by the paths of images. A stream gives its first rows, with a warning. Of plain text,
            with `window`, the documents that hold a sample of so many windows. None = all.
        seed: of the sample.
        order: `first` takes the first records instead of a sample.
        window: tokens of the windows that plain text will be cut into; None = each text is a row like others.
        held_out: False = by default the training split.
        skip_bad: leave out entries of a file in COCO's format that have defects, and count them in `warnings`.

    Raises:
        FulldepthError: if there is nothing to read, or the data are not of the named kind.
    """
    if isinstance(data, Source):
        return data
    if limit is not None and limit < 1:
        raise FulldepthError(f"At least one row must be read, got the limit {limit}.")
    pick = None if limit is None else partial(choose, limit=limit, seed=seed, order=order)
    opened = open_data(data, config=config, split=split, held_out=held_out, images=True, skip_bad=skip_bad, pick=pick)
    if opened.is_stream and limit is None:
        raise FulldepthError(f"{opened.name} is streamed and may have no end: give a limit.")
    if opened.items and isinstance(opened.items[0], Mapping) and isinstance(opened.items[0].get("objects"), Objects):
        records = [Record(image=row["image"], objects=row["objects"], where=where) for where, row in opened.rows()]
        return Source(opened.name, "objects", records, opened.labels, opened.warnings)
    where, row = next(opened.rows(_columns_to_read), ("", None))
    if row is None:
        raise FulldepthError(f"{opened.name} is empty. Expected rows with the columns {EXPECTED}.")
    columns = choose_columns(row, where)
    return _sampled(opened, columns, limit, seed, order, window)


def choose(identities: Sequence[int], limit: int, seed: int, order: Order) -> list[int]:
    """Indices, ascending, of at most `limit` items: a uniform sample by their identities, or the first ones."""
    return list(range(len(identities))[:limit]) if order == "first" else sample(identities, limit, seed)


def _sampled(
    opened: Opened, columns: Columns, limit: int | None, seed: int, order: Order, window: int | None
) -> Source:
    """The records of all rows, or of a sample; see `open_source`."""
    every = ((None, where, row) for where, row in opened.rows(_columns_to_read))
    if limit is None:
        return _source(opened, columns, every)
    names = [name for name in columns[1:] if name is not None]
    plain = window is not None and columns.kind == "text" and columns.label is None
    if opened.is_stream:
        warning = f"{opened.name} is a stream: its first {limit:,} rows are read, which are no sample of all."
        return _source(replace(opened, warnings=(*opened.warnings, warning)), columns, islice(every, limit))
    if order == "first":
        first = _until(every, columns, window * limit * MOST_CHARACTERS) if window and plain else islice(every, limit)
        return _source(opened, columns, first)
    if window is not None and plain:
        rows: Iterable[Row] | None = sampled_documents(opened, names, limit, seed, window)
        source = _source(opened, columns, every if rows is None else rows)
        return source if rows is None else replace(source, window=window)
    rows = sampled_rows(opened, names, limit, seed)
    source = _source(opened, columns, every if rows is None else rows, sampled=rows is not None)
    if rows is not None and window is not None and source.kind == "text" and columns.label is not None:
        bare = columns._replace(label=None)  # a sample without a single label: the texts are drawn by their length
        drawn = sampled_documents(opened, names[:-1], limit, seed, window)
        return replace(_source(opened, bare, every if drawn is None else drawn, unlabelled=True), window=window)
    return source


def _until(rows: Iterable[AnyRow], columns: Columns, characters: int) -> Iterator[AnyRow]:
    """The first rows whose texts have so many characters."""
    for row in rows:
        yield row
        characters -= len(str(row[2].get(columns.first)))
        if characters <= 0:
            return


def _columns_to_read(names: Iterable[str], where: str) -> list[str]:
    return [name for name in choose_columns(names, where)[1:] if name is not None]


def _source(
    opened: Opened, columns: Columns, rows: Iterable[AnyRow], *, sampled: bool = False, unlabelled: bool = False
) -> Source:
    """The records of rows. If they are a sample, the names of classes are still those of all rows.

    A label in a row is refused if the first row has none, unless all labels are known to be `unlabelled`.
    """
    images = columns.kind == "images"
    records: list[Record] = []
    labels: list[tuple[str, Any]] = []
    for name, where, row in rows:
        require_columns(row, (columns.first, columns.second, columns.label), where)
        late = next((column for column in LABEL_COLUMNS if column in row), None)
        if late is not None and columns.label is None and columns.kind != "pairs" and not unlabelled:
            raise FulldepthError(
                f"{where} has {late!r}, which the first row of {opened.name} lacks. Give every row one; null = unknown."
            )
        read: Callable[[Any, str], Any] = image_value if images else text_value
        first = read(row[columns.first], f"{where}, {columns.first!r}")
        second = None if columns.second is None else row[columns.second]
        if second is not None or (columns.second is not None and not images):
            second = text_value(second, f"{where}, {columns.second!r}")
        labels.append((where, row[columns.label] if columns.label else None))
        if images:
            name = _image_identity(name, first, where, opened)
            records.append(Record(text=second, image=first, where=where, identity=name))
        elif columns.kind == "pairs":
            records.append(Record(prompt=first, response=second, where=where, identity=name))
        else:
            records.append(Record(text=first, second=second, where=where, identity=name))
    if columns.kind == "pairs":
        return Source(opened.name, "pairs", records, warnings=opened.warnings)
    everything = labels
    if sampled and any(isinstance(label, str) for _, label in labels):
        column = str(columns.label)
        everything = [(where, row.get(column)) for where, row in opened.rows(lambda *_: [column])]
    numbers, classes = _class_indices(labels, everything, opened.class_names(columns.label))
    records = [replace(record, label=number) for record, number in zip(records, numbers, strict=True)]
    kind = columns.kind if images or all(number is None for number in numbers) else "labelled-text"
    return Source(opened.name, kind, records, classes, opened.warnings)


def _image_identity(name: int | None, image: ImageLoader, where: str, opened: Opened) -> int:
    """Identity of an image: of its row in a sample, else its path, its content in a list, or its place in a table."""
    if name is not None:
        return name
    if isinstance(image, StoredImage) and image.name:
        return identity(image.name)
    return identity(image_content(image)) if opened.items else identity(where)


def identities(source: Source) -> list[int]:
    """Identity of each record, of no two the same: that of its row, or its text, image or place."""
    return [int(number) for number in distinct([_identity(record) for record in source.records])]


def _identity(record: Record) -> int:
    if record.identity is not None:
        return record.identity
    if record.image is not None:
        name = record.image.name if isinstance(record.image, StoredImage) else ""
        return identity(name or record.where)
    return identity(*(part or "" for part in (record.text, record.second, record.prompt, record.response)))


def _class_indices(
    labels: Sequence[tuple[str, Any]], everything: Sequence[tuple[str, Any]], class_names: Sequence[str] = ()
) -> tuple[list[int | None], tuple[str, ...]]:
    """Class indices and class names of raw labels (each after its location): integers, digits or names.

    Numbers stay as they are, negative ones (a hidden test label) become None; names are numbered in sorted order of
    `everything`, the labels of all rows. Space around a label does not count, and an empty one is None.
    """

    def stripped(label: Any) -> Any:
        return (clean_text(label).strip() or None) if isinstance(label, str) else label

    labels, everything = ([(at, stripped(label)) for at, label in given] for given in (labels, everything))
    present = [label for _, label in everything if label is not None]
    if all(isinstance(label, str) for label in present) and not all(DIGITS.fullmatch(label) for label in present):
        names = tuple(sorted(set(present)))
        index = {label: i for i, label in enumerate(names)}
        return [None if label is None else index[label] for _, label in labels], names
    classes = [None if label is None else _class_index(where, label) for where, label in labels]
    return [None if c is None or c < 0 else c for c in classes], tuple(class_names)


def _class_index(where: str, label: Any) -> int:
    digits = isinstance(label, str) and len(label) < 20 and DIGITS.fullmatch(label)
    if digits or isinstance(label, int) or (isinstance(label, float) and label.is_integer()):
        index = int(label)
        if index < MOST_CLASSES:
            return index
    raise FulldepthError(
        f"{where}: the label {one_line(repr(label), 100)} is not a class. Expected a whole number below "
        f"{MOST_CLASSES:,} or, throughout, names."
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

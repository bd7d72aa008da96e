"""`open_source`: opens data as records of one kind, for measuring."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import Fingerprint
from fulldepth.core.uncertainty import distinct, identity, sample
from fulldepth.data.coco import Objects
from fulldepth.data.columns import (
    CONVERSATIONS,
    EXPECTED,
    LABEL_COLUMNS,
    RESPONSE_COLUMNS,
    Columns,
    choose_columns,
    clean_text,
    prompt_text,
    require_columns,
    text_value,
)
from fulldepth.data.images import image_value
from fulldepth.data.opening import Opened, Order, open_data
from fulldepth.data.records import ConversationRecord, DataRecord, ImageRecord, TextRecord

MOST_CLASSES = 10**6
DIGITS = re.compile(r"-?\d+")
"""A label that is a number."""
SKIP = "--skip-bad (in training: data.skip_bad=true) leaves such rows out and counts them."
"""Remedy for a bad row."""
Record = TypeVar("Record", bound=DataRecord)


@dataclass(frozen=True)
class Source:
    """Named records of one kind."""

    name: str
    kind: str
    """`text`, `pairs` (prompt and response), `chats`, `labelled-text`, `images` or `objects` (images with boxes)."""
    records: Sequence[DataRecord]
    class_names: tuple[str, ...] = ()
    """Name of each class index; empty if classes have no names."""
    warnings: tuple[str, ...] = ()
    """Sentences on what was read, and on entries that were skipped."""
    origin: Any = field(default=None, repr=False, compare=False)
    """The data that they were read from, as for `open_data`; None = made in another way."""

    @property
    def captioned(self) -> bool:
        """True if these are images with a text each."""
        return self.kind == "images" and any(record.caption is not None for record in self.of(ImageRecord))

    @property
    def num_classes(self) -> int | None:
        """Number of classes, at least those with a name; None if no record has a label."""
        highest = max((record.label for record in self.records if record.label is not None), default=None)
        return None if highest is None else max(len(self.class_names), highest + 1)

    @property
    def hash(self) -> str:
        """`sha256:...` of the content: texts, labels, and images as stored, without file names.

        Two sources have equal hashes if and only if their content is equal.

        Raises:
            FulldepthError: if an image cannot be read.
        """
        fingerprint = Fingerprint(self.kind, str(len(self.class_names)), *self.class_names)
        for record in self.records:
            for text in _texts_of(record):
                fingerprint.add(b"" if text is None else b"=" + text.encode("utf-8", "surrogatepass"))
            if isinstance(record, ConversationRecord) and record.messages is not None:
                fingerprint.add(record.messages.encode("utf-8", "surrogatepass"))
            fingerprint.add(str(record.label).encode())
            if isinstance(record, ImageRecord) and record.objects is not None:
                fingerprint.add(repr(record.objects).encode())
            fingerprint.add(b"=" + record.image.content() if isinstance(record, ImageRecord) else b"")
        return str(fingerprint)

    def of(self, kind: type[Record]) -> list[Record]:
        """The records, typed as the one kind that all of them are.

        Raises:
            TypeError: if one is of another kind.
        """
        records = [record for record in self.records if isinstance(record, kind)]
        if len(records) < len(self.records):
            raise TypeError(f"{self.name} holds {self.kind}, and not only {kind.__name__}s.")
        return records

    def select(self, indices: Iterable[int]) -> Source:
        """The records of these indices."""
        return replace(self, records=[self.records[index] for index in indices])

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

    With a `limit`, little more than the sample is read: of a file only the drawn lines or row groups are parsed, a Hub
    data set is streamed, and only drawn images are opened. A bad row that is not drawn is not seen, and hashes are of
    what was read. Where labels are names, the labels of all rows are read, as names are numbered in sorted order.

    Args:
        data: as for `open_data`, and a folder of images, with class sub-folders or not, below `train|validation|test`
            or not; a `.json` file in COCO's format; `digits:builtin`. Rows hold `text` or `sentence` and perhaps
            `label`, two sentences, `prompt` + `response`, or `image`; a `.txt` file is one document. A `Source` is
            returned as it is.
        config: configuration of a Hub data set.
        split: which split of an image folder, of built-in data or of a Hub data set; by default the validation or test
            split where there is one.
        limit: most records to read, a uniform sample by the numbers of the rows; of a stream, a sample of its first
            rows, with a warning. Of plain text, with `window`, rows that hold several times the text of so many
            windows. None = all.
        seed: of the sample.
        order: `first` takes the first records instead of a sample.
        window: tokens of the windows that plain text will be cut into; None = each text is a row like others.
        held_out: False = by default the training split.
        skip_bad: leave out entries of a file in COCO's format that have defects, and count them in `warnings`.

    Returns:
        The records with their name, kind and warnings.

    Raises:
        FulldepthError: if there is nothing to read, or the data are not of the named kind.
    """
    if isinstance(data, Source):
        return data
    if limit is not None and limit < 1:
        raise FulldepthError(f"At least one row must be read, got the limit {limit}.")
    streaming = limit is not None
    opened = open_data(
        data, config=config, split=split, streaming=streaming, held_out=held_out, images=True, skip_bad=skip_bad
    )
    if opened.is_stream and limit is None:
        raise FulldepthError(f"{opened.name} is streamed and may have no end: give a limit.")
    where, row = next(opened.rows(_columns_to_read), ("", None))
    if row is None:
        raise FulldepthError(f"{opened.name} is empty. Expected rows with the columns {EXPECTED}.")
    columns = choose_columns(row, where)
    if isinstance(row.get("objects"), Objects):
        columns = Columns("objects", "image", None, None)
    if limit is None:
        return replace(_source(opened, columns, opened.rows(_columns_to_read), sampled=False), origin=data)
    for windows in (window if columns.kind == "text" and columns.label is None else None, window):
        rows = opened.sampled(columns.names, limit, seed=seed, order=order, window=windows)
        source = _source(opened, columns, rows, sampled=True)
        if windows == window or source.kind != "text":
            break  # else no label is known, so it will be cut into windows
    if windows is not None and order == "random" and source.kind == "text":
        # windows are drawn by the text of a document alone, so that stored results can be made again
        records = [replace(record, identity=identity(record.text)) for record in source.of(TextRecord)]
        source = replace(source, records=records)
    return replace(source, origin=data)


def choose(identities: Sequence[int], limit: int, seed: int, order: Order) -> list[int]:
    """Indices, ascending, of at most `limit` items: a uniform sample by their identities, or the first ones.

    Args:
        identities: identity of each item.
        limit: most indices.
        seed: seed of the sample.
        order: `random` draws a sample, `first` takes the first items.

    Returns:
        The indices; all if there are no more than `limit`.
    """
    return list(range(len(identities))[:limit]) if order == "first" else sample(identities, limit, seed)


def _columns_to_read(names: Iterable[str], where: str) -> list[str]:
    return choose_columns(names, where).names


def _source(
    opened: Opened, columns: Columns, rows: Iterable[tuple[str, Mapping[str, Any]]], *, sampled: bool
) -> Source:
    """The records of rows. If they are a sample, the names of classes are still those of all rows."""
    kind = columns.kind
    images = columns.kind in ("images", "objects")
    records: list[DataRecord] = []
    labels: list[tuple[str, Any]] = []
    read: Any = image_value if images else text_value
    for where, row in rows:
        require_columns(row, columns.required, where)
        late = next((column for column in LABEL_COLUMNS if column in row), None)
        if late is not None and columns.label is None and kind not in CONVERSATIONS:
            raise FulldepthError(
                f"{where} has {late!r}, which the first row of {opened.name} lacks. Give every row one; null = unknown."
            )
        labels.append((where, row[columns.label] if columns.label else None))
        if kind in CONVERSATIONS:
            records.append(_conversation(row, columns, where))
            continue
        first = read(row[columns.first], f"{where}, {columns.first!r}")
        second = None if columns.second is None else row[columns.second]
        if columns.second is not None and (second is not None or not images):
            second = text_value(second, f"{where}, {columns.second!r}")
        if images:
            records.append(ImageRecord(caption=second, image=first, objects=row.get("objects"), where=where))
        else:
            records.append(TextRecord(text=first, second=second, where=where))
    warnings = list(opened.warnings)
    everything = labels
    if opened.is_stream:
        warnings.append(
            f"{opened.name} is a stream: the hash is of {len(records):,} of its first rows, no sample of all."
        )
    elif sampled and len(records) < len(opened):
        warnings.append(f"The hash of the data covers {len(records):,} of the {len(opened):,} rows in {opened.name}.")
        if any(isinstance(label, str) for _, label in labels):
            column = str(columns.label)
            everything = [(where, row.get(column)) for where, row in opened.rows(lambda *_: [column])]
    numbers, classes = _class_indices(labels, everything, opened.class_names(columns.label))
    records = [replace(record, label=number) for record, number in zip(records, numbers, strict=True)]
    if kind == "text" and any(number is not None for number in numbers):
        kind = "labelled-text"
    return Source(opened.name, kind, records, classes, tuple(warnings))


def _conversation(row: Mapping[str, Any], columns: Columns, where: str) -> ConversationRecord:
    """The record of a chat, or of a prompt with its response: two texts, or lists of messages."""
    conversation = {name: row[name] for name in (*columns.required, *RESPONSE_COLUMNS) if name in row}
    if columns.second is None or isinstance(row[columns.first], list):
        return ConversationRecord(conversation=conversation, where=where)
    prompt = prompt_text(row, (columns.first, columns.second), where)
    response = text_value(row[columns.second], f"{where}, {columns.second!r}")
    return ConversationRecord(prompt=prompt, response=response, conversation=conversation, where=where)


def identities(source: Source) -> list[int]:
    """Identity of each record, of no two the same: of its text, or of the name or place of its image.

    Args:
        source: the records.

    Returns:
        One number a record, in their order.
    """
    return [int(number) for number in distinct(content_identities(source))]


def content_identities(source: Source) -> list[int]:
    """Identity of each record's content, its unit of independence: as `identities`, but the same for equal texts."""
    return [record.content if record.identity is None else record.identity for record in source.records]


def _texts_of(record: DataRecord) -> tuple[str | None, str | None, str | None, str | None]:
    """Text (or caption), second text, prompt and response, in the order that hashes and identities read."""
    if isinstance(record, TextRecord):
        return record.text, record.second, None, None
    if isinstance(record, ConversationRecord):
        return None, None, record.prompt, record.response
    assert isinstance(record, ImageRecord)
    return record.caption, None, None, None


def _class_indices(
    labels: Sequence[tuple[str, Any]], everything: Sequence[tuple[str, Any]], class_names: Sequence[str] = ()
) -> tuple[list[int | None], tuple[str, ...]]:
    """Class indices and class names of raw labels (each after its location): integers, digits or names.

    Numbers stay as they are, negative ones (a hidden test label) become None; names are numbered in sorted order of
    `everything`, the labels of all rows. Space around a label does not count, and an empty one is None.
    """

    def cleaned(label: Any) -> Any:
        return (clean_text(label).strip() or None) if isinstance(label, str) else label

    present = [label for _, value in everything if (label := cleaned(value)) is not None]
    if all(isinstance(label, str) for label in present) and not all(DIGITS.fullmatch(label) for label in present):
        names = tuple(sorted(set(present)))
        index = {label: i for i, label in enumerate(names)}
        return [index.get(cleaned(value)) for _, value in labels], names
    classes: list[int | None] = []
    for where, value in labels:
        number = None
        label = cleaned(value)
        if label is not None:
            written = isinstance(label, str) and len(label) < 20 and DIGITS.fullmatch(label)
            whole = written or isinstance(label, int) or (isinstance(label, float) and label.is_integer())
            if not whole or (number := int(label)) >= MOST_CLASSES:
                raise FulldepthError(
                    f"{where}: the label {one_line(repr(label), 100)} is not a class. Expected a whole number below "
                    f"{MOST_CLASSES:,} or, throughout, names."
                )
        classes.append(None if number is None or number < 0 else number)
    return classes, tuple(class_names)

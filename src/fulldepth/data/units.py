"""Units: parts of a source that can be read independently, in any order, by any process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from fulldepth.data.columns import column_texts, text_column, text_value
from fulldepth.data.corpus import END_OF_TEXT
from fulldepth.data.files import (
    ROWS,
    jsonl_rows,
    next_line,
    next_paragraph,
    parquet_groups,
    parquet_rows,
    parquet_shape,
    text_lines,
)
from fulldepth.errors import FulldepthError, one_line

PIECE = 8192
"""Characters after which a long plain text is cut at the next empty line."""
UNIT_BYTES = 2**27
"""Approximate size of a unit. The cutting of a `.txt` file into documents restarts after every so many bytes."""
UNIT_ROWS = 2**16
"""Rows of a Hub data set in a unit."""


@dataclass(frozen=True)
class Unit:
    """Consecutive documents of a source."""

    read: Callable[[int], Iterator[str]] = field(repr=False)
    """(skip) -> all documents of the unit but the first `skip`."""
    size: int | None = None
    """Approximate bytes of text; None = unknown."""


class Span(NamedTuple):
    """A part of a file: lines that begin at bytes `start` up to `stop`, or row groups; `stop` None = to the end."""

    path: Path
    start: int
    stop: int | None
    size: int
    """Approximate bytes of text."""


def text_pieces(lines: Iterable[str], piece: int = PIECE) -> Iterator[str]:
    """Cut plain text, given as lines, into documents of at least `piece` characters, whose concatenation is the text.

    A document ends at the first empty line after `piece` characters, or at the first line end after twice as many. A
    line with only `<|endoftext|>` also ends a document, and is dropped.
    """
    parts: list[str] = []
    size = 0
    for line in lines:
        marked = line.strip() == END_OF_TEXT
        if not marked:
            parts.append(line)
            size += len(line)
        if marked or size >= 2 * piece or (size >= piece and not line.strip()):
            if parts:
                yield "".join(parts)
            parts, size = [], 0
    if parts:
        yield "".join(parts)


def read_articles(units: Sequence[Unit], skip: int) -> Iterator[str]:
    """The articles of several units, without the first `skip`: lines, or rows of one line each, from a heading
    ` = Title = ` after an empty line to the next (WikiText); ` = = Section = = ` starts none.
    """
    return islice(_articles(text for unit in units for text in unit.read(0)), skip, None)


def _articles(texts: Iterable[str]) -> Iterator[str]:
    parts: list[str] = []
    for text in texts:
        for line in (text if text.endswith("\n") else text + "\n").splitlines(keepends=True):
            words = line.split()
            heading = len(words) > 2 and words[0] == words[-1] == "=" and "=" not in (words[1], words[-2])
            if heading and parts and not parts[-1].strip() and any(map(str.strip, parts)):
                yield "".join(parts)
                parts = []
            parts.append(line)
    if parts:
        yield "".join(parts)


def file_units(files: Sequence[Path], column: str | None) -> list[Unit]:
    """Units of text files and tables: parts of large files, and groups of small ones."""
    units: list[Unit] = []
    waiting: list[Span] = []
    size = 0
    for span in (span for file in files for span in _spans(file, column)):
        waiting.append(span)
        size += span.size
        if size >= UNIT_BYTES:
            units.append(Unit(partial(read_spans, tuple(waiting), column), size))
            waiting, size = [], 0
    return [*units, Unit(partial(read_spans, tuple(waiting), column), size)] if waiting else units


def row_units(data: Any, column: str, name: str) -> list[Unit]:
    """Units of a `datasets.Dataset`: ranges of rows."""
    starts = range(0, len(data), UNIT_ROWS)
    return [Unit(partial(read_rows, data, column, name, s, min(s + UNIT_ROWS, len(data)))) for s in starts]


def stream_units(data: Any, column: str, name: str) -> list[Unit]:
    """Units of a `datasets.IterableDataset`: its shards, which are the files of the repository."""
    count = data.num_shards
    if count < 2:
        return [Unit(partial(read_stream, data, column, name))]
    shards = (data.shard(num_shards=count, index=index) for index in range(count))
    return [Unit(partial(read_stream, s, column, f"{name} shard {i} of {count}")) for i, s in enumerate(shards, 1)]


def _spans(path: Path, column: str | None) -> Iterator[Span]:
    suffix, size = path.suffix.lower(), path.stat().st_size
    if suffix == ".parquet":
        yield from _row_groups(path, parquet_groups(path, text_column(parquet_shape(path)[0], column, path.name)))
    elif suffix == ".tsv" or size <= UNIT_BYTES:
        yield Span(path, 0, None, size)
    else:
        for start in range(0, size, UNIT_BYTES):
            last = start + UNIT_BYTES >= size
            yield Span(path, start, None if last else start + UNIT_BYTES, min(UNIT_BYTES, size - start))


def _row_groups(path: Path, sizes: list[int]) -> Iterator[Span]:
    start, total = 0, 0
    for group, size in enumerate(sizes):
        total += size
        if total >= UNIT_BYTES or group == len(sizes) - 1:
            yield Span(path, start, group + 1, total)
            start, total = group + 1, 0


def read_spans(spans: Sequence[Span], column: str | None, skip: int) -> Iterator[str]:
    """The documents of several parts of files, without the first `skip`."""
    return islice((text for span in spans for text in _read_span(span, column)), skip, None)


def _read_span(span: Span, column: str | None) -> Iterator[str]:
    path, suffix = span.path, span.path.suffix.lower()
    if suffix == ".txt":
        start, stop = (byte and next_paragraph(path, byte, 2 * PIECE) for byte in (span.start, span.stop))
        yield from text_pieces(text_lines(path, start or 0, stop))
        return
    if suffix == ".parquet":  # reads only the text column
        column = text_column(parquet_shape(path)[0], column, path.name)
        rows = parquet_rows(path, [column], None if span.stop is None else range(span.start, span.stop))
    elif suffix == ".jsonl" and (span.start or span.stop is not None):
        if column is None:  # chosen by the first row of the file
            where, row = next(jsonl_rows(path))
            column = text_column(row, None, where)
        start, stop = (byte and next_line(path, byte) for byte in (span.start, span.stop))
        rows = jsonl_rows(path, start or 0, stop)
    else:
        rows = ROWS[suffix](path)
    yield from column_texts(rows, column)


def read_rows(data: Any, column: str, name: str, start: int, stop: int, skip: int) -> Iterator[str]:
    """The texts of rows `start + skip` up to `stop` of a `datasets.Dataset`."""
    first = min(start + skip, stop)
    return _read(data.select(range(first, stop)), column, name, first)


def read_stream(data: Any, column: str, name: str, skip: int) -> Iterator[str]:
    """The texts of a `datasets.IterableDataset`, without the first `skip`."""
    return _read(data.skip(skip), column, name, skip)


def _read(rows: Iterable[Any], column: str, name: str, number: int) -> Iterator[str]:
    try:
        for row in rows:
            number += 1
            yield text_value(row[column], f"{name} row {number}, {column!r}")
    except FulldepthError:
        raise
    except Exception as error:  # any exception of the network, or of readers of the repository's files
        raise FulldepthError(
            f"Reading {name} stopped after {number} documents: {one_line(error).rstrip('.')}. "
            "Start again to go on from there."
        ) from error

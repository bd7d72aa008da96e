"""`RowIndex`: the rows of opened data by number, so that a sample is read without parsing the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from fulldepth.data.columns import clean_text
from fulldepth.data.drawing import draw_documents
from fulldepth.data.files import (
    lengths_of,
    parquet_lengths,
    parquet_rows,
    parquet_shape,
    rows_of_lines,
    scan_lines,
    text_rows,
)
from fulldepth.data.images import StoredImage, image_content, image_name, image_value
from fulldepth.data.opening import Opened, table_rows
from fulldepth.files import reading
from fulldepth.uncertainty import distinct, identity, ranks, sample

Row = tuple[int, str, Mapping[str, Any]]
"""Identity, place and content of a row."""
Read = Callable[[list[int]], Iterable[tuple[str, Mapping[str, Any]]]]
"""(numbers, ascending) -> place and content of these rows."""


@dataclass(frozen=True)
class RowIndex:
    """The rows of a source or of a file, by number."""

    identities: NDArray[np.uint64]
    """`[N]`: of a line or an item its content, of a table its row number, of a text file its path."""
    sizes: NDArray[np.int64]
    """`[N]`, at least the characters of each row's text; 0 where no text is searched for."""
    read: Read

    @classmethod
    def of(cls, identities: ArrayLike, sizes: ArrayLike, read: Read) -> RowIndex:
        """The rows of these identities, of which equal ones are told apart."""
        return cls(distinct(identities), np.asarray(sizes, dtype=np.int64), read)

    def __len__(self) -> int:
        return len(self.identities)

    def rows(self, chosen: list[int]) -> list[Row]:
        """The chosen rows."""
        return [(int(self.identities[number]), *row) for number, row in zip(chosen, self.read(chosen), strict=True)]


def sampled_rows(opened: Opened, columns: Sequence[str], limit: int, seed: int) -> list[Row] | None:
    """A uniform sample of `limit` rows, in the order of the data; None if there are no more rows than that."""
    index = row_index(opened, columns)
    return None if len(index) <= limit else index.rows(sample(index.identities, limit, seed))


def sampled_documents(opened: Opened, columns: Sequence[str], limit: int, seed: int, window: int) -> list[Row] | None:
    """The rows whose texts hold a sample of `limit` windows of `window` tokens; None if that takes all rows.

    See `fulldepth.data.drawing`. A few rows are read to find their lengths, those whose keys may be small enough.
    """
    index = row_index(opened, columns, texts=True)
    read: dict[int, Row] = {}

    def length_of(numbers: list[int]) -> list[int]:
        ordered = sorted(numbers)
        read.update(zip(ordered, index.rows(ordered), strict=True))
        return [sum(len(text) for text in _texts(read[number][2], columns)) for number in numbers]

    chosen = draw_documents(index.identities, index.sizes, length_of, count=limit, window=window, seed=seed)
    return None if chosen is None else [read[number] for number in chosen]


def _texts(row: Mapping[str, Any], columns: Sequence[str]) -> Iterator[str]:
    """The texts of a row, where they are texts; what is not is refused when the row is used."""
    return (value for column in columns if isinstance(value := row.get(column), str))


def row_index(opened: Opened, columns: Sequence[str], *, texts: bool = False) -> RowIndex:
    """The rows of data that are no stream.

    Args:
        opened: from `open_data`.
        columns: that are read.
        texts: whether sizes are needed.
    """
    names, measured = list(columns), list(columns) if texts else []
    if opened.files:
        root = opened.path if opened.path is not None and opened.path.is_dir() else opened.files[0].parent
        return _joined([_of_file(file, file.relative_to(root).as_posix(), names, measured) for file in opened.files])
    if opened.table is not None:
        return _of_table(opened.name, opened.table, names, measured)
    places = [f"{opened.name} row {number}" for number in range(1, len(opened.items) + 1)]
    items = [{"text": item} if isinstance(item, str) else item for item in opened.items]
    identities = [
        identity(*(_value(item[name], where) for name in names if name in item))
        for where, item in zip(places, items, strict=True)
    ]
    sizes = [sum(map(len, _texts(item, measured))) for item in items]
    return RowIndex.of(identities, sizes, lambda chosen: ((places[number], items[number]) for number in chosen))


def _value(value: Any, where: str) -> str | bytes:
    """What identifies a cell: its text, the name or content of its image, or what Python writes for it."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, bytes):
        return value
    stored = isinstance(value, Mapping) and (value.get("bytes") or value.get("path"))
    if not stored and not isinstance(value, Path | Image.Image | StoredImage):
        return repr(value)
    load = image_value(value, where)
    return image_name(load) or image_content(load)


def _of_file(path: Path, name: str, names: list[str], measured: list[str]) -> RowIndex:
    suffix = path.suffix.lower()
    if suffix == ".txt":
        with reading(path):
            size = path.stat().st_size
        return RowIndex.of([identity(name)], [size], lambda _: text_rows(path))
    if suffix == ".parquet":
        count = parquet_shape(path)[1]
        sizes = sum((np.array(parquet_lengths(path, column)) for column in measured), np.zeros(count, np.int64))
        return RowIndex.of(_numbered(count, name), sizes, lambda chosen: parquet_rows(path, names, chosen))
    lines = scan_lines(path)
    return RowIndex.of(np.array(lines.identities), lines.sizes, lambda chosen: rows_of_lines(path, lines, chosen))


def _numbered(count: int, name: str) -> NDArray[np.uint64]:
    """Identities of the rows of a table, by name and number."""
    return np.asarray(ranks(np.arange(count), identity(name)) >> np.uint64(1))


def _of_table(name: str, table: datasets.Dataset, names: list[str], measured: list[str]) -> RowIndex:
    sizes = np.zeros(len(table), np.int64)
    with reading(name):
        for column in measured:
            batches = table.select_columns([column]).with_format("arrow").iter(1000)
            sizes += np.array([n for batch in batches for chunk in batch[column].chunks for n in lengths_of(chunk)])

    def read(chosen: list[int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        rows = table_rows(name, table.select(chosen), lambda *_: names)
        return ((f"{name} row {number + 1}", row) for number, (_, row) in zip(chosen, rows, strict=True))

    return RowIndex.of(_numbered(len(table), ""), sizes, read)


def _joined(parts: list[RowIndex]) -> RowIndex:
    """The rows of several files."""
    ends = np.cumsum([len(part) for part in parts])

    def read(chosen: list[int]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for part, end in zip(parts, ends.tolist(), strict=True):
            if inside := [number - end + len(part) for number in chosen if end - len(part) <= number < end]:
                yield from part.read(inside)

    identities = np.concatenate([part.identities for part in parts])
    return RowIndex.of(identities, np.concatenate([part.sizes for part in parts]), read)

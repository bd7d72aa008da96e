"""Rows of .txt, .jsonl, .tsv and .parquet files, all in order or some by number. Nothing in a file is executed.

A file that cannot be read, is empty, malformed or beyond the limits is a `FulldepthError` that names the file and the
location, raised when reading reaches it.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import count, repeat
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet

from fulldepth.core.errors import FulldepthError, names_of, one_line
from fulldepth.core.files import reading, reading_each, unique_keys
from fulldepth.data.columns import Choice

Rows = Iterator[tuple[str, dict[str, Any]]]
"""Pairs of location (`a.jsonl line 3`, for messages) and row."""

SUFFIXES = (".txt", ".jsonl", ".tsv", ".parquet")
TABLES = SUFFIXES[1:]
"""Suffixes of files whose rows have columns."""
LONGEST_LINE = 64 << 20
"""Most bytes of a line of text or of a row of a table."""
SPARE_BYTES = 1 << 30
EXPANSION = 200
"""Limit of a decompressed file: `SPARE_BYTES` plus `EXPANSION` times its compressed size."""
WHITE = "".join(chr(byte) for byte in range(128) if chr(byte).isspace())
"""White space in ASCII. A line of nothing else is blank."""
IS_TEXT = np.array([chr(byte) not in WHITE for byte in range(256)])
"""Whether a byte of UTF-8 is no ASCII white space."""
BYTE_ORDER_MARK = "\ufeff".encode()
CHUNK = 16 << 20
"""Bytes of a file that are searched for line ends at a time."""
BATCH_ROWS = 1 << 14
BATCH_BYTES = 64 << 20
NESTED_BATCH_ROWS = 16
"""Most rows of a parquet file that are decoded at a time, and their bytes; rows if columns hold lists or mappings."""


def folder_files(folder: Path) -> Iterator[Path]:
    """The files of a folder and its sub-folders, links followed.

    Raises:
        FulldepthError: if something would be left out without a word: a sub-folder cannot be read, a link leads nowhere
            or back to a folder above it, or an entry is a pipe or a device. Hidden entries may be anything.
    """

    def refuse(error: OSError) -> None:
        raise error

    for at, folders, names in reading_each(folder, os.walk(folder, onerror=refuse, followlinks=True)):
        for path in (Path(at, name) for name in folders):
            if path.is_symlink() and Path(at).resolve().is_relative_to(path.resolve()):
                raise FulldepthError(f"Cannot read {path}: the link leads to a folder that holds it. Remove it.")
        for path in (Path(at, name) for name in names):
            if path.is_file():
                yield path
            elif not path.name.startswith("."):
                what = "it is not a regular file" if path.exists() else "the link leads nowhere"
                raise FulldepthError(f"Cannot read {path}: {what}. Restore the file, or remove this one.")


def count_rows(path: Path) -> int:
    """Number of rows of a file, without blank lines; no row is decoded."""
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return 1
    if suffix == ".parquet":
        with reading(path):
            return int(pyarrow.parquet.read_metadata(_regular(path)).num_rows)
    return max(0, len(_filled_lines(path)) - (suffix == ".tsv"))


def read_rows(path: Path, choose: Choice | None = None, numbers: Sequence[int] | None = None) -> Rows:
    """The rows of a file, lazily.

    Args:
        path: of the file; a `.txt` file is one row, whose `text` is the whole file. In a `.tsv` file quotation marks
            are literal: GLUE's files quote nothing.
        choose: selects the columns to read of a `.parquet` file; None = all.
        numbers: of the rows to read, from 0, ascending; None = all. Blank lines give no row.
    """
    suffix = path.suffix.lower()
    if suffix == ".txt":
        yield path.name, {"text": "".join(text_lines(path))}
    elif suffix == ".parquet":
        yield from _parquet_rows(path, choose, numbers)
    elif suffix == ".jsonl":
        for where, line in _lines(path, numbers):
            yield where, _json_row(line, where)
    else:
        names: list[str] = []
        wanted = None if numbers is None else [0, *(number + 1 for number in numbers)]
        for where, line in _lines(path, wanted):
            cells = line.rstrip("\n").split("\t")
            if not names:
                names = cells
                if len(set(names)) < len(names):
                    raise FulldepthError(f"{where}: two columns have the same name. It has: {names_of(names)}.")
                continue
            if len(cells) != len(names):
                raise FulldepthError(f"{where} has {len(cells)} cells, expected {len(names)}: {names_of(names)}.")
            yield where, dict(zip(names, cells, strict=True))


def text_lines(path: Path) -> Iterator[str]:
    r"""The lines of a UTF-8 file, each with its `\n`; no byte-order mark."""
    return (line for _, line in _lines(path, blank=True))


def _lines(path: Path, numbers: Sequence[int] | None = None, *, blank: bool = False) -> Iterator[tuple[str, str]]:
    """Location and text of lines, all or those of some numbers; blank ones only on request."""
    empty = numbers is None
    places: Iterable[Any] = zip(count(), repeat(None)) if numbers is None else _filled_lines(path)[numbers].tolist()
    with reading(path), _regular(path).open("rb") as file:
        for number, start in places:
            position = file.tell() if start is None else file.seek(start)
            line = file.readline(LONGEST_LINE + 1)
            if not line:
                break
            if len(line) > LONGEST_LINE:
                raise FulldepthError(f"Cannot read {path}: it has a line of more than {LONGEST_LINE >> 20} MiB.")
            text = _decode(line, path, position)
            empty = empty and not text.strip()
            if blank or text.strip(WHITE):
                yield f"{path.name} line {number + 1}", text
    if empty:
        raise FulldepthError(f"{path} is empty: it has {path.stat().st_size} bytes and no text.")


def _regular(path: Path) -> Path:
    if not path.is_file():
        raise FulldepthError(f"Cannot read {path}: it is {'not a regular file' if path.exists() else 'missing'}.")
    return path


def _filled_lines(path: Path) -> np.ndarray:
    """[lines, 2] number from 0, and first byte, of each line that is not blank."""
    with reading(path):
        stat = _regular(path).stat()
        return _line_starts(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=16)
def _line_starts(path: Path, size: int, changed: int) -> np.ndarray:
    starts = [np.zeros(1, np.int64)]  # first byte of each line
    filled = []  # whether a byte of each line is no white space
    last = False
    with path.open("rb") as file:
        mark = len(BYTE_ORDER_MARK) if file.read(3) == BYTE_ORDER_MARK else 0
        file.seek(0)
        for position in range(0, size, CHUNK):
            content = np.frombuffer(bytearray(file.read(CHUNK)), np.uint8)
            content[: max(0, mark - position)] = ord(" ")
            ends = np.flatnonzero(content == ord("\n"))
            starts.append(ends + position + 1)
            parts = np.logical_or.reduceat(IS_TEXT[content], np.append(0, ends))  # but the first begin with a line end
            parts[0] |= last
            filled.append(parts[:-1])
            last = parts[-1]
    numbers = np.flatnonzero(np.append(np.concatenate([[], *filled]), last))
    return np.stack([numbers, np.concatenate(starts)[numbers]], axis=1)


def _decode(line: bytes, path: Path, position: int) -> str:
    """The text of a line that starts at byte `position` of a file; a line end of Windows becomes a plain one."""
    nul = line.find(b"\0")
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        nul = error.start if nul < 0 else nul
    if nul >= 0:
        raise FulldepthError(
            f"{path} is not a text file: byte {position + nul} (0x{line[nul]:02x}) is no text in UTF-8."
        )
    text = text if position else text.removeprefix("\ufeff")
    return text.removesuffix("\r\n") + "\n" if text.endswith("\r\n") else text


def _json_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line, object_pairs_hook=unique_keys)
    except (RecursionError, ValueError) as error:  # too deep nesting, a key twice, or a number of thousands of digits
        raise FulldepthError(f"{where} is not valid JSON: {one_line(error)}.") from error
    if not isinstance(row, dict):
        raise FulldepthError(f"{where} holds a JSON {type(row).__name__}, expected an object such as {{'text': ...}}.")
    return row


def parquet_classes(path: Path, column: str) -> tuple[str, ...]:
    """Names of the classes of a column of a `.parquet` file, which `datasets` writes into its schema; empty without."""
    with reading(path):
        schema = pyarrow.parquet.read_schema(_regular(path))
    with suppress(Exception):  # of damaged metadata, columns of other types, and types that `datasets` lacks
        return tuple(map(str, datasets.Features.from_arrow_schema(schema)[column].names))
    return ()


def _parquet_rows(path: Path, choose: Choice | None, numbers: Sequence[int] | None) -> Rows:
    """Rows of a `.parquet` file, of which only the row groups that hold one of the `numbers` are read.

    A file of a few kilobytes can represent terabytes, as repeated values are stored once. Repeated values therefore
    stay shared until their row is read, and the total decoded size is limited.
    """
    budget = None
    for first, batch in reading_each(path, _parquet_batches(path, choose, numbers)):
        positions: Sequence[int] = range(batch.num_rows)
        if numbers is not None:
            start, stop = (bisect_left(numbers, place) for place in (first, first + batch.num_rows))
            positions = [number - first for number in numbers[start:stop]]
        if not positions:
            continue
        budget = SPARE_BYTES + EXPANSION * path.stat().st_size if budget is None else budget
        with reading(path):
            for column in batch.columns:  # with shared values counted in every row
                size: Any = column.nbytes
                if pyarrow.types.is_dictionary(column.type):
                    lengths = pyarrow.compute.binary_length(column.dictionary).cast("int64").take(column.indices)
                    size = pyarrow.compute.sum(lengths).as_py() or 0
                budget -= size
        if budget <= 0:
            raise FulldepthError(
                f"Cannot read {path}: its rows hold more than {SPARE_BYTES >> 30} GiB and {EXPANSION} times its size."
            )
        for index in positions:
            with reading(path):
                row = {name: column[index].as_py() for name, column in zip(batch.schema.names, batch, strict=True)}
            yield f"{path.name} row {first + index + 1}", row


def _parquet_batches(
    path: Path, choose: Choice | None, numbers: Sequence[int] | None
) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
    """Number of the first row and content of batches, of the row groups that hold one of the numbers."""
    metadata = pyarrow.parquet.read_metadata(_regular(path))
    schema = metadata.schema.to_arrow_schema()
    if len(set(schema.names)) < len(schema.names):
        raise FulldepthError(f"Cannot read {path}: two columns have the same name.")
    columns = None if choose is None else choose(schema.names, path.name)
    types = {field.name: field.type for field in schema if columns is None or field.name in columns}
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    shared = [name for name, kind in types.items() if pyarrow.types.is_string(kind) or pyarrow.types.is_binary(kind)]
    batch_rows = NESTED_BATCH_ROWS
    if not any(map(pyarrow.types.is_nested, types.values())):
        size = sum(group.total_byte_size for group in groups)
        batch_rows = max(1, min(BATCH_ROWS, BATCH_BYTES * metadata.num_rows // max(1, size)))
    stop = 0
    with pyarrow.parquet.ParquetFile(path, read_dictionary=shared) as file:
        for number, group in enumerate(groups):
            first = stop
            stop = stop + group.num_rows
            if numbers is None or bisect_left(numbers, first) < bisect_left(numbers, stop):
                for batch in file.iter_batches(batch_size=batch_rows, columns=columns, row_groups=[number]):
                    yield first, batch
                    first += batch.num_rows

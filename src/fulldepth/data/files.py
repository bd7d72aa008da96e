"""Readers of the rows of .txt, .jsonl, .tsv and .parquet files. Nothing in a file is executed or unpickled.

A file that cannot be read, is empty, malformed or beyond the limits is a `FulldepthError` that names the file and the
location, raised when reading reaches it.
"""

from __future__ import annotations

import json
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow
import pyarrow.compute
import pyarrow.parquet

from fulldepth.errors import FulldepthError, names_of, one_line
from fulldepth.files import reading, reading_each
from fulldepth.uncertainty import identity

Rows = Iterator[tuple[str, dict[str, Any]]]

LONGEST_LINE = 64 << 20
"""Most bytes of a line of text or of a row of a table."""
SPARE_BYTES, EXPANSION = 1 << 30, 200
"""Limit of a decompressed file: `SPARE_BYTES` plus `EXPANSION` times its compressed size."""
BATCH_ROWS, NESTED_BATCH_ROWS = 1024, 16
"""Rows of a parquet file that are decoded at a time; the second if columns hold lists or mappings."""


def path_of(name: str | Path) -> Path:
    """The path of a data argument, which need not exist; `~` is the home folder."""
    with reading(one_line(name)):
        path = Path(name).expanduser()
        path.exists()
    return path


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


def text_lines(path: Path) -> Iterator[str]:
    r"""The lines of a UTF-8 file, each with its `\n`; no byte-order mark."""
    position, blank = 0, True
    for line in reading_each(path, _byte_lines(path)):
        text = _decode(line, path, position)
        position += len(line)
        blank = blank and not text.strip()
        yield text.removesuffix("\r\n") + "\n" if text.endswith("\r\n") else text
    if blank:
        raise FulldepthError(f"{path} is empty: it has {position} bytes and no text.")


def _byte_lines(path: Path) -> Iterator[bytes]:
    """The lines of a file, none longer than `LONGEST_LINE`."""
    if path.exists() and not path.is_file():
        raise FulldepthError(f"Cannot read {path}: it is not a regular file.")
    with path.open("rb") as file:
        while line := file.readline(LONGEST_LINE + 1):
            if len(line) > LONGEST_LINE:
                raise FulldepthError(f"Cannot read {path}: it has a line of more than {LONGEST_LINE >> 20} MiB.")
            yield line


def _decode(line: bytes, path: Path, position: int) -> str:
    """The text of a line that starts at byte `position` of a file."""
    nul = line.find(b"\0")
    if nul >= 0:
        raise FulldepthError(
            f"{path} is not a text file: byte {position + nul} is NUL. Expected text encoded in UTF-8."
        )
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FulldepthError(
            f"{path} is not a text file: byte {position + error.start} (0x{line[error.start]:02x}) is not valid UTF-8. "
            "Expected text encoded in UTF-8."
        ) from error
    return text if position else text.removeprefix("\ufeff")


def text_rows(path: Path) -> Rows:
    """One row, whose `text` is the whole `.txt` file."""
    yield path.name, {"text": "".join(text_lines(path))}


def jsonl_rows(path: Path) -> Rows:
    """The objects on the lines of a `.jsonl` file."""
    for number, line in enumerate(text_lines(path), start=1):
        if line.strip():
            where = f"{path.name} line {number}"
            yield where, _json_row(line, where)


def _json_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise FulldepthError(f"{where} is not valid JSON: {error.msg} at column {error.colno}.") from error
    except (RecursionError, ValueError) as error:  # too deep nesting, or a number of thousands of digits
        raise FulldepthError(f"{where} cannot be read as JSON: {one_line(error)}.") from error
    if not isinstance(row, dict):
        raise FulldepthError(f"{where} holds a JSON {type(row).__name__}, expected an object such as {{'text': ...}}.")
    return row


def tsv_rows(path: Path) -> Rows:
    """The lines of a `.tsv` file below its header. Quotation marks are literal: GLUE's files quote nothing."""
    names: list[str] = []
    for number, line in enumerate(text_lines(path), start=1):
        where = f"{path.name} line {number}"
        if number == 1:
            names = _cells(line)
            if len(set(names)) < len(names):
                raise FulldepthError(f"{where}: two columns have the same name. It has: {names_of(names)}.")
        elif line.strip():
            yield where, _tsv_row(line, names, where)


def _cells(line: str) -> list[str]:
    return line.removesuffix("\n").removesuffix("\r").split("\t")  # lines of Windows end with both


def _tsv_row(line: str, names: list[str], where: str) -> dict[str, Any]:
    cells = _cells(line)
    if len(cells) != len(names):
        raise FulldepthError(f"{where} has {len(cells)} cells, expected {len(names)}: {names_of(names)}.")
    return dict(zip(names, cells, strict=True))


class Lines(NamedTuple):
    """The lines of a file that hold rows: 32 bytes for each, whatever its length."""

    identities: array[int]
    starts: array[int]
    sizes: array[int]
    """Bytes."""
    numbers: array[int]


def scan_lines(path: Path) -> Lines:
    """The rows of a `.jsonl` or `.tsv` file, found without decoding or parsing them."""
    lines = Lines(*(array("Q") for _ in Lines._fields))
    position, header = 0, path.suffix.lower() == ".tsv"
    for number, line in enumerate(reading_each(path, _byte_lines(path)), start=1):
        content = line.strip()
        if content and not (header and number == 1):
            for column, value in zip(lines, (identity(content), position, len(content), number), strict=True):
                column.append(value)
        position += len(line)
    return lines


def rows_of_lines(path: Path, lines: Lines, chosen: Sequence[int]) -> Rows:
    """The rows on the chosen lines, by their index; nothing else is decoded or parsed."""
    header = path.suffix.lower() == ".tsv"
    names = _cells(next(text_lines(path))) if header else []
    with reading(path), path.open("rb") as file:
        for index in chosen:
            file.seek(lines.starts[index])
            line = _decode(file.readline(), path, lines.starts[index])
            where = f"{path.name} line {lines.numbers[index]}"
            line = line.removesuffix("\r\n")
            yield where, _tsv_row(line, names, where) if header else _json_row(line, where)


def parquet_shape(path: Path) -> tuple[list[str], int]:
    """The names of the columns of a `.parquet` file, and its number of rows."""
    with reading(path), _open_parquet(path) as file:
        return list(file.schema_arrow.names), file.metadata.num_rows


def parquet_classes(path: Path, column: str) -> tuple[str, ...]:
    """Names of the classes of a column of a `.parquet` file, which `datasets` writes into its schema; empty without."""
    with reading(path), _open_parquet(path) as file:
        described = (file.schema_arrow.metadata or {}).get(b"huggingface", b"{}")
    try:
        names = json.loads(described)["info"]["features"][column]["names"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def parquet_lengths(path: Path, column: str) -> list[int]:
    """Bytes of the text in each row of a column of a `.parquet` file; no row becomes a Python object."""
    with reading(path):
        return [size for _, batch in _parquet_batches(path, [column]) for size in lengths_of(batch[0])]


def lengths_of(column: Any) -> list[int]:
    """Bytes of each text of an Arrow column; 0 where it holds something else."""
    if pyarrow.types.is_dictionary(column.type):
        lengths = pyarrow.compute.binary_length(column.dictionary).take(column.indices)
    elif any(check(column.type) for check in (pyarrow.types.is_string, pyarrow.types.is_large_string)):
        lengths = pyarrow.compute.binary_length(column)
    else:
        return [0] * len(column)
    return [size or 0 for size in lengths.to_pylist()]


def parquet_rows(path: Path, names: list[str] | None = None, chosen: Sequence[int] | None = None) -> Rows:
    """The rows of a `.parquet` file, optionally only some columns (`names`), and of some indices, ascending.

    A file of a few kilobytes can represent terabytes, as repeated values are stored once. Repeated values therefore
    stay shared until their row is read, and the total decoded size is limited.
    """
    only, budget = None if chosen is None else set(chosen), 0
    for first, batch in reading_each(path, _parquet_batches(path, names, chosen)):
        budget = budget or SPARE_BYTES + EXPANSION * path.stat().st_size
        with reading(path):
            budget -= sum(map(_decoded_bytes, batch.columns))
        if budget <= 0:
            raise FulldepthError(
                f"Cannot read {path}: its rows hold more than {SPARE_BYTES >> 30} GiB and {EXPANSION} times its size."
            )
        for index in range(batch.num_rows):
            if only is None or first + index in only:
                with reading(path):
                    row = {name: column[index].as_py() for name, column in zip(batch.schema.names, batch, strict=True)}
                yield f"{path.name} row {first + index + 1}", row


def _open_parquet(path: Path, **options: Any) -> pyarrow.parquet.ParquetFile:
    if not path.is_file():
        raise FulldepthError(f"Cannot read {path}: it is {'not a regular file' if path.exists() else 'missing'}.")
    return pyarrow.parquet.ParquetFile(path, **options)


def _parquet_batches(
    path: Path, names: list[str] | None, chosen: Sequence[int] | None = None
) -> Iterator[tuple[int, pyarrow.RecordBatch]]:
    """Index of the first row and content of batches, of the row groups that hold one of the chosen rows."""
    with _open_parquet(path) as file:
        if len(set(file.schema_arrow.names)) < len(file.schema_arrow.names):
            raise FulldepthError(f"Cannot read {path}: two columns have the same name.")
        fields = [field for field in file.schema_arrow if names is None or field.name in names]
        counts = [file.metadata.row_group(number).num_rows for number in range(file.metadata.num_row_groups)]
    texts = [
        field.name for field in fields if pyarrow.types.is_string(field.type) or pyarrow.types.is_binary(field.type)
    ]
    rows = NESTED_BATCH_ROWS if any(pyarrow.types.is_nested(field.type) for field in fields) else BATCH_ROWS
    stop = 0
    with _open_parquet(path, read_dictionary=texts) as file:
        for group, count in enumerate(counts):
            first, stop = stop, stop + count
            if chosen is None or bisect_left(chosen, first) < bisect_left(chosen, stop):
                for batch in file.iter_batches(batch_size=rows, columns=names, row_groups=[group]):
                    yield first, batch
                    first += batch.num_rows


def _decoded_bytes(column: pyarrow.Array) -> int:
    """Bytes of a column with shared values counted in every row."""
    if not pyarrow.types.is_dictionary(column.type):
        return int(column.nbytes)
    lengths = pyarrow.compute.binary_length(column.dictionary).cast("int64").take(column.indices)
    return int(pyarrow.compute.sum(lengths).as_py() or 0)


ROWS: dict[str, Callable[[Path], Rows]] = {
    ".txt": text_rows,
    ".jsonl": jsonl_rows,
    ".tsv": tsv_rows,
    ".parquet": parquet_rows,
}
"""Suffix -> reader that yields rows lazily, for files of any size."""

"""Rows and texts from files: .txt, .jsonl, .tsv, .parquet. Nothing in a file is ever executed or unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from fulldepth.data.records import Record, Source, choose_columns, from_rows
from fulldepth.errors import FulldepthError

Rows = Iterator[tuple[str, dict[str, Any]]]


def read_text(path: Path) -> str:
    r"""The text of a UTF-8 file, without its byte-order mark, lines ended by `\n`.

    Raises:
        FulldepthError: if the file cannot be read, is empty, or is not text (says at which byte).
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise FulldepthError(f"Cannot read {path}: {error.strerror or error}.") from error
    if not data.strip():
        raise FulldepthError(f"{path} is empty: it has {len(data)} bytes and no text.")
    nul = data.find(b"\0")
    if nul >= 0:
        raise FulldepthError(f"{path} is not a text file: byte {nul} is NUL. Expected text encoded in UTF-8.")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise FulldepthError(
            f"{path} is not a text file: byte {error.start} (0x{data[error.start]:02x}) is not valid UTF-8. "
            "Expected text encoded in UTF-8."
        ) from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


def text_source(path: Path, limit: int | None = None) -> Source:
    """A `.txt` file: the whole file is one document, whatever `limit`."""
    return Source(path.name, "text", [Record(text=read_text(path))])


def folder_source(path: Path, files: list[Path], limit: int | None = None) -> Source:
    """A folder of `.txt` files, one document each, in the order of their names."""
    return Source(path.name, "text", [Record(text=read_text(file)) for file in files[:limit]])


def jsonl_source(path: Path, limit: int | None = None) -> Source:
    """A `.jsonl` file: one JSON object a line, blank lines apart."""
    return from_rows(path.name, islice(_jsonl_rows(path), limit))


def _jsonl_rows(path: Path) -> Rows:
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path.name} line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise FulldepthError(f"{where} is not valid JSON: {error.msg} at column {error.colno}.") from error
        except (RecursionError, ValueError) as error:  # nested too deeply, or a number of thousands of digits
            raise FulldepthError(f"{where} cannot be read as JSON: {error}.") from error
        if not isinstance(row, dict):
            raise FulldepthError(
                f"{where} holds a JSON {type(row).__name__}, expected an object such as {{'text': ...}}."
            )
        yield where, row


def tsv_source(path: Path, limit: int | None = None) -> Source:
    """A `.tsv` file with a header line. Quotation marks mean themselves: GLUE's files quote nothing."""
    return from_rows(path.name, islice(_tsv_rows(path), limit))


def _tsv_rows(path: Path) -> Rows:
    header, *lines = read_text(path).split("\n")
    names = header.split("\t")
    choose_columns(names, f"The header of {path.name}")
    for number, line in enumerate(lines, start=2):
        if not line.strip():
            continue
        where, cells = f"{path.name} line {number}", line.split("\t")
        if len(cells) != len(names):
            raise FulldepthError(f"{where} has {len(cells)} cells, expected {len(names)}: {', '.join(names)}.")
        yield where, dict(zip(names, cells, strict=True))


def parquet_source(path: Path, limit: int | None = None) -> Source:
    """A `.parquet` file."""
    try:
        return from_rows(path.name, islice(_parquet_rows(path), limit))
    except (OSError, pyarrow.ArrowException) as error:
        raise FulldepthError(f"{path} cannot be read as a parquet file: {error}") from error


def _parquet_rows(path: Path) -> Rows:
    with pyarrow.parquet.ParquetFile(path) as file:
        columns = choose_columns(file.schema_arrow.names, path.name)
        names = [name for name in columns[1:] if name is not None]
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=names):
            for row in batch.to_pylist():
                number += 1
                yield f"{path.name} row {number}", row


READERS = {".txt": text_source, ".jsonl": jsonl_source, ".tsv": tsv_source, ".parquet": parquet_source}
"""Suffix -> reader."""

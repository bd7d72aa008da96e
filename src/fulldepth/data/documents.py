"""`open_documents`: training text of any size, as documents that are read lazily."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import HfApi

from fulldepth.data.columns import column_texts, text_column, text_value
from fulldepth.data.corpus import END_OF_TEXT
from fulldepth.data.files import ROWS, parquet_rows, parquet_shape, text_lines
from fulldepth.data.opening import CORPUS, Opened, open_data
from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import reading

COMMIT = re.compile(r"@([0-9a-f]{40})\b")
PIECE = 8192
"""Characters after which a long plain text is cut at the next empty line."""


@dataclass(frozen=True)
class Documents:
    """Texts in a fixed order, read lazily; can be iterated repeatedly."""

    name: str
    identity: Mapping[str, Any] = field(repr=False)
    """JSON values that identify the text: files with sizes and times, or a data set with its revision."""
    read: Callable[[int], Iterator[str]] = field(repr=False)
    """(skip) -> all documents but the first `skip`."""
    length: int | None = None
    """Number of documents, if known without reading them."""

    def __iter__(self) -> Iterator[str]:
        return self.read(0)


def open_documents(
    data: Any,
    *,
    column: str | None = None,
    config: str | None = None,
    split: str | None = None,
    streaming: bool = False,
    articles: bool = False,
) -> Documents:
    """Open text for training.

    Args:
        data: as for `open_data`; `corpus:builtin` is its training part. A row of a table is a document. Plain text
            (novels of the built-in corpus, `.txt` files) is cut into one or more documents by `text_pieces`, so that
            parts of it can be held out. `Documents` are returned unchanged.
        column: column that holds the text; None = `text` or `sentence`.
        config: configuration of a Hub data set.
        split: split of a Hub data set, None = `train`; part of the built-in corpus.
        streaming: read a Hub data set as a stream instead of downloading it first.
        articles: rows are lines of articles (WikiText), which are the documents, see `articles_of`.

    Raises:
        FulldepthError: if there is nothing to read, or the data are not of the named kind.
    """
    if isinstance(data, Documents):
        return data
    opened = documents_of(open_data(data, config=config, split=split, streaming=streaming), column)
    if not articles:
        return opened
    identity = {**opened.identity, "documents": "articles"}
    return replace(opened, identity=identity, read=lambda skip: islice(articles_of(opened), skip, None), length=None)


def documents_of(opened: Opened, column: str | None = None) -> Documents:
    """The documents of opened data; `column` and errors as for `open_documents`."""
    if opened.path is not None:
        return _from_files(opened, opened.path, column)
    if opened.table is not None:
        return _from_table(opened, opened.table, column)
    texts = list(column_texts(opened.rows(), None if opened.is_plain else column))
    if opened.name.startswith(CORPUS):
        texts = [piece for text in texts for piece in text_pieces(io.StringIO(text))]
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    identity = {"kind": "texts", "sha256": digest.hexdigest()}
    return Documents(opened.name, identity, lambda skip: islice(texts, skip, None), len(texts))


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


def articles_of(texts: Iterable[str]) -> Iterator[str]:
    """The articles of texts that are lines, or rows of one line each: from a heading ` = Title = ` after an empty line
    to the next (WikiText); ` = = Section = = ` starts none.
    """
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


def _from_files(opened: Opened, path: Path, column: str | None) -> Documents:
    length = 0
    tables = [file for file in opened.files if file.suffix.lower() == ".parquet"]
    for file in tables:
        names, rows = parquet_shape(file)
        text_column(names, column, file.name)
        length += rows
    stats = [(file.relative_to(path).as_posix(), file.stat()) for file in opened.files]
    identity = {
        "kind": "files",
        "path": str(path.resolve()),
        "files": [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats],
        "column": column,
        "piece": PIECE,
    }
    return Documents(
        opened.name,
        identity,
        lambda skip: islice((text for file in opened.files for text in _file_texts(file, column)), skip, None),
        length if len(tables) == len(opened.files) else None,
    )


def _file_texts(path: Path, column: str | None) -> Iterator[str]:
    """The documents of a file."""
    suffix = path.suffix.lower()
    if suffix == ".txt":
        return text_pieces(text_lines(path))
    if suffix == ".parquet":  # reads only the text column
        column = text_column(parquet_shape(path)[0], column, path.name)
        return column_texts(parquet_rows(path, [column]), column)
    return column_texts(ROWS[suffix](path), column)


def _from_table(opened: Opened, table: Any, column: str | None) -> Documents:
    """The rows of a data set from the Hub, or of one made by a program, identified by its fingerprint."""
    with reading(opened.name):
        names = table.column_names or list(next(iter(table), {}))
    chosen = text_column(names, column, opened.name)
    table = table.select_columns([chosen])
    stream = isinstance(table, datasets.IterableDataset)
    if opened.repository is None and stream:
        raise FulldepthError("A streamed data set of a program cannot be told from another one. Give a Dataset.")
    length = None if stream else len(table)
    identity = {
        "kind": "hub" if opened.repository else "fingerprint",
        "name": opened.name,
        "revision": _revision(table, opened.repository) if opened.repository else table._fingerprint,
        "column": chosen,
        "rows": length,
    }
    return Documents(opened.name, identity, partial(_table_texts, table, chosen, opened.name), length)


def _table_texts(table: Any, column: str, name: str, skip: int) -> Iterator[str]:
    number = skip
    try:
        for row in table.skip(skip):
            number += 1
            yield text_value(row[column], f"{name} row {number}, {column!r}")
    except FulldepthError:
        raise
    except Exception as error:  # any exception of the network, or of readers of the repository's files
        raise FulldepthError(
            f"Reading {name} stopped after {number} documents: {one_line(error).rstrip('.')}. "
            "Start again to go on from there."
        ) from error


def _revision(data: Any, repository: str) -> str | None:
    """The commit of a Hub data set, from its download or from the Hub; None if unknown."""
    for address in data.info.download_checksums or ():
        if match := COMMIT.search(address):
            return match.group(1)
    try:
        return HfApi().dataset_info(repository).sha
    except Exception:  # any network error: identify the data by name only
        return None

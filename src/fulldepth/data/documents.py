"""`open_documents`: training text of any size, as documents in units that can be read independently."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from huggingface_hub import HfApi

from fulldepth.data import units
from fulldepth.data.columns import column_texts, text_column
from fulldepth.data.files import parquet_shape
from fulldepth.data.opening import Opened, open_data
from fulldepth.data.units import PIECE, Unit, text_pieces
from fulldepth.errors import FulldepthError
from fulldepth.files import reading

COMMIT = re.compile(r"@([0-9a-f]{40})\b")


@dataclass(frozen=True)
class Documents:
    """Texts in a fixed order, read lazily; can be iterated repeatedly."""

    name: str
    identity: Mapping[str, Any] = field(repr=False)
    """JSON values that identify the text: files with sizes and times, or a data set with its revision."""
    units: Sequence[Unit] = field(repr=False)
    """Parts that can be read independently; documents are numbered through them in this order."""
    length: int | None = None
    """Number of documents, if known without reading them."""
    size: int | None = None
    """Bytes of the files; None for other sources."""
    portable: bool = False
    """Whether the units can be sent to other processes."""

    def __iter__(self) -> Iterator[str]:
        return (text for unit in self.units for text in unit.read(0))


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
        articles: rows are lines of articles, which are the documents (`units.read_articles`); one process reads them.

    Raises:
        FulldepthError: if there is nothing to read, or the data are not of the named kind.
    """
    if isinstance(data, Documents):
        return data
    opened = documents_of(open_data(data, config=config, split=split, streaming=streaming), column)
    if not articles:
        return opened
    whole = Unit(partial(units.read_articles, opened.units), opened.size)
    return replace(opened, identity={**opened.identity, "documents": "articles"}, units=[whole], length=None)


def documents_of(opened: Opened, column: str | None = None) -> Documents:
    """The documents of opened data; `column` and errors as for `open_documents`."""
    if opened.path is not None:
        return _from_files(opened, opened.path, column)
    if opened.table is not None:
        return _from_table(opened, opened.table, column)
    texts = list(column_texts(opened.rows(), None if opened.is_plain else column))
    if opened.is_corpus:
        texts = [piece for text in texts for piece in text_pieces(io.StringIO(text))]
    digest = hashlib.sha256()
    for text in texts:
        digest.update(hashlib.sha256(text.encode()).digest())
    identity = {"kind": "texts", "sha256": digest.hexdigest()}
    return Documents(opened.name, identity, [Unit(lambda skip: islice(texts, skip, None))], len(texts))


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
        "piece": [PIECE, units.UNIT_BYTES],
    }
    documents = length if len(tables) == len(opened.files) else None
    size = sum(stat.st_size for _, stat in stats)
    return Documents(opened.name, identity, units.file_units(opened.files, column), documents, size, portable=True)


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
    parts = (units.stream_units if stream else units.row_units)(table, chosen, opened.name)
    identity = {
        "kind": "hub" if opened.repository else "fingerprint",
        "name": opened.name,
        "revision": _revision(table, opened.repository) if opened.repository else table._fingerprint,
        "column": chosen,
        "rows": length,
        "units": len(parts),
    }
    return Documents(opened.name, identity, parts, length, portable=True)


def _revision(data: Any, repository: str) -> str | None:
    """The commit of a Hub data set, from its download or from the Hub; None if unknown."""
    for address in data.info.download_checksums or ():
        if match := COMMIT.search(address):
            return match.group(1)
    try:
        return HfApi().dataset_info(repository).sha
    except Exception:  # any network error: identify the data by name only
        return None

"""Token ids on disk: files of bounded size, written once by any number of processes and read by position.

A unit of a source becomes one or more files `UNIT-PART.bin`: the concatenated ids of its documents, then the number of
ids of each document (0 for a document without tokens). `UNIT-PART.json`, written afterwards, holds the counts; without
it the file is ignored. The content depends on the text and the tokenizer alone.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pydantic
from pydantic import Field

from fulldepth.errors import FulldepthError
from fulldepth.files import atomic, read_document

SHARD_TOKENS = 2**25
"""Token ids after which a file ends with the current document (64 MiB at two bytes per id)."""
SHARD_DOCUMENTS = 2**22
"""Most documents in a file."""
OPEN_FILES = 64
"""Files that a reader keeps open."""
BINARY = getattr(os, "O_BINARY", 0)
"""Windows: without it, a handle of the operating system converts line ends."""
LENGTH = np.dtype("<u4")
Count = Annotated[int, Field(ge=0, le=2**48)]


class Note(pydantic.BaseModel):
    """Contents of a token file: schema of its `.json`."""

    tokens: Count
    documents: Count
    """Number of documents, including those without tokens."""
    highest: int = Field(ge=-1, lt=2**32)
    """The highest id; -1 if there is none."""
    last: bool
    """Whether this is the last file of the unit."""
    hash: str = Field(pattern="^sha256:[0-9a-f]{64}$")
    """Hash of the ids and the documents' lengths, as stored."""


class Shard(NamedTuple):
    """A complete file of token ids."""

    unit: int
    part: int
    note: Note


class Encoded(NamedTuple):
    """Tokenised documents."""

    ids: np.ndarray
    """[sum of lengths] ids."""
    lengths: np.ndarray
    """[documents] int64, ids of each document."""


class Shards:
    """The token files of a source, read by position.

    Args:
        folder: folder of the files; need not exist yet.
        dtype: type of the ids; little-endian.
    """

    def __init__(self, folder: Path, dtype: np.dtype) -> None:
        self.folder, self.dtype = folder, dtype
        self.most_tokens, self.most_documents = SHARD_TOKENS, SHARD_DOCUMENTS
        self._files: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._whole: dict[int, list[Shard]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, without open files."""
        return {**self.__dict__, "_files": OrderedDict(), "_whole": {}}

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        """Close the files; `close` is bound early because `os` may be unloaded at interpreter exit."""
        for handle in self._files.values():
            close(handle)

    def path(self, unit: int, part: int) -> Path:
        """The file of token ids; its note has the suffix `.json`."""
        return self.folder / f"{unit:06}-{part:04}.bin"

    def lock(self, unit: int) -> Path:
        """The file that a writer of the unit locks."""
        return self.folder / "locks" / f"{unit:06}"

    def of_unit(self, unit: int) -> list[Shard]:
        """The complete files of a unit, in order; the unit is complete if the final one is marked `last`."""
        if unit in self._whole:
            return self._whole[unit]
        shards: list[Shard] = []
        while not (shards and shards[-1].note.last) and (shard := self.find(unit, len(shards))):
            shards.append(shard)
        if shards and shards[-1].note.last:
            self._whole[unit] = shards
        return shards

    def find(self, unit: int, part: int) -> Shard | None:
        """A file, if it and its note exist and its size agrees with the note; else None."""
        path = self.path(unit, part)
        if not path.with_suffix(".json").exists():
            return None
        try:
            note = read_document(path.with_suffix(".json"), Note)
        except FulldepthError:
            return None
        size = note.tokens * self.dtype.itemsize + note.documents * LENGTH.itemsize
        return Shard(unit, part, note) if path.is_file() and path.stat().st_size == size else None

    def drop(self, shard: Shard) -> None:
        """Remove the note of a damaged file, so that the file is made anew."""
        self._whole.clear()
        if (handle := self._files.pop((shard.unit, shard.part), None)) is not None:
            os.close(handle)
        self.path(shard.unit, shard.part).with_suffix(".json").unlink(missing_ok=True)

    def ids(self, shard: Shard, start: int, stop: int) -> np.ndarray:
        """[stop - start] ids of a file, at positions `start` up to `stop`."""
        size = self.dtype.itemsize
        return np.frombuffer(self._bytes(shard, start * size, (stop - start) * size), self.dtype)

    def lengths(self, shard: Shard, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: number of ids of documents `start` up to `stop` of a file."""
        offset = shard.note.tokens * self.dtype.itemsize + start * LENGTH.itemsize
        return np.frombuffer(self._bytes(shard, offset, (stop - start) * LENGTH.itemsize), LENGTH).astype(np.int64)

    def _bytes(self, shard: Shard, offset: int, count: int) -> bytes:
        """Part of a file, read instead of mapped, as mapped pages would count as the process's memory."""
        key = shard.unit, shard.part
        if key not in self._files:
            if len(self._files) >= OPEN_FILES:
                os.close(self._files.popitem(last=False)[1])
            self._files[key] = os.open(self.path(*key), os.O_RDONLY | BINARY)
        self._files.move_to_end(key)
        blocks = []
        while count and (block := _read_at(self._files[key], count, offset)):
            blocks.append(block)
            offset, count = offset + len(block), count - len(block)
        if count:
            raise FulldepthError(f"{self.path(*key)} is shorter than it was. Start again to make it anew.")
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def hash_of(self, shard: Shard, tokens: int, lengths: np.ndarray) -> str:
        """`Note.hash` of the first `tokens` ids of the file, in documents of these lengths."""
        digest = hashlib.sha256()
        for start in range(0, tokens, 2**22):
            digest.update(self.ids(shard, start, min(start + 2**22, tokens)).tobytes())
        digest.update(lengths.astype(LENGTH).tobytes())
        return f"sha256:{digest.hexdigest()}"


def _read_at(handle: int, count: int, offset: int) -> bytes:
    """Up to `count` bytes at `offset`. Without `os.pread` (Windows) the handle's position moves: one thread only."""
    if hasattr(os, "pread"):
        return os.pread(handle, count, offset)
    os.lseek(handle, offset, os.SEEK_SET)
    return os.read(handle, count)


class EncodedDocuments:
    """A stream of tokenised documents, which can be taken in any portions."""

    def __init__(self, batches: Iterator[Encoded]) -> None:
        self._batches = batches
        self._batch: Encoded | None = None

    def peek(self) -> Encoded | None:
        """The next documents, at least one; None at the end."""
        while self._batch is None or not len(self._batch.lengths):
            self._batch = next(self._batches, None)
            if self._batch is None:
                return None
        return self._batch

    def take(self, documents: int) -> Encoded:
        """Remove and return the first `documents` of those that `peek` returned."""
        assert self._batch is not None
        ids, lengths = self._batch
        tokens = int(lengths[:documents].sum())
        self._batch = Encoded(ids[tokens:], lengths[documents:])
        return Encoded(ids[:tokens], lengths[:documents])


def write_shard(shards: Shards, unit: int, part: int, documents: EncodedDocuments) -> Shard:
    """Write the next file of a unit: documents up to `SHARD_TOKENS` ids, `SHARD_DOCUMENTS` or the end of the unit."""
    path = shards.path(unit, part)
    path.with_suffix(".json").unlink(missing_ok=True)
    digest, lengths = hashlib.sha256(), [np.zeros(0, np.int64)]
    tokens, count, highest = 0, 0, -1
    with atomic(path) as temporary, temporary.open("wb") as file:
        while (batch := documents.peek()) is not None:
            before = tokens + np.cumsum(batch.lengths) - batch.lengths  # [documents], ids in the file before each
            fit = min(int(np.searchsorted(before, shards.most_tokens)), shards.most_documents - count)
            if not fit:
                break
            taken = documents.take(fit)
            content = taken.ids.astype(shards.dtype).tobytes()
            file.write(content)
            digest.update(content)
            lengths.append(taken.lengths)
            tokens, count = tokens + len(taken.ids), count + fit
            highest = max(highest, int(taken.ids.max()) if len(taken.ids) else -1)
        content = np.concatenate(lengths).astype(LENGTH).tobytes()
        file.write(content)
        digest.update(content)
    note = Note(
        tokens=tokens,
        documents=count,
        highest=highest,
        last=documents.peek() is None,
        hash=f"sha256:{digest.hexdigest()}",
    )
    write_json(path.with_suffix(".json"), note.model_dump())
    return Shard(unit, part, note)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    with atomic(path) as part:
        part.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="utf-8")

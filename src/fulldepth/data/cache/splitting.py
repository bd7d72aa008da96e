"""Split of documents into training and validation, and positions of the tokens of both parts.

The split is applied when tokens are read; whether a document is held out depends on its number and the seed alone. A
table of prefix sums with one row per `BLOCK` documents locates any token of a part: 16 bytes for each 1,024 documents,
saved beside the tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pydantic
from pydantic import Field

from fulldepth.data.cache.token_files import Count, Shard, Shards, write_json
from fulldepth.errors import FulldepthError
from fulldepth.files import atomic, read_bytes, read_document

PARTS = ("train", "validation")
BLOCK = 1024
"""Documents in a row of the table."""
MOST_TABLE_BYTES = 2**32
ROW = np.dtype("<i8")
Hash = Annotated[str, Field(pattern="^sha256:[0-9a-f]{64}$")]


class DamagedError(Exception):
    """A token file is inconsistent with its note."""

    def __init__(self, shard: Shard) -> None:
        super().__init__(shard)
        self.shard = shard


@dataclass(frozen=True)
class Split:
    """Choice of the documents held out for validation, and limit of the tokens.

    A document's part depends on its number in the source and the seed alone, so appending documents moves none.
    """

    share: float
    seed: int
    max_tokens: int | None = None
    """Most ids in each part; reading ends when one part reaches it."""

    def held_out(self, numbers: np.ndarray) -> np.ndarray:
        """[n] bool, for [n] numbers of documents from 0: whether u(seed, number) < share.

        u is the output number `number` of the generator splitmix64 whose state is the first output for `seed`, in
        units of 2**-64.

        Source: Steele, Lea, Flood 2014 (splitmix64).
        """
        state = _mix(np.array([self.seed + 1], np.uint64) * GOLDEN)
        bits = _mix(state + (numbers.astype(np.uint64) + np.uint64(1)) * GOLDEN)
        return (bits >> np.uint64(11)) * 2.0**-53 < self.share

    def key(self) -> str:
        """Identifier of this split in the file names of a source."""
        described = json.dumps([self.share, self.seed if 0 < self.share < 1 else 0, self.max_tokens, BLOCK])
        return hashlib.sha256(described.encode()).hexdigest()[:16]


GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(bits: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class Extent(pydantic.BaseModel):
    """How much of a source a split reads: schema of `split-KEY.json`."""

    shards: Count
    """Number of token files, from the first."""
    numbers: Count
    """Number of documents, including those without tokens."""
    tokens: tuple[Count, Count]
    """Ids of the training and the validation part, cut at `max_tokens`."""
    documents: tuple[Count, Count]
    """Documents of both parts, without those that have no tokens."""
    highest: int = Field(ge=-1, lt=2**32)
    hash: Hash
    """Hash of the ids, the lengths of documents and the choice of held-out ones."""
    made_from: Hash
    """Hash of the token files."""
    table: Hash


class Tokens(NamedTuple):
    """The parts of a source under a split."""

    parts: dict[str, Part]
    highest: int
    """The highest id."""
    hash: str
    """`sha256:...`, equal for equal tokens in the same documents and parts."""


class Part:
    """Reads one part by position. Reading a range costs O(log n) plus the reading of its blocks.

    `table` is [blocks + 1, 2]: ids of the training (`column` 0) and the validation part (1) before each block.
    """

    def __init__(
        self, shards: Shards, files: list[Shard], split: Split, table: np.ndarray, column: int, extent: Extent
    ) -> None:
        self.shards, self.split, self.table, self.column = shards, split, table, column
        self.tokens, self.documents = extent.tokens[column], extent.documents[column]
        self._files = files
        counts = np.array([file.note.documents for file in files], np.int64)
        self._numbers = np.concatenate([[0], np.cumsum(counts)])  # [files + 1], documents before each
        self._blocks = np.concatenate([[0], np.cumsum(-(-counts // BLOCK))])  # [files + 1], rows of the table
        self._latest: tuple[int, _Block] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """State for another process, without the block read last."""
        return {**self.__dict__, "_latest": None}

    def read(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: ids at positions `start` up to `stop`, 0 <= start < stop <= `tokens`."""
        parts = []
        for block in self._between(start, stop):
            first = np.maximum(block.starts, start)
            last = np.minimum(block.stops, stop)
            chosen = np.flatnonzero(first < last)
            first, last = first[chosen], last[chosen]
            places = block.places[chosen] + first - block.starts[chosen]  # start of each document's ids in the file
            ends = places + last - first
            breaks = np.flatnonzero(places[1:] != ends[:-1]) + 1  # interrupted by documents of the other part
            for run in np.split(np.arange(len(chosen)), breaks):
                parts.append(self.shards.ids(block.file, int(places[run[0]]), int(ends[run[-1]])))
        return np.concatenate(parts).astype(np.int64)

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Positions, relative to `start`, of the documents that begin at positions `start` up to `stop`."""
        starts = np.concatenate([block.starts for block in self._between(start, stop)])
        return starts[(starts >= start) & (starts < stop)] - start

    def _between(self, start: int, stop: int) -> Iterable[_Block]:
        """The blocks with documents of this part that have ids in `start` up to `stop`."""
        before = self.table[:, self.column]
        number = int(np.searchsorted(before, start, side="right")) - 1
        while number < len(before) - 1 and before[number] < stop:
            if before[number + 1] > max(start, before[number]):
                yield self._block(number)
            number += 1

    def _block(self, number: int) -> _Block:
        if self._latest is None or self._latest[0] != number:
            self._latest = number, self._read_block(number)
        return self._latest[1]

    def _read_block(self, number: int) -> _Block:
        index = int(np.searchsorted(self._blocks, number, side="right")) - 1
        file, first = self._files[index], (number - int(self._blocks[index])) * BLOCK
        last = min(first + BLOCK, file.note.documents)
        lengths = self.shards.lengths(file, first, last)
        numbers = int(self._numbers[index]) + np.arange(first, last)
        chosen = (self.split.held_out(numbers) == bool(self.column)) & (lengths > 0)
        offset = int(self.table[number].sum() - self.table[self._blocks[index]].sum())  # of the block in the file
        places = offset + np.cumsum(lengths) - lengths
        stops = int(self.table[number, self.column]) + np.cumsum(lengths[chosen])
        return _Block(file, stops - lengths[chosen], stops, places[chosen])


class _Block(NamedTuple):
    """The documents of one part in a block."""

    file: Shard
    starts: np.ndarray
    """[documents] positions in the part."""
    stops: np.ndarray
    places: np.ndarray
    """[documents] positions in the file."""


@dataclass
class _Count:
    """Running sums over the files of a source, in order, for a split."""

    shards: Shards
    split: Split
    rows: list[np.ndarray] = field(default_factory=list)
    tokens: np.ndarray = field(default_factory=lambda: np.zeros(2, np.int64))
    documents: np.ndarray = field(default_factory=lambda: np.zeros(2, np.int64))
    number: int = 0
    highest: int = -1
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, shard: Shard) -> bool:
        """Count a file; returns whether a part then has `max_tokens`."""
        lengths = self.shards.lengths(shard, 0, shard.note.documents)
        if int(lengths.sum()) != shard.note.tokens:
            raise DamagedError(shard)
        held_out = self.split.held_out(np.arange(self.number, self.number + len(lengths)))
        parts = np.stack([np.where(held_out, 0, lengths), np.where(held_out, lengths, 0)])  # [2, documents]
        end, limit = len(lengths), self.split.max_tokens
        if limit is not None:
            full = np.flatnonzero((self.tokens[:, None] + np.cumsum(parts, axis=1) >= limit).any(axis=0))
            end = int(full[0]) + 1 if len(full) else end
        self._add(shard, lengths[:end], parts[:, :end], held_out[:end])
        return limit is not None and bool((self.tokens >= limit).any())

    def _add(self, shard: Shard, lengths: np.ndarray, parts: np.ndarray, held_out: np.ndarray) -> None:
        if len(lengths):
            sums = np.add.reduceat(parts, np.arange(0, len(lengths), BLOCK), axis=1)  # [2, blocks]
            self.rows.append((self.tokens[:, None] + np.cumsum(sums, axis=1) - sums).T)
        self.tokens = self.tokens + parts.sum(axis=1)
        limit = self.split.max_tokens
        beyond = int(np.maximum(self.tokens - limit, 0).sum()) if limit is not None else 0  # ids of the last document
        tokens = int(lengths.sum()) - beyond
        highest, digest = shard.note.highest, shard.note.hash
        if tokens < shard.note.tokens or len(lengths) < shard.note.documents:
            lengths = lengths.copy()
            lengths[-1] -= beyond
            digest = self.shards.hash_of(shard, tokens, lengths)
            highest = int(self.shards.ids(shard, 0, tokens).max()) if tokens else -1
        self.highest = max(self.highest, highest)
        self.number += len(lengths)
        self.documents = self.documents + (parts > 0).sum(axis=1)
        if limit is not None:
            self.tokens = np.minimum(self.tokens, limit)
        self.digest.update(f"{digest}:{len(lengths)}:{tokens};".encode() + np.packbits(held_out).tobytes())

    def table(self) -> np.ndarray:
        """[blocks + 1, 2]: number of ids of both parts before each block; totals in the last row."""
        return np.concatenate([*self.rows, self.tokens[None]]).astype(ROW)


def open_parts(shards: Shards, files: Iterable[Shard | None], split: Split) -> Tokens | None:
    """The parts of a source under a split; None if tokens are missing.

    `files` are in order, with None for the first missing one. `DamagedError` if a file is inconsistent with its note.
    """
    listed = list(files)
    complete = None not in listed
    existing = [file for file in listed if file is not None]
    stored = _stored(shards, existing, split, complete)
    if stored is None:
        count = _Count(shards, split)
        full = next((index for index, file in enumerate(existing) if count.add(file)), None)
        if full is None and not complete:
            return None
        stored = _store(shards, existing if full is None else existing[: full + 1], split, count)
    extent, table = stored
    existing = existing[: extent.shards]
    parts = {name: Part(shards, existing, split, table, column, extent) for column, name in enumerate(PARTS)}
    return Tokens(parts, extent.highest, extent.hash)


def _store(shards: Shards, files: list[Shard], split: Split, count: _Count) -> tuple[Extent, np.ndarray]:
    """Save the table beside the tokens, unless the folder is read-only."""
    table = count.table()
    extent = Extent(
        shards=len(files),
        numbers=count.number,
        tokens=(int(count.tokens[0]), int(count.tokens[1])),
        documents=(int(count.documents[0]), int(count.documents[1])),
        highest=count.highest,
        hash=f"sha256:{count.digest.hexdigest()}",
        made_from=_hash_of_files(files),
        table=_hash(table.tobytes()),
    )
    with suppress(OSError):
        with atomic(_path(shards, split, ".bin")) as part:
            part.write_bytes(table.tobytes())
        write_json(_path(shards, split, ".json"), extent.model_dump())
    return extent, table


def _stored(shards: Shards, files: list[Shard], split: Split, complete: bool) -> tuple[Extent, np.ndarray] | None:
    """The saved table, if it was made from the same files and is sufficient."""
    try:
        if not _path(shards, split, ".json").exists():
            return None
        extent = read_document(_path(shards, split, ".json"), Extent)
        content = read_bytes(_path(shards, split, ".bin"), most=MOST_TABLE_BYTES)
    except FulldepthError:
        return None
    enough = split.max_tokens is not None and max(extent.tokens) >= split.max_tokens
    if not enough and (not complete or extent.shards < len(files)):
        return None
    files = files[: extent.shards]
    rows = sum(-(-file.note.documents // BLOCK) for file in files)
    if (extent.made_from, extent.table) != (_hash_of_files(files), _hash(content)):
        return None
    table = np.frombuffer(content, ROW).reshape(-1, 2)
    return (extent, table) if len(table) <= rows + 1 else None


def _path(shards: Shards, split: Split, suffix: str) -> Path:
    return shards.folder / f"split-{split.key()}{suffix}"


def _hash_of_files(files: list[Shard]) -> str:
    return _hash("".join(file.note.hash for file in files).encode())


def _hash(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"

"""Token ids on disk: files of bounded size that are written once, and read through memory maps."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SHARD_TOKENS = 2**27
"""Token ids in a file (a file of 256 MiB at two bytes)."""
START = np.dtype("<i8")


class Layout(NamedTuple):
    """Where the token ids of one part (`train`, `validation`) lie, and how they are written."""

    folder: Path
    part: str
    dtype: np.dtype
    """Little-endian: `<u2` where the vocabulary fits, else `<u4`."""
    shard_tokens: int
    """Ids in each file but the last."""

    def shard(self, index: int) -> Path:
        """The file with ids number `index * shard_tokens` and up."""
        return self.folder / f"{self.part}-{index:05}.bin"

    @property
    def starts(self) -> Path:
        """The file with the position of each document's first id."""
        return self.folder / f"{self.part}-documents.bin"

    def sizes(self, tokens: int, documents: int) -> dict[Path, int]:
        """File -> bytes that it has once so much is written; empty files do not exist."""
        sizes = {self.starts: documents * START.itemsize}
        for index, first in enumerate(range(0, tokens, self.shard_tokens)):
            sizes[self.shard(index)] = min(self.shard_tokens, tokens - first) * self.dtype.itemsize
        return {path: size for path, size in sizes.items() if size}

    def is_whole(self, tokens: int, documents: int) -> bool:
        """Whether every file has exactly the bytes that it should have."""
        sizes = self.sizes(tokens, documents)
        return all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())


class ShardWriter:
    """Appends documents to one part.

    Args:
        layout: where to.
        tokens: go on after so many ids; what lies behind them is thrown away.
        documents: go on after so many documents.

    Raises:
        EOFError: if less than that is there.
    """

    def __init__(self, layout: Layout, tokens: int = 0, documents: int = 0) -> None:
        self.layout, self.tokens, self.documents = layout, tokens, documents
        sizes = layout.sizes(tokens, documents)
        for path in layout.folder.glob(f"{layout.part}-*.bin"):
            if path not in sizes:
                path.unlink()
        for path, size in sizes.items():
            if not path.is_file() or path.stat().st_size < size:
                raise EOFError(f"{path} is shorter than {size} bytes")
            os.truncate(path, size)
        self._starts = layout.starts.open("ab")
        self._shard = layout.shard(tokens // layout.shard_tokens).open("ab")

    def add(self, ids: np.ndarray) -> None:
        """One more document; `ids` [n], n >= 1."""
        self._starts.write(np.array([self.tokens], START).tobytes())
        self.documents += 1
        while len(ids):
            done = self.tokens % self.layout.shard_tokens
            now, ids = np.split(ids, [self.layout.shard_tokens - done])
            self._shard.write(now.astype(self.layout.dtype).tobytes())
            self.tokens += len(now)
            if self.tokens % self.layout.shard_tokens == 0:
                self._sync(self._shard)
                self._shard.close()
                self._shard = self.layout.shard(self.tokens // self.layout.shard_tokens).open("ab")

    def sync(self) -> None:
        """Everything so far is on the disk when this returns."""
        self._sync(self._starts)
        self._sync(self._shard)

    @staticmethod
    def _sync(file: Any) -> None:
        file.flush()
        os.fsync(file.fileno())

    def close(self) -> None:
        """Let go of the files; empty ones disappear."""
        for file in (self._starts, self._shard):
            file.close()
            path = Path(file.name)
            if not path.stat().st_size:
                path.unlink()


class TokenShards:
    """Reads one part. Any range costs the same; nothing is held in memory but what was asked for.

    Args:
        layout: where from.
        tokens: ids in all.
        documents: documents in all.
    """

    def __init__(self, layout: Layout, tokens: int, documents: int) -> None:
        self.layout, self.tokens, self.documents = layout, tokens, documents
        self._maps: dict[Path, np.ndarray] = {}

    def __getstate__(self) -> dict[str, Any]:
        """A worker process maps the files anew."""
        return {**self.__dict__, "_maps": {}}

    def _map(self, path: Path, dtype: np.dtype) -> np.ndarray:
        if path not in self._maps:
            self._maps[path] = np.asarray(np.memmap(path, dtype=dtype, mode="r"))
        return self._maps[path]

    def read(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] int64: ids number `start` up to `stop`, which both exist."""
        size = self.layout.shard_tokens
        parts = []
        for index in range(start // size, (stop - 1) // size + 1):
            first = index * size
            shard = self._map(self.layout.shard(index), self.layout.dtype)
            parts.append(shard[max(start - first, 0) : stop - first].astype(np.int64))
        return np.concatenate(parts)

    def starts(self, start: int, stop: int) -> np.ndarray:
        """Positions, counted from `start`, of the documents that begin in `start` up to `stop`."""
        starts = self._map(self.layout.starts, START)
        first, last = np.searchsorted(starts, [start, stop])
        return starts[first:last].astype(np.int64) - start

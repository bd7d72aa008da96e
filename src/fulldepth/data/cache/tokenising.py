"""`tokenise`: the token ids of documents, from the cache or tokenised where they are missing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from filelock import FileLock

from fulldepth import launch
from fulldepth.data.cache import token_files
from fulldepth.data.cache.encoder import Encoder
from fulldepth.data.cache.splitting import DamagedError, Split, Tokens, open_parts
from fulldepth.data.cache.token_files import Shard, Shards, write_json
from fulldepth.data.cache.writers import Job, Progress, cannot_write, write_in_parallel
from fulldepth.data.documents import Documents
from fulldepth.errors import FulldepthError
from fulldepth.files import remove_leftovers
from fulldepth.progress import Watcher

VERSION = 2
"""Version of layout and content; files of other versions are not read."""
SOURCE = "source.json"
RESCAN = 5.0
"""Seconds between two scans of the files of other machines."""
MANY_TOKENS = 2**28
"""Missing tokens from which `advice` is given."""
BYTES_PER_TOKEN = 4
"""Approximate value for English text."""


def default_cache() -> Path:
    """`tokens/` under `$FULLDEPTH_CACHE`, else `$XDG_CACHE_HOME/fulldepth`, else `~/.cache/fulldepth`."""
    if own := os.environ.get("FULLDEPTH_CACHE"):
        return Path(own).expanduser() / "tokens"
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path("~/.cache").expanduser()) / "fulldepth" / "tokens"


def default_writers() -> int:
    """Default number of writers: this process's share of the machine's cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, launch.local_world()))


def tokens_folder(documents: Documents, encoder: Encoder, cache: Path) -> Path:
    """Cache folder of the ids of a text under a tokenizer."""
    return cache / _sha256(_description(documents, encoder))[:20]


def _description(documents: Documents, encoder: Encoder) -> dict[str, object]:
    """Everything that determines the ids and their files."""
    return {
        "version": VERSION,
        "tokenizer": encoder.fingerprint(),
        "source": dict(documents.identity),
        "units": len(documents.units),
        "dtype": encoder.dtype.str,
        "shard": [token_files.SHARD_TOKENS, token_files.SHARD_DOCUMENTS],
    }


def tokenise(
    documents: Documents,
    encoder: Encoder,
    split: Split,
    cache: Path,
    watcher: Watcher,
    *,
    writers: int | None = None,
    advice: str | None = None,
) -> Tokens:
    """The documents' token ids, tokenised where not cached; arguments and errors as for `pack`."""
    folder = tokens_folder(documents, encoder, cache)
    shards = Shards(folder, encoder.dtype)
    token_limit = _expected_total(split)
    tokens = None
    try:
        while (tokens := _open(shards, documents, split)) is None:
            if advice and _to_make(documents, shards, token_limit) >= MANY_TOKENS:
                watcher.say(advice)
            _make(documents, encoder, shards, token_limit, watcher, writers)
            token_limit = None if token_limit is None else _held(shards, documents) + 1
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        raise cannot_write(folder, error) from error
    if not any(part.tokens for part in tokens.parts.values()):
        count = sum(file.note.documents for file in _files(shards, documents) if file is not None)
        raise FulldepthError(f"{documents.name} is empty: {count} documents, and no token in them.")
    return tokens


def _expected_total(split: Split) -> int | None:
    """Expected ids of both parts when the larger one has `max_tokens`; None = no limit."""
    return None if split.max_tokens is None else round(split.max_tokens / max(split.share, 1 - split.share))


def _files(shards: Shards, documents: Documents) -> Iterator[Shard | None]:
    """The token files in order, then None if one is missing."""
    for unit in range(len(documents.units)):
        files = shards.of_unit(unit)
        yield from files
        if not (files and files[-1].note.last):
            yield None
            return


def _held(shards: Shards, documents: Documents) -> int:
    """Number of ids before the first missing file."""
    return sum(file.note.tokens for file in _files(shards, documents) if file is not None)


def _open(shards: Shards, documents: Documents, split: Split) -> Tokens | None:
    """The tokens on disk, None if too few; damaged files are dropped."""
    while True:
        try:
            return open_parts(shards, _files(shards, documents), split)
        except DamagedError as error:
            shards.drop(error.shard)


def _make(
    documents: Documents,
    encoder: Encoder,
    shards: Shards,
    token_limit: int | None,
    watcher: Watcher,
    writers: int | None,
) -> None:
    """Write missing files, in parallel if there are several units."""
    folder = shards.folder
    (folder / "locks").mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "locks" / "source"):  # threads of one process share their temporary names
        if not (folder / SOURCE).exists():
            write_json(folder / SOURCE, _description(documents, encoder))
    remove_leftovers(folder)
    job = Job(documents.units, encoder, folder, token_limit)
    missing = job.missing()
    meter = _Meter(documents, shards, token_limit, watcher)
    if meter.tokens:
        watcher.say(f"Tokenising goes on after {meter.tokens:,} tokens.")
    if not missing:
        return
    count = min(writers or default_writers(), _useful_writers(job, len(missing), meter.tokens))
    if count > 1 and documents.portable:
        write_in_parallel(job, count, meter.hear)
    job.write(meter.hear, lambda: watcher.say(f"Waiting for another process that tokenises into {folder}."))
    meter.finish()


def _useful_writers(job: Job, missing: int, held: int) -> int:
    """Number of useful writers: one per missing unit, at most one per file still needed for `token_limit`."""
    if job.token_limit is None:
        return missing
    return min(missing, -(-(job.token_limit - held) // token_files.SHARD_TOKENS))


def _to_make(documents: Documents, shards: Shards, token_limit: int | None) -> int:
    """Approximate number of missing ids; at most 0 if unknown."""
    total = (documents.size or 0) // BYTES_PER_TOKEN
    return (total if token_limit is None else min(token_limit, total or token_limit)) - _held(shards, documents)


class _Meter:
    """Progress in tokens if their number is limited, else in documents if it is known, else in bytes of the files."""

    def __init__(self, documents: Documents, shards: Shards, token_limit: int | None, watcher: Watcher) -> None:
        self.documents, self.shards, self.token_limit, self.watcher = documents, shards, token_limit, watcher
        self.units: dict[int, Progress] = {}
        self.total = token_limit or documents.length or documents.size or 0
        self.shown, self.looked = 0, monotonic()
        self._look()
        self.start, self.before = monotonic(), self.tokens
        unit = "tokens" if token_limit else "documents" if documents.length is not None else "bytes"
        self.title = f"Tokenising {documents.name} ({unit})"
        watcher.begin(self.title, self.total)
        self._show()

    @property
    def tokens(self) -> int:
        """Ids written so far by all processes."""
        return sum(unit.tokens for unit in self.units.values())

    def hear(self, progress: Progress) -> None:
        """Process a report of a writer on this machine."""
        self.units[progress.unit] = progress
        if monotonic() - self.looked > RESCAN:
            self._look()
        self._show()

    def finish(self) -> None:
        """Show completion."""
        self._to(self.total)

    def _look(self) -> None:
        """Count the ids on disk where they exceed the reports of this machine's writers."""
        for unit in range(len(self.documents.units)):
            files = self.shards.of_unit(unit)
            tokens = sum(file.note.tokens for file in files)
            if files and tokens >= self.units.get(unit, Progress(unit, 0, 0, 0)).tokens:
                size = self.documents.units[unit].size or 0
                count = sum(file.note.documents for file in files)
                self.units[unit] = Progress(unit, count, size if files[-1].note.last else 0, tokens)
        self.looked = monotonic()

    def _show(self) -> None:
        values = self.units.values()
        if self.token_limit:
            self._to(self.tokens)
        else:
            self._to(sum(d.documents if self.documents.length is not None else d.characters for d in values))
        new, seconds = self.tokens - self.before, monotonic() - self.start
        if new:
            self.watcher.retitle(f"{self.title}, {new / seconds:,.0f} tokens/s")

    def _to(self, position: int) -> None:
        position = min(position, self.total) if self.total else position
        if position > self.shown:
            self.watcher.advance(position - self.shown)
            self.shown = position


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

"""Documents into shards of token ids, once: under a lock, taken up again after a kill, found again by a fingerprint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from fulldepth.data.documents import Documents
from fulldepth.data.shards import SHARD_TOKENS, Layout, ShardWriter, TokenShards
from fulldepth.data.tokens import Frame, check_vocabulary, encode_texts
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher

VERSION = 1
"""Of the layout and of what is written; another one never reads these shards."""
PARTS = ("train", "validation")
INDEX, PROGRESS, LOCK = "index.json", "progress.json", "lock"
BATCH_DOCUMENTS, BATCH_CHARACTERS = 256, 2**20
SAVE_TOKENS = 2**24
"""Ids between two notes of how far it is."""


class Tokens(NamedTuple):
    """What was tokenised."""

    parts: dict[str, TokenShards]
    highest: int
    """The highest id."""
    hash: str
    """`sha256:...` over the ids and the documents' starts of both parts."""


@dataclass
class Encoder:
    """Text to token ids with the special tokens that the tokenizer puts around a text, and end-of-text after it.

    Raises:
        FulldepthError: if the tokenizer has no end-of-text token.
    """

    tokenizer: Any
    frame: Frame = field(init=False)
    end: int = field(init=False)
    dtype: np.dtype = field(init=False)
    """The smaller of two and four bytes that holds every id."""

    def __post_init__(self) -> None:
        if self.tokenizer.eos_token_id is None:
            raise FulldepthError("The tokenizer has no end-of-text token (eos_token), which must end each document.")
        self.end = int(self.tokenizer.eos_token_id)
        self.frame = Frame.of(self.tokenizer, ["text"])
        highest = max(self.end, *self.tokenizer.get_vocab().values())
        self.dtype = np.dtype("<u2" if highest < 2**16 else "<u4")

    def __call__(self, texts: list[str]) -> list[np.ndarray]:
        """[n] ids of each text; none for a text without tokens."""
        encoded = encode_texts(self.tokenizer, texts, add_special_tokens=False, return_attention_mask=False)
        return [self._document(ids) for ids in encoded["input_ids"]]

    def _document(self, ids: list[int]) -> np.ndarray:
        if not ids:
            return np.zeros(0, np.int64)
        framed = self.frame.wrap(ids)
        return np.array(framed if framed[-1] == self.end else [*framed, self.end], np.int64)

    def fingerprint(self) -> str:
        """SHA-256 over everything in the tokenizer that decides ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            described: Any = [type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items())]
        else:  # truncation and padding are left over from whatever it was used for last
            described = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
        raw = getattr(self.tokenizer, "split_special_tokens", False)
        return _sha256([described, raw, self.end, self.frame.prefix, self.frame.suffix])


@dataclass(frozen=True)
class Split:
    """Which documents are held out for validation, and when enough is read.

    The choice depends on a document's place in the source and on the seed alone: documents added at the end move none.
    """

    share: float
    seed: int
    max_tokens: int | None = None
    """Ids in each part at most; the one that gets there first ends the reading."""

    def part(self, document: int) -> str:
        """The part of document number `document`, from 0."""
        digest = hashlib.blake2b(f"{self.seed}:{document}".encode(), digest_size=8).digest()
        return PARTS[int.from_bytes(digest, "big") < self.share * 2.0**64]


def tokenise(
    documents: Documents, encoder: Encoder, split: Split, cache: Path, vocab_size: int | None, watcher: Watcher
) -> Tokens:
    """The documents' token ids, from the cache or made now; see `fulldepth.data.packed.pack`.

    Raises:
        FulldepthError: if there are no tokens, the model lacks one, or they cannot be written.
    """
    description = {
        "version": VERSION,
        "tokenizer": encoder.fingerprint(),
        "source": dict(documents.identity),
        "share": split.share,
        "seed": split.seed,
        "max_tokens": split.max_tokens,
        "dtype": encoder.dtype.str,
        "shard_tokens": SHARD_TOKENS,
    }
    folder = cache / _sha256(description)[:20]
    layouts = {part: Layout(folder, part, encoder.dtype, SHARD_TOKENS) for part in PARTS}
    tokens = _open(layouts)
    if tokens is None:
        try:
            with _locked(folder, watcher):
                tokens = _open(layouts)  # another process may have made it
                if tokens is None:
                    _Build(documents, encoder, split, layouts, vocab_size, watcher).run(description)
                    tokens = _open(layouts)
        except OSError as error:
            raise FulldepthError(f"Cannot write tokens to {folder}: {error.strerror or error}.") from error
    if tokens is None:
        raise FulldepthError(f"The tokens in {folder} changed while they were written. Start again.")
    return tokens


def _open(layouts: Mapping[str, Layout]) -> Tokens | None:
    """What is there, if it is whole."""
    index = _read_json(layouts["train"].folder / INDEX)
    if index is None:
        return None
    if not all(layouts[part].is_whole(*index[part]) for part in PARTS):
        return None
    parts = {part: TokenShards(layouts[part], *index[part]) for part in PARTS}
    return Tokens(parts, index["highest"], index["hash"])


@contextmanager
def _locked(folder: Path, watcher: Watcher) -> Iterator[None]:
    """One process at a time; a killed one lets go."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        watcher.say(f"Waiting for another process that tokenises into {folder}.")
        lock.acquire(poll_interval=0.2)
    try:
        yield
    finally:
        lock.release()


@dataclass
class _Build:
    documents: Documents
    encoder: Encoder
    split: Split
    layouts: Mapping[str, Layout]
    vocab_size: int | None
    watcher: Watcher
    read: int = 0
    """Documents read, the empty ones too."""
    highest: int = -1
    writers: dict[str, ShardWriter] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.layouts["train"].folder

    @property
    def tokens(self) -> int:
        return sum(writer.tokens for writer in self.writers.values())

    def run(self, description: Mapping[str, Any]) -> None:
        """Write both parts, and the index last."""
        (self.folder / INDEX).unlink(missing_ok=True)
        self._go_on()
        try:
            self._write_all()
            for writer in self.writers.values():
                writer.sync()
        finally:
            for writer in self.writers.values():
                writer.close()
        if not self.tokens:
            raise FulldepthError(f"{self.documents.name} is empty: {self.read} documents, and no token in them.")
        digest = _content_hash(self.layouts, self._state())
        _write_json(self.folder / INDEX, {**self._state(), "hash": digest, "made from": description})
        (self.folder / PROGRESS).unlink(missing_ok=True)

    def _state(self) -> dict[str, Any]:
        counts = {part: [writer.tokens, writer.documents] for part, writer in self.writers.items()}
        return {"read": self.read, "highest": self.highest, **counts}

    def _go_on(self) -> None:
        """Open the writers where a killed run noted that it was, or at the beginning."""
        state = _read_json(self.folder / PROGRESS)
        try:
            for part, layout in self.layouts.items():
                self.writers[part] = ShardWriter(layout, *(state[part] if state else ()))
            if state:
                self.read, self.highest = state["read"], state["highest"]
                self.watcher.say(f"Tokenising goes on after {self.read} documents.")
        except EOFError:
            for writer in self.writers.values():
                writer.close()
            self.watcher.say(f"The tokens in {self.folder} are damaged. Tokenising starts again.")
            self.writers = {part: ShardWriter(layout) for part, layout in self.layouts.items()}

    def _write_all(self) -> None:
        meter = _Meter(self.documents, self.split.max_tokens, self.watcher)
        meter.show(self.read, 0, self._fullest())
        saved = self.tokens
        for texts in _batches(self.documents.read(self.read)):
            characters = sum(map(len, texts))
            if self._write(texts):
                break
            meter.show(self.read, characters, self._fullest())
            if self.tokens - saved >= SAVE_TOKENS:
                saved = self.tokens
                self._save()
        meter.finish()

    def _write(self, texts: list[str]) -> bool:
        """Append a batch; whether that was enough."""
        for ids in self.encoder(texts):
            writer = self.writers[self.split.part(self.read)]
            self.read += 1
            if not len(ids):
                continue
            if ids.max() > self.highest:
                self.highest = int(ids.max())
                check_vocabulary(self.highest, self.encoder.tokenizer, self.vocab_size)
            most = self.split.max_tokens
            writer.add(ids if most is None else ids[: most - writer.tokens])
            if writer.tokens == most:
                return True
        return False

    def _fullest(self) -> int:
        return max(writer.tokens for writer in self.writers.values())

    def _save(self) -> None:
        for writer in self.writers.values():
            writer.sync()
        _write_json(self.folder / PROGRESS, self._state())


class _Meter:
    """How far it is: in tokens where enough is a number of them, else in documents, else in bytes of the files."""

    def __init__(self, documents: Documents, max_tokens: int | None, watcher: Watcher) -> None:
        self.by_tokens, self.by_documents = max_tokens is not None, documents.length is not None
        self.total = max_tokens or documents.length or documents.size or 0
        self.done, self.characters, self.watcher = 0, 0, watcher
        unit = "tokens" if self.by_tokens else "documents" if self.by_documents else "bytes"
        watcher.begin(f"Tokenising {documents.name} ({unit})", self.total)

    def show(self, documents: int, characters: int, tokens: int) -> None:
        self.characters += characters
        now = tokens if self.by_tokens else documents if self.by_documents else self.characters
        self._to(now)

    def finish(self) -> None:
        self._to(self.total)

    def _to(self, now: int) -> None:
        now = min(now, self.total) if self.total else now
        if now > self.done:
            self.watcher.advance(now - self.done)
            self.done = now


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts in lists short enough to be tokenised at once."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) == BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _content_hash(layouts: Mapping[str, Layout], state: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for part in PARTS:
        tokens, documents = state[part]
        digest.update(f"{part}:{tokens}:{documents}:{layouts[part].dtype.str};".encode())
        for path in layouts[part].sizes(tokens, documents):
            with path.open("rb") as file:
                for block in iter(partial(file.read, 2**20), b""):
                    digest.update(block)
    return f"sha256:{digest.hexdigest()}"


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    """All of it or nothing, whenever the process is killed."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)

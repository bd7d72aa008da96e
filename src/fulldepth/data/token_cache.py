"""Token ids of documents on disk: tokenised once for each text and tokenizer, in order, and resumed after a kill.

The ids of a text are in files `000000.bin`, `000001.bin`, ... of bounded size: the concatenated ids of documents, then
the number of ids of each document (0 for a document without tokens). `000000.json`, written afterwards, holds the
counts; without it the file is made anew. The content depends on the text and the tokenizer alone, so runs with other
seeds, shares, lengths and numbers of steps read the same files, and a run that needs more tokens adds to them.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import pydantic
from filelock import FileLock, Timeout
from pydantic import Field
from tokenizers import Tokenizer

from fulldepth.data.documents import Documents
from fulldepth.data.tokens import Frame, check_vocabulary, encode_texts
from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import atomic, read_document, reading, remove_leftovers
from fulldepth.progress import Watcher

VERSION = 3
"""Version of layout and content; files of other versions are not read."""
FILE_TOKENS = 2**25
"""Token ids after which a file ends with the current document (64 MiB at two bytes per id)."""
FILE_DOCUMENTS = 2**22
"""Most documents in a file."""
BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, 2**22
"""Most documents, and characters, that are tokenised at once, by all cores."""
LENGTH = np.dtype("<u4")
Count = Annotated[int, Field(ge=0, le=2**48)]


@dataclass
class Encoder:
    """Tokenises documents, with the tokenizer's special tokens around each and end-of-text after it.

    Raises:
        FulldepthError: if the tokenizer has no end-of-text token.
    """

    tokenizer: Any
    vocab_size: int | None = None
    """Vocabulary size of the model: ids beyond it are refused; None = not checked."""
    frame: Frame = field(init=False)
    end: int = field(init=False)
    dtype: np.dtype = field(init=False)
    """Unsigned integer of two or four bytes, the smaller that holds every id."""
    core: Tokenizer | None = field(init=False, default=None, repr=False)
    """A copy of the Rust tokenizer without truncation and padding; None for a tokenizer in Python."""

    def __post_init__(self) -> None:
        if self.tokenizer.eos_token_id is None:
            raise FulldepthError("The tokenizer has no end-of-text token (eos_token), which must end each document.")
        self.end = int(self.tokenizer.eos_token_id)
        self.frame = Frame.of(self.tokenizer, ["text"])
        highest = max(self.end, *self.tokenizer.get_vocab().values())
        self.dtype = np.dtype("<u2" if highest < 2**16 else "<u4")
        if (backend := getattr(self.tokenizer, "backend_tokenizer", None)) is not None:
            self.core = Tokenizer.from_str(backend.to_str())
            self.core.no_truncation()
            self.core.no_padding()
            self.core.encode_special_tokens = bool(getattr(self.tokenizer, "split_special_tokens", False))

    def __call__(self, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of all texts, and how many of them are of each; refuses ids that the model lacks."""
        if self.core is None:
            encoded = encode_texts(self.tokenizer, list(texts), add_special_tokens=False, return_attention_mask=False)
            ids_of = encoded["input_ids"]
        else:
            with reading(f"text with the tokenizer {self.tokenizer.name_or_path or type(self.tokenizer).__name__}"):
                encodings = self.core.encode_batch_fast(list(texts), add_special_tokens=False)
                ids_of = [encoding.ids for encoding in encodings]
        flat, lengths = array("I"), []
        for ids in ids_of:
            start = len(flat)
            if ids:
                flat.extend(self.frame.wrap(ids))
                if flat[-1] != self.end:
                    flat.append(self.end)
            lengths.append(len(flat) - start)
        all_ids = np.frombuffer(flat, np.uint32) if flat else np.zeros(0, np.uint32)
        check_vocabulary(int(all_ids.max(initial=0)), self.tokenizer, self.vocab_size)
        return all_ids, np.array(lengths, np.int64)

    def fingerprint(self) -> str:
        """SHA-256 of everything in the tokenizer that determines ids."""
        if self.core is None:
            described: Any = [type(self.tokenizer).__name__, sorted(self.tokenizer.get_vocab().items())]
        else:
            described = {k: v for k, v in json.loads(self.core.to_str()).items() if k not in ("truncation", "padding")}
        raw = getattr(self.tokenizer, "split_special_tokens", False)
        return _sha256([described, raw, self.end, self.frame.prefix, self.frame.suffix])


class Note(pydantic.BaseModel):
    """Contents of a token file: schema of its `.json`."""

    tokens: Count
    documents: Count
    """Number of documents, including those without tokens."""
    highest: int = Field(ge=-1, lt=2**32)
    """The highest id; -1 if there is none."""
    last: bool
    """Whether the text ends with this file."""
    hash: str = Field(pattern="^sha256:[0-9a-f]{64}$")
    """Hash of the ids and the documents' lengths, as stored."""


class TokenFile(NamedTuple):
    """A complete file of token ids."""

    path: Path
    dtype: np.dtype
    note: Note
    lengths: np.ndarray
    """[documents] ids of each document."""

    def ids(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] ids at positions `start` up to `stop`."""
        ids = np.fromfile(self.path, self.dtype, stop - start, offset=start * self.dtype.itemsize)
        if len(ids) < stop - start:
            raise FulldepthError(f"{self.path} is shorter than it was. Start again to make it anew.")
        return ids

    def hash_of(self, tokens: int, lengths: np.ndarray) -> str:
        """`Note.hash` of the first `tokens` ids, in documents of these lengths."""
        digest = hashlib.sha256(self.ids(0, tokens).tobytes())
        digest.update(lengths.astype(LENGTH).tobytes())
        return f"sha256:{digest.hexdigest()}"


class TokenCache:
    """The token files of a text.

    Args:
        documents: the text.
        encoder: tokenises it.
        cache: folder for the ids of any number of texts and tokenizers; None = `tokens/` under `$FULLDEPTH_CACHE`, else
            `$XDG_CACHE_HOME/fulldepth`, else `~/.cache/fulldepth`.
    """

    def __init__(self, documents: Documents, encoder: Encoder, cache: Path | None) -> None:
        self.name, self.documents, self.encoder = documents.name, documents, encoder
        source, size = dict(documents.identity), [FILE_TOKENS, FILE_DOCUMENTS]
        described = [VERSION, encoder.fingerprint(), source, encoder.dtype.str, size]
        self.folder = (cache or _default_folder()) / _sha256(described)[:20]
        self.files: list[TokenFile] = []
        self.find()

    @property
    def complete(self) -> bool:
        """Whether the whole text is there."""
        return bool(self.files) and self.files[-1].note.last

    @property
    def tokens(self) -> int:
        """Number of ids."""
        return sum(file.note.tokens for file in self.files)

    def find(self) -> None:
        """Add the files that are on disk, up to the first that is missing or inconsistent with its note."""
        with self._writing():
            while not self.complete and (file := self._file(len(self.files))) is not None:
                self.files.append(file)

    def _file(self, number: int) -> TokenFile | None:
        path, dtype = self.folder / f"{number:06}.bin", self.encoder.dtype
        try:
            note = read_document(path.with_suffix(".json"), Note)
        except FulldepthError:
            return None
        start = note.tokens * dtype.itemsize
        if not path.is_file() or path.stat().st_size != start + note.documents * LENGTH.itemsize:
            return None
        lengths = np.fromfile(path, LENGTH, offset=start).astype(np.int64)
        return TokenFile(path, dtype, note, lengths) if lengths.sum() == note.tokens else None

    def extend(self, tokens: int | None, watcher: Watcher) -> None:
        """Tokenise until there are so many ids, or all; waits for another process that does it.

        Raises:
            FulldepthError: if the folder cannot be written.
        """
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(self.folder / "lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                watcher.say(f"Waiting for another process that tokenises into {self.folder}.")
                lock.acquire()
            try:
                remove_leftovers(self.folder)
                self.find()
                if not self._enough(tokens):
                    self._write_until(tokens, watcher)
            finally:
                lock.release()

    def _enough(self, tokens: int | None) -> bool:
        return self.complete or (tokens is not None and self.tokens >= tokens)

    def _write_until(self, tokens: int | None, watcher: Watcher) -> None:
        """Write files, with progress in tokens if their number is limited, else in documents."""
        documents = sum(file.note.documents for file in self.files)
        done, total, unit = documents, self.documents.length or 0, "documents"
        if tokens is not None:
            done, total, unit = self.tokens, tokens, "tokens"
        if self.tokens:
            watcher.say(f"Tokenising goes on after {self.tokens:,} tokens.")
        watcher.begin(f"Tokenising {self.name} ({unit})", total)
        watcher.advance(done)
        left = total - done

        def show(**batch: int) -> None:
            nonlocal left
            step = min(batch[unit], left) if total else batch[unit]
            left -= step
            watcher.advance(step)

        ahead = _Encoded(self.documents.read(documents), self.encoder, show)
        while not self._enough(tokens):
            self._write_file(ahead)
        watcher.advance(max(0, left))

    def _write_file(self, ahead: _Encoded) -> None:
        """Write the next file: documents up to `FILE_TOKENS` ids, `FILE_DOCUMENTS` or the end of the text."""
        path = self.folder / f"{len(self.files):06}.bin"
        path.with_suffix(".json").unlink(missing_ok=True)
        digest, parts = hashlib.sha256(), [np.zeros(0, np.int64)]
        tokens, count, highest = 0, 0, -1
        with atomic(path) as temporary, temporary.open("wb") as file:
            while ahead.more():
                before = tokens + np.cumsum(ahead.lengths) - ahead.lengths  # [documents], ids in the file before each
                fit = min(int(np.searchsorted(before, FILE_TOKENS)), FILE_DOCUMENTS - count)
                if not fit:
                    break
                ids, lengths = ahead.take(fit)
                content = ids.astype(self.encoder.dtype).tobytes()
                file.write(content)
                digest.update(content)
                parts.append(lengths)
                tokens, count = tokens + len(ids), count + fit
                highest = max(highest, int(ids.max(initial=0)) if len(ids) else -1)
            lengths = np.concatenate(parts)
            file.write(lengths.astype(LENGTH).tobytes())
            digest.update(lengths.astype(LENGTH).tobytes())
        note = Note(
            tokens=tokens,
            documents=count,
            highest=highest,
            last=not ahead.more(),
            hash=f"sha256:{digest.hexdigest()}",
        )
        with atomic(path.with_suffix(".json")) as temporary:
            temporary.write_text(json.dumps(note.model_dump(), indent=1, sort_keys=True), encoding="utf-8")
        self.files.append(TokenFile(path, self.encoder.dtype, note, lengths))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn errors of the file system into refusals; NotImplementedError: a file system without locks."""
        try:
            yield
        except (OSError, NotImplementedError) as error:
            reason = getattr(error, "strerror", None) or one_line(error, 200)
            raise FulldepthError(
                f"Cannot write tokens to {self.folder}: {reason}. Choose another folder: data.cache=FOLDER, or the "
                "environment variable FULLDEPTH_CACHE."
            ) from error


class _Encoded:
    """A stream of tokenised documents, which can be taken in any portions."""

    def __init__(self, texts: Iterator[str], encoder: Encoder, show: Callable[..., None]) -> None:
        self.texts, self.encoder, self.show = texts, encoder, show
        self.ids, self.lengths = np.zeros(0, np.uint32), np.zeros(0, np.int64)

    def more(self) -> bool:
        """Whether there is another document; tokenises the next batch if none is waiting."""
        if not len(self.lengths):
            batch: list[str] = []
            size = 0
            for text in self.texts:
                batch.append(text)
                size += len(text)
                if len(batch) == BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
                    break
            if batch:
                self.ids, self.lengths = self.encoder(batch)
                self.show(documents=len(batch), tokens=len(self.ids))
        return len(self.lengths) > 0

    def take(self, documents: int) -> tuple[np.ndarray, np.ndarray]:
        """Remove the first `documents`; their ids and lengths."""
        lengths, self.lengths = np.split(self.lengths, [documents])
        ids, self.ids = np.split(self.ids, [int(lengths.sum())])
        return ids, lengths


def _default_folder() -> Path:
    if own := os.environ.get("FULLDEPTH_CACHE"):
        return Path(own).expanduser() / "tokens"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fulldepth" / "tokens"


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()

"""`pack`: training and validation windows of equal length, read from token ids on disk.

Ids are stored as datatrove's `DocumentTokenizer` stores them: `NAME.ds` holds the ids of all documents as uint16 or
uint32, `NAME.ds.index` the position at which each document ends as uint64. One machine writes such a file here; the
folder that many machines wrote with datatrove is read as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from datasets.exceptions import DatasetGenerationError
from filelock import FileLock
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils.data import Dataset

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import atomic_folder, reading, sha256_of
from fulldepth.core.progress import Watcher
from fulldepth.core.targets import IGNORE
from fulldepth.core.uncertainty import counted, ranks
from fulldepth.data.opening import Documents, open_documents
from fulldepth.data.tokens import Frame, check_vocabulary, encode_texts

SUFFIX = ".ds"
INDEX = ".ds.index"
BATCH_DOCUMENTS = 1000
"""Documents that are tokenised at once."""
PROCESS_DOCUMENTS = 50_000
"""Documents for each process that tokenises."""
SCANNED = 1024
BLOCK = 1 << 19
"""Most blocks of a file that its hash covers, evenly spread, and the ids of a block."""
GOLDEN = 0x9E3779B97F4A7C15
"""Step of splitmix64's counter."""
NO_LIMIT = 1 << 62
"""Tokens that no text has."""


class Encoder:
    """Tokenises documents, with the tokenizer's special tokens around each and end-of-text after it.

    Args:
        tokenizer: with an end-of-text token.
        vocab_size: vocabulary size of the model: ids beyond it are refused; None = not checked.
        end_of_text: False adds no end-of-text token.

    Raises:
        FulldepthError: if the tokenizer has no end-of-text token to add.
    """

    def __init__(self, tokenizer: Any, vocab_size: int | None = None, *, end_of_text: bool = True) -> None:
        if end_of_text and tokenizer.eos_token_id is None:
            raise FulldepthError(
                "The tokenizer has no end-of-text token (eos_token), which must end each document. If the documents "
                "are parts of texts, set data.end_of_text=false."
            )
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.end: int | None = int(tokenizer.eos_token_id) if end_of_text else None
        self.frame = Frame.of(tokenizer, ["text"])
        highest = max(self.end or 0, *tokenizer.get_vocab().values())
        self.dtype = np.dtype("<u2" if highest < 2**16 else "<u4")  # the smaller that holds every id

    def __call__(self, texts: Sequence[str]) -> dict[str, list[Any]]:
        """`ids` of each text, none for a text without tokens; refuses ids that the model lacks."""
        options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        ids_of = encode_texts(self.tokenizer, list(texts), **options)["input_ids"]
        rows = [self.frame.wrap(ids) if ids else [] for ids in ids_of]
        if self.end is not None:
            for row in rows:
                if row and row[-1] != self.end:
                    row.append(self.end)
        check_vocabulary(max((max(row) for row in rows if row), default=0), self.tokenizer, self.vocab_size)
        return {"ids": [np.array(row, np.uint32) for row in rows]}

    def fingerprint(self) -> str:
        """SHA-256 of everything in the tokenizer that determines ids."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        described: Any
        if backend is not None:
            described = {k: v for k, v in json.loads(backend.to_str()).items() if k not in ("truncation", "padding")}
        else:  # its rules are Python code, with settings and further files
            with TemporaryDirectory() as folder:
                self.tokenizer.save_pretrained(folder)
                described = [[file.name, sha256_of(file.read_bytes())] for file in sorted(Path(folder).iterdir())]
        raw = getattr(self.tokenizer, "split_special_tokens", False)
        return _sha256([described, raw, self.end, self.frame.prefix, self.frame.suffix])


def tokenised(
    documents: Documents, encoder: Encoder, cache: Path | None, most: int | None, watcher: Watcher
) -> TokenFiles:
    """The token ids of a text, from the cache, or tokenised by all cores; waits for another process that does it.

    `datasets` keeps what is finished: after a kill the same call goes on from there. Of a stream, documents are read
    until there are `most` ids (None = all).

    Raises:
        FulldepthError: if the text cannot be read, or the cache not be written.
    """
    most = most if documents.is_stream else None
    key = _sha256([encoder.fingerprint(), dict(documents.identity), encoder.dtype.str, most])[:20]
    if cache is None:
        cache_folder = os.environ.get("FULLDEPTH_CACHE")
        users = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        cache = Path(cache_folder or Path(users, "fulldepth")).expanduser() / "tokens"
    folder = cache / key
    work = cache / f"{key}.work"
    with _writing(folder):
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{key}.lock"):
            if not folder.is_dir():
                watcher.say(f"Tokenising {documents.name}")
                with atomic_folder(folder) as part:
                    batches = _encoded(documents, encoder, key, work, watcher)
                    _write(batches, part / f"text{SUFFIX}", encoder.dtype, most)
                shutil.rmtree(work, ignore_errors=True)
    return TokenFiles.of(folder)


def _encoded(documents: Documents, encoder: Encoder, key: str, work: Path, watcher: Watcher) -> Iterator[Any]:
    """Arrow tables of `ids`, one row for each document."""
    features = datasets.Features(text=datasets.Value("string"))
    options: dict[str, Any] = {"batched": True, "batch_size": BATCH_DOCUMENTS, "input_columns": "text"}
    options["remove_columns"] = "text"
    if documents.is_stream:
        stream = datasets.IterableDataset.from_generator(documents.rows, features=features).map(encoder, **options)
        yield from stream.with_format("arrow").iter(BATCH_DOCUMENTS)
        return
    texts = datasets.Dataset.from_generator(
        documents.rows, features=features, cache_dir=str(work / "texts"), fingerprint=key
    )
    processes = os.cpu_count() or 1
    total = len(texts)
    watcher.begin("Tokenising", total)
    for start in range(0, total, processes * PROCESS_DOCUMENTS):
        part = texts.select(range(start, min(start + processes * PROCESS_DOCUMENTS, total)))
        ids = part.map(
            encoder,
            features=datasets.Features(ids=datasets.List(datasets.Value("uint32"))),
            num_proc=len(part) // PROCESS_DOCUMENTS or None,
            cache_file_name=str(work / f"ids-{start}-{len(part)}.arrow"),  # another number of cores cuts other parts
            new_fingerprint=f"{key}-{start}-{len(part)}",
            **options,
        )
        watcher.advance(len(part))
        yield from ids.with_format("arrow").iter(BATCH_DOCUMENTS)


def _write(batches: Iterable[Any], path: Path, dtype: np.dtype, most: int | None) -> None:
    """Write the ids of documents, and where each ends, to a file and its index."""
    total = 0
    with path.open("wb") as file, path.with_suffix(INDEX).open("wb") as index:
        for batch in batches:
            for chunk in filter(len, batch["ids"].chunks):
                chunk.flatten().to_numpy().astype(dtype).tofile(file)
                ends = total + np.cumsum(chunk.value_lengths().to_numpy())
                ends.astype("<u8").tofile(index)
                total = int(ends[-1])
            if most is not None and total >= most:
                break


def write_tokens(documents: Iterable[ArrayLike], folder: Path) -> None:
    """Write the token ids of documents as the files of a new folder, which `pack(tokens=...)` reads.

    Args:
        documents: ids of each document, [n] below 2**32; at least one document.
        folder: folder to create, or to replace.

    Raises:
        FulldepthError: if the folder cannot be written.
    """
    rows = [np.asarray(ids, "<u4") for ids in documents]
    ends = np.cumsum([len(row) for row in rows], dtype="<u8")
    with _writing(folder):
        shutil.rmtree(folder, ignore_errors=True)
        with atomic_folder(folder) as part:
            np.concatenate(rows).tofile(part / f"text{SUFFIX}")
            ends.tofile(part / f"text{INDEX}")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Hide the bars of `datasets`, and turn errors of the file system into refusals."""
    showed_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    except DatasetGenerationError as error:
        cause = error.__cause__ or error
        refusal = cause if isinstance(cause, FulldepthError) else FulldepthError(f"Cannot read: {one_line(cause)}.")
        raise refusal from error
    except (OSError, NotImplementedError) as error:  # NotImplementedError: a file system without locks
        reason = getattr(error, "strerror", None) or one_line(error, 200)
        raise FulldepthError(
            f"Cannot write tokens to {folder}: {reason}. Choose another folder: data.cache=FOLDER, or the "
            "environment variable FULLDEPTH_CACHE."
        ) from error
    finally:
        if showed_bars:
            datasets.enable_progress_bars()


def _sha256(value: object) -> str:
    return sha256_of(json.dumps(value, sort_keys=True))


@dataclass(frozen=True)
class TokenFiles:
    """The token files of a folder, as one text."""

    folder: Path
    files: tuple[tuple[Path, str], ...]
    """Path and type of the ids."""
    first: np.ndarray
    """[files + 1] positions at which files begin."""
    ends: np.ndarray = field(repr=False)
    """[documents] positions at which documents end."""

    @classmethod
    def of(cls, folder: Path) -> TokenFiles:
        """The files of a folder and its sub-folders, in the order of their paths.

        Raises:
            FulldepthError: if there are none, or a file is not of the size that its index states.
        """
        files = []
        first = [0]
        ends = [np.zeros(0, np.int64)]
        for index in sorted(folder.rglob(f"*{INDEX}")):
            path = index.with_suffix("")
            with reading(index):
                document_ends = np.fromfile(index, "<u8").astype(np.int64)
                size = path.stat().st_size
            total = int(document_ends[-1]) if len(document_ends) else 0
            if size not in (2 * total, 4 * total) or (np.diff(document_ends, prepend=0) < 0).any():
                raise FulldepthError(f"Cannot read {path}: it has {size:,} bytes, and its index ends at {total:,} ids.")
            ends.append(document_ends + first[-1])
            if total:
                files.append((path, f"<u{size // total}"))
                first.append(first[-1] + total)
        if not files:
            raise FulldepthError(f"{folder} is empty: it holds no token in files *{SUFFIX} with *{INDEX}.")
        return cls(folder, tuple(files), np.array(first), np.concatenate(ends))

    def ids(self, start: int, stop: int) -> np.ndarray:
        """[stop - start] ids from position `start` on, within one file."""
        number = int(np.searchsorted(self.first, start, side="right")) - 1
        tokens: np.ndarray = _mapped(*self.files[number])[start - self.first[number] : stop - self.first[number]]
        return tokens

    def scan(self) -> tuple[int, str]:
        """The highest id and a hash, over the ends of all documents and the ids of evenly spread blocks (of a file of
        up to `SCANNED` blocks all).
        """
        digest = hashlib.sha256(self.ends.tobytes())
        highest = -1
        for path, dtype in self.files:
            ids = _mapped(path, dtype)
            for start in range(0, len(ids), BLOCK * (1 + len(ids) // (BLOCK * SCANNED))):
                block = ids[start : start + BLOCK]
                highest = max(highest, int(block.max()))
                digest.update(block.astype("<u4").tobytes())
        return highest, f"sha256:{digest.hexdigest()}"


@lru_cache(maxsize=256)
def _mapped(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype, mode="r")


class Part(NamedTuple):
    """The documents of one part of a text, without those that have no tokens; 16 bytes of memory for each."""

    files: TokenFiles
    places: np.ndarray
    """[documents] positions in the whole text at which the documents of this part begin."""
    stops: np.ndarray
    """[documents] positions in this part, whose documents are joined, at which they end."""


def split_tokens(files: TokenFiles, share: float, seed: int, max_tokens: int | None) -> list[Part]:
    """The training and the held-out part of a text; arguments as for `pack`.

    Document number n, from 0, is held out if u(seed, n) < share. u is output number n of the generator splitmix64 whose
    state is the first output for `seed`, in units of 2**-64. It depends on number and seed alone, so appending
    documents moves none.

    Source: Steele, Lea, Flood 2014 (splitmix64).
    """
    lengths = np.diff(files.ends, prepend=0)
    counters = np.arange(len(lengths), dtype=np.uint64) * np.uint64(GOLDEN)
    held_out = (ranks(ranks([0], seed) + counters, 0) >> np.uint64(11)) * 2.0**-53 < share
    parts = []
    for in_part in (~held_out, held_out):
        kept_documents = in_part & (lengths > 0)
        stops = np.cumsum(lengths[kept_documents])
        used = len(stops) if max_tokens is None else int(np.searchsorted(stops, max_tokens)) + 1
        places = (files.ends - lengths)[kept_documents][:used]
        parts.append(Part(files, places, stops[:used].clip(max=max_tokens or NO_LIMIT)))
    return parts


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of `sequence_length` tokens, in the order of the documents; an incomplete last window is dropped.

    An item is `input_ids` [T] int64 and `labels` [T] int64, which are the same ids: a causal model shifts them itself,
    so that a window has T - 1 targets; without `end_of_text` the label of a document's first token is -100, too, as
    nothing announces it. Without `across_documents` there is also `position_ids` [T] int64, 0 at the first token of
    the window and of each document in it. transformers derives a block-diagonal attention mask from them if the model
    gets neither an `attention_mask` nor a cache: pass `use_cache=False`, which is not the default.

    Args:
        part: the documents to cut, from `split_tokens`.
        sequence_length: T.
        across_documents: whether attention may cross from one document into the next.
        end_of_text: whether documents end with the end-of-text token.
        limit: most windows, spread evenly over all n: window i is number floor(i n / limit).
    """

    def __init__(
        self,
        part: Part,
        sequence_length: int,
        *,
        across_documents: bool = True,
        end_of_text: bool = True,
        limit: int | None = None,
    ) -> None:
        self.part = part
        self.sequence_length = sequence_length
        self.across_documents = across_documents
        self.end_of_text = end_of_text
        self.documents = len(part.stops)  # of the whole part, regardless of `limit`, as are the tokens
        self.tokens = int(part.stops[-1]) if self.documents else 0
        self.available = self.tokens // sequence_length
        self.count = self.available if limit is None else min(self.available, limit)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -self.count <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        start = (index % self.count) * self.available // self.count * self.sequence_length
        stop = start + self.sequence_length
        stops = self.part.stops
        first, last = np.searchsorted(stops, [start, stop - 1], side="right")
        read = np.arange(first, last + 1)  # [documents] indices of those in the window
        begins = np.where(read > 0, stops[read - 1], 0)  # [documents] positions in this part
        inside = np.maximum(begins, start)
        places = self.part.places[read] + inside - begins
        ends = places + np.minimum(stops[read], stop) - inside
        parts = [self.part.files.ids(*place) for place in zip(places.tolist(), ends.tolist(), strict=True)]
        ids = torch.from_numpy(np.concatenate(parts).astype(np.int64))
        item = {"input_ids": ids, "labels": ids.clone()}
        begins_inside = begins[begins >= start] - start
        if not self.end_of_text:
            item["labels"][begins_inside] = IGNORE
        if not self.across_documents:
            document = np.zeros(len(ids), np.int64)  # [T], start of each token's document, at least 0
            document[begins_inside] = begins_inside
            item["position_ids"] = torch.from_numpy(np.arange(len(ids)) - np.maximum.accumulate(document))
        return item


def flatten_windows(items: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Collate windows of B x T tokens into one row of B T tokens with the loss and the targets of the `[B, T]` batch.

    transformers takes the variable-length path of flash attention from position ids only for a batch of one row
    (`_is_packed_sequence` in its `modeling_flash_attention_utils`); with more rows, attention would cross documents. In
    the row every window and every document starts at position 0. A causal model predicts a label from the token before
    it, so the first label of each window, which no `[B, T]` batch counts, is -100.

    Args:
        items: windows with `input_ids`, `labels` and `position_ids`, each [T], as `Windows` gives without
            `across_documents`; T may differ.

    Returns:
        `input_ids`, `labels` and `position_ids`, each [1, B T] int64. Call the model with `use_cache=False` and no
        `attention_mask`: with either it ignores the position ids.

    Raises:
        FulldepthError: if an item has no position ids, or they do not start at 0.
    """
    if any("position_ids" not in item or int(item["position_ids"][0]) for item in items):
        raise FulldepthError(
            "Only windows with position_ids that start at 0 can be flattened (across_documents=false)."
        )
    row = {name: torch.cat([item[name] for item in items])[None] for name in ("input_ids", "labels", "position_ids")}
    starts = np.cumsum([0, *(len(item["labels"]) for item in items[:-1])])
    row["labels"][0, starts] = IGNORE
    return row


@dataclass(frozen=True)
class Packed:
    """Packed text for training. Each document is either in `train` or in `validation`."""

    name: str
    train: Windows
    validation: Windows
    hash: str
    """`sha256:...` over documents, windows and token ids, see `TokenFiles.scan`."""
    folder: Path
    """Folder of the token ids."""
    sources: int
    """Files, novels or rows that the documents are, or are pieces of."""
    unit: str = "document"
    """What a document is called: `piece of text` where files or novels are cut."""
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens in both parts, end-of-text included."""
        return self.train.tokens + self.validation.tokens

    @property
    def documents(self) -> int:
        """Documents in both parts, without those that have no tokens."""
        return self.train.documents + self.validation.documents


class _EncodedText(NamedTuple):
    """A text as token ids."""

    name: str
    files: TokenFiles
    unit: str = "document"
    sources: int | None = None
    """Files, novels or rows that the documents come from; None = one for each document."""


def _encoded_text(data: Any, encoder: Encoder, cache: Path | None, most: int | None, watcher: Watcher) -> _EncodedText:
    """The token ids of a text, or those in a folder of token files."""
    if not holds_tokens(data):
        text = open_documents(data)
        return _EncodedText(text.name, tokenised(text, encoder, cache, most, watcher), text.unit, text.sources)
    return _stored_text(data, encoder)


def holds_tokens(data: Any) -> bool:
    """Return True for the path of a folder of token files that `pack` reads."""
    return isinstance(data, Path) and data.is_dir() and any(data.rglob(f"*{INDEX}"))


def _stored_text(folder: Path, encoder: Encoder) -> _EncodedText:
    """The token files of a folder, whose first document must end as the encoder would end it."""
    files = TokenFiles.of(folder)
    if encoder.end is not None:
        _check_end_of_text(files, folder, encoder.end)
    return _EncodedText(folder.name, files)


def _check_end_of_text(files: TokenFiles, folder: Path, end_of_text: int) -> None:
    """Refuse token files whose first document does not end with the tokenizer's end-of-text token."""
    end = int(files.ends[files.ends > 0][0])
    last = int(files.ids(end - 1, end)[0])
    if last != end_of_text:
        raise FulldepthError(
            f"The first document in {folder} ends with the token {last}, not with the tokenizer's end-of-text token "
            f"{end_of_text}. Give the tokenizer that made these files, and make them with eos_token; if their "
            "documents are parts of texts, set data.end_of_text=false."
        )


def pack(
    documents: Any,
    tokenizer: Any,
    *,
    sequence_length: int,
    tokens: Path | None = None,
    cache: Path | None = None,
    max_tokens: int | None = None,
    validation: Any = None,
    validation_share: float = 0.01,
    validation_sequences: int | None = None,
    seed: int = 0,
    across_documents: bool = True,
    end_of_text: bool = True,
    vocab_size: int | None = None,
    watcher: Watcher | None = None,
) -> Packed:
    """Tokenise documents once and cut them into windows.

    A document is encoded as its token ids with the tokenizer's special tokens around them, if any, and one end-of-text
    token. The documents of a part are concatenated; window i is tokens i T up to (i + 1) T.

    Args:
        documents: what `open_documents` returns or takes; not read if there are `tokens`.
        tokenizer: tokenizer of transformers with an end-of-text token (`eos_token`).
        sequence_length: T, tokens of a window, at least 2.
        tokens: folder that datatrove's `DocumentTokenizer` or `write_tokens` wrote with this tokenizer, in place of
            `documents`.
        cache: folder for the token ids of any number of texts and tokenizers; None = `tokens/` under
            `$FULLDEPTH_CACHE`, else `$XDG_CACHE_HOME/fulldepth`, else `~/.cache/fulldepth`.
        max_tokens: most tokens in each part, the first ones; a stream is read no further.
        validation: other text for validation, like `documents`, or the `Path` of a folder like `tokens`, of which
            nothing is then held out.
        validation_share: share of the documents that is held out, 0 <= share < 1. Whether a document is held out
            depends on its number and the seed alone, so appending documents moves none.
        validation_sequences: most validation windows, spread evenly over those held out; None = all.
        seed: seed of the choice of held-out documents.
        across_documents: False adds `position_ids` that keep attention inside documents; see `Windows`.
        end_of_text: False for documents that are parts of texts: none is given an end-of-text token, and the first
            token of a document is no target.
        vocab_size: vocabulary size of the model, against which ids are checked; None = not checked.
        watcher: receives messages.

    Returns:
        The windows of training and of validation, with what identifies their tokens.

    Raises:
        FulldepthError: if there is no text, too little for one window of a part, no document held out, or a token
            that the model lacks; if the tokenizer has no end-of-text token, or the cache cannot be written.
    """
    if sequence_length < 2 or not 0 <= validation_share < 1:
        raise FulldepthError(
            "sequence_length must be at least 2, and the held-out share at least 0 and below 1; got "
            f"{sequence_length} and {validation_share}."
        )
    encoder = Encoder(tokenizer, vocab_size, end_of_text=end_of_text)
    share = validation_share if validation is None else 0.0
    needed = None if max_tokens is None else round(max_tokens / max(share, 1 - share))
    stored = (encoder, cache, needed, watcher or Watcher())
    name, files, unit, sources = _encoded_text(documents, *stored) if tokens is None else _stored_text(tokens, encoder)
    train, held = split_tokens(files, share, seed, max_tokens)
    counts = len(train.stops), len(held.stops)
    sources = sources or sum(counts)
    if share and not all(counts):
        raise FulldepthError(
            f"{name} has {counted(sum(counts), unit)}, too few to hold out a share of "
            f"{share}: none is left for {'validation' if counts[0] else 'training'}. Give more text, another share, or "
            "other validation text."
        )
    highest, content = files.scan()
    hashes = [content]
    if validation is not None:
        further = _encoded_text(validation, *stored)
        held = split_tokens(further.files, 1.0, seed, max_tokens)[1]
        sources += further.sources or len(held.stops)
        other, content = held.files.scan()
        highest = max(highest, other)
        hashes = [*hashes, content]
    cut = partial(Windows, sequence_length=sequence_length, across_documents=across_documents, end_of_text=end_of_text)
    windows = cut(train)
    held_windows = cut(held, limit=validation_sequences)
    warnings = check_vocabulary(highest, tokenizer, vocab_size)
    for part, windows_of_part in (("training", windows), ("validation", held_windows)):
        if not len(windows_of_part) and (windows_of_part is windows or windows_of_part.documents):
            raise FulldepthError(
                f"{name} has {windows_of_part.tokens} {part} tokens, fewer than one sequence of "
                f"{sequence_length}. Give more text or a smaller sequence_length."
            )
    if held_windows.documents and len(held_windows) < (validation_sequences or 0):
        warnings.append(f"The validation text fills only {len(held_windows)} of {validation_sequences} sequences.")
    places = [sha256_of(part.places.tobytes()) for part in (train, held)]
    sizes = [windows.tokens, held_windows.tokens, sequence_length, across_documents, len(held_windows)]
    if not end_of_text:
        sizes.append(end_of_text)
    digest = f"sha256:{_sha256([hashes, places, sizes])}"
    return Packed(name, windows, held_windows, digest, files.folder, sources, unit, tuple(warnings))

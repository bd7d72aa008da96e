"""`pack`: training and validation windows of equal length, read from token ids on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fulldepth.data.documents import open_documents
from fulldepth.data.token_cache import Encoder, TokenCache, TokenFile
from fulldepth.data.tokens import check_vocabulary
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher
from fulldepth.targets import IGNORE
from fulldepth.uncertainty import ranks

GOLDEN = 0x9E3779B97F4A7C15
"""Step of splitmix64's counter."""
NO_LIMIT = 1 << 62
"""Tokens that no text has."""


@dataclass(frozen=True)
class Part:
    """The documents of one part of a text, joined, read by position; 16 bytes of memory for each document."""

    files: Sequence[TokenFile]
    first: np.ndarray
    """[files + 1] positions in the whole text at which files begin."""
    places: np.ndarray
    """[documents] positions in the whole text at which the documents of this part begin."""
    stops: np.ndarray
    """[documents] positions in this part at which they end."""

    @property
    def documents(self) -> int:
        """Number of documents, without those that have no tokens."""
        return len(self.stops)

    @property
    def tokens(self) -> int:
        """Number of ids."""
        return int(self.stops[-1]) if len(self.stops) else 0

    def read(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids at positions `start` up to `stop`, [stop - start] int64, and at which of them, from 0, documents begin.

        Documents that follow one another in a file are read at once.
        """
        one, other = np.searchsorted(self.stops, [start, stop - 1], side="right")
        at = np.arange(one, other + 1)  # [documents] indices of those that are read
        begins = np.where(at > 0, self.stops[at - 1], 0)  # [documents] positions in this part
        first, last = np.maximum(begins, start), np.minimum(self.stops[at], stop)
        places = self.places[at] + first - begins
        ends = places + last - first
        file = np.searchsorted(self.first, places, side="right") - 1
        breaks = np.flatnonzero((places[1:] != ends[:-1]) | (file[1:] != file[:-1])) + 1
        parts = []
        for run in np.split(np.arange(len(at)), breaks):
            of = int(file[run[0]])
            parts.append(self.files[of].ids(*(int(end - self.first[of]) for end in (places[run[0]], ends[run[-1]]))))
        return np.concatenate(parts).astype(np.int64), begins[begins >= start] - start


class Tokens(NamedTuple):
    """The parts of a text."""

    train: Part
    validation: Part
    highest: int
    """The highest id."""
    hash: str
    """`sha256:...`, equal for equal tokens in the same documents and parts."""


def held_out(numbers: np.ndarray, share: float, seed: int) -> np.ndarray:
    """[n] bool: which documents are held out, for [n] numbers of documents from 0: whether u(seed, number) < share.

    u is the output number `number` of the generator splitmix64 whose state is the first output for `seed`, in units of
    2**-64. It depends on the number and the seed alone, so appending documents moves none.

    Source: Steele, Lea, Flood 2014 (splitmix64).
    """
    bits = ranks(ranks([0], seed) + numbers.astype(np.uint64) * np.uint64(GOLDEN), 0)
    return (bits >> np.uint64(11)) * 2.0**-53 < share


def split_tokens(cache: TokenCache, share: float, seed: int, max_tokens: int | None) -> Tokens | None:
    """The parts of the text whose tokens are on disk; None if they are too few.

    Args:
        cache: the tokens.
        share: of the documents that are held out.
        seed: of their choice.
        max_tokens: most ids in each part; reading ends when one part reaches it, possibly within a document.
    """
    lengths = np.concatenate([np.zeros(0, np.int64), *(file.lengths for file in cache.files)])
    outside = held_out(np.arange(len(lengths)), share, seed)
    ends = np.stack([np.cumsum(np.where(outside == part, lengths, 0)) for part in (False, True)])  # [2, documents]
    most = NO_LIMIT if max_tokens is None else max_tokens
    full = np.flatnonzero((ends >= most).any(axis=0))
    if not len(full) and not cache.complete:
        return None
    if len(full):  # the last document ends where the part is full
        last = int(full[0])
        lengths, outside, ends = lengths[: last + 1].copy(), outside[: last + 1], ends[:, : last + 1]
        lengths[last] -= max(0, int(ends[int(outside[last]), last]) - most)
        ends = np.minimum(ends, most)
    files, digest, highest, number = [], hashlib.sha256(), -1, 0
    for file in cache.files:
        used = lengths[number : number + file.note.documents]
        if not len(used):
            break
        tokens, note = int(used.sum()), file.note
        whole = (tokens, len(used)) == (note.tokens, note.documents)
        highest = max(highest, note.highest if whole else int(file.ids(0, tokens).max(initial=0)))
        files.append(file._replace(lengths=np.zeros(0, np.int64)))  # not needed any more
        digest.update(f"{note.hash if whole else file.hash_of(tokens, used)}:{len(used)}:{tokens};".encode())
        number += len(used)
    digest.update(np.packbits(outside).tobytes())
    first = np.cumsum([0, *(file.note.tokens for file in files)])
    starts = np.cumsum(lengths) - lengths
    chosen = [(outside == part) & (lengths > 0) for part in (False, True)]
    train, validation = (Part(files, first, starts[kept], end[kept]) for kept, end in zip(chosen, ends, strict=True))
    return Tokens(train, validation, highest, f"sha256:{digest.hexdigest()}")


def tokenised(cache: TokenCache, share: float, seed: int, max_tokens: int | None, watcher: Watcher) -> Tokens:
    """The parts of a text, tokenised where tokens are missing; arguments as for `split_tokens`."""
    wanted = None if max_tokens is None else round(max_tokens / max(share, 1 - share))
    while (tokens := split_tokens(cache, share, seed, max_tokens)) is None:
        cache.extend(wanted, watcher)
        wanted = None if wanted is None else cache.tokens + 1
    if not tokens.train.documents and not tokens.validation.documents:
        raise FulldepthError(f"{cache.name} is empty: it has no token.")
    return tokens


class Windows(Dataset[dict[str, Tensor]]):
    """Windows of `sequence_length` tokens, in the order of the documents; an incomplete last window is dropped.

    An item is `input_ids` [T] int64 and `labels` [T] int64, which are the same ids: a causal model shifts them itself,
    so that a window has T - 1 targets. Without `across_documents` there is also `position_ids` [T] int64, 0 at the
    first token of the window and of each document in it. transformers derives a block-diagonal attention mask from
    them if the model gets neither an `attention_mask` nor a cache: pass `use_cache=False`, which is not the default.

    Args:
        part: the token ids to cut.
        sequence_length: T.
        across_documents: whether attention may cross from one document into the next.
        limit: most windows, spread evenly over all n: window i is number floor(i n / limit).
    """

    def __init__(
        self, part: Part, sequence_length: int, *, across_documents: bool = True, limit: int | None = None
    ) -> None:
        self.part, self.sequence_length, self.across_documents = part, sequence_length, across_documents
        self.documents, self.tokens = part.documents, part.tokens  # of the whole part, regardless of `limit`
        self.available = part.tokens // sequence_length
        self.count = self.available if limit is None else min(self.available, limit)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -self.count <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        start = (index % self.count) * self.available // self.count * self.sequence_length
        read, begins = self.part.read(start, start + self.sequence_length)
        ids = torch.from_numpy(read)
        item = {"input_ids": ids, "labels": ids.clone()}
        if not self.across_documents:
            first = np.zeros(len(ids), np.int64)  # [T], start of each token's document, at least 0
            first[begins] = begins
            item["position_ids"] = torch.from_numpy(np.arange(len(ids)) - np.maximum.accumulate(first))
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
    """`sha256:...` over token ids, documents and windows: equal if and only if the data are."""
    folder: Path
    """Folder of the token ids."""
    warnings: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens in both parts, end-of-text included."""
        return self.train.tokens + self.validation.tokens

    @property
    def documents(self) -> int:
        """Documents in both parts, without those that have no tokens."""
        return self.train.documents + self.validation.documents

    def require_documents(self, processes: int) -> None:
        """Check that there are at least as many training documents as processes.

        Raises:
            FulldepthError: if there are fewer.
        """
        if self.train.documents < processes:
            raise FulldepthError(
                f"{self.name} has {self.train.documents} training documents, fewer than the {processes} processes. "
                "Use more text or fewer processes."
            )


def pack(
    documents: Any,
    tokenizer: Any,
    *,
    sequence_length: int,
    cache: Path | None = None,
    max_tokens: int | None = None,
    validation: Any = None,
    validation_share: float = 0.01,
    validation_sequences: int | None = None,
    seed: int = 0,
    across_documents: bool = True,
    vocab_size: int | None = None,
    watcher: Watcher | None = None,
) -> Packed:
    """Tokenise documents once and cut them into windows.

    A document is encoded as its token ids with the tokenizer's special tokens around them, if any, and one end-of-text
    token. The documents of a part are concatenated; window i is tokens i T up to (i + 1) T.

    Args:
        documents: what `open_documents` returns or takes.
        tokenizer: tokenizer of transformers with an end-of-text token (`eos_token`).
        sequence_length: T, tokens of a window, at least 2.
        cache: folder for the token ids of any number of texts and tokenizers; None = `tokens/` under
            `$FULLDEPTH_CACHE`, else `$XDG_CACHE_HOME/fulldepth`, else `~/.cache/fulldepth`.
        max_tokens: most tokens in each part: reading stops when one part has them, possibly within a document.
        validation: other text for validation, like `documents`, of which nothing is then held out.
        validation_share: share of the documents that is held out, 0 <= share < 1. Whether a document is held out
            depends on its number and the seed alone, so appending documents moves none.
        validation_sequences: most validation windows, spread evenly over those held out; None = all.
        seed: seed of the choice of held-out documents.
        across_documents: False adds `position_ids` that keep attention inside documents; see `Windows`.
        vocab_size: vocabulary size of the model, against which ids are checked; None = not checked.
        watcher: receives progress and messages.

    Raises:
        FulldepthError: if there is no text, too little for one window of a part, no document held out, or a token
            that the model lacks; if the tokenizer has no end-of-text token, or the cache cannot be written.
    """
    for given, least in ((sequence_length, 2), (max_tokens, 1), (validation_sequences, 1)):
        if given is not None and given < least:
            raise FulldepthError(
                f"sequence_length must be at least 2, max_tokens and validation_sequences at least 1; got {given}."
            )
    if not 0 <= validation_share < 1:
        raise FulldepthError(f"The held-out share must be at least 0 and below 1, got {validation_share}.")
    encoder, watcher = Encoder(tokenizer, vocab_size), watcher or Watcher()
    share = validation_share if validation is None else 0.0
    source = TokenCache(open_documents(documents), encoder, cache)
    tokens = tokenised(source, share, seed, max_tokens, watcher)
    train, held = tokens.train.documents, tokens.validation.documents
    if share and not (train and held):
        raise FulldepthError(
            f"{source.name} has {train + held} documents, too few to hold out a share of {share}: none is left for "
            f"{'validation' if train else 'training'}. Give more documents, another share, or other validation text."
        )
    other_source, other = source, tokens
    if validation is not None:
        other_source = TokenCache(open_documents(validation), encoder, cache)
        other = tokenised(other_source, 1.0, seed, max_tokens, watcher)
    cut = partial(Windows, sequence_length=sequence_length, across_documents=across_documents)
    windows, held_windows = cut(tokens.train), cut(other.validation, limit=validation_sequences)
    warnings = check_vocabulary(max(tokens.highest, other.highest), tokenizer, vocab_size)
    _require_window(source.name, "training", windows)
    if held_windows.documents:
        _require_window(other_source.name, "validation", held_windows)
        if len(held_windows) < (validation_sequences or 0):
            warnings.append(f"The validation text fills only {len(held_windows)} of {validation_sequences} sequences.")
    content = repr([tokens.hash, other.hash, sequence_length, across_documents, len(windows), len(held_windows)])
    digest = f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"
    return Packed(source.name, windows, held_windows, digest, source.folder, tuple(warnings))


def _require_window(name: str, part: str, windows: Windows) -> None:
    if not len(windows):
        raise FulldepthError(
            f"{name} has {windows.tokens} {part} tokens, fewer than one sequence of {windows.sequence_length}. "
            "Give more text or a smaller sequence_length."
        )

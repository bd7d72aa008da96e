"""`pack`: training and validation windows of equal length, read from token ids on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fulldepth.data.cache.encoder import Encoder
from fulldepth.data.cache.splitting import Part, Split, Tokens
from fulldepth.data.cache.tokenising import default_cache, tokenise, tokens_folder
from fulldepth.data.documents import open_documents
from fulldepth.data.tokens import check_vocabulary
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher
from fulldepth.targets import IGNORE


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
        self.available = part.tokens // sequence_length
        self.count = self.available if limit is None else min(self.available, limit)

    @property
    def documents(self) -> int:
        """Documents in the whole part, regardless of `limit`."""
        return self.part.documents

    @property
    def tokens(self) -> int:
        """Tokens in the whole part."""
        return self.part.tokens

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not -self.count <= index < self.count:
            raise IndexError(f"window {index} of {self.count}")
        start = (index % self.count) * self.available // self.count * self.sequence_length
        stop = start + self.sequence_length
        ids = torch.from_numpy(self.part.read(start, stop))
        item = {"input_ids": ids, "labels": ids.clone()}
        if not self.across_documents:
            item["position_ids"] = torch.from_numpy(self._positions(start, stop))
        return item

    def _positions(self, start: int, stop: int) -> np.ndarray:
        first = np.zeros(stop - start, np.int64)  # [T], start of each token's document, at least 0
        inside = self.part.starts(start, stop)
        first[inside] = inside
        return np.arange(stop - start) - np.maximum.accumulate(first)


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
    labels = [item["labels"].clone() for item in items]
    for window in labels:
        window[0] = IGNORE
    parts = {name: [item[name] for item in items] for name in ("input_ids", "position_ids")}
    return {name: torch.cat(rows)[None] for name, rows in {**parts, "labels": labels}.items()}


@dataclass(frozen=True)
class Packed:
    """Packed text for training. Each document is either in `train` or in `validation`."""

    name: str
    train: Windows
    validation: Windows
    hash: str
    """`sha256:...` over token ids, documents and windows: equal if and only if the data are."""
    warnings: tuple[str, ...] = ()
    folder: Path | None = None
    """Folder of the token ids."""

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
    writers: int | None = None,
    advice: str | None = None,
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
        writers: most processes that tokenise; None = one for each core.
        advice: message shown before tokenising about 268 million tokens or more.
        watcher: receives progress and messages.

    Raises:
        FulldepthError: if there is no text, too little for one window of a part, no document held out, or a token
            that the model lacks; if the tokenizer has no end-of-text token, or the cache cannot be written.
    """
    _check(sequence_length, validation_share, max_tokens, validation_sequences)
    cut = partial(Windows, sequence_length=sequence_length, across_documents=across_documents)
    source, encoder, watcher = open_documents(documents), Encoder(tokenizer, vocab_size), watcher or Watcher()
    cache, share = cache or default_cache(), validation_share if validation is None else 0.0
    read = partial(tokenise, encoder=encoder, cache=cache, watcher=watcher, writers=writers, advice=advice)
    tokens = read(source, split=Split(share, seed, max_tokens))
    _require_split(source.name, tokens, share)
    other_source = source if validation is None else open_documents(validation)
    other = tokens if validation is None else read(other_source, split=Split(1.0, seed, max_tokens))
    train, held_out = cut(tokens.parts["train"]), cut(other.parts["validation"], limit=validation_sequences)
    warnings = check_vocabulary(max(tokens.highest, other.highest), tokenizer, vocab_size)
    warnings += _check_windows(source.name, train, other_source.name, held_out, validation_sequences)
    content = repr([tokens.hash, other.hash, sequence_length, across_documents, len(train), len(held_out)])
    digest = f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"
    return Packed(source.name, train, held_out, digest, tuple(warnings), tokens_folder(source, encoder, cache))


def _check_windows(name: str, train: Windows, other_name: str, held_out: Windows, sequences: int | None) -> list[str]:
    """Warnings if there are fewer validation windows than requested; refuses a part that does not fill one window."""
    _require_window(name, "training", train)
    if not held_out.documents:
        return []
    _require_window(other_name, "validation", held_out)
    if len(held_out) < (sequences or 0):
        return [f"The validation text fills only {len(held_out)} of {sequences} sequences."]
    return []


def _check(length: int, share: float, max_tokens: int | None, sequences: int | None) -> None:
    if length < 2:
        raise FulldepthError(f"A sequence needs at least 2 tokens, so that one predicts the next; got {length}.")
    if not 0 <= share < 1:
        raise FulldepthError(f"The held-out share must be at least 0 and below 1, got {share}.")
    for name, value in (("max_tokens", max_tokens), ("validation_sequences", sequences)):
        if value is not None and value < 1:
            raise FulldepthError(f"{name} must be at least 1, got {value}.")


def _require_split(name: str, tokens: Tokens, share: float) -> None:
    if not share:
        return
    train, held_out = tokens.parts["train"].documents, tokens.parts["validation"].documents
    if not train or not held_out:
        raise FulldepthError(
            f"{name} has {train + held_out} documents, too few to hold out a share of {share}: none is left for "
            f"{'validation' if train else 'training'}. Give more documents, another share, or other validation text."
        )


def _require_window(name: str, part: str, windows: Windows) -> None:
    if not len(windows):
        raise FulldepthError(
            f"{name} has {windows.tokens} {part} tokens, fewer than one sequence of {windows.sequence_length}. "
            "Give more text or a smaller sequence_length."
        )

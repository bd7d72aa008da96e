"""Text to token ids: special tokens, beginnings of long texts, checks against the model, and search for words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import reading

MARGIN = 16
"""Tokens discarded before a cut through a text, where they may differ from those of the whole text."""


def encode_texts(tokenizer: Any, *texts: str | list[str], target: bool = False, **options: Any) -> Mapping[str, Any]:
    """The tokenizer's result for a text, a pair of texts or a list of texts; `options` are the tokenizer's.

    `target` reads what an encoder-decoder is to write (`text_target`), perhaps in another language, in place of what it
    is given.

    If the (untrusted) tokenizer fails, or returns anything but token ids, a `FulldepthError` names it.
    """
    with reading(f"text with {_name(tokenizer)}"):
        given = {"text_target": texts[0]} if target else {}
        encoded: Mapping[str, Any] = tokenizer(*() if target else texts, verbose=False, **given, **options)
        rows = encoded["input_ids"] if isinstance(texts[0], list) else [encoded["input_ids"]]
        for ids in rows:
            numbers = np.asarray(ids)
            if numbers.ndim != 1 or (numbers.size and (numbers.dtype.kind not in "iu" or numbers.min() < 0)):
                raise FulldepthError(f"{_name(tokenizer)} gives {one_line(ids, 100)} for a text. Expected token ids.")
    return encoded


def decode_ids(tokenizer: Any, ids: Sequence[int], **options: Any) -> str:
    """The text of token ids; `options` are the tokenizer's.

    Args:
        tokenizer: a tokenizer of transformers.
        ids: the token ids.
        **options: options of the tokenizer's `decode`, such as `skip_special_tokens`.

    Returns:
        The text.

    Raises:
        FulldepthError: if the tokenizer fails or returns anything but text; the message names it.
    """
    with reading(f"token ids with {_name(tokenizer)}"):
        text = tokenizer.decode(list(ids), **options)
    if not isinstance(text, str):
        raise FulldepthError(f"{_name(tokenizer)} gives a {type(text).__name__} for token ids. Expected text.")
    return text


def _name(tokenizer: Any) -> str:
    """Name of the tokenizer, for a message."""
    return f"the tokenizer {one_line(getattr(tokenizer, 'name_or_path', None) or type(tokenizer).__name__, 200)}"


def plain_ids(tokenizer: Any, text: str, *, target: bool = False) -> list[int]:
    """Token ids of `text` without special tokens around it; `target` as for `encode_texts`."""
    return list(encode_texts(tokenizer, text, target=target, add_special_tokens=False)["input_ids"])


def leading_ids(tokenizer: Any, text: str, needed: int) -> list[int]:
    """The first `needed` or more token ids of `text`, all if there are fewer; tokenises little more than necessary."""
    size = 8 * (needed + MARGIN)
    while size < len(text):
        ids = plain_ids(tokenizer, text[:size])
        if len(ids) >= needed + MARGIN:
            return ids[:-MARGIN]
        size *= 2
    return plain_ids(tokenizer, text)


def check_vocabulary(highest: int, tokenizer: Any, vocab_size: int | None) -> list[str]:
    """Warnings, if the tokenizer has tokens that the model's vocabulary of `vocab_size` (None = any) lacks.

    `FulldepthError` if the model lacks the highest id that came up.
    """
    if vocab_size is None:
        return []
    if highest >= vocab_size:
        raise FulldepthError(
            f"Wrong tokenizer: it has {len(tokenizer)} tokens and gave the id {highest}, "
            f"but the model's vocabulary has {vocab_size}."
        )
    if len(tokenizer) > vocab_size:
        return [
            f"The tokenizer has {len(tokenizer)} tokens, the model's vocabulary {vocab_size}; no id beyond came up."
        ]
    return []


def padding_id(candidates: Iterable[int | None], vocab_size: int | None) -> int:
    """The first of the ids that the model's vocabulary of `vocab_size` (None = any) has, else 0.

    Padding is masked, but the model must have its embedding; a tokenizer may have gained its padding token later.
    """
    ids = [number for number in candidates if isinstance(number, int) and number >= 0]
    return next((number for number in ids if vocab_size is None or number < vocab_size), 0)


def check_positions(length: int, max_positions: int | None) -> None:
    """Refuse sequences that are longer than the model's positions (None = any)."""
    if max_positions is not None and length > max_positions:
        raise FulldepthError(
            f"Sequences of {length} tokens are longer than the model's {max_positions} positions. "
            f"Set sequence_length to {max_positions} or less."
        )


@dataclass(frozen=True)
class Frame:
    """The special tokens that a tokenizer adds before and after a text; both may be empty."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def wrap(self, ids: Sequence[int]) -> list[int]:
        """`ids` with the special tokens around them."""
        return [*self.prefix, *ids, *self.suffix]

    def ids(self, tokenizer: Any, text: str, starts: bool = True, ends: bool = True) -> list[int]:
        """Token ids of a text, or of a piece of it that may not start or end it; none if it has no token of its own."""
        ids = plain_ids(tokenizer, text)
        return [*self.prefix * starts, *ids, *self.suffix * ends] if ids else []

    @classmethod
    def of(cls, tokenizer: Any, texts: Iterable[str], *, target: bool = False) -> Frame:
        """The frame, found by comparing the first non-empty text with and without special tokens; `target` as for
        `encode_texts`.
        """
        for text in texts:
            sample = text[:200]
            plain = plain_ids(tokenizer, sample, target=target)
            full = list(encode_texts(tokenizer, sample, target=target)["input_ids"])
            for start in range(len(full) - len(plain) + 1):
                if plain and full[start : start + len(plain)] == plain:
                    return cls(tuple(full[:start]), tuple(full[start + len(plain) :]))
        return cls()


class WordFinder:
    """Finds words among token ids, as encoded with and without a leading space.

    A word that the tokenizer cannot encode is never found.
    """

    def __init__(self, tokenizer: Any, words: Sequence[str]) -> None:
        self.tokenizer = tokenizer
        self.words = tuple(words)
        self.variants: dict[tuple[int, ...], int] = {}
        for index, word in enumerate(self.words):
            for written in (" " + word, word):
                ids = tuple(plain_ids(tokenizer, written))
                if ids and tokenizer.unk_token_id not in ids:
                    self.variants.setdefault(ids, index)
        self.lengths = sorted({len(ids) for ids in self.variants}, reverse=True)

    def find(self, ids: Sequence[int]) -> list[int]:
        """For each position, the index of the longest word that ends there, -1 elsewhere."""
        indices = [-1] * len(ids)
        for end in range(1, len(ids) + 1):
            for length in self.lengths:
                index = self.variants.get(tuple(ids[end - length : end])) if length <= end else None
                if index is not None and self._is_whole(ids, end - length, end):
                    indices[end - 1] = index
                    break
        return indices

    def _is_whole(self, ids: Sequence[int], start: int, end: int) -> bool:
        """Return True if no letter of a longer word touches the match: `is` in `this` or `island` is not `is`."""
        word = self._decode(ids[start:end]).strip()
        before = self._decode(ids[max(0, start - 1) : end]).rstrip()
        after = self._decode(ids[start : end + 1]).lstrip()
        previous = before[: -len(word)][-1:] if before.endswith(word) else ""
        following = after[len(word) :][:1] if after.startswith(word) else ""
        return not any(c.isalnum() or c == "_" for c in previous + following)

    def _decode(self, ids: Sequence[int]) -> str:
        return decode_ids(self.tokenizer, ids, clean_up_tokenization_spaces=False)

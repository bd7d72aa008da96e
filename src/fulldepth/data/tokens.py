"""Text to token ids: the tokenizer's own special tokens, long texts read from the front only, words found again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fulldepth.errors import FulldepthError

MARGIN = 16
"""Tokens next to a cut through a text may differ from those of the whole text; this many are thrown away."""


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of `text` without special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def leading_ids(tokenizer: Any, text: str, needed: int) -> list[int]:
    """The first `needed` or more token ids of `text`, all where there are fewer; reads little more than that takes."""
    size = 8 * (needed + MARGIN)
    while size < len(text):
        ids = plain_ids(tokenizer, text[:size])
        if len(ids) >= needed + MARGIN:
            return ids[:-MARGIN]
        size *= 2
    return plain_ids(tokenizer, text)


def check_vocabulary(highest: int, tokenizer: Any, vocab_size: int | None) -> list[str]:
    """Warnings, if the tokenizer has tokens that the model's vocabulary of `vocab_size` (None = any) lacks.

    Args:
        highest: the highest token id that came up.
        tokenizer: what gave it.
        vocab_size: ids of the model are 0..vocab_size-1.

    Raises:
        FulldepthError: if the model lacks an id that came up.
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


@dataclass(frozen=True)
class Frame:
    """The special tokens that a tokenizer puts before and after a text; both may be empty."""

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.prefix) + len(self.suffix)

    def wrap(self, ids: Sequence[int]) -> list[int]:
        """`ids` with the special tokens around them."""
        return [*self.prefix, *ids, *self.suffix]

    @classmethod
    def of(cls, tokenizer: Any, texts: Iterable[str]) -> Frame:
        """The frame, read off the first of `texts` that has tokens, with and without special tokens."""
        for text in texts:
            sample = text[:200]
            plain, full = plain_ids(tokenizer, sample), list(tokenizer(sample, verbose=False)["input_ids"])
            for start in range(len(full) - len(plain) + 1):
                if plain and full[start : start + len(plain)] == plain:
                    return cls(tuple(full[:start]), tuple(full[start + len(plain) :]))
        return cls()


class WordFinder:
    """Finds words among token ids, as the tokenizer writes them with and without a space in front.

    Args:
        tokenizer: encodes the words, and decodes neighbours to see whether a match is a whole word.
        words: what to look for; a word that the tokenizer cannot write is never found.
    """

    def __init__(self, tokenizer: Any, words: Sequence[str]) -> None:
        self.tokenizer, self.words = tokenizer, tuple(words)
        self.variants: dict[tuple[int, ...], int] = {}
        for index, word in enumerate(self.words):
            for written in (" " + word, word):
                ids = tuple(plain_ids(tokenizer, written))
                if ids and tokenizer.unk_token_id not in ids:
                    self.variants.setdefault(ids, index)
        self.lengths = sorted({len(ids) for ids in self.variants}, reverse=True)

    def find(self, ids: Sequence[int]) -> list[int]:
        """For each position, the index of the word whose last token stands there (the longest one), -1 elsewhere."""
        found = [-1] * len(ids)
        for end in range(1, len(ids) + 1):
            for length in self.lengths:
                index = self.variants.get(tuple(ids[end - length : end])) if length <= end else None
                if index is not None and self._is_whole(ids, end - length, end):
                    found[end - 1] = index
                    break
        return found

    def _is_whole(self, ids: Sequence[int], start: int, end: int) -> bool:
        """Whether no letter of a longer word touches the match: `is` in `this` or `island` is not `is`."""
        word = self._decode(ids[start:end]).strip()
        before = self._decode(ids[max(0, start - 1) : end]).rstrip()
        after = self._decode(ids[start : end + 1]).lstrip()
        left = before[: -len(word)][-1:] if before.endswith(word) else ""
        right = after[len(word) :][:1] if after.startswith(word) else ""
        return not any(c.isalnum() or c == "_" for c in left + right)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)

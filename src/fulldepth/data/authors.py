"""The built-in labelled texts: passages of novels of the built-in corpus, labelled with their authors."""

from __future__ import annotations

from functools import cache
from typing import Any

from fulldepth.data.corpus import novels
from fulldepth.errors import unknown

AUTHORS = "authors:"
PARTS = ("train", "test")
WORDS = 48
"""Words of a passage."""
PASSAGES = 500
"""Passages of each author, in both parts together."""
TEST_SHARE = 5
"""One in so many passages is in the test part."""


@cache
def author_rows(part: str) -> tuple[dict[str, Any], ...]:
    """The rows of one part, with `text` and `label`, the author's name.

    The classes are the six authors of the corpus's training part with two novels. Each has 500 passages of 48
    consecutive words, spread evenly over both; every fifth is in `test` (600 passages), the others in `train` (2,400).

    Args:
        part: `train` or `test`.

    Raises:
        FulldepthError: if there is no such part.
    """
    if part not in PARTS:
        raise unknown("part of the built-in passages", part, PARTS)
    words: dict[str, list[list[str]]] = {}
    for novel in novels():
        if novel.part == "train":
            words.setdefault(novel.author, []).append(novel.text.split())
    rows = []
    for author, books in sorted(words.items()):
        passages = [book[start : start + WORDS] for book in books for start in range(0, len(book) - WORDS, WORDS)]
        for number in range(PASSAGES if len(books) > 1 else 0):
            if (number % TEST_SHARE == TEST_SHARE - 1) == (part == "test"):
                rows.append({"text": " ".join(passages[number * len(passages) // PASSAGES]), "label": author})
    return tuple(rows)

"""Labelled texts: passages of the built-in novels with the names of their authors.

    python examples/authors.py authors/
    fulldepth train tiny-bert --output runs/bert

writes `authors/train.tsv` (2,400 passages of 48 words by six authors) and `authors/test.tsv` (600), which the recipes
`tiny-bert` and `tiny-gpt2` name.
"""

import sys
from collections import defaultdict
from pathlib import Path

from fulldepth.data.corpus import novels

WORDS = 48
"""Words of a passage."""
PASSAGES = 500
"""Passages of each author; every fifth is in the test part."""


def main(folder: str | Path = "authors") -> None:
    """Write both parts: passages spread evenly over the two novels of each author."""
    books = defaultdict(list)
    for novel in novels():
        if novel.part == "train":
            books[novel.author].append(novel.text.split())
    rows: dict[str, list[str]] = {"train": ["text\tlabel"], "test": ["text\tlabel"]}
    for author, texts in sorted(books.items()):
        if len(texts) < 2:
            continue
        passages = [words[start : start + WORDS] for words in texts for start in range(0, len(words) - WORDS, WORDS)]
        for number in range(PASSAGES):
            passage = " ".join(passages[number * len(passages) // PASSAGES])
            rows["test" if number % 5 == 4 else "train"].append(f"{passage}\t{author}")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for part, lines in rows.items():
        (Path(folder) / f"{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])

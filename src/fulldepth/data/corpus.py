"""The built-in data, public-domain novels (see CORPUS.md) and handwritten digits, and training of small tokenizers."""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import BertWordPieceTokenizer, ByteLevelBPETokenizer, Tokenizer
from transformers import BertTokenizer, PreTrainedTokenizerFast

from fulldepth.core.errors import unknown
from fulldepth.data.images import StoredImage

CORPUS = "corpus:builtin"
DIGITS = "digits:builtin"
PARTS = ("train", "heldout")
DIGIT_PARTS = ("train", "test")
TEST_SHARE = 5
"""One in so many images of each class is in the test part."""
END_OF_TEXT = "<|endoftext|>"
"""End-of-text and padding token."""
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Special tokens of BERT, ids 0 to 4."""
LEAST_TOKENS = 257
"""The 256 bytes and `<|endoftext|>`."""
LETTERS = 1000
"""Most letters of a WordPiece vocabulary, the most frequent ones."""


class Novel(NamedTuple):
    """One document of the built-in corpus."""

    part: str
    title: str
    author: str
    year: int
    text: str


@cache
def novels() -> tuple[Novel, ...]:
    """The novels of the built-in corpus, by part and in order of publication."""
    packed = files(__package__).joinpath("corpus.txt.xz").read_bytes()
    documents = []
    for document in lzma.decompress(packed).decode("utf-8").split("\f")[1:]:
        header, text = document.split("\n", 1)
        part, title, author, year = header.split("|")
        documents.append(Novel(part, title, author, int(year), text))
    return tuple(documents)


def builtin_texts(part: str = "train") -> list[str]:
    """The texts of the novels in one part of the built-in corpus.

    Args:
        part: `train` (19 novels, 9.5 MB) or `heldout` (2 novels by other authors, 0.8 MB).

    Returns:
        One text a novel, in the order of the corpus.

    Raises:
        FulldepthError: if there is no such part.
    """
    if part not in PARTS:
        raise unknown("part of the built-in corpus", part, PARTS)
    return [novel.text for novel in novels() if novel.part == part]


def digit_rows(part: str) -> list[dict[str, Any]]:
    """The rows of one part of scikit-learn's handwritten digits, with `image` and `label`, in scikit-learn's order.

    Of each class the fifth, tenth, ... image is in `test` (355 images), the others are in `train` (1,442). Grey values
    0 to 16 become 0 to 255.

    Args:
        part: `train` or `test`.

    Raises:
        FulldepthError: if there is no such part.

    Source: Alpaydin and Kaynak 1998 (UCI Optical Recognition of Handwritten Digits), the copy in scikit-learn.
    """
    if part not in DIGIT_PARTS:
        raise unknown("part of the built-in digits", part, DIGIT_PARTS)
    digits = load_digits()
    images = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # [1797, 8, 8]
    seen: Counter[int] = Counter()
    rows = []
    for pixels, label in zip(images, digits.target.tolist(), strict=True):
        seen[label] += 1
        if (seen[label] % TEST_SHARE == 0) == (part == "test"):
            image = Image.fromarray(pixels).convert("RGB")
            rows.append({"image": StoredImage(image.copy, pixels.tobytes), "label": label})
    return rows


BUILTIN: dict[str, tuple[tuple[str, ...], Callable[[str], list[dict[str, Any]]], tuple[str, ...]]] = {
    CORPUS: (PARTS, lambda part: [{"text": text} for text in builtin_texts(part)], ()),
    DIGITS: (DIGIT_PARTS, digit_rows, tuple("0123456789")),
}
"""Built-in data -> parts (to train on, held out), function of the part, names of the classes."""


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer like GPT-2's (no unknown tokens, text is not normalised) on `texts`.

    Args:
        texts: documents to learn the merges from; the result is deterministic.
        vocab_size: most tokens; at least 257, the 256 bytes and `<|endoftext|>`.

    Returns:
        The tokenizer; `<|endoftext|>` (id 0) is its eos and padding token, and it adds no special tokens.

    Raises:
        ValueError: if `vocab_size` is too small.

    Source: Sennrich et al. 2016 (BPE); Radford et al. 2019 (over bytes).
    """
    if vocab_size < LEAST_TOKENS:
        raise ValueError(f"vocab_size must be at least {LEAST_TOKENS}, got {vocab_size}")
    learner = ByteLevelBPETokenizer(trim_offsets=False)
    learner.train_from_iterator(texts, vocab_size, special_tokens=[END_OF_TEXT], show_progress=False)
    core = Tokenizer.from_str(learner.to_str())
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


def train_wordpiece(texts: Iterable[str], vocab_size: int = 4096) -> BertTokenizer:
    """Train a WordPiece tokenizer like that of uncased BERT on `texts`: lower case, accents removed.

    Equal texts give equal tokenizers. The trainer of `tokenizers` numbers the letters inside words (`##a`) in random
    order, by which it also decides between equally frequent pairs; so they are given to it in order.

    Args:
        texts: to learn the pieces from.
        vocab_size: most tokens, the special ones included.

    Returns:
        The tokenizer; a text becomes `[CLS] text [SEP]`, a pair `[CLS] first [SEP] second [SEP]` with token types.

    Source: Devlin et al. 2019 (BERT).
    """
    texts = list(texts)
    learner = BertWordPieceTokenizer(lowercase=True)
    inside = Counter[str]()
    for text in texts:
        for word, _ in learner.pre_tokenizer.pre_tokenize_str(learner.normalize(text)):
            inside.update(word[1:])
    common = sorted(inside, key=lambda letter: (-inside[letter], letter))[:LETTERS]
    numbered = [*BERT_TOKENS, *(f"##{letter}" for letter in sorted(common))]
    learner.train_from_iterator(
        texts,
        vocab_size,
        initial_alphabet=[],
        limit_alphabet=LETTERS,
        special_tokens=[*numbered],
        show_progress=False,
    )
    return BertTokenizer(learner.get_vocab())

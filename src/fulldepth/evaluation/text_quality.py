"""Measures of generated text (Aligned training, App. C.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

import torch
from torch import Tensor

NGRAMS = (2, 3, 4)


class Mean(NamedTuple):
    """A mean over texts."""

    value: float
    error: float | None
    """Standard error; None for one text."""
    texts: int


def diversity(text: str) -> float | None:
    r"""Share of n-grams of words that are not repeated, from 0 to 1.

    .. math:: \prod_{n=2}^{4} \frac{|\text{unique n-grams}|}{|\text{total n-grams}|}

    Words are separated by white space. None for a text of fewer than four words, which has no 4-grams.

    Source: Aligned training, Eq. 22.
    """
    words = text.split()
    if len(words) < max(NGRAMS):
        return None
    return math.prod(_distinct_share(words, size) for size in NGRAMS)


def _distinct_share(words: Sequence[str], size: int) -> float:
    ngrams = [tuple(words[at : at + size]) for at in range(len(words) - size + 1)]
    return len(set(ngrams)) / len(ngrams)


def coherence(prefix: Tensor, continuation: Tensor) -> Tensor:
    r"""Cosine of the sentence embeddings of prefixes and their continuations, `[N]`, from -1 to 1.

    .. math:: \frac{h_x^T h_{\hat x}}{\lVert h_x \rVert \lVert h_{\hat x} \rVert}

    Args:
        prefix: `[N, D]`.
        continuation: `[N, D]`.

    Source: Aligned training, Eq. 21.
    """
    return torch.cosine_similarity(prefix.double(), continuation.double(), dim=-1).clamp(-1, 1)


def perplexity(log_probabilities: Iterable[float]) -> float:
    """`exp` of the mean negative log-probability (nats) of tokens; infinite where float64 cannot hold it."""
    mean = -fmean(log_probabilities)
    return math.exp(mean) if mean < 700 else math.inf


def mean_of(values: Iterable[float | None]) -> Mean | None:
    """Mean and standard error of the values that are not None; None if there are none."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None
    error = stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
    return Mean(fmean(numbers), error, len(numbers))

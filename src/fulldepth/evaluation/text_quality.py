"""Measures of generated text (Aligned training, App. C.2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fulldepth.uncertainty import deal, ratio_error

NGRAMS = (2, 3, 4)


class Mean(NamedTuple):
    """A mean over texts."""

    value: float
    error: float | None
    """Standard error over clusters; None if it is not known."""
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


def mean_of(values: Iterable[float | None], clusters: Sequence[int]) -> Mean | None:
    """Mean of the values that are not None, with its standard error over clusters; None if there are none.

    Args:
        values: of each text.
        clusters: unit of independence of each text, such as its document; empty = no error is known.
    """
    texts = list(values)
    known = [at for at, value in enumerate(texts) if value is not None]
    numbers = np.array([texts[at] for at in known], np.float64)
    if not known:
        return None
    group = deal([clusters[at] for at in known]) if clusters else np.zeros(len(known), np.int64)
    error = float(ratio_error(np.bincount(group, numbers), np.bincount(group)))
    return Mean(float(numbers.mean()), None if math.isnan(error) else error, len(known))

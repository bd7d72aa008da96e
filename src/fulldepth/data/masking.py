"""Masking for masked language models."""

from __future__ import annotations

import numpy as np

from fulldepth.targets import IGNORE

MASKED_SHARE = 0.15
"""Share of the ordinary tokens that is masked, as in BERT; always by the mask token, never by a random one."""


def mask_tokens(
    ids: np.ndarray, special: np.ndarray, mask_id: int, *, seed: int, index: int, share: float = MASKED_SHARE
) -> tuple[np.ndarray, np.ndarray]:
    """Replace a share of the ordinary tokens by the mask token.

    Args:
        ids: `[T]` token ids.
        special: `[T]` bool, positions that are never masked.
        mask_id: id of the mask token.
        seed: determines the positions together with `index`, independently of batching and order.
        index: index of the sequence in the whole data set.
        share: share of the ordinary tokens, rounded; at least one token if there is any.

    Returns:
        `[T]` ids with masks, and `[T]` targets: the true token where masked, -100 elsewhere.

    Source: Devlin et al. 2019, section 3.1.
    """
    ordinary = np.flatnonzero(~special)
    count = min(len(ordinary), max(1, round(share * len(ordinary))))
    chosen = np.random.default_rng([seed, index]).choice(ordinary, count, replace=False)
    masked_ids, targets = ids.copy(), np.full_like(ids, IGNORE)
    targets[chosen], masked_ids[chosen] = ids[chosen], mask_id
    return masked_ids, targets

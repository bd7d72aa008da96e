"""Key/value caches of models with layers without attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class TokenCounter(CacheLayerMixin):
    """The only entry of a cache when no layer has attention: the number of tokens."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True
        self.cumulative_length = 0

    def lazy_initialization(self, key_states: Tensor, *args: Any) -> None:
        """Nothing is stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Refuse: a model without attention has no keys and values to keep.

        Raises:
            TypeError: always.
        """
        raise TypeError("this model has no attention, so its cache holds no keys and values")

    def get_seq_length(self) -> int:
        """Number of tokens."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Length and offset of a mask, which no layer reads; transformers 4 passes the query's positions."""
        length = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.cumulative_length + length, 0

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """No limit; the name before transformers 5."""
        return -1

    def reset(self) -> None:
        """Set the number of tokens to 0."""
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens (a negative number, as in transformers)."""
        self.cumulative_length = max(0, self.cumulative_length - abs(tokens_to_remove))

    def offload(self) -> None:
        """Nothing to move."""

    def prefetch(self) -> None:
        """Nothing to move."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Every sequence has the same length."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence has the same length."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Every sequence has the same length."""


def compact(cache: Cache, skipped: set[int], num_layers: int) -> None:
    """Remove the entries of layers without attention from an empty cache with entries for all layers, in place.

    Args:
        cache: a cache; one that was compacted before, or adds entries by itself, does not change.
        skipped: layers without attention, 1..L.
        num_layers: L.

    Raises:
        ValueError: if the cache already holds tokens for all layers, and so was filled by another model.
    """
    if skipped and len(cache.layers) == num_layers:
        if cache.get_seq_length() > 0:
            raise ValueError(
                f"this cache was filled by another model: it has entries for all {num_layers} layers, and "
                f"{len(skipped)} of this model's have no attention"
            )
        cache.layers = [entry for layer, entry in enumerate(cache.layers, start=1) if layer not in skipped]
    if not cache.layers and len(skipped) >= num_layers:
        cache.layers.append(TokenCounter())


__all__ = ["TokenCounter", "compact"]

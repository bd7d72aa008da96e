"""A key/value cache whose layers may hold different numbers of positions, and that can be cropped."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from fulldepth.core.errors import FulldepthError

KNOWN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers that hold nothing but keys and values, of all positions or of a window."""


class LayerCache(DynamicCache):
    """The keys and values of a decoder, `[B, heads, positions, channels]` in each layer.

    It is a transformers cache and works in the model's own forward pass. In addition, layers may hold fewer positions
    than others: while tokens from position `start` = n on are run, masks and positions are those of a cache of n
    positions, and writing to a layer that holds another number is an error. Layers with a sliding window keep positions
    that leave the window until the next `crop`, so that it can undo tokens.

    Args:
        config: configuration of the model, with its layers' sliding windows.

    Raises:
        FulldepthError: if a layer keeps anything but keys and values of its own (recurrent states, another layer's).
    """

    layers: list[Any]

    def __init__(self, config: PreTrainedConfig) -> None:
        try:
            super().__init__(config=config)
        except Exception as error:
            raise FulldepthError(f"transformers makes no cache for {type(config).__name__}: {error!r}.") from error
        unknown = {type(layer).__name__ for layer in self.layers if type(layer) not in KNOWN_LAYERS}
        if unknown or not self.layers:
            raise FulldepthError(
                f"The cache of {type(config).__name__} has layers that are not keys and values of single layers "
                f"({', '.join(sorted(unknown)) or 'none at all'}); they can be neither left behind nor cut back."
            )
        self.activate_past_recording()
        self.start = 0
        """Position of the first token that is run."""

    @property
    def lengths(self) -> list[int]:
        """[L] number of positions that each layer has seen."""
        return [layer.get_seq_length() for layer in self.layers]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The position of the first token that is run, for every layer."""
        return self.start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys of a 0-based layer for `query_length` new positions, and the position of the first key."""
        visible = min(self.start, self._window(layer_idx))
        return visible + query_length, self.start - visible

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a 0-based layer, and return the keys and values visible to the new positions.

        Raises:
            FulldepthError: if the layer does not end where the new positions start.
        """
        if (length := self.layers[layer_idx].get_seq_length()) != self.start:
            raise FulldepthError(
                f"Layer {layer_idx + 1} has {length} positions in the cache, but the tokens start at position "
                f"{self.start}; run the layer on the tokens between, or crop the cache."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, length: int) -> None:
        """Remove all positions from `length` on; layers that hold fewer keep theirs.

        Raises:
            FulldepthError: if positions that a sliding window needs are no longer held.
        """
        for index, layer in enumerate(self.layers):
            if not layer.is_initialized:
                continue
            seen = layer.get_seq_length()
            beyond = max(0, seen - length)
            if layer.keys.shape[-2] - beyond < min(seen - beyond, self._window(index)):
                raise FulldepthError(
                    f"Layer {index + 1} has a sliding window and no longer holds the positions that it needs to be "
                    f"cropped to {length}; crop once after each run, not further back than that run's start."
                )
            layer.crop(-beyond)

    def _window(self, index: int) -> int:
        """Maximum number of earlier positions that a 0-based layer reads."""
        layer = self.layers[index]
        return layer.sliding_window - 1 if layer.is_sliding else sys.maxsize

"""A key/value cache whose layers may hold different numbers of positions, and that can be cropped."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from fulldepth.errors import FulldepthError

KNOWN_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
"""Cache layers that hold nothing but keys and values, of all positions or of a window."""


class LayerCache(DynamicCache):
    """The keys and values of a decoder, `[B, heads, positions, channels]` in each layer.

    It is a transformers cache and works in the model's own forward pass. In addition, layers may hold fewer positions
    than others: while tokens from position n on are run (`starting_at`), masks and positions are those of a cache of n
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
        self._start: int | None = None

    @property
    def lengths(self) -> list[int]:
        """[L] number of positions that each layer has seen."""
        return [layer.get_seq_length() for layer in self.layers]

    @contextmanager
    def starting_at(self, start: int) -> Iterator[None]:
        """While open, the cache reports `start` positions, and `update` of a layer with another number is an error.

        Args:
            start: position of the first token that is run.
        """
        before, self._start = self._start, start
        try:
            yield
        finally:
            self._start = before

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions in a 0-based layer; within `starting_at`, its start."""
        return super().get_seq_length(layer_idx) if self._start is None else self._start

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys of a 0-based layer for `query_length` new positions, and the position of the first key."""
        if self._start is None:
            return super().get_mask_sizes(query_length, layer_idx)
        visible = min(self._start, self._window(layer_idx))
        return visible + query_length, self._start - visible

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append to a 0-based layer, and return the keys and values visible to the new positions.

        Raises:
            FulldepthError: within `starting_at`, if the layer does not end where the new positions start.
        """
        if self._start is not None and (length := self.layers[layer_idx].get_seq_length()) != self._start:
            raise FulldepthError(
                f"Layer {layer_idx + 1} has {length} positions in the cache, but the tokens start at position "
                f"{self._start}; run the layer on the tokens between, or crop the cache."
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def crop(self, length: int | Sequence[int]) -> None:
        """Remove all positions from `length` on; layers that hold fewer are unchanged.

        With one length per sequence, every layer must hold the same number of positions. Sequences that keep fewer
        positions than the longest are shifted to the right: position i of sequence b moves to
        `i + max(length) - length[b]`, and the positions before are padding, which the attention mask must exclude.

        Args:
            length: number of positions to keep, padding included: for all sequences, or for each.

        Raises:
            FulldepthError: for different lengths if the layers hold different numbers of positions or fewer than a
                length, or if positions that a sliding window needs are no longer held.
        """
        lengths = [length] if isinstance(length, int) else list(length)
        if min(lengths, default=-1) < 0:
            raise FulldepthError(f"A cache is cropped to 0 positions or more, not to {length}.")
        differ = min(lengths) < max(lengths)
        if differ and (len({*self.lengths}) > 1 or max(lengths) > self.lengths[0]):
            raise FulldepthError("Sequences can keep different numbers of positions only if all layers hold them.")
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:
                own = [min(lengths[0], layer.get_seq_length())] * len(layer.keys)
                self._cut(index, layer, lengths if differ else own)

    def drop_first(self, count: int) -> None:
        """Remove the first positions of every layer, which are padding in all sequences; later ones move to the left.

        Args:
            count: number of positions, no more than any layer has seen.
        """
        for layer in self.layers:
            if not layer.is_initialized:
                continue
            length = layer.get_seq_length() - count
            beyond = max(0, layer.keys.shape[-2] - length)
            layer.keys, layer.values = layer.keys[:, :, beyond:], layer.values[:, :, beyond:]
            if layer.is_sliding:
                layer.cumulative_length = length

    def _cut(self, index: int, layer: Any, ends: Sequence[int]) -> None:
        """Crop one layer, so that sequence b ends with position `ends[b] - 1`."""
        dropped = layer.get_seq_length() - layer.keys.shape[-2]
        room = min(max(ends), self._window(index))
        if any(min(end, room) > end - dropped for end in ends):
            raise FulldepthError(
                f"Layer {index + 1} has a sliding window and no longer holds the positions before {dropped} that it "
                f"needs at {min(ends)} positions; crop once after each run, not further back than that run's start."
            )
        if len({*ends}) == 1:
            columns = slice(ends[0] - dropped - room, ends[0] - dropped)
            layer.keys, layer.values = layer.keys[:, :, columns], layer.values[:, :, columns]
        else:
            last = torch.tensor(ends, device=layer.keys.device)[:, None] - dropped
            columns = (last + torch.arange(-room, 0, device=layer.keys.device)).clamp(min=0)
            rows = torch.arange(len(ends), device=layer.keys.device)[:, None]
            layer.keys, layer.values = (
                states.transpose(1, 2)[rows, columns].transpose(1, 2) for states in (layer.keys, layer.values)
            )
        if layer.is_sliding:
            layer.cumulative_length = max(ends)

    def _window(self, index: int) -> int:
        """Maximum number of earlier positions that a 0-based layer reads."""
        layer = self.layers[index]
        return layer.sliding_window - 1 if layer.is_sliding else sys.maxsize

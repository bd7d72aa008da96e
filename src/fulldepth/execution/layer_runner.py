"""Runs a model's blocks one at a time on stored states, so that what variants of it share is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fulldepth.errors import FulldepthError
from fulldepth.execution import body_inputs, capture
from fulldepth.execution.stream import TOLERANCE, relative_error
from fulldepth.hf import Anatomy

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""What a block is given beside the state: positional and keyword arguments (masks, position embeddings, ...)."""


class LayerRunner:
    """The blocks of a model as functions of a state.

    `begin` runs the model's own forward pass with its blocks replaced by what merely notes their arguments: embeddings,
    masks and position embeddings are made, nothing is multiplied. `run` then gives any block any state, with the
    arguments that the model itself would give. Switches inside blocks act as they stand when a block runs.

    Args:
        anatomy: a decoder with one residual stream.
        batch: a small batch on which it is proven that the blocks, run one after another, give the model's own states.

    Raises:
        FulldepthError: if they do not: the model does something between its blocks, or in them, that is not replayed.
    """

    def __init__(self, anatomy: Anatomy, batch: Mapping[str, Tensor]) -> None:
        self.anatomy = anatomy
        self._arguments: list[Arguments] = []
        self._first: Tensor | None = None
        self._extras = [0] * anatomy.num_layers
        """What each block gives beside the state: 0 = it gives a tensor, n = a tuple of the state and n more."""
        self._tuple = [False] * anatomy.num_layers
        self._prove(batch)

    @torch.no_grad()
    def begin(self, batch: Mapping[str, Tensor]) -> Tensor:
        """[B, T, D] what the first block reads, h_0; from now on `run` is about this batch.

        Args:
            batch: `input_ids` and `attention_mask`, `[B, T]` on the model's device.
        """
        self._arguments, self._first = [], None
        with self._blocks_replaced():
            self._body(batch)
        if self._first is None or len(self._arguments) != self.anatomy.num_layers:
            raise FulldepthError(
                f"{type(self.anatomy.model).__name__} ran {len(self._arguments)} of its {self.anatomy.num_layers} "
                "blocks; its blocks cannot be run one by one."
            )
        return self._first

    def run(self, layer: int, states: Tensor) -> Tensor:
        """[B, T, D] what a 1-based layer's block makes of the states `[B, T, D]` of the batch that was begun."""
        args, kwargs = self._arguments[layer - 1]
        given = self.anatomy.blocks[layer - 1](states, *args, **kwargs)
        return given[0] if isinstance(given, tuple) else given

    def _body(self, batch: Mapping[str, Tensor]) -> None:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        self.anatomy.body(**body_inputs(self.anatomy, inputs))

    @contextmanager
    def _blocks_replaced(self) -> Iterator[None]:
        """Every block gives its input back; attributes that the model reads of them stay. Always healed."""
        blocks = list(self.anatomy.blocks)
        before = [block.__dict__.get("forward") for block in blocks]
        try:
            for index, block in enumerate(blocks):
                block.forward = partial(self._note, index)
            yield
        finally:
            for block, own in zip(blocks, before, strict=True):
                block.__dict__.pop("forward", None)
                if own is not None:
                    block.forward = own

    def _note(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """In place of a block: keep its arguments, return its state in the form that the block returns."""
        state = args[0] if args else kwargs.pop("hidden_states")
        if index == 0:
            self._first = state
        if index == len(self._arguments):
            self._arguments.append((args[1:], kwargs))
        return (state, *[None] * self._extras[index]) if self._tuple[index] else state

    @torch.no_grad()
    def _prove(self, batch: Mapping[str, Tensor]) -> None:
        """Compare the states of the model's own pass with those of its blocks run one by one."""
        kind = type(self.anatomy.model).__name__
        hooks = [block.register_forward_hook(partial(self._form, i)) for i, block in enumerate(self.anatomy.blocks)]
        try:
            with capture(self.anatomy, ["residual"]) as activations:
                self._body(batch)
                own = activations["residual"]
        finally:
            for hook in hooks:
                hook.remove()
        states = self.begin(batch)
        for layer in range(1, self.anatomy.num_layers + 1):
            version = states._version
            after = self.run(layer, states)
            if states._version != version or after is states:
                raise FulldepthError(f"Layer {layer} of {kind} overwrites its input; states cannot be used twice.")
            error = relative_error(after, own[layer])
            if not error <= TOLERANCE[after.dtype]:  # NaN is no agreement
                raise FulldepthError(
                    f"Layer {layer} of {kind}, run by itself, misses the model's own state by {error:.1e} (relative); "
                    "what this model does around its blocks is not known here, so no search can be made."
                )
            states = after

    def _form(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        self._tuple[index] = isinstance(output, tuple)
        self._extras[index] = len(output) - 1 if isinstance(output, tuple) else 0

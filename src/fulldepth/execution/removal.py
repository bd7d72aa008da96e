"""Runs a model with the update of one part of a layer set to zero at chosen positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fulldepth.core.errors import FulldepthError
from fulldepth.execution.hooks import capture
from fulldepth.execution.layer_runner import LayerRunner
from fulldepth.hf import Anatomy
from fulldepth.hf.modes import first_input, hooked, state_in, with_state
from fulldepth.hf.scalars import ROLES


@contextmanager
def update_removed(anatomy: Anatomy, layer: int, part: str, where: Tensor) -> Iterator[None]:
    """Set the update of a part to zero at chosen positions inside `with`; hooks are removed on exit.

    The output of a branch is replaced by zeros where the block adds it to the stream: after the norm of the branch in
    blocks that have one (Gemma 2, OLMo 2). Without a whole layer, the block's output is its input. Where layers read
    more than the layer before (`Anatomy.not_serial`), the outputs of both branches are replaced instead. Everything
    inside the part is computed as always, so other positions still read the keys and values of these.

    Args:
        anatomy: a model whose branches are proven.
        layer: 1-based.
        part: `layer`, `attention` or `mlp`, which this layer must have.
        where: `[B, T]` bool, the positions.
    """
    whole = part == "layer" and anatomy.not_serial is None
    modules: list[nn.Module] = [anatomy.blocks[layer - 1]]
    if not whole:
        roles = ROLES if part == "layer" else (part,)
        branches = (anatomy.part(layer, f"{role}_branch") for role in roles)
        modules = [branch for branch in branches if branch is not None]

    def remove(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Put a whole block's input, or zeros, in place of the output at these positions."""
        states = state_in(output)
        places = where.to(states.device)
        if states.ndim == 2:  # [B T, D], as some experts return
            places = places.flatten()
        elif anatomy.family.sequence_first:
            places = places.T
        other = first_input(args, kwargs) if whole else states.new_zeros(())
        return with_state(output, torch.where(places[..., None], other, states))

    with hooked(module.register_forward_hook(remove, with_kwargs=True) for module in modules):
        yield


class PartRemover:
    """The residual stream of a batch without one part of a layer, from the states before that layer.

    Layers are run one by one from the stored states. In a model whose layers cannot be run so (`LayerRunner` refuses
    it), each removal takes a forward pass of its own (`whole_passes`).

    Args:
        anatomy: a decoder whose branches are proven.
        inputs: a small batch on which the layer runner is checked.
    """

    def __init__(self, anatomy: Anatomy, inputs: Mapping[str, Tensor]) -> None:
        self.anatomy = anatomy
        self.runner: LayerRunner | None = None
        try:
            self.runner = LayerRunner(anatomy, inputs)
        except FulldepthError:
            self.runner = None
        self._inputs: Mapping[str, Tensor] = {}
        self._read: list[Tensor] = []
        """What each layer reads, in the model's own layout."""

    @property
    def whole_passes(self) -> bool:
        """True if every removal takes a forward pass of its own."""
        return self.runner is None

    @torch.no_grad()
    def begin(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Start a batch; returns the states h_0..h_L of the whole model, `[B, T, D]` each."""
        self._inputs = inputs
        self._read = []
        if self.runner is None:
            return self._whole_pass()
        state = self.runner.begin(inputs)
        states = [self.anatomy.stream(state)]
        for layer in self.anatomy.layers:
            self._read.append(state)
            state = self.runner.run(layer, state)
            states.append(self.anatomy.stream(state))
            state = self.anatomy.handed_on(state)
        return states

    @torch.no_grad()
    def without(self, layer: int, part: str, where: Tensor) -> Sequence[Tensor]:
        """The states h'_s..h'_L without a part of the 1-based layer s at chosen positions, `[B, T, D]` each.

        Args:
            layer: s.
            part: as for `update_removed`.
            where: as for `update_removed`, positions of the batch of `begin`.
        """
        with update_removed(self.anatomy, layer, part, where):
            if self.runner is None:
                return self._whole_pass()[layer:]
            state = self.runner.run(layer, self._read[layer - 1])
        states = [self.anatomy.stream(state)]
        for later in range(layer + 1, self.anatomy.num_layers + 1):
            state = self.runner.run(later, self.anatomy.handed_on(state))
            states.append(self.anatomy.stream(state))
        return states

    def _whole_pass(self) -> list[Tensor]:
        """The states h_0..h_L of one forward pass of the model."""
        with capture(self.anatomy, ["residual"]) as activations:
            self.anatomy.run_body(self._inputs)
            return activations["residual"]

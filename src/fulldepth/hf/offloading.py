"""Reads weights that accelerate has offloaded to the CPU's memory or to disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fulldepth.errors import FulldepthError


def loaded_weight(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A parameter or buffer of a model, read from memory or disk if it is offloaded.

    Args:
        model: as loaded, possibly with a device map.
        name: of the tensor in the model's state dict.
        tensor: the entry of the state dict; on the device `meta` if it is offloaded.

    Raises:
        FulldepthError: if it is on the device `meta` and no hook of accelerate has it.
    """
    if tensor.device.type != "meta":
        return tensor
    path, _, suffix = name.rpartition(".")
    while True:
        for weights in _weights_maps(model.get_submodule(path)):
            try:
                weight: Tensor = weights[suffix]
            except KeyError:
                continue
            return weight
        if not path:
            raise FulldepthError(f"The weight {name} is neither in memory nor offloaded, so it cannot be read.")
        path, _, parent = path.rpartition(".")
        suffix = f"{parent}.{suffix}"


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's inputs: that of its first loaded weights."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights are loaded only while their module runs."""
    return any(parameter.device.type == "meta" for parameter in model.parameters())


@contextmanager
def in_memory(module: nn.Module) -> Iterator[None]:
    """Load the offloaded weights of a module once, keep them inside `with`, and offload them on leaving.

    Otherwise accelerate reads a weight again in every forward pass and overwrites a changed value. A module without
    offloaded weights is not changed.
    """
    with ExitStack() as stack:
        for part in module.modules():
            for hook in _hooks(part):
                if getattr(hook, "offload", False):
                    stack.enter_context(_loaded(part, hook))
        yield


@contextmanager
def _loaded(module: nn.Module, hook: Any) -> Iterator[None]:
    """Load the weights of one hook of accelerate, and drop them on leaving."""
    try:
        hook.pre_forward(module)
        hook.offload = False
        yield
    finally:
        hook.offload = True
        hook.post_forward(module, None)


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """The hooks of accelerate on a module."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def _weights_maps(module: nn.Module) -> list[Mapping[str, Tensor]]:
    """The maps from which accelerate's hooks on a module read its weights."""
    maps = (getattr(hook, "weights_map", None) for hook in _hooks(module))
    return [weights for weights in maps if weights is not None]

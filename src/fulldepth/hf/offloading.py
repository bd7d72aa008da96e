"""Reads weights that accelerate has offloaded, from where they are: the CPU's memory or files on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fulldepth.errors import FulldepthError


def loaded_weight(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A parameter or buffer of a model; one that is offloaded is read, and held by nobody else.

    Args:
        model: as loaded, perhaps with a device map.
        name: of the tensor in the model's state dict.
        tensor: as the module holds it; on the device `meta` if it is offloaded.

    Raises:
        FulldepthError: if it is on no device, and no hook of accelerate says where it is.
    """
    if tensor.device.type != "meta":
        return tensor
    path, _, rest = name.rpartition(".")
    while True:
        for weights in _weights_maps(model.get_submodule(path)):
            try:
                found: Tensor = weights[rest]
            except KeyError:
                continue
            return found
        if not path:
            raise FulldepthError(f"The weight {name} is not in memory, and offloaded nowhere, so it cannot be read.")
        path, _, parent = path.rpartition(".")
        rest = f"{parent}.{rest}"


def device_of(model: nn.Module) -> torch.device:
    """Where a model expects its inputs: the device of its first weights that are loaded."""
    return next((p.device for p in model.parameters() if p.device.type != "meta"), torch.device("cpu"))


def is_offloaded(model: nn.Module) -> bool:
    """Whether some weights are loaded only while their module runs."""
    return any(parameter.device.type == "meta" for parameter in model.parameters())


@contextmanager
def in_memory(module: nn.Module) -> Iterator[None]:
    """Load the offloaded weights of a module and keep them inside `with`, whatever runs it.

    By itself accelerate reads a weight again in every forward pass, over whatever was put in its place. On leaving the
    weights are offloaded again. A module without offloaded weights stays as it is.
    """
    with ExitStack() as stack:
        for part in module.modules():
            for hook in _hooks(part):
                if getattr(hook, "offload", False):
                    stack.enter_context(_loaded(part, hook))
        yield


@contextmanager
def _loaded(module: nn.Module, hook: Any) -> Iterator[None]:
    """Have one hook of accelerate load its module's weights now, and drop them on leaving."""
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
    """Where accelerate's hooks on a module read its weights from."""
    maps = (getattr(hook, "weights_map", None) for hook in _hooks(module))
    return [weights for weights in maps if weights is not None]

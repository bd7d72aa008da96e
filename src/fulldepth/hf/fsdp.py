"""Calls modules of a model that FSDP2 shards outside of the model's forward pass."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.func import functional_call


def uses_fsdp(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a model or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


class GatheredModule:
    """A module with its present weights, unsharded on every process, and without its hooks.

    FSDP2 shards modules in groups, and a group's hooks expect one forward pass of all its modules. An additional call
    of a module makes them reduce the group's gradients too early; later gradients, for instance of a tied embedding,
    are lost without an error. This object can be called any number of times between the model's forward and backward
    passes, and in recomputation.

    Gradients of all calls add up in float32 and reach the module's own parameters. Where a parameter is whole (its
    group stays gathered after the forward pass), FSDP2 reduces it with the group's other gradients at the end of the
    backward pass. Where it is sharded, it is gathered here, and its gradient is the mean over the processes, as is
    FSDP2's.

    Args:
        module: a module with one positional input.
    """

    def __init__(self, module: nn.Module) -> None:
        self._plain = _WithoutHooks(module)
        full = {name: _gathered(parameter) for name, parameter in self._plain.named_parameters()}
        self._dtypes = {name: weight.dtype for name, weight in full.items()}
        self._weights = {name: w.to(torch.promote_types(w.dtype, torch.float32)) for name, w in full.items()}

    def __call__(self, states: Tensor) -> Tensor:
        """The module's output for `states`."""
        weights = {name: weight.to(self._dtypes[name]) for name, weight in self._weights.items()}
        result: Tensor = functional_call(self._plain, weights, (states,))
        return result

    def parameters(self) -> Iterator[Tensor]:
        """The weights that `__call__` uses."""
        return iter(self._weights.values())


class _WithoutHooks(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, states: Tensor) -> Tensor:
        """The module's forward pass, without the hooks that calling it would run."""
        result: Tensor = self.module.forward(states)
        return result


def _gathered(parameter: nn.Parameter) -> Tensor:
    """The unsharded parameter; the gradient of its shard is the mean over the processes."""
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    full: Tensor = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if full.requires_grad:
        full.register_hook(lambda gradient: gradient / mesh.size())
    return full

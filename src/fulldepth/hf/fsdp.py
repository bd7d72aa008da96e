"""Modules of a model that FSDP2 shards, called outside the model's forward pass."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.func import functional_call


def uses_fsdp(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a model or a part of it."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


class GatheredModule:
    """A module with the weights that it has now, whole on every process, and without its hooks.

    FSDP2 shards modules in groups, and a group's hooks expect one forward pass of all its modules. A module that is
    called once more makes them reduce the group's gradients too early; gradients that come later are lost without an
    error (of a tied embedding, for instance). This object can be called any number of times between the model's forward
    and backward passes, and in recomputation.

    Gradients of all calls add up in float32 and reach the module's own parameters. Where a parameter is whole (its
    group stays gathered after the forward pass), FSDP2 reduces it with the group's other gradients at the end of the
    backward pass. Where it is sharded, it is gathered here, and its gradient is the mean over the processes, as is
    FSDP2's.

    Args:
        module: of one positional input.
    """

    def __init__(self, module: nn.Module) -> None:
        self._plain = _WithoutHooks(module)
        whole = {name: _whole(parameter) for name, parameter in self._plain.named_parameters()}
        self._dtypes = {name: weight.dtype for name, weight in whole.items()}
        self._weights = {name: w.to(torch.promote_types(w.dtype, torch.float32)) for name, w in whole.items()}

    def __call__(self, states: Tensor) -> Tensor:
        """What the module gives for `states`."""
        weights = {name: weight.to(self._dtypes[name]) for name, weight in self._weights.items()}
        result: Tensor = functional_call(self._plain, weights, (states,))
        return result


class _WithoutHooks(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, states: Tensor) -> Tensor:
        """The module's forward pass, without the hooks that calling it would run."""
        result: Tensor = self.module.forward(states)
        return result


def _whole(parameter: nn.Parameter) -> Tensor:
    """All of a parameter; the gradient of its shard is the mean over the processes."""
    if not isinstance(parameter, DTensor):
        return parameter
    mesh = parameter.device_mesh
    whole: Tensor = parameter.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda gradient: gradient / mesh.size())
    return whole

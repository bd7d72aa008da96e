"""The output weights of a decoder's branches: the parameters that a branch's output is proportional to.

They are found by running the branch, so they need no names: biases, stacked tensors of experts, shared experts and
norms behind a branch are found as well as one projection.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fulldepth.core.errors import FulldepthError
from fulldepth.hf.anatomy import Anatomy
from fulldepth.hf.modes import device_of, evaluating, first_input, hooked, in_memory, state_in
from fulldepth.hf.scalars import ROLES

OFFSETS = (0.0, 1.0)
"""Numbers that families add to a weight before they use it: none, or 1 as Gemma's norms do."""
INVARIANT = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
"""Largest relative change accepted where halving the stream must change nothing. A factor of 2 causes no rounding, so
only the norms' eps has an effect, below 1e-4 for a stream of size 1. A gated MLP without a norm differs by 0.1."""
PROBE = 0.02
"""Standard deviation of the random values that replace a branch's weights while its output weights are searched. The
weights themselves may be zero, as biases are at the start, and would hide the weights behind them."""
_Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a module."""


@dataclass(frozen=True)
class OutputWeights:
    """The parameters that a branch's output is proportional to."""

    branch: nn.Module
    names: tuple[str, ...]
    """Names inside the branch."""
    offset: float
    """The number that the family adds to these parameters before it uses them."""

    def times(self, factor: float) -> dict[str, Tensor]:
        """Name -> value with which the branch returns `factor` times its output, in the parameter's own type."""
        return {name: self.multiplied(self.branch.get_parameter(name), factor) for name in self.names}

    def multiplied(self, weight: Tensor, factor: float) -> Tensor:
        """Return the value of one of these parameters for `factor` times the output; the parameter does not change."""
        weight = weight.detach()
        if factor == 0.0:  # 0 times a negative weight would be -0
            return torch.full_like(weight, -self.offset)
        scaled = torch.empty_like(weight)
        parts = weight if weight.ndim > 2 else weight[None]  # one expert at a time, to save memory in float64
        for target, part in zip(scaled.view_as(parts), parts, strict=True):
            target.copy_((part.double() + self.offset) * factor - self.offset)
        return scaled


def find_output_weights(
    anatomy: Anatomy, branches: Iterable[tuple[int, str]], ids: Tensor
) -> dict[tuple[int, str], OutputWeights]:
    """Find the output weights of branches by running them.

    All parameters of a branch are set to zero. Then, in the order of their modules' calls, each gets random values and
    keeps them if the output stays exactly 0. Those still zero at the end are a minimal set, nearest to the output.
    Experts in a list count as one. Branches of the same modules and parameter names have the same output weights, so
    one branch of each kind is run.

    Args:
        anatomy: the model.
        branches: (1-based layer, `attention` or `mlp`).
        ids: [B, T] tokens to run.

    Returns:
        (layer, role) -> its output weights; layers that lack the branch are left out.

    Raises:
        FulldepthError: if weights are quantised, or no weights make the output of a branch 0.
    """
    kinds: dict[Any, dict[tuple[int, str], nn.Module]] = {}
    for layer, role in branches:
        branch = anatomy.part(layer, f"{role}_branch")
        if branch is None or anatomy.part(layer, role) is None:
            continue
        for name, parameter in branch.named_parameters():
            if parameter.dtype not in INVARIANT or hasattr(parameter, "__tensor_flatten__"):
                raise FulldepthError(
                    f"The weights {name} of the {role} of layer {layer} are quantised and cannot be multiplied "
                    "exactly. Fold first, then quantise."
                )
        kind = type(branch), *(name for name, _ in branch.named_parameters())
        kinds.setdefault(kind, {})[layer, role] = branch
    output_weights: dict[tuple[int, str], OutputWeights] = {}
    firsts = [next(iter(alike.values())) for alike in kinds.values()]
    with evaluating(anatomy.model):
        calls = _record(anatomy, firsts, ids) if firsts else {}
        for first, alike in zip(firsts, kinds.values(), strict=True):
            layer, role = next(iter(alike))
            with in_memory(first):
                weights = _find(first, calls[first], f"the {role} of layer {layer}")
            output_weights |= {key: OutputWeights(branch, *weights) for key, branch in alike.items()}
    return output_weights


def scale_obstacle(anatomy: Anatomy, ids: Tensor) -> str | None:
    """Return the reason why the residual stream of a model cannot be kept at another scale; None if it can.

    One block of each kind is run on half the stream with halved output weights: the outputs of its branches and of the
    block must be half of the original ones, and the output of the final norm must be the same.

    Args:
        anatomy: the model.
        ids: [B, T] tokens to run.

    Raises:
        FulldepthError: as `find_output_weights`.
    """
    firsts: dict[Any, int] = {}
    for layer, block in enumerate(anatomy.blocks, start=1):
        firsts.setdefault((type(block), *(type(anatomy.part(layer, role)) for role in ROLES)), layer)
    layers = sorted(firsts.values())
    weights = find_output_weights(anatomy, [(layer, role) for layer in layers for role in ROLES], ids)
    with evaluating(anatomy.model):
        calls = _record(anatomy, [anatomy.blocks[layer - 1] for layer in layers], ids)
        for layer in layers:
            block = anatomy.blocks[layer - 1]
            branches = {role: weights[layer, role] for role in ROLES if (layer, role) in weights}
            with in_memory(block):
                reason = _block_obstacle(block, branches, calls[block])
            if reason:
                return reason
        norm = anatomy.final_norm
        if norm is None:
            return "it has no final norm, which removes the last factor"
        with in_memory(norm), torch.no_grad():
            stream = _unit(first_input(*calls[block]))
            stream = stream.to(next(norm.parameters(), stream).device)
            if _is_same(norm(stream / 2), norm(stream)):
                return None
            return "the output of its final norm depends on the scale of the stream"


def _block_obstacle(block: nn.Module, weights: Mapping[str, OutputWeights], call: _Call) -> str | None:
    """Return the reason why a block's output does not follow the scale of its stream; None if it does."""
    paths = {module: path for path, module in block.named_modules()}
    halves = {
        f"{paths[output.branch]}.{name}".removeprefix("."): value
        for output in weights.values()
        for name, value in output.times(0.5).items()
    }
    full = _run_block(block, {}, weights, call, 1.0)
    half = _run_block(block, halves, weights, call, 0.5)
    for role in weights:
        if not _is_same(2 * half[role], full[role]):
            name = "MLP" if role == "mlp" else role
            return f"the output of its {name} depends on the scale of the stream, which folding changes"
    if not _is_same(2 * half["block"], full["block"]):
        return "its blocks add something to the stream that does not follow the scale of their branches"
    return None


def _run_block(
    block: nn.Module, values: Mapping[str, Tensor], weights: Mapping[str, OutputWeights], call: _Call, scale: float
) -> dict[str, Tensor]:
    """Return the outputs of a block and its branches for a stream of this scale, with `values` for some parameters."""
    outputs: dict[str, Tensor] = {}

    def keep(role: str, module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[role] = state_in(output)

    branches = {role: output.branch for role, output in weights.items()}
    with hooked(branch.register_forward_hook(partial(keep, role)) for role, branch in branches.items()):
        outputs["block"] = _output(block, values, _with_stream(call, scale * _unit(first_input(*call))))
    return outputs


def _unit(stream: Tensor) -> Tensor:
    """Return the stream `[..., D]`, scaled so that every position has root mean square 1."""
    wide = stream.float()
    return (wide / wide.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-12)).to(stream.dtype)


def _is_same(actual: Tensor, expected: Tensor) -> bool:
    """Return True if two outputs are equal up to rounding and the eps of norms."""
    error = (actual.double() - expected.double()).abs().max()
    return bool(error <= INVARIANT.get(expected.dtype, 1e-3) * expected.double().abs().max())


@torch.no_grad()
def _record(anatomy: Anatomy, modules: Iterable[nn.Module], ids: Tensor) -> dict[nn.Module, _Call]:
    """Return the arguments of modules in one forward pass without padding."""
    calls: dict[nn.Module, _Call] = {}

    def keep(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls[module] = (args, kwargs)

    modules = list(modules)
    ids = ids.to(device_of(anatomy.model))
    with hooked(module.register_forward_pre_hook(keep, with_kwargs=True) for module in modules):
        anatomy.body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    if missing := [type(module).__name__ for module in modules if module not in calls]:
        raise FulldepthError(
            f"{type(anatomy.model).__name__} does not call its {missing[0]} for text, so its weights cannot be tested."
        )
    return calls


def _find(branch: nn.Module, call: _Call, where: str) -> tuple[tuple[str, ...], float]:
    """Return names and offset of a branch's output weights."""
    generator = torch.Generator().manual_seed(0)
    returned = {path: -1 for path, _ in branch.named_modules()}
    """Path of each module -> rank of the return of its last call; -1 for modules that are not called."""
    calls = count()

    def keep(path: str, *_: Any) -> None:
        returned[path] = next(calls)

    hooks = (module.register_forward_hook(partial(keep, path)) for path, module in branch.named_modules())
    with hooked(hooks), torch.no_grad():
        branch(*call[0], **call[1])
    stream = first_input(*call)
    call = _with_stream(call, torch.randn(stream.shape, generator=generator).to(stream))
    groups: dict[str, list[str]] = {}
    for name in sorted(dict(branch.named_parameters()), key=lambda name: returned[name.rpartition(".")[0]]):
        groups.setdefault(re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name), []).append(name)

    def put(values: dict[str, Tensor], names: Iterable[str], offset: float | None) -> None:
        """Set parameters to zero, or to random values if `offset` is None. One is held at a time, to save memory."""
        for name in names:
            parameter = branch.get_parameter(name)
            values.pop(name, None)
            if offset is None:
                values[name] = torch.randn(parameter.shape, generator=generator).mul_(PROBE).to(parameter)
            else:
                values[name] = torch.full_like(parameter, -offset)

    for offset in OFFSETS:
        values: dict[str, Tensor] = {}
        put(values, dict(branch.named_parameters()), offset)
        if _output(branch, values, call).any():
            continue
        needed = []
        for names in groups.values():
            put(values, names, None)
            if _output(branch, values, call).any():
                put(values, names, offset)
                needed += names
        return tuple(needed), offset
    raise FulldepthError(
        f"The output of {where} cannot be set to zero by its weights: they are quantised, or the output is not linear "
        "in any of them."
    )


@torch.no_grad()
def _output(module: nn.Module, values: Mapping[str, Tensor], call: _Call) -> Tensor:
    """Return the output of a call with these values for some parameters."""
    return state_in(functional_call(module, dict(values), *call))


def _with_stream(call: _Call, stream: Tensor) -> _Call:
    """Return the call with another first input."""
    args, kwargs = call
    return ((stream, *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": stream})

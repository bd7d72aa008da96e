"""Trace of one forward pass: input and output state of each module call, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fulldepth.errors import FulldepthError, is_out_of_memory, one_line
from fulldepth.hf import Anatomy, body_inputs, logits_of


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a module."""

    path: str
    """Name of the module, from the model."""
    module: nn.Module
    given: Tensor
    gave: Tensor


@dataclass
class Trace:
    """The calls of a model's modules in the order in which they ended, without modules inside blocks."""

    positions: tuple[int, int] | None
    """Sequences and tokens of the batch; None for images."""
    calls: list[Call] = field(default_factory=list)
    logits: Tensor | None = None
    """Logits of the whole model; None without a head."""

    def of(self, modules: Iterable[nn.Module]) -> list[Call]:
        """The calls of these modules."""
        members = set(modules)
        return [call for call in self.calls if call.module in members]

    def at(self, path: str) -> Call | None:
        """The last call of the module with this name."""
        return next((call for call in reversed(self.calls) if call.path == path), None)

    def readers(self, state: Tensor) -> Iterator[Call]:
        """The calls whose input is this state."""
        return (call for call in self.calls if equal(call.given, state))


def equal(state: Tensor, other: Tensor) -> bool:
    """Whether two states have the same shape, dtype and values."""
    if state.shape != other.shape or state.dtype != other.dtype:
        return False
    is_view = state.data_ptr() == other.data_ptr() and state.stride() == other.stride()
    return is_view or torch.equal(state.to(other.device), other)


@torch.no_grad()
def follow(anatomy: Anatomy, inputs: Mapping[str, Any]) -> Trace:
    """Run a model once and record the inputs and outputs of its modules.

    Args:
        anatomy: names the model and its body; its blocks are not used.
        inputs: a small batch for the whole model, as keyword arguments.

    Raises:
        FulldepthError: if the model fails on the batch.
    """
    ids = inputs.get("decoder_input_ids", inputs.get("input_ids")) if anatomy.family.modality == "text" else None
    trace = Trace(None if ids is None else (ids.shape[0], ids.shape[1]))
    alone = anatomy.family.tower and anatomy.head is None  # a whole CLIP needs both inputs
    runner = anatomy.runner if alone else anatomy.model

    def record(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        named = (*args[:1], kwargs.get("hidden_states"), *args, *kwargs.values())
        given, gave = next((value for value in named if isinstance(value, Tensor)), None), _main_state(output)
        if given is not None and gave is not None:
            trace.calls.append(Call(path, module, given, gave))

    with ExitStack() as hooks:
        for path, module in anatomy.model.named_modules():
            *above, last = path.split(".")
            if last.isdigit() or not any(name.isdigit() for name in above):  # members of lists, and all outside blocks
                hooks.callback(module.register_forward_hook(partial(record, path), with_kwargs=True).remove)
        output = run(runner, body_inputs(anatomy, inputs))
    trace.logits = logits_of(output) if runner is anatomy.model else None
    return trace


def run(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """The output of a module for a small batch.

    Raises:
        FulldepthError: if it fails; out-of-memory errors are re-raised.
    """
    try:
        return module(**inputs)
    except FulldepthError:
        raise
    except Exception as error:
        names = ", ".join(inputs)
        raise FulldepthError(
            f"{type(module).__name__} fails on a small batch of {names}: {reason_of(error)}"
        ) from error


def reason_of(error: Exception) -> str:
    """Description of an error; out-of-memory errors are re-raised."""
    if is_out_of_memory(error):
        raise error
    return str(error) if isinstance(error, FulldepthError) else f"{type(error).__name__}: {one_line(error)}"


def _main_state(output: Any) -> Tensor | None:
    """The state in a module's output: a tensor, the first of a tuple, or the last hidden state; None for logits."""
    while not isinstance(output, Tensor):
        if isinstance(output, Mapping) and output:
            if "logits" in output and "last_hidden_state" not in output:
                return None
            output = output.get("last_hidden_state", next(iter(output.values())))
        elif isinstance(output, tuple | list) and output:
            output = output[0]
        else:
            return None
    return output

"""Trace of one forward pass: input and output state of each module call, in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fulldepth.errors import FulldepthError, is_out_of_memory, one_line
from fulldepth.hf import Anatomy


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


def body_inputs(anatomy: Anatomy, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of the body, without a decoder's cache, which would only take memory."""
    if anatomy.family.tower == "vision" and "pixel_values" in inputs:
        inputs = {"pixel_values": inputs["pixel_values"]}  # a whole CLIP also takes text
    if anatomy.family.tower == "encoder":
        return dict(inputs)
    decodes = anatomy.task in ("causal-lm", "seq2seq-lm") or getattr(anatomy.config, "use_cache", None) is True
    return {**inputs, "use_cache": False} if decodes and anatomy.family.modality == "text" else dict(inputs)


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
    with ExitStack() as hooks:
        for path, module in anatomy.model.named_modules():
            if _is_followed(path):
                handle = module.register_forward_hook(_recorder(trace, path), with_kwargs=True)
                hooks.callback(handle.remove)
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


def logits_of(output: Any) -> Tensor | None:
    """The logits in a model's output; None without a head."""
    entries = (output.get(name) for name in ("prediction_logits", "logits")) if isinstance(output, Mapping) else ()
    return next((logits for logits in entries if isinstance(logits, Tensor)), None)


def first_state(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The state in a module's arguments: the first one, `hidden_states`, or the first tensor among the others."""
    named = (args[:1] or (None,))[0], kwargs.get("hidden_states"), *args, *kwargs.values()
    return next((value for value in named if isinstance(value, Tensor)), None)


def main_state(output: Any) -> Tensor | None:
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


def _is_followed(path: str) -> bool:
    """Whether a module's calls are recorded: modules outside blocks, and every member of a list.

    `layers.3` and `stages.0.blocks.1` are; `layers.3.mlp` is not.
    """
    *above, last = path.split(".")
    return last.isdigit() or not any(name.isdigit() for name in above)


def _recorder(trace: Trace, path: str) -> Callable[..., None]:
    def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given, gave = first_state(args, kwargs), main_state(output)
        if given is not None and gave is not None:
            trace.calls.append(Call(path, module, given, gave))

    return record

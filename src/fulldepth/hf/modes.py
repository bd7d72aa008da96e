"""Context managers around a model: evaluation mode, hooks, frozen and offloaded weights, a silent library.

Also what a module's hooks need: the device of its inputs, the state that it reads and that in its output.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import GenerationConfig, PreTrainedModel, logging

from fulldepth.core.errors import FulldepthError


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside `with`; on leaving, the mode of every module is restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def learning() -> Iterator[None]:
    """Gradients are computed inside `with`, also if the caller is in `torch.no_grad()` or `torch.inference_mode()`.

    On leaving, the random states of Python, numpy and torch, which a training seeds, are restored.
    """
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    of_torch = torch.get_rng_state()
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.set_rng_state(of_torch)
        if of_gpus:
            torch.cuda.set_rng_state_all(of_gpus)


@contextmanager
def plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Replace the model's `generation_config` by the defaults inside `with`."""
    own_config = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own_config


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Let no parameter require a gradient inside `with`; on leaving, `requires_grad` is restored."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def silent(level: int = logging.CRITICAL) -> Iterator[None]:
    """Messages of transformers below `level`, and its progress bars, are not shown inside `with`."""
    before = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity(level)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def hooked(hooks: Iterable[RemovableHandle]) -> Iterator[None]:
    """Keep hooks inside `with`, and remove them on leaving.

    Args:
        hooks: what registering each of them returns. As a generator it registers them here, so that the first ones are
            removed even if a later one fails.
    """
    with ExitStack() as registered:
        for hook in hooks:
            registered.callback(hook.remove)
        yield


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's inputs: that of its first loaded weights.

    If all are offloaded, it is the first device on which accelerate runs a module; else the CPU.
    """
    loaded = (parameter.device for parameter in model.parameters() if parameter.device.type != "meta")
    hooks = (hook for module in model.modules() for hook in _hooks(module))
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    runs_on = (torch.device(device) for device in devices if device is not None)
    return next(chain(loaded, runs_on), torch.device("cpu"))


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """Return the hooks that accelerate attached to a module."""
    outer: Any = getattr(module, "_hf_hook", None)
    return tuple(getattr(outer, "hooks", () if outer is None else (outer,)))


def first_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the state that a module reads: its first argument, `hidden_states`, or else its first tensor; None without
    one.
    """
    values = (*args[:1], kwargs.get("hidden_states"), *args, *kwargs.values())
    return next((value for value in values if isinstance(value, Tensor)), None)


def state_in(output: Any) -> Tensor:
    """Return the state in a module's output: the output itself, or the first entry of a tuple or list."""
    state: Tensor = output[0] if isinstance(output, tuple | list) else output
    return state


def with_state(output: Any, state: Tensor) -> Any:
    """Return a module's output with another state; further entries are unchanged."""
    return type(output)([state, *output[1:]]) if isinstance(output, tuple | list) else state


def is_offloaded(model: nn.Module) -> bool:
    """Return True if accelerate loads some weights only while their module runs."""
    return any(parameter.device.type == "meta" for parameter in model.parameters())


@contextmanager
def in_memory(module: nn.Module) -> Iterator[None]:
    """Load the offloaded weights of a module once, keep them inside `with`, and offload them on leaving.

    Otherwise accelerate reads a weight again in every forward pass and overwrites a changed value. A module without
    offloaded weights is not changed.
    """
    loaded: list[tuple[Any, nn.Module]] = []
    try:
        for part in module.modules():
            for hook in _hooks(part):
                if getattr(hook, "offload", False):
                    loaded.append((hook, part))
                    hook.pre_forward(part)
                    hook.offload = False
        yield
    finally:
        for hook, part in loaded:
            hook.offload = True
            hook.post_forward(part, None)


def loaded_weight(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """Return a parameter or buffer of a model, read from memory or disk if it is offloaded.

    Args:
        model: a loaded model, possibly with a device map.
        name: the tensor's name in the model's state dict.
        tensor: the entry of the state dict; on the device `meta` if it is offloaded.

    Raises:
        FulldepthError: if it is on the device `meta` and no hook of accelerate has it.
    """
    path, _, attribute = name.rpartition(".")
    if tensor.device.type == "meta":
        with in_memory(model.get_submodule(path)):
            tensor = getattr(model.get_submodule(path), attribute).detach()
    if tensor.device.type == "meta":
        raise FulldepthError(f"The weight {name} is neither in memory nor offloaded, so it cannot be read.")
    return tensor

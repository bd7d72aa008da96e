"""The one reader of activations: names a site, runs the model, hands out tensors; always heals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fulldepth.errors import FulldepthError, unknown
from fulldepth.hf import Anatomy

SITES = {
    "embeddings": "h_0, what the first block reads; 1 state",
    "residual": "h_0..h_L, the stream before the final norm; L+1 states",
    "attention_input": "x, what each block reads; L states",
    "attention_output": "x', the stream after attention, residual included (for post-norm blocks after the norm)",
    "attention_branch": "what attention adds to the stream, multipliers and norms of the branch applied",
    "mlp_branch": "what the MLP adds to the stream, likewise",
    "mlp_input": "what the MLP sub-layer adds to: x' for most, after cross-attention in a decoder that has one",
    "value": "value states of the attention, [B, T, key/value heads x head size]",
    "final_normed": "the final norm applied to h_L; 1 state",
}
"""Every site by name. All are `[B, T, D]` tensors, one for each layer 1..L unless said otherwise."""


class Tape:
    """What one forward pass left at the sites: `tape["residual"]` is a list of tensors in layer order."""

    def __init__(self, anatomy: Anatomy, sites: Iterable[str]) -> None:
        self.anatomy = anatomy
        self.sites = tuple(sites)
        self._seen: dict[tuple[str, int], Tensor] = {}
        self._versions: dict[tuple[str, int], int] = {}

    def clear(self) -> None:
        """Forget everything, before the next forward pass."""
        self._seen.clear()

    def record(self, site: str, layer: int, state: Tensor) -> None:
        """Keep one state of a 1-based layer."""
        self._seen[site, layer] = state
        self._versions[site, layer] = 0 if state.is_inference() else state._version

    def __getitem__(self, site: str) -> list[Tensor]:
        """States of a site in layer order.

        Raises:
            FulldepthError: if the site was not asked for, or the forward pass did not reach every layer.
        """
        if site not in self.sites:
            raise FulldepthError(f"Site {site!r} was not captured; captured: {', '.join(self.sites)}.")
        layers = range(1, self.anatomy.num_layers + 1)
        if site == "embeddings":
            return [self._read("x", 1)]
        if site == "residual":
            return [self._read("x", 1), *(self._read("y", layer) for layer in layers)]
        if site == "attention_input":
            return [self._read("x", layer) for layer in layers]
        if site == "attention_output":
            return [self._attention_output(layer) for layer in layers]
        if site == "final_normed":
            return [self.anatomy.normalise(self._read("y", len(layers)))]
        return [self._read(site, layer) for layer in layers]

    def _read(self, name: str, layer: int) -> Tensor:
        """One state, `[B, T, D]` even where a module works on `[B T, D]`; an error if it was overwritten since."""
        if (name, layer) not in self._seen:
            raise FulldepthError(f"No activation was captured at {name} of layer {layer}; did the model run?")
        state = self._seen[name, layer]
        if self._versions[name, layer] != (0 if state.is_inference() else state._version):
            raise FulldepthError(f"The model overwrote its own state at {name} of layer {layer} in place.")
        if state.ndim == 2:
            state = state.view(*self._seen["x", 1].shape[:2], -1)
        return state

    def _attention_output(self, layer: int) -> Tensor:
        """x': read where the model has it, else the sum x + A."""
        if ("attention_output", layer) in self._seen:
            return self._read("attention_output", layer)
        return self._read("x", layer) + self._read("attention_branch", layer)

    def stack(self, site: str, device: torch.device | None = None) -> Tensor:
        """[S, B, T, D] all states of a site on one device."""
        states = self[site]
        device = device or states[-1].device
        return torch.stack([state.to(device) for state in states])


@contextmanager
def capture(anatomy: Anatomy, sites: Iterable[str], *, grad: bool = False) -> Iterator[Tape]:
    """Hook a model so that each forward pass fills a `Tape`; on leaving, every hook is gone, whatever happened.

    Nothing else about the model changes: no device, dtype, mode or attribute. Recomputation under gradient
    checkpointing does not record a second time.

    Args:
        anatomy: the model and where its parts are.
        sites: names out of `SITES`.
        grad: keep the states in the graph (for losses); else they are detached.

    Raises:
        FulldepthError: for an unknown site, or one that this family has no module for.
    """
    wanted = tuple(sites)
    for site in wanted:
        if site not in SITES:
            raise unknown("site", site, SITES)
    tape = Tape(anatomy, wanted)
    handles: list[RemovableHandle] = []
    blocks = set(anatomy.blocks)
    try:
        for module, before, name, layer, change in _places(anatomy, set(wanted)):
            if grad and module not in blocks and _reentrant(anatomy.blocks[layer - 1]):
                raise FulldepthError(
                    f"{name} lies inside a block, and reentrant gradient checkpointing gives it no gradient; enable "
                    "checkpointing with use_reentrant=False."
                )
            handles.append(_hook(tape, module, before, name, layer, change, grad))
        yield tape
    finally:
        for handle in handles:
            handle.remove()


def _reentrant(block: nn.Module) -> bool:
    """Whether the first run of a block's inside will have no graph."""
    function = getattr(block, "_gradient_checkpointing_func", None)
    active = block.training and getattr(block, "gradient_checkpointing", False)
    return bool(active and getattr(function, "keywords", {}).get("use_reentrant"))


Place = tuple[nn.Module, bool, str, int, Callable[[Tensor], Tensor] | None]
"""Module, whether its input is read (else its output), name on the tape, 1-based layer, what is done to the tensor."""


def _places(anatomy: Anatomy, wanted: set[str]) -> Iterator[Place]:
    """Where hooks have to go for the sites wanted."""
    scale = anatomy.branch_scale

    def scaled(branch: Tensor) -> Tensor:
        return branch * scale  # a new tensor: some families add to a branch in place

    for layer, block in enumerate(anatomy.blocks, start=1):
        if "attention_input" in wanted or layer == 1 or _needs_sum(anatomy, wanted):
            yield block, True, "x", layer, None
        if wanted & {"residual", "final_normed"}:
            yield block, False, "y", layer, None
        if "attention_output" in wanted and not _needs_sum(anatomy, wanted):
            yield (*_attention_output(anatomy, layer), "attention_output", layer, None)
        for site in ("attention_branch", "mlp_branch"):
            if site in wanted or (site == "attention_branch" and _needs_sum(anatomy, wanted)):
                yield _required(anatomy, layer, site), False, site, layer, scaled
        if "mlp_input" in wanted:
            yield _mlp_input(anatomy, layer, block), True, "mlp_input", layer, None
        if "value" in wanted:
            yield _required(anatomy, layer, "value"), False, "value", layer, anatomy.value_states


def _needs_sum(anatomy: Anatomy, wanted: set[str]) -> bool:
    """Whether x' exists nowhere in the model (parallel residual), so that it has to be added up."""
    return "attention_output" in wanted and anatomy.family.design == "parallel"


def _attention_output(anatomy: Anatomy, layer: int) -> tuple[nn.Module, bool]:
    """Where the model itself holds x': what the MLP sub-layer reads, or what the norm after attention gives."""
    if anatomy.family.design == "post":
        return _required(anatomy, layer, "attention_norm"), False
    reader = anatomy.part(layer, "mlp_norm") or _required(anatomy, layer, "mlp")
    return reader, True


def _mlp_input(anatomy: Anatomy, layer: int, block: nn.Module) -> nn.Module:
    """The module that reads what the MLP sub-layer adds to: the block itself where both branches add to x."""
    if anatomy.family.design == "parallel":
        return block
    reader = anatomy.part(layer, "mlp_norm") if anatomy.family.design == "pre" else None
    return reader or _required(anatomy, layer, "mlp")


def _required(anatomy: Anatomy, layer: int, role: str) -> nn.Module:
    """The module with a role, or an error that says what the family lacks."""
    module = anatomy.part(layer, role)
    if module is None:
        raise FulldepthError(
            f"Layer {layer} of {type(anatomy.model).__name__} (anatomy {anatomy.family.name}) has no known {role}; "
            f"name it in the settings: anatomy.{role}=PATH."
        )
    return module


def _hook(
    tape: Tape,
    module: nn.Module,
    before: bool,
    name: str,
    layer: int,
    change: Callable[[Tensor], Tensor] | None,
    grad: bool,
) -> RemovableHandle:
    """Register one hook that records a tensor and changes nothing."""

    def record(value: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputation inside backward
            return
        state = _tensor(value)
        state = state if change is None else change(state)
        tape.record(name, layer, state if grad else state.detach())

    if before:
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: record(args[0] if args else _hidden(kwargs)), with_kwargs=True
        )
    return module.register_forward_hook(lambda _, args, output: record(output))


def _hidden(kwargs: dict[str, Any]) -> Any:
    """The state among keyword arguments: `hidden_states`, or the first tensor."""
    if "hidden_states" in kwargs:
        return kwargs["hidden_states"]
    return next(value for value in kwargs.values() if isinstance(value, Tensor))


def _tensor(value: Any) -> Tensor:
    """The state in what a module gave: a tensor (transformers 5) or the first item of a tuple (before, and T5)."""
    while isinstance(value, tuple | list):
        value = value[0]
    if not isinstance(value, Tensor):
        raise FulldepthError(f"Expected a tensor from a hooked module, got {type(value).__name__}.")
    return value

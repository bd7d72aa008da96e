"""The calls between a decoder block and its parts, and the check that a decoder can skip some of them."""

from __future__ import annotations

import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fulldepth.errors import FulldepthError
from fulldepth.hf.anatomy import Anatomy


@dataclass(frozen=True)
class Port:
    """The call of one of a block's two parts."""

    norm: str | None
    """Child whose output is the part's input; None where the input is the stream itself."""
    shared: bool
    """Whether another module also reads that norm."""
    outputs: int
    """Length of the tuple that the part returns; 0 for a tensor."""


@dataclass(frozen=True)
class Wiring:
    """The calls of a block's parts."""

    attention: Port
    mlp: Port
    outputs: int
    """Length of the tuple that the block returns; 0 for a tensor."""


_Call = tuple[nn.Module, Any, Any]
"""A module, its input and its output."""


class _AllRecorded(Exception):  # noqa: N818
    """Ends a pass after the last block of interest."""


def wirings(anatomy: Anatomy) -> dict[int, Wiring]:
    """The wiring of every layer, recorded while two tokens run through the first block of each kind."""
    parts = {
        layer: (block, anatomy.part(layer, "attention"), anatomy.part(layer, "mlp"))
        for layer, block in enumerate(anatomy.blocks, start=1)
    }
    kinds = {layer: tuple(map(type, modules)) for layer, modules in parts.items()}
    firsts = {kind: layer for layer, kind in reversed(kinds.items())}
    calls: dict[int, list[_Call]] = {layer: [] for layer in firsts.values()}
    waiting = {anatomy.blocks[layer - 1] for layer in calls}

    def record(layer: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls[layer].append((module, first_input(args, kwargs), output))
        waiting.discard(module)
        if not waiting:
            raise _AllRecorded

    with ExitStack() as hooks:
        for layer in calls:
            branches = [anatomy.part(layer, role) for role in ("attention_branch", "mlp_branch")]
            for module in {*anatomy.blocks[layer - 1].children(), *parts[layer], *branches}:
                if module is not None:
                    handle = module.register_forward_hook(partial(record, layer), with_kwargs=True)
                    hooks.callback(handle.remove)
        _run_two_tokens(anatomy)
    by_kind = {kind: _wiring(anatomy, layer, calls[layer]) for kind, layer in firsts.items()}
    return {layer: by_kind[kind] for layer, kind in kinds.items()}


def _run_two_tokens(anatomy: Anatomy) -> None:
    """Run a pass without side effects, including on the random state."""
    embeddings: Any = anatomy.body.get_input_embeddings()  # type: ignore[operator]
    device = embeddings.weight.device
    ids = torch.zeros(1, 2, dtype=torch.long, device="cpu" if device.type == "meta" else device)  # meta: offloaded
    devices = [ids.device] if ids.device.type == "cuda" else []
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices), suppress(_AllRecorded):
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # under gradient checkpointing
        anatomy.body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


def _wiring(anatomy: Anatomy, layer: int, calls: list[_Call]) -> Wiring:
    """The wiring of one block; refuses a block that does not call its parts as the anatomy says."""
    block = anatomy.blocks[layer - 1]
    names = {module: name for name, module in block.named_children()}
    _, stream, output = next(call for call in calls if call[0] is block)
    ports = {}
    for role in ("attention", "mlp"):
        part, branch = anatomy.part(layer, role), anatomy.part(layer, f"{role}_branch")
        if part is None:
            ports[role] = Port(None, False, 0)
            continue
        call, added = (next((call for call in calls if call[0] is module), None) for module in (part, branch))
        if call is None or added is None:
            raise FulldepthError(f"Layer {layer} cannot be switched: its block does not call its {role} for text.")
        _, part_input, part_output = call
        norm, norm_input, _ = next((c for c in calls if c[2] is part_input and c[0] in names), (None, part_input, None))
        readers = [module for module, other, _ in calls if other is part_input]
        ports[role] = Port(None if norm is None else names[norm], len(readers) > 1, _elements(part_output))
        if not block.training and not _is_close(norm_input, stream):  # dropout would hide it
            path = "itself" if norm is None else f"through {names[norm]}"
            raise FulldepthError(f"Layer {layer} cannot be switched: its {role} does not read the stream {path}.")
        if anatomy.family.design != "parallel":
            term = added[2][0] if isinstance(added[2], tuple) else added[2]
            stream = stream + anatomy.branch_scale * term.view_as(stream)
    return Wiring(ports["attention"], ports["mlp"], _elements(output))


def _is_close(states: Any, stream: torch.Tensor) -> bool:
    """Whether two states are equal up to rounding in any dtype; a state and its norm are not."""
    if not isinstance(states, torch.Tensor) or states.numel() != stream.numel():
        return False
    return bool((states.view_as(stream) - stream).abs().max() <= 0.1 * stream.abs().max())


def _elements(output: Any) -> int:
    return len(output) if isinstance(output, tuple) else 0


def check_can_skip(anatomy: Anatomy) -> None:
    """Refuse a model that cannot skip blocks.

    Raises:
        FulldepthError: with the reason.
    """
    reason = _obstacle(anatomy)
    if reason:
        raise FulldepthError(f"{type(anatomy.model).__name__} cannot skip: {reason}.")


def _obstacle(anatomy: Anatomy) -> str | None:
    family, config = anatomy.family, anatomy.model.config
    attentions = filter(None, (anatomy.part(layer, "attention") for layer in range(1, anatomy.num_layers + 1)))
    causal = all(getattr(m, "is_causal", True) is not False for part in attentions for m in part.modules())
    checks = {
        "it is an encoder, and only decoders are known to work without some of their attention": (
            anatomy.task in ("masked-lm", "image-classification")
            or family.modality != "text"
            or family.tower is not None
            or not causal
        ),
        "its attention also reads an encoder": (
            getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
        ),
        "its norms follow the residual sums, so a block without its branch would change the stream": (
            family.design == "post"
        ),
        "its layers read a tree of earlier outputs": bool(anatomy.layers_with("input_norms")),
        "its blocks hold several residual streams (Hyper-Connections)": anatomy.has_streams,
        "its attention reads a memory of earlier layers": bool(anatomy.layers_with("router")),
        "its attention and MLP modules are not known": not (
            anatomy.layers_with("attention") and anatomy.layers_with("mlp")
        ),
        "its layers share modules": len(set(anatomy.blocks)) < anatomy.num_layers,
    }
    return next((reason for reason, holds in checks.items() if holds), None)


def cache_index(anatomy: Anatomy, layer: int) -> int:
    """Index of a 1-based layer's entry in a cache."""
    attention = anatomy.part(layer, "attention")
    for module in attention.modules() if attention is not None else ():
        if isinstance(index := getattr(module, "layer_idx", None), int):
            return index
    return layer - 1


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor input of a call."""
    return args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))

"""How the blocks of a decoder call their parts, and which decoders can do without some of them."""

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
    """How a block calls one of its two parts."""

    norm: str | None
    """The child whose output the part reads; None where the part reads the stream itself."""
    shared: bool
    """Whether something else reads that norm too."""
    outputs: int
    """Elements of the tuple that the part gives; 0 for a tensor."""


@dataclass(frozen=True)
class Wiring:
    """How a block calls its parts."""

    attention: Port
    mlp: Port
    outputs: int
    """Elements of the tuple that the block gives; 0 for a tensor."""


_Call = tuple[nn.Module, Any, Any]
"""A module, the tensor that it read, what it gave."""


class _Seen(Exception):  # noqa: N818
    """Enough of the model has run."""


def wirings(anatomy: Anatomy) -> dict[int, Wiring]:
    """How every layer's block calls its parts, read off two tokens that run through the first block of each kind."""
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
            raise _Seen

    with ExitStack() as hooks:
        for layer in calls:
            branches = [anatomy.part(layer, role) for role in ("attention_branch", "mlp_branch")]
            for module in {*anatomy.blocks[layer - 1].children(), *parts[layer], *branches}:
                if module is not None:
                    handle = module.register_forward_hook(partial(record, layer), with_kwargs=True)
                    hooks.callback(handle.remove)
        _run_two_tokens(anatomy)
    found = {kind: _wiring(anatomy, layer, calls[layer]) for kind, layer in firsts.items()}
    return {layer: found[kind] for layer, kind in kinds.items()}


def _run_two_tokens(anatomy: Anatomy) -> None:
    """A pass that leaves no trace, not even in the random numbers that dropout would take."""
    embeddings: Any = anatomy.body.get_input_embeddings()  # type: ignore[operator]
    home = embeddings.weight.device
    ids = torch.zeros(1, 2, dtype=torch.long, device="cpu" if home.type == "meta" else home)  # meta: offloaded
    devices = [ids.device] if ids.device.type == "cuda" else []
    with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices), suppress(_Seen):
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # under gradient checkpointing
        anatomy.body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)


def _wiring(anatomy: Anatomy, layer: int, calls: list[_Call]) -> Wiring:
    """How one block calls its parts.

    Raises:
        FulldepthError: if it does not call them, or they do not read what the anatomy says.
    """
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
            raise FulldepthError(f"Layer {layer} cannot be switched: its block does not call its {role} on a text.")
        _, read, gave = call
        norm, given, _ = next((c for c in calls if c[2] is read and c[0] in names), (None, read, None))
        readers = [module for module, other, _ in calls if other is read]
        ports[role] = Port(None if norm is None else names[norm], len(readers) > 1, _elements(gave))
        if not block.training and not _is_close(given, stream):  # dropout would hide it
            path = "itself" if norm is None else f"through {names[norm]}"
            raise FulldepthError(f"Layer {layer} cannot be switched: its {role} does not read the stream {path}.")
        if anatomy.family.design != "parallel":
            term = added[2][0] if isinstance(added[2], tuple) else added[2]
            stream = stream + anatomy.branch_scale * term.view_as(stream)
    return Wiring(ports["attention"], ports["mlp"], _elements(output))


def _is_close(given: Any, stream: torch.Tensor) -> bool:
    """Whether two states are the same but for rounding, in any dtype; a state and its norm are not."""
    if not isinstance(given, torch.Tensor) or given.numel() != stream.numel():
        return False
    return bool((given.view_as(stream) - stream).abs().max() <= 0.1 * stream.abs().max())


def _elements(output: Any) -> int:
    return len(output) if isinstance(output, tuple) else 0


def check_can_skip(anatomy: Anatomy) -> None:
    """Refuse what cannot skip, with the reason."""
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
        "its norms stand after the sums, so a block without its branch would not pass the stream on": (
            family.design == "post"
        ),
        "its layers read a tree of earlier outputs": bool(anatomy.layers_with("input_norms")),
        "its blocks hold several residual streams (Hyper-Connections)": anatomy.has_streams,
        "its attention reads a memory of earlier layers": bool(anatomy.layers_with("router")),
        "where its attention and MLP are is not known": not (
            anatomy.layers_with("attention") and anatomy.layers_with("mlp")
        ),
        "its layers share modules": len(set(anatomy.blocks)) < anatomy.num_layers,
    }
    return next((reason for reason, holds in checks.items() if holds), None)


def cache_index(anatomy: Anatomy, layer: int) -> int:
    """The entry of a 1-based layer in a cache."""
    attention = anatomy.part(layer, "attention")
    for module in attention.modules() if attention is not None else ():
        if isinstance(index := getattr(module, "layer_idx", None), int):
            return index
    return layer - 1


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor that a module reads."""
    return args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))

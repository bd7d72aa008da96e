"""Skips parts of a model in place, scales the rest, and restores the model.

Modules keep their places, names and weights; only their `forward` functions are replaced temporarily. Parameters,
state dict, hooks and anatomy are therefore the same while parts are skipped.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fulldepth.errors import FulldepthError
from fulldepth.hf.anatomy import Anatomy
from fulldepth.hf.scalars import Scalars, check_layers, factor_names

_SWITCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Lists of blocks with switches in use."""
_CLASS = object()
"""Marks a function that a module inherits from its class."""
_MODEL = 0
"""Layer number of replacements that belong to no layer."""
PARTS = ("attention", "mlp", "attention_branch", "mlp_branch")
BRANCH = {"attention": "b_att", "mlp": "b_mlp"}
STREAM = {"attention": "s_att", "mlp": "s_mlp"}
"""Part -> factor of its branch; part -> factor of the stream that the branch is added to."""


class Port(NamedTuple):
    """The call of a block, or of one of its two parts."""

    norm: str | None = None
    """Child whose output is the part's input; None where the input is the stream itself."""
    shared: bool = False
    """Whether another module also reads that norm."""
    outputs: int = 0
    """Length of the tuple that is returned; 0 for a tensor."""


class Switches:
    """Turns attention, MLP or whole layers of a decoder off and on in place, and scales the rest.

    A skipped attention computes no norm, no attention and no keys or values; the stream is unchanged, `x' = x`. Its
    cache entry gets one number per token, because the length of a cache and the size of a mask are read from the first
    entries. `generate`, loops with a cache, left-padded batches and passes without a cache therefore agree for every
    set of layers. A cache can be continued with the set of skipped layers that it was filled with, or a larger one.

    On leaving, also by an exception, the model is restored. One `with` at a time; the object can be used again.

    Args:
        anatomy: the model; its design must have been checked (`execution.find_anatomy`).
        granularity: the part that a skipped layer does not compute: `attention`, `mlp` or `layer`.

    Raises:
        FulldepthError: for an unknown granularity, and a model that cannot skip: encoders, post-norm blocks, blocks
            that read more than the layer before them (tree, Hyper-Connections, memory).
    """

    def __init__(self, anatomy: Anatomy, granularity: str = "attention") -> None:
        factor_names(granularity, skipped=True)
        family, config = anatomy.family, anatomy.model.config
        attentions = filter(None, (anatomy.part(layer, "attention") for layer in range(1, anatomy.num_layers + 1)))
        causal = all(getattr(m, "is_causal", True) is not False for part in attentions for m in part.modules())
        obstacles = {
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
        for reason, holds in obstacles.items():
            if holds:
                raise FulldepthError(f"{type(anatomy.model).__name__} cannot skip: {reason}.")
        self.anatomy = anatomy
        self.granularity = granularity
        self._skipped: frozenset[int] = frozenset()
        self._scalars: Scalars | None = None
        self._wirings: dict[int, dict[str, Port]] | None = None
        self._replaced: dict[int, dict[tuple[nn.Module, str], Any]] = {}

    @property
    def skipped(self) -> frozenset[int]:
        """The 1-based layers that are skipped at present."""
        return self._skipped

    @property
    def scalars(self) -> Scalars | None:
        """The factors in use; None = the plain model."""
        return self._scalars

    @scalars.setter
    def scalars(self, scalars: Scalars | None) -> None:
        self._check_entered()
        if scalars is not None:
            anatomy = self.anatomy
            for name, own, other in (
                ("layers", scalars.num_layers, anatomy.num_layers),
                ("granularity", scalars.granularity, self.granularity),
            ):
                if own != other:
                    raise FulldepthError(f"Scalars of {name} {own}, for a model with switches of {name} {other}.")
            for role in ("attention", "mlp"):
                if not anatomy.has(role):
                    present = ", ".join(map(str, anatomy.layers_with(role)))
                    raise FulldepthError(f"Scalars need every layer to have its {role}; only layers {present} do.")
        self._scalars = scalars
        for layer in range(1, self.anatomy.num_layers + 1):
            self._apply(layer)

    def __enter__(self) -> Self:
        if self._wirings is not None:
            raise FulldepthError("These switches are already in use; leave their `with` first.")
        blocks = self.anatomy.block_list
        if blocks in _SWITCHED:
            raise FulldepthError(
                f"Layers of this {type(self.anatomy.model).__name__} are switched by other switches; leave those first."
            )
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in self.anatomy.body.modules()):
            raise FulldepthError(
                "Layers that are compiled one by one cannot be switched; compile the whole model, or nothing."
            )
        self._wirings = _wirings(self.anatomy)
        _SWITCHED.add(blocks)
        model = self.anatomy.model
        self._replace(_MODEL, model, partial(self._save, model.save_pretrained), "save_pretrained")
        return self

    def __exit__(self, *exception: object) -> None:
        for layer in list(self._replaced):
            self._heal(layer)
        self._skipped, self._scalars, self._wirings = frozenset(), None, None
        _SWITCHED.discard(self.anatomy.block_list)

    def skip(self, layers: Iterable[int]) -> None:
        """Skip exactly these 1-based layers; nothing is loaded or copied.

        Raises:
            FulldepthError: outside `with`, for layers out of range, and for a layer that has no such part.
        """
        self._check_entered()
        skipped = check_layers(layers, self.anatomy.num_layers)
        for layer in sorted(skipped):
            if self.granularity != "layer" and self.anatomy.part(layer, self.granularity) is None:
                raise FulldepthError(f"Layer {layer} has no {self.granularity} to skip.")
        changed = self._skipped ^ skipped
        self._skipped = skipped
        for layer in sorted(changed):
            self._apply(layer)

    def _save(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Replaces `save_pretrained`, which would write the plain model."""
        if self._skipped or self._scalars is not None:
            raise FulldepthError(
                "Saving a model that is switched in place would write the plain model. Export it (fulldepth skip "
                "apply), or save it outside the `with`."
            )
        return save(*args, **kwargs)

    def _check_entered(self) -> None:
        if self._wirings is None:
            raise FulldepthError("Switches work inside their `with` only: with Switches(anatomy) as switches: ...")

    def _apply(self, layer: int) -> None:
        """Replace the functions of one layer according to skipped layers and scalars."""
        self._heal(layer)
        skipped = layer in self._skipped
        factors = None if self._scalars is None else self._scalars.get(layer)
        if factors is not None and set(factors) != set(factor_names(self.granularity, skipped)):
            # An error only when the layer runs: skipped layers and scalars are set one after the other.
            self._replace(layer, self.anatomy.blocks[layer - 1], partial(_refuse, layer, skipped, tuple(factors)))
            return
        if skipped:
            self._take_out(layer)
        if factors:
            self._scale(layer, factors)

    def _take_out(self, layer: int) -> None:
        assert self._wirings is not None
        ports, block = self._wirings[layer], self.anatomy.blocks[layer - 1]
        attention = self.anatomy.part(layer, "attention") or nn.Identity()
        indices = (index for part in attention.modules() if isinstance(index := getattr(part, "layer_idx", None), int))
        index = None if self.granularity == "mlp" else next(indices, layer - 1)
        if self.granularity == "layer":
            self._replace(layer, block, partial(_without, ports["layer"].outputs, index, True))
            return
        port = ports[self.granularity]
        part, branch = self._part(layer, self.granularity), self._part(layer, f"{self.granularity}_branch")
        if port.norm is not None and not port.shared:
            self._replace(layer, block.get_submodule(port.norm), partial(_without, 0, None, True))
        self._replace(layer, part, partial(_without, port.outputs, index, False))
        if branch is not part:
            self._replace(layer, branch, partial(_without, 0, None, False))

    def _scale(self, layer: int, factors: dict[str, nn.Parameter]) -> None:
        assert self._wirings is not None
        mixer = _Mixer(self.anatomy, layer, factors)
        for role in BRANCH:
            if mixer.notes(role):
                norm = self._wirings[layer][role].norm
                reader = self._part(layer, role) if norm is None else self.anatomy.blocks[layer - 1].get_submodule(norm)
                self._replace(layer, reader, partial(mixer.note, reader.forward))
            if mixer.mixes(role):
                branch = self._part(layer, f"{role}_branch")
                self._replace(layer, branch, partial(mixer.mix, role, branch.forward))

    def _part(self, layer: int, role: str) -> nn.Module:
        part = self.anatomy.part(layer, role)
        assert part is not None  # checked by the callers
        return part

    def _replace(self, layer: int, module: nn.Module, function: Callable[..., Any], name: str = "forward") -> None:
        """Replace a function of a module, and remember the earlier one (offloading also sets `forward` on modules)."""
        self._replaced.setdefault(layer, {}).setdefault((module, name), vars(module).get(name, _CLASS))
        vars(module)[name] = function

    def _heal(self, layer: int) -> None:
        for (module, name), function in self._replaced.pop(layer, {}).items():
            if function is _CLASS:
                del vars(module)[name]
            else:
                vars(module)[name] = function


@contextmanager
def skipping(
    anatomy: Anatomy, layers: Iterable[int], granularity: str = "attention", scalars: Scalars | None = None
) -> Iterator[Switches]:
    """Skip these 1-based layers inside `with`, with optional scalars; on leaving, the model is restored.

    Raises:
        FulldepthError: as `Switches`.
    """
    with Switches(anatomy, granularity) as switches:
        switches.skip(layers)
        switches.scalars = scalars
        yield switches


class _Mixer:
    """Applies one layer's factors: replaces a branch's output so that the block's own sum is the scaled one."""

    def __init__(self, anatomy: Anatomy, layer: int, factors: dict[str, nn.Parameter]) -> None:
        self._factors = factors
        self._scale = anatomy.branch_scale
        self._parallel = anatomy.family.design == "parallel"
        self._block = anatomy.blocks[layer - 1]
        parts = (anatomy.part(layer, "attention"), anatomy.part(layer, "mlp"))
        between = [child for child in self._block.children() if child not in parts and isinstance(child, nn.Dropout)]
        rates = [v for name, v in vars(self._block).items() if "dropout" in name and isinstance(v, float)]
        self._dropout = any(rate > 0 for rate in (*rates, *(module.p for module in between)))
        """Whether the block in training applies dropout between its branches and the stream."""
        self._stream: Tensor | None = None
        """The stream that the next branch is added to."""

    def mixes(self, role: str) -> bool:
        """Whether there are factors for this part."""
        return BRANCH[role] in self._factors

    def notes(self, role: str) -> bool:
        """Whether the stream is recorded before this part; in parallel blocks before attention, for both parts."""
        return role == "attention" if self._parallel else self.mixes(role)

    def note(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record the input of a module that reads the stream: x, or x' for the MLP.

        Not the block's input: gradient checkpointing recomputes only the modules inside the block.
        """
        self._stream = first_input(args, kwargs)
        return forward(*args, **kwargs)

    def mix(self, role: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The branch's output `b A + (s - 1) x`, so that the block's own sum is `b A + s x`."""
        output = forward(*args, **kwargs)
        stream, self._stream = self._stream, None
        if stream is None:
            raise FulldepthError("Scalars cannot be used: this model computes its MLP before its attention.")
        if self._dropout and self._block.training:
            raise FulldepthError("Scalars need the model in evaluation mode: its blocks drop out branches.")
        branch = output[0] if isinstance(output, tuple) else output
        # b A + (s - 1) x, for a block that multiplies it by `scale`; in float32 at least, in the dtype of the sum.
        dtype = torch.promote_types(branch.dtype, stream.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        b, s = (self._factors[names[role]].to(branch.device, wide) for names in (BRANCH, STREAM))
        mixed = (b * branch.to(wide) + (s - 1) / self._scale * stream.to(branch.device, wide)).to(dtype)
        if self._parallel and role == "attention" and self.mixes("mlp"):
            self._stream = stream + self._scale * mixed
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed


def _without(outputs: int, index: int | None, identity: bool, *args: Any, **kwargs: Any) -> Any:
    """Replaces a branch by zeros, or (`identity`) a block by its input; attention still counts its tokens in the cache.

    The state is the first element of a tuple of `outputs`, or alone for 0.
    """
    states = first_input(args, kwargs)
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    if cache is not None and index is not None:  # one number per token, by its own `update` (windows, beams, crops)
        entry = cache.layers[index] if index < len(cache.layers) else None
        blanks = []
        for name in ("keys", "values"):
            # An entry that has a shape keeps it: allocated in advance, or filled while the layer was not skipped.
            held = getattr(entry, name, None)
            heads, width = (held.shape[1], held.shape[-1]) if held is not None and held.ndim == 4 else (1, 1)
            blanks.append(states.new_zeros(states.shape[0], heads, states.shape[1], width))
        cache.update(*blanks, index)
    states = states if identity else torch.zeros_like(states)
    return (states, *[None] * (outputs - 1)) if outputs else states


def _refuse(layer: int, skipped: bool, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    raise FulldepthError(
        f"Layer {layer} is {'' if skipped else 'not '}skipped, but its scalars are {', '.join(names) or 'none'}; use "
        "scalars made for the layers that are skipped."
    )


def _wirings(anatomy: Anatomy) -> dict[int, dict[str, Port]]:
    """The calls of every layer: `layer`, `attention` and `mlp`; recorded while two tokens run through the model."""
    calls: dict[int, list[tuple[nn.Module, Any, Any]]] = {}

    def record(layer: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.setdefault(layer, []).append((module, first_input(args, kwargs), output))

    embeddings: Any = anatomy.body.get_input_embeddings()  # type: ignore[operator]
    device = embeddings.weight.device
    ids = torch.zeros(1, 2, dtype=torch.long, device="cpu" if device.type == "meta" else device)  # meta: offloaded
    devices = [ids.device] if ids.device.type == "cuda" else []
    with ExitStack() as hooks, warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices):
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # under gradient checkpointing
        for layer, block in enumerate(anatomy.blocks, start=1):
            parts: set[Any] = {block, *block.children(), *(anatomy.part(layer, role) for role in PARTS)} - {None}
            for module in parts:
                hooks.callback(module.register_forward_hook(partial(record, layer), with_kwargs=True).remove)
        anatomy.body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return {layer: _wiring(anatomy, layer, calls[layer]) for layer in calls}


def _wiring(anatomy: Anatomy, layer: int, calls: list[tuple[nn.Module, Any, Any]]) -> dict[str, Port]:
    """The calls of one block; refuses a block that does not call its parts as the anatomy says."""
    block = anatomy.blocks[layer - 1]
    names = {module: name for name, module in block.named_children()}
    _, stream, output = next(call for call in calls if call[0] is block)
    ports = {"layer": Port(outputs=len(output) if isinstance(output, tuple) else 0)}
    for role in BRANCH:
        part, branch = anatomy.part(layer, role), anatomy.part(layer, f"{role}_branch")
        if part is None:
            ports[role] = Port()
            continue
        call, added = (next((call for call in calls if call[0] is module), None) for module in (part, branch))
        if call is None or added is None:
            raise FulldepthError(f"Layer {layer} cannot be switched: its block does not call its {role} for text.")
        _, part_input, part_output = call
        norm, norm_input, _ = next((c for c in calls if c[2] is part_input and c[0] in names), (None, part_input, None))
        readers = [module for module, other, _ in calls if other is part_input]
        ports[role] = Port(
            None if norm is None else names[norm],
            len(readers) > 1,
            len(part_output) if isinstance(part_output, tuple) else 0,
        )
        states = norm_input if isinstance(norm_input, Tensor) and norm_input.numel() == stream.numel() else -stream
        # The input up to rounding in any dtype; a state and its norm differ by more. Dropout would hide it.
        if not (block.training or (states.view_as(stream) - stream).abs().max() <= 0.1 * stream.abs().max()):
            path = "itself" if norm is None else f"through {names[norm]}"
            raise FulldepthError(f"Layer {layer} cannot be switched: its {role} does not read the stream {path}.")
        if anatomy.family.design != "parallel":
            term = added[2][0] if isinstance(added[2], tuple) else added[2]
            stream = stream + anatomy.branch_scale * term.view_as(stream)
    return ports


def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor input of a call."""
    return args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))

"""Skips parts of a model in place, scales the rest, and restores the model.

Modules keep their places, names and weights; only their `forward` functions are replaced temporarily. Parameters,
state dict, hooks and anatomy are therefore the same while parts are skipped.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fulldepth.core.errors import FulldepthError, first_reason
from fulldepth.hf.anatomy import Anatomy
from fulldepth.hf.families import OR
from fulldepth.hf.modes import device_of, first_input, hooked, state_in, with_state
from fulldepth.hf.scalars import FACTORS_OF_PART, ROLES, Block, Scalars, blocks_of, factor_names

_SWITCHED: weakref.WeakKeyDictionary[nn.Module, Switches] = weakref.WeakKeyDictionary()
"""List of blocks -> the switches in use."""


class Port(NamedTuple):
    """The modules of a block, or of one of its two parts, and what they pass on."""

    part: nn.Module
    branch: nn.Module
    """Module whose output is added to the stream: the part, or a norm after it."""
    norm: nn.Module | None
    """Child whose output is the part's input; None where the input is the stream itself."""
    shared: bool
    """True if another module also reads that norm."""
    outputs: int
    """Length of the tuple that the part returns; 0 for a tensor."""
    handed: Mapping[int, int | str] = {}
    """Of a block: index of an output that the next block reads besides the stream -> its place or name among the
    arguments. Zaya's routers read those of the layer before."""


class Switches:
    """Turns attention, MLP or whole layers of a decoder off and on in place, and scales the rest.

    A skipped attention computes no norm, no attention and no keys or values; the stream is unchanged, `x' = x`. Its
    cache entry gets one number per token, because the length of a cache and the size of a mask are read from the first
    entries. `generate`, loops with a cache, left-padded batches and passes without a cache therefore agree for every
    set of layers. A cache can be continued with the set of skipped layers that it was filled with, or a larger one.

    In a model whose layers read more than the layer before (`Anatomy.not_serial`), a skipped branch is computed and
    its output set to zero (`zeroes`); a skipped `layer` has both branches set to zero. Everything else is unchanged:
    the sum of a tree and its norms, the mixing of residual streams, and the states, keys and values that later layers
    read from a memory, including those of the skipped layer. Scalars are refused.

    The model is restored on leaving, also by an exception. A model can have one such `with` at a time. The object can
    be used again.

    Args:
        anatomy: the model; its design must have been checked (`execution.find_anatomy`).
        granularity: the part that a skipped layer does not compute: `attention`, `mlp` or `layer`; `any` = blocks.

    Raises:
        FulldepthError: for an unknown granularity, and for models that cannot skip blocks, such as encoders and
            post-norm models.
    """

    def __init__(self, anatomy: Anatomy, granularity: str = "attention") -> None:
        blocks_of((), granularity, anatomy.num_layers)
        if (reason := obstacle_to_skipping(anatomy, granularity)) is not None:
            leaves_layers = granularity != "layer" and obstacle_to_skipping(anatomy, "layer") is None
            advice = " Skip whole layers: --granularity layer." if leaves_layers else ""
            raise FulldepthError(f"{type(anatomy.model).__name__} cannot skip blocks: {reason}.{advice}")
        self.anatomy = anatomy
        self.granularity = granularity
        self.zeroes = anatomy.not_serial is not None
        """True if a skipped branch is computed, and its output set to zero."""
        self.no_scalars = anatomy.not_serial or obstacle_to_skipping(anatomy, "any")
        """The reason why scalars are refused; None if they are not."""
        self.skipped: frozenset[Block] = frozenset()
        """The blocks that are skipped at present."""
        self._scalars: Scalars | None = None
        self._ports: dict[int, dict[str, Port]] = {}
        self._replaced: dict[int, ExitStack] = {}
        """1-based layer (0 for the model) -> stack of callbacks that restore its functions."""

    @property
    def scalars(self) -> Scalars | None:
        """The factors in use; None = the plain model."""
        return self._scalars

    @scalars.setter
    def scalars(self, scalars: Scalars | None) -> None:
        self._check_entered()
        if scalars is not None and self.no_scalars is not None:
            kind = type(self.anatomy.model).__name__
            raise FulldepthError(f"{kind} takes no scalars: {self.no_scalars}. Search with --no-fit.")
        depth = self.anatomy.num_layers
        if scalars is not None and (scalars.num_layers, scalars.granularity) != (depth, self.granularity):
            raise FulldepthError(
                f"These scalars are for {scalars.num_layers} layers with granularity {scalars.granularity}; the "
                f"switches are for {depth} layers with granularity {self.granularity}."
            )
        for role in () if scalars is None else ROLES:
            if not self.anatomy.has(role):
                present = ", ".join(map(str, self.anatomy.layers_with(role)))
                raise FulldepthError(
                    f"Scalars need the {role} of every layer; only layers {present} have one. Search with --no-fit."
                )
        self._scalars = scalars
        for layer in self.anatomy.layers:
            self._apply(layer)

    def __enter__(self) -> Self:
        if self._ports:
            raise FulldepthError("These switches are already in use; leave their `with` first.")
        blocks = self.anatomy.block_list
        if blocks in _SWITCHED:
            raise FulldepthError(
                f"Layers of this {type(self.anatomy.model).__name__} are switched by other switches; leave their "
                "`with` first."
            )
        if any(getattr(module, "_compiled_call_impl", None) is not None for module in self.anatomy.body.modules()):
            raise FulldepthError(
                "Layers that are compiled one by one cannot be skipped; compile the whole model, or nothing."
            )
        self._ports = {layer: {} for layer in self.anatomy.layers}
        if not self.zeroes:
            whole = self.granularity == "layer" and self.no_scalars is not None
            self._ports = _ports(self.anatomy, () if whole else ROLES)
        _SWITCHED[blocks] = self
        model = self.anatomy.model
        self._replace(0, model, partial(self._save, model.save_pretrained), "save_pretrained")
        return self

    def __exit__(self, *exception: object) -> None:
        for layer in list(self._replaced):
            self._replaced.pop(layer).close()
        self.skipped = frozenset()
        self._scalars = None
        self._ports = {}
        _SWITCHED.pop(self.anatomy.block_list, None)

    def skip(self, removed: Iterable[int | Block]) -> None:
        """Skip exactly these 1-based layers (blocks for granularity `any`); nothing is loaded or copied.

        Raises:
            FulldepthError: outside `with`, for layers out of range, and for a layer that has no such part.
        """
        self._check_entered()
        skipped = blocks_of(removed, self.granularity, self.anatomy.num_layers)
        for layer, part in sorted(skipped):
            if part != "layer" and self.anatomy.part(layer, part) is None:
                raise FulldepthError(f"Layer {layer} has no {part} to skip.")
        changed = self.skipped ^ skipped
        self.skipped = skipped
        for layer in sorted({block.layer for block in changed}):
            self._apply(layer)

    def _save(self, save: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run in place of `save_pretrained`, which would write the plain model."""
        if self.skipped or self._scalars is not None:
            raise FulldepthError(
                "Saving a model with skipped layers or scalars would write the plain model. Export it (fulldepth skip "
                "apply), or save it outside the `with`."
            )
        return save(*args, **kwargs)

    def _check_entered(self) -> None:
        """Refuse a call outside of `with`."""
        if not self._ports:
            raise FulldepthError("Switches work only inside their `with`: with Switches(anatomy) as switches: ...")

    def _apply(self, layer: int) -> None:
        """Replace the functions of one layer according to skipped layers and scalars."""
        self._replaced.pop(layer, ExitStack()).close()
        block = self.anatomy.blocks[layer - 1]
        skipped = sorted(b.part for b in self.skipped if b.layer == layer)
        factors = None if self._scalars is None else self._scalars.get(layer)
        if factors is not None and set(factors) != set(factor_names(self.skipped, layer)):
            # An error only when the layer runs: skipped layers and scalars are set one after the other.
            self._replace(layer, block, partial(_refuse, layer, bool(skipped), tuple(factors)))
            return
        for part in skipped:
            if self.zeroes:
                for role in ROLES if part == "layer" else (part,):
                    branch = self.anatomy.part(layer, f"{role}_branch")
                    if branch is not None:
                        self._replace(layer, branch, partial(_zeroed, branch.forward))
                continue
            port = self._ports[layer][part]
            if port.norm is not None and not port.shared:
                self._replace(layer, port.norm, partial(_without, 0, None, True, {}))
            caching = self.anatomy.part(layer, "attention") or block
            stated = (getattr(module, "layer_idx", None) for module in caching.modules())
            indices = (index for index in stated if isinstance(index, int))
            index = None if part == "mlp" else next(indices, layer - 1)
            self._replace(layer, port.part, partial(_without, port.outputs, index, part == "layer", port.handed))
            if port.branch is not port.part:
                self._replace(layer, port.branch, partial(_without, 0, None, False, {}))
        mixer = _Mixer(self.anatomy, block, factors or {})
        parallel = self.anatomy.family.design == "parallel"
        for role in ROLES if factors else ():
            port = self._ports[layer][role]
            mixes = FACTORS_OF_PART[role][0] in mixer.factors
            # In parallel blocks the stream is recorded before attention, for both parts.
            if role == "attention" if parallel else mixes:
                reader = port.norm or port.part
                self._replace(layer, reader, partial(mixer.note, reader.forward))
            if mixes:
                self._replace(layer, port.branch, partial(mixer.mix, role, port.branch.forward))

    def _replace(self, layer: int, module: nn.Module, function: Callable[..., Any], name: str = "forward") -> None:
        """Replace a function of a module until its layer is restored, which also restores one that offloading set."""
        attributes = vars(module)
        if name in attributes:
            restore = partial(attributes.update, {name: attributes[name]})
        else:
            restore = partial(attributes.pop, name)
        self._replaced.setdefault(layer, ExitStack()).callback(restore)
        attributes[name] = function


def skipped_in_place(anatomy: Anatomy) -> frozenset[Block]:
    """Return the blocks of a model that are skipped at present (`skipping`)."""
    switches = _SWITCHED.get(anatomy.block_list)
    return frozenset() if switches is None else switches.skipped


@contextmanager
def skipping(
    anatomy: Anatomy, removed: Iterable[int | Block], granularity: str = "attention", scalars: Scalars | None = None
) -> Iterator[Switches]:
    """Skip these 1-based layers (blocks for granularity `any`) inside `with`, with optional scalars.

    The model is restored on leaving.

    Args:
        anatomy: the model; its design must have been checked (`execution.find_anatomy`).
        removed: 1-based layers, or blocks for the granularity `any`.
        granularity: the part that a skipped layer does not compute: `attention`, `mlp` or `layer`; `any` = blocks.
        scalars: factors of the remaining branches and of the stream; None = none.

    Returns:
        A context manager that gives the `Switches`, in which blocks can be skipped and restored.

    Raises:
        FulldepthError: as `Switches`.
    """
    with Switches(anatomy, granularity) as switches:
        switches.skip(removed)
        switches.scalars = scalars
        yield switches


def obstacle_to_skipping(anatomy: Anatomy, granularity: str) -> str | None:
    """Return the clause that says why nothing of this granularity can be skipped, that is not computed; None if
    it can.
    """
    family = anatomy.family
    paths = ((family.attention, family.attention_branch), (family.mlp, family.mlp_branch))
    adds_stream = any(str(branch).startswith(f"{part}.") for part, branch in paths)
    reason = "its attention or its MLP adds the stream itself, so a block without it would lose the stream"
    whole = granularity == "layer" and anatomy.not_serial is None and anatomy.task == "causal-lm"
    return obstacle_to_removing(anatomy, whole) or (reason if adds_stream and not whole else None)


def obstacle_to_removing(anatomy: Anatomy, whole: bool = False) -> str | None:
    """Return the clause that says why what a part adds to the stream cannot be removed; None if it can.

    Args:
        anatomy: of the model.
        whole: only whole layers are removed, of a language model whose head is proven to read no later token; their
            attention and MLP need not be known.
    """
    family = anatomy.family
    config = anatomy.model.config
    attentions = filter(None, (anatomy.part(layer, "attention") for layer in anatomy.layers))
    causal = all(getattr(m, "is_causal", True) is not False for part in attentions for m in part.modules())
    obstacles = {
        "it is an encoder, and only decoders are known to work without some of their attention": (
            anatomy.task in ("masked-lm", "image-classification")
            or family.modality != "text"
            or family.tower is not None
            or not (causal or whole)
        ),
        "its attention also reads an encoder": (
            getattr(config, "is_encoder_decoder", False)
            or (getattr(config, "add_cross_attention", False) and not whole)
        ),
        "its norms follow the residual sums, so a block without its branch would change the stream": (
            family.design == "post" and not whole
        ),
        "its attention and MLP modules are not known": not (
            whole or (anatomy.layers_with("attention") and anatomy.layers_with("mlp"))
        ),
        "its layers share modules": len(set(anatomy.blocks)) < anatomy.num_layers,
    }
    return first_reason(obstacles)


class _Mixer:
    """Applies one layer's factors: changes the output of a branch so that the block's own sum is the scaled sum."""

    def __init__(self, anatomy: Anatomy, block: nn.Module, factors: dict[str, nn.Parameter]) -> None:
        self.factors = factors
        self.block = block
        self.scale = anatomy.branch_scale
        self.continues = anatomy.family.design == "parallel" and "b_mlp" in factors
        """True if the MLP's branch is added to the stream after attention, as in a parallel block."""
        parts = {name for path in (anatomy.family.attention, anatomy.family.mlp) for name in str(path).split(OR)}
        between = (child for name, child in block.named_children() if name not in parts)
        rates = [value for name, value in vars(block).items() if "dropout" in name and isinstance(value, float)]
        rates += [module.p for module in between if isinstance(module, nn.Dropout)]
        self.drops_out = any(rate > 0 for rate in rates)
        """True if the block in training applies dropout between its branches and the stream."""
        self.stream: Tensor | None = None
        """The stream that the next branch is added to."""

    def note(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Record the input of a module that reads the stream: x, or x' for the MLP.

        Not the block's input: gradient checkpointing recomputes only the modules inside the block.
        """
        self.stream = first_input(args, kwargs)
        return forward(*args, **kwargs)

    def mix(self, role: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return `b A + (s - 1) x` in place of a branch's output A, so that the block's own sum is `b A + s x`."""
        output = forward(*args, **kwargs)
        stream = self.stream
        self.stream = None
        if stream is None:
            raise FulldepthError("Scalars cannot be used: this model computes the MLP before the attention.")
        if self.drops_out and self.block.training:
            raise FulldepthError("Scalars need the model in evaluation mode, because its blocks apply dropout.")
        branch = state_in(output)
        # b A + (s - 1) x, for a block that multiplies it by `scale`; in float32 at least, in the dtype of the sum.
        dtype = torch.promote_types(branch.dtype, stream.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        b, s = (self.factors[name].to(branch.device, wide) for name in FACTORS_OF_PART[role])
        stream = stream.view_as(branch)  # experts may return [B T, D]
        mixed = (b * branch.to(wide) + (s - 1) / self.scale * stream.to(branch.device, wide)).to(dtype)
        if role == "attention" and self.continues:
            self.stream = stream + self.scale * mixed
        return with_state(output, mixed)


def _without(
    outputs: int, index: int | None, identity: bool, handed: Mapping[int, int | str], *args: Any, **kwargs: Any
) -> Any:
    """Run in place of a branch and return zeros, or (`identity`) in place of a block and return its input.

    Attention still counts its tokens in the cache.

    Args:
        outputs: length of the tuple to return, whose first element is the state; 0 = the state alone.
        index: entry of the cache in which tokens are counted; None = they are not counted.
        identity: return the input, not zeros.
        handed: see `Port`; what the block was given is returned.
        *args: positional arguments of the replaced function.
        **kwargs: its named arguments.
    """
    states = first_input(args, kwargs)
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    entry = cache.layers[index] if cache is not None and index is not None and index < len(cache.layers) else None
    linear = entry is not None and not hasattr(entry, "update")  # the state of linear attention counts no tokens
    if cache is not None and index is not None and not linear:
        blanks = []  # one number per token, added by the cache's `update` (windows, beams, crops)
        for name in ("keys", "values"):
            # An entry that has a shape keeps it: allocated in advance, or filled while the layer was not skipped.
            stored = getattr(entry, name, None)
            heads, width = (stored.shape[1], stored.shape[-1]) if stored is not None and stored.ndim == 4 else (1, 1)
            blanks.append(states.new_zeros(states.shape[0], heads, states.shape[1], width))
        cache.update(*blanks, index)
    states = states if identity else torch.zeros_like(states)
    given: dict[int | str, Any] = dict(enumerate(args))
    given.update(kwargs.items())
    more = (given.get(handed[number]) if number in handed else None for number in range(1, outputs))
    return (states, *more) if outputs else states


def _zeroed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a branch and set its output to zero. Further outputs, such as keys for later layers, are unchanged."""
    output = forward(*args, **kwargs)
    return with_state(output, torch.zeros_like(state_in(output)))


def _refuse(layer: int, skipped: bool, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Run in place of a layer whose scalars do not fit: raise an error."""
    raise FulldepthError(
        f"Layer {layer} is {'' if skipped else 'not '}skipped, but its scalars are {', '.join(names) or 'none'}; use "
        "scalars made for the layers that are skipped."
    )


def _ports(anatomy: Anatomy, roles: Collection[str]) -> dict[int, dict[str, Port]]:
    """1-based layer -> its port `layer` and those of `roles`, recorded while two tokens run through the model."""
    calls: dict[int, list[tuple[nn.Module, Any, Any]]] = {}
    last_outputs: dict[int, Tensor] = {}
    handed: dict[int, int | str] = {}

    def record(layer: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        calls.setdefault(layer, []).append((module, first_input(args, kwargs), output))
        if module is anatomy.blocks[layer - 1]:
            given = [*enumerate(args), *kwargs.items()]
            handed.update({number: key for number, x in last_outputs.items() for key, value in given if value is x})
            more = output[1:] if isinstance(output, tuple | list) else ()
            last_outputs.clear()
            last_outputs.update({number: x for number, x in enumerate(more, start=1) if isinstance(x, Tensor)})

    ids = torch.zeros(1, 2, dtype=torch.long, device=device_of(anatomy.model))
    devices = [ids.device] if ids.device.type == "cuda" else []
    modules: list[tuple[int, nn.Module]] = []
    for layer, block in enumerate(anatomy.blocks, start=1):
        parts = (anatomy.part(layer, f"{role}{end}") for role in roles for end in ("", "_branch"))
        modules += [(layer, module) for module in {block, *block.children(), *filter(None, parts)}]
    hooks = (module.register_forward_hook(partial(record, layer), with_kwargs=True) for layer, module in modules)
    with hooked(hooks), warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices):
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad")  # under gradient checkpointing
        anatomy.body(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    ports = {layer: _ports_of_layer(anatomy, layer, roles, calls[layer]) for layer in calls}
    return {
        layer: {**of_layer, "layer": of_layer["layer"]._replace(handed=handed)} for layer, of_layer in ports.items()
    }


def _ports_of_layer(
    anatomy: Anatomy, layer: int, roles: Collection[str], calls: list[tuple[nn.Module, Any, Any]]
) -> dict[str, Port]:
    """Return the ports of one block. Refuse a block that does not call its parts as the anatomy says."""
    block = anatomy.blocks[layer - 1]
    names = {module: name for name, module in block.named_children()}
    first = {module: (states, output) for module, states, output in reversed(calls)}
    stream, output = first[block]
    ports = {"layer": Port(block, block, None, False, len(output) if isinstance(output, tuple | list) else 0)}
    for role in roles:
        part = anatomy.part(layer, role)
        branch = anatomy.part(layer, f"{role}_branch")
        if part is None or branch is None:
            continue
        if not {part, branch} <= first.keys():
            raise FulldepthError(f"Layer {layer} cannot be skipped: its block does not call its {role} for text.")
        states, output = first[part]
        readers = [module for module, other, _ in calls if other is states]
        norm, source, _ = next((c for c in calls if c[2] is states and c[0] in names), (None, states, None))
        ports[role] = Port(part, branch, norm, len(readers) > 1, len(output) if isinstance(output, tuple | list) else 0)
        # A tenth allows rounding in any dtype; a state and its norm differ by more. Dropout would prevent the check.
        reads = isinstance(source, Tensor) and source.numel() == stream.numel()
        if not block.training and not (
            reads and (source.view_as(stream) - stream).abs().max() <= 0.1 * stream.abs().max()
        ):
            path = "itself" if norm is None else f"through {names[norm]}"
            raise FulldepthError(f"Layer {layer} cannot be skipped: its {role} does not read the stream {path}.")
        if anatomy.family.design != "parallel":
            stream = stream + anatomy.branch_scale * state_in(first[branch][1]).view_as(stream)
    return ports

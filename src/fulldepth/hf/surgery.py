"""Skips parts of a model in place, scales the rest, and restores the model.

Modules keep their places, names and weights; only their `forward` functions are replaced temporarily. Parameters,
state dict, hooks and anatomy are therefore the same while parts are skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from fulldepth.errors import FulldepthError
from fulldepth.hf.anatomy import Anatomy
from fulldepth.hf.scalars import GRANULARITIES, Scalars, check_layers, factor_names
from fulldepth.hf.wiring import Wiring, cache_index, check_can_skip, first_input, wirings

_SWITCHED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Lists of blocks with switches in use."""
_CLASS = object()
"""Marks a function that a module inherits from its class."""
_MODEL = 0
"""Layer number of replacements that belong to no layer."""
BRANCH = {"attention": "b_att", "mlp": "b_mlp"}
STREAM = {"attention": "s_att", "mlp": "s_mlp"}
"""Part -> factor of its branch; part -> factor of the stream that the branch is added to."""


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
        check_can_skip(anatomy)
        self.anatomy = anatomy
        self.granularity = granularity
        self._skipped: frozenset[int] = frozenset()
        self._scalars: Scalars | None = None
        self._wirings: dict[int, Wiring] | None = None
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
            self._check_scalars(scalars)
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
        self._wirings = wirings(self.anatomy)
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

    def _check_scalars(self, scalars: Scalars) -> None:
        anatomy = self.anatomy
        if scalars.num_layers != anatomy.num_layers:
            raise FulldepthError(f"Scalars of {scalars.num_layers} layers for a model of {anatomy.num_layers}.")
        if scalars.granularity != self.granularity:
            raise FulldepthError(f"Scalars of granularity {scalars.granularity}, switches of {self.granularity}.")
        if scalars.width not in (None, anatomy.width):
            raise FulldepthError(f"Scalars of {scalars.width} channels for a model of {anatomy.width}.")
        for role in ("attention", "mlp"):
            if not anatomy.has(role):
                present = ", ".join(map(str, anatomy.layers_with(role)))
                raise FulldepthError(f"Scalars need every layer to have its {role}; only layers {present} do.")

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
        wiring, block, index = self._wirings[layer], self.anatomy.blocks[layer - 1], cache_index(self.anatomy, layer)
        if self.granularity == "layer":
            self._replace(layer, block, partial(_pass_by, wiring.outputs, index))
            return
        port = wiring.attention if self.granularity == "attention" else wiring.mlp
        part, branch = self._part(layer, self.granularity), self._part(layer, f"{self.granularity}_branch")
        if port.norm is not None and not port.shared:
            self._replace(layer, block.get_submodule(port.norm), _identity)
        self._replace(layer, part, partial(_nothing, port.outputs, index if self.granularity == "attention" else None))
        if branch is not part:
            self._replace(layer, branch, partial(_nothing, 0, None))

    def _scale(self, layer: int, factors: dict[str, nn.Parameter]) -> None:
        assert self._wirings is not None
        wiring, block = self._wirings[layer], self.anatomy.blocks[layer - 1]
        mixer = _Mixer(self.anatomy, layer, factors)
        for role, port in {"attention": wiring.attention, "mlp": wiring.mlp}.items():
            if mixer.notes(role):
                reader = self._part(layer, role) if port.norm is None else block.get_submodule(port.norm)
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
        self._dropout = _has_dropout(self._block, anatomy.part(layer, "attention"), anatomy.part(layer, "mlp"))
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
        mixed = _mixed(branch, stream, self._factors[BRANCH[role]], self._factors[STREAM[role]], self._scale)
        if self._parallel and role == "attention" and self.mixes("mlp"):
            self._stream = stream + self._scale * mixed
        return (mixed, *output[1:]) if isinstance(output, tuple) else mixed


def _mixed(branch: Tensor, stream: Tensor, b: Tensor, s: Tensor, scale: float) -> Tensor:
    """`b A + (s - 1) x`, for a block that multiplies it by `scale`; in float32 at least, in the dtype of the sum.

    With factors of 1 it is A to the bit.
    """
    dtype = torch.promote_types(branch.dtype, stream.dtype)
    wide = torch.promote_types(dtype, torch.float32)
    b, s, stream = (tensor.to(branch.device, wide) for tensor in (b, s, stream))
    mixed = b * branch.to(wide) + (s - 1) / scale * stream
    return mixed.to(dtype)


def _has_dropout(block: nn.Module, *parts: nn.Module | None) -> bool:
    """Whether a block in training applies dropout between its branches and the stream."""
    modules = [child for child in block.children() if child not in parts and isinstance(child, nn.Dropout)]
    rates = [value for name, value in vars(block).items() if "dropout" in name and isinstance(value, float)]
    return any(module.p > 0 for module in modules) or any(rate > 0 for rate in rates)


def _shaped(state: Tensor, outputs: int) -> Any:
    """A state as its block expects it: the tensor, or the first element of a tuple."""
    return (state, *[None] * (outputs - 1)) if outputs else state


def _identity(*args: Any, **kwargs: Any) -> Any:
    return first_input(args, kwargs)


def _nothing(outputs: int, index: int | None, *args: Any, **kwargs: Any) -> Any:
    """Replaces a branch by zeros; attention still counts its tokens in the cache."""
    states = first_input(args, kwargs)
    if index is not None:
        _count(states, index, args, kwargs)
    return _shaped(torch.zeros_like(states), outputs)


def _pass_by(outputs: int, index: int, *args: Any, **kwargs: Any) -> Any:
    """Replaces a block by the identity."""
    states = first_input(args, kwargs)
    _count(states, index, args, kwargs)
    return _shaped(states, outputs)


def _refuse(layer: int, skipped: bool, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    raise FulldepthError(
        f"Layer {layer} is {'' if skipped else 'not '}skipped, but its scalars are {', '.join(names) or 'none'}; use "
        "scalars made for the layers that are skipped."
    )


def _count(states: Tensor, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add one number per token to the cache, if there is one, through its own `update` (windows, beams, crops)."""
    cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, Cache)), None)
    if cache is None:
        return
    entry = cache.layers[index] if index < len(cache.layers) else None

    def blanks(held: Tensor | None) -> Tensor:
        # An entry that already has a shape keeps it: allocated in advance, or filled while the layer was not skipped.
        heads, width = (held.shape[1], held.shape[-1]) if held is not None and held.ndim == 4 else (1, 1)
        return states.new_zeros(states.shape[0], heads, states.shape[1], width)

    cache.update(blanks(getattr(entry, "keys", None)), blanks(getattr(entry, "values", None)), index)


__all__ = ["GRANULARITIES", "Switches", "skipping"]

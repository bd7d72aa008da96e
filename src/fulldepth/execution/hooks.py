"""Captures activations by site name with forward hooks, which are always removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fulldepth.core.errors import FulldepthError, unknown
from fulldepth.hf import Anatomy
from fulldepth.hf.scalars import ROLES

SITES = {
    "embeddings": "h_0, what the first block reads; 1 state",
    "residual": "h_0..h_L, the stream before the final norm; L+1 states",
    "attention_input": "x, what each block reads; L states",
    "attention_output": "x', the stream after attention, residual included (for post-norm blocks after the norm)",
    "attention_branch": "what attention adds to the stream, multipliers and norms of the branch applied",
    "mlp_branch": "what the MLP adds to the stream, likewise",
    "mlp_input": "what the MLP sub-layer adds to: x' for most, after cross-attention in a decoder that has one",
    "attention_carried": "what attention adds to: x, for blocks with several streams their sum after mixing",
    "value": "value states of the attention, [B, T, key/value heads x head size]",
    "final_normed": "the final norm applied to h_L; 1 state",
}
"""Sites of states by name. All are `[B, T, D]` tensors, one for each layer 1..L unless stated otherwise.

Where blocks hold several residual streams (Hyper-Connections), the stream is their sum, as the final norm reads it."""

COEFFICIENTS = {
    "routing": "weights of the attention's memory, in layers that have one: [heads, sources], with a dynamic router "
    "[B, T, heads, sources], over key and value states [heads, sources, heads]",
}
"""Sites of mixing weights that a model applies to its states; some models have them, in all or some layers."""
REENTRANT = (
    "{} lies inside a block, and reentrant gradient checkpointing gives it no gradient; enable checkpointing with "
    "use_reentrant=False (in a Trainer gradient_checkpointing_kwargs={{'use_reentrant': False}})."
)
ROLE_OF_SITE = {"routing": "router"}
"""Site of coefficients -> role of the module that computes them."""


Key = tuple[str, int]
"""Name of a captured state, and its 1-based layer."""


STACKED = -1
"""Version of a state that was copied into a stack."""


def stack_rows(captured: Collection[Key], sites: Collection[str], layers: int) -> dict[Key, tuple[str, int]]:
    """Captured state -> the requested site that consists of such states, and its row in the site's stack.

    Args:
        captured: all states that are captured.
        sites: the requested sites; those that are sums of captured states have no stack.
        layers: L.
    """
    every = range(1, layers + 1)
    states = {site: [(site, layer) for layer in every] for site in ("attention_output", "value")}
    states["residual"] = [("h0" if ("h0", 1) in captured else "x", 1), *(("y", layer) for layer in every)]
    whole = [site for site in states if site in sites and all(key in captured for key in states[site])]
    return {key: (site, row) for site in whole for row, key in enumerate(states[site])}


class Activations:
    """Activations of one forward pass by site: `activations["residual"]` is a list of tensors in layer order."""

    def __init__(self, anatomy: Anatomy, sites: Iterable[str]) -> None:
        self.anatomy = anatomy
        self.sites = tuple(sites)
        self._seen: dict[Key, tuple[Tensor, int]] = {}
        """Each state with the version that it had, to tell whether the model overwrote it."""
        self.turns: Counter[Key] = Counter()
        """Calls of shared blocks in this pass."""
        self.repeated = False
        """Whether states of one pass replaced those of another one since `clear`."""
        self.rows: dict[Key, tuple[str, int]] = {}
        """As from `stack_rows`: states of these are copied into one tensor `[S, B, T, D]` per site, which every pass
        overwrites, so that states are held once and not twice."""
        self.device: torch.device | None = None
        """Of the stacks; a state on another device stays where it is."""
        self._stacks: dict[str, Tensor] = {}

    def clear(self, *, keep_stacks: bool = True) -> None:
        """Drop all states before the next pass; with `keep_stacks` it overwrites the tensors of `stacked`."""
        self._seen.clear()
        self.repeated = False
        if not keep_stacks:
            self._stacks = {}

    def turn(self, point: HookPoint, layers: list[int]) -> int:
        """The 1-based layer to which this call of a module belongs."""
        if len(layers) == 1:
            return layers[0]
        turn = self.turns[point.name, layers[0]]
        self.turns[point.name, layers[0]] += 1
        if turn >= len(layers):
            raise FulldepthError(f"A module of shared layers ran more than {len(layers)} times in one pass.")
        return layers[turn]

    @property
    def holds_the_stream(self) -> bool:
        """True if the states of `residual` are the model's own tensors, so that gradients flow through them."""
        states = [state for (name, _), (state, _) in self._seen.items() if name in ("h0", "x", "y")]
        return not self.anatomy.has_streams and all(state.ndim == 3 for state in states)

    def record(self, site: str, layer: int, state: Tensor) -> None:
        """Store one state of a 1-based layer."""
        key = (site, layer)
        if key in self.rows and state.device == self.device:
            name, row = self.rows[key]
            stack = self._stacks.get(name)
            if state.ndim == 3 and (stack is None or stack.shape[1:] != state.shape or stack.dtype != state.dtype):
                count = sum(place[0] == name for place in self.rows.values())
                stack = self._stacks[name] = state.new_empty(count, *state.shape)
            if stack is not None and state.numel() == stack[row].numel():
                stack[row] = state.view(stack.shape[1:])
                self._seen[key] = stack[row], STACKED
                return
        self.repeated |= key in self._seen
        self._seen[key] = state, 0 if state.is_inference() else state._version

    def has_run(self, site: str) -> bool:
        """Return True if every layer has a state at a site that consists of captured states, such as `value`."""
        return all((site, layer) in self._seen for layer in self.anatomy.layers)

    def __getitem__(self, site: str) -> list[Tensor]:
        """States of a site in layer order.

        Raises:
            FulldepthError: if the site is not captured, or the forward pass did not reach every layer.
        """
        if site not in self.sites:
            raise FulldepthError(f"Site {site!r} was not captured; captured: {', '.join(self.sites)}.")
        if site in COEFFICIENTS:
            return [self._read(site, layer) for layer in self.anatomy.layers_with(ROLE_OF_SITE[site])]
        layers = self.anatomy.layers
        if site == "embeddings":
            return [self._first()]
        if site == "residual":
            return [self._first(), *(self._read("y", layer) for layer in layers)]
        if site == "final_normed":
            return [self.anatomy.normalise(self._read("y", len(layers)))]
        if site == "attention_output" and self.anatomy.family.design == "parallel":  # the model never computes it
            return [self._read("x", layer) + self._branch("attention_branch", layer) for layer in layers]
        if site.endswith("_branch"):
            return [self._branch(site, layer) for layer in layers]
        carried = "attention_carried" if self.anatomy.has_streams else "x"  # the stream to which attention adds
        name = {"attention_input": "x", "attention_carried": carried}.get(site, site)
        return [self._read(name, layer) for layer in layers]

    def coefficients(self, site: str) -> dict[int, Tensor]:
        """1-based layer -> weights at a site of `COEFFICIENTS`."""
        return dict(zip(self.anatomy.layers_with(ROLE_OF_SITE[site]), self[site], strict=True))

    def _read(self, name: str, layer: int) -> Tensor:
        """One state, `[B, T, D]` even if the module works on `[B T, D]`; raises an error if it was overwritten."""
        if (name, layer) not in self._seen:
            if _reentrant(self.anatomy.blocks[layer - 1]):  # switched on after the model was hooked
                raise FulldepthError(REENTRANT.format(name))
            raise FulldepthError(f"No activation was captured at {name} of layer {layer}; did the model run?")
        state, version = self._seen[name, layer]
        if version not in (STACKED, 0 if state.is_inference() else state._version):
            raise FulldepthError(f"The model overwrote its own state at {name} of layer {layer} in place.")
        if state.ndim == 2 and name not in COEFFICIENTS:
            state = state.view(*self._first().shape[:2], -1)
        return state

    def _first(self) -> Tensor:
        """h_0: the input of the first block, which is its x unless the block sums several states to x."""
        return self._read("h0" if ("h0", 1) in self._seen else "x", 1)

    def _branch(self, site: str, layer: int) -> Tensor:
        """A branch's contribution to the stream: with several streams, its output times the sum of their weights."""
        if self.anatomy.family.sparse and self.anatomy.part(layer, site) is None:
            return torch.zeros_like(self._first())
        branch = self._read(site, layer)
        if not self.anatomy.has_streams:
            return branch
        return branch * self._read(f"{site}_weight", layer).to(branch.dtype)

    def stack(self, site: str, device: torch.device | None = None) -> Tensor:
        """[S, B, T, D] all states of a site on one device."""
        keys = [key for key, place in self.rows.items() if place[0] == site and device in (None, self.device)]
        if keys and all(key in self._seen and self._seen[key][1] == STACKED for key in keys):
            return self._stacks[site]
        states = self[site]
        device = device or states[-1].device
        return torch.stack([state.to(device) for state in states])


@contextmanager
def capture(
    anatomy: Anatomy, sites: Iterable[str], *, grad: bool = False, stacked: torch.device | None = None
) -> Iterator[Activations]:
    """Hook a model so that each forward pass fills an `Activations`; all hooks are removed on exit.

    Nothing else about the model changes: no device, dtype, mode or attribute. Recomputation under gradient
    checkpointing is not recorded.

    Args:
        anatomy: the model and the paths of its parts.
        sites: keys of `SITES` and `COEFFICIENTS`.
        grad: keep the states in the graph (for losses), and record only while gradients are enabled; else states are
            detached.
        stacked: device on which states are copied into one tensor per site, which the next pass overwrites, as soon as
            the model computes them. None = states are kept where they are.

    Returns:
        A context manager that gives the `Activations`; every forward pass inside it fills them anew.

    Raises:
        FulldepthError: for an unknown site, or a site for which this family has no module.
    """
    sites = tuple(sites)
    known = [*SITES, *COEFFICIENTS]
    for site in sites:
        if site not in known:
            raise unknown("site", site, known)
    activations = Activations(anatomy, sites)
    handles: list[RemovableHandle] = []
    layers_of: dict[nn.Module, list[int]] = {}  # block -> its layers, several where they share it
    for layer, block in enumerate(anatomy.blocks, start=1):
        layers_of.setdefault(block, []).append(layer)
    try:
        points = [(block, point) for block in layers_of for point in _points(anatomy, set(sites), layers_of[block][0])]
        if stacked is not None:
            captured = {(point.name, layer) for block, point in points for layer in layers_of[block]}
            activations.rows = stack_rows(captured, sites, anatomy.num_layers)
            activations.device = stacked
        for block, point in points:
            if grad and point.module not in layers_of and _reentrant(block):
                raise FulldepthError(REENTRANT.format(point.name))
            handles.append(_hook(activations, point, layers_of[block], grad))
        if len(layers_of) < anatomy.num_layers:
            handles.append(anatomy.runner.register_forward_pre_hook(lambda *_: activations.turns.clear()))
        yield activations
    finally:
        for handle in handles:
            handle.remove()


def _reentrant(block: nn.Module) -> bool:
    """Return True if a block uses reentrant checkpointing, so that its first run builds no graph."""
    function = getattr(block, "_gradient_checkpointing_func", None)
    active = block.training and getattr(block, "gradient_checkpointing", False)
    return bool(active and getattr(function, "keywords", {}).get("use_reentrant"))


class HookPoint(NamedTuple):
    """A place in the model where a state is captured."""

    module: nn.Module
    before: bool
    """Whether the module's input is captured; else its output."""
    name: str
    """Key in the recorded activations."""
    change: Callable[[Any], Tensor]
    """Extracts the state from the module's input or output."""


def _points(anatomy: Anatomy, sites: set[str], layer: int) -> Iterator[HookPoint]:
    """Hook points for the requested sites in one layer."""
    yield from _stream_points(anatomy, sites, layer, anatomy.blocks[layer - 1])
    yield from _branch_points(anatomy, sites, layer)
    if "value" in sites:
        value = _required(anatomy, layer, "value")
        yield HookPoint(value, False, "value", lambda output: anatomy.value_states(_tensor(output)))
    for site in sites & ROLE_OF_SITE.keys():
        module = anatomy.part(layer, ROLE_OF_SITE[site])
        if module is not None:
            yield HookPoint(module, False, site, _tensor)
        elif not anatomy.layers_with(ROLE_OF_SITE[site]):
            _required(anatomy, layer, ROLE_OF_SITE[site])


def _stream_points(anatomy: Anatomy, sites: set[str], layer: int, block: nn.Module) -> Iterator[HookPoint]:
    """Points of the stream before, inside and after the block."""

    def stream(value: Any) -> Tensor:
        return anatomy.stream(_tensor(value))

    reader = anatomy.reader(layer)
    if layer == 1 and reader is not block:
        yield HookPoint(block, True, "h0", stream)
    reads_x = "attention_input" in sites or ("attention_carried" in sites and not anatomy.has_streams)
    if reads_x or (layer == 1 and reader is block) or _needs_sum(anatomy, sites):
        yield HookPoint(reader, True, "x", stream)
    if sites & {"residual", "final_normed"}:
        yield HookPoint(block, False, "y", stream)
    design = anatomy.family.design
    before = anatomy.part(layer, "mlp_norm")
    if "attention_output" in sites and design != "parallel":
        # the output of the norm after attention, else what the MLP sub-layer reads
        role = "mlp_connection" if anatomy.has_streams else "attention_norm" if design == "post" else "mlp"
        module = (role == "mlp" and before) or _required(anatomy, layer, role)
        yield HookPoint(module, role != "attention_norm", "attention_output", stream)
    if "mlp_input" in sites and not anatomy.has_streams:  # the block itself if both branches add to x
        module = block if design == "parallel" else (design == "pre" and before) or _required(anatomy, layer, "mlp")
        yield HookPoint(module, True, "mlp_input", stream)


def _branch_points(anatomy: Anatomy, sites: set[str], layer: int) -> Iterator[HookPoint]:
    """Points of the branches and, with several streams, of their connections."""
    scale = anatomy.branch_scale
    for kind in ROLES:
        site = f"{kind}_branch"
        if site in sites or (kind == "attention" and _needs_sum(anatomy, sites)):
            module = anatomy.part(layer, site) if anatomy.family.sparse else _required(anatomy, layer, site)
            if module is not None:
                # a new tensor: some families add to a branch in place
                yield HookPoint(module, False, site, lambda value: _tensor(value) * scale)
        if not anatomy.has_streams:
            continue
        # a connection returns: the branch's input, the streams without the branch, the branch's weight in each
        connection = _required(anatomy, layer, f"{kind}_connection")
        if site in sites:
            yield HookPoint(connection, False, f"{site}_weight", lambda value: value[2].sum(-1, keepdim=True))
        carried = {"attention": "attention_carried", "mlp": "mlp_input"}[kind]
        if carried in sites:
            yield HookPoint(connection, False, carried, lambda value: anatomy.stream(value[1]))


def _needs_sum(anatomy: Anatomy, sites: set[str]) -> bool:
    """Return True if the model never computes x' (parallel residual), so that it must be summed here."""
    return "attention_output" in sites and anatomy.family.design == "parallel"


def _required(anatomy: Anatomy, layer: int, role: str) -> nn.Module:
    """The module with a role; raises an error if the family has none."""
    module = anatomy.part(layer, role)
    if module is None:
        raise FulldepthError(
            f"Layer {layer} of {type(anatomy.model).__name__} (anatomy {anatomy.family.name}) has no known {role}; "
            f"measure takes it from its settings: anatomy.{role}=PATH."
        )
    return module


def _hook(activations: Activations, point: HookPoint, layers: list[int], grad: bool) -> RemovableHandle:
    """Register one hook that records a tensor and changes nothing; call number i of a pass belongs to `layers[i]`."""

    def record(value: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # recomputation inside backward
            return
        if grad and not torch.is_grad_enabled():  # an evaluation during training
            return
        state = point.change(value)
        activations.record(point.name, activations.turn(point, layers), state if grad else state.detach())

    if grad:  # torch.compile must not trace the hook
        record = torch.compiler.disable(record)
    if point.before:
        return point.module.register_forward_pre_hook(_Recorder(record, before=True), with_kwargs=True)
    return point.module.register_forward_hook(_Recorder(record, before=False))


class _Recorder:
    """Hook that hands a module's input or output on; pickles and copies of a hooked model record nothing."""

    def __init__(self, record: Callable[[Any], None] | None = None, *, before: bool = False) -> None:
        self.record = record
        self.before = before

    def __call__(self, module: nn.Module, args: tuple[Any, ...], last: Any) -> None:
        """Record: `last` is the keyword arguments before a module, else its output."""
        if self.record is not None:
            if self.before and not args:  # the state among keyword arguments
                first = next((value for value in last.values() if isinstance(value, Tensor)), None)
                args = (last.get("hidden_states", first),)
            self.record(args[0] if self.before else last)

    def __reduce__(self) -> tuple[type[_Recorder], tuple[()]]:
        return _Recorder, ()


def _tensor(value: Any) -> Tensor:
    """The state in a module's output: a tensor (transformers 5) or the first item of a tuple (earlier, and T5)."""
    while isinstance(value, tuple | list):
        value = value[0]
    if not isinstance(value, Tensor):
        raise FulldepthError(f"Expected a tensor from a hooked module, got {type(value).__name__}.")
    return value

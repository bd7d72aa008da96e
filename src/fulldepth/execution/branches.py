"""Finds attention and MLP in blocks by arithmetic: they are the modules whose outputs a block adds to its input."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fulldepth.core.errors import FulldepthError
from fulldepth.execution.stream import main_state
from fulldepth.hf import Anatomy, is_adapted
from fulldepth.hf.families import OR, Design
from fulldepth.hf.model_hash import equal
from fulldepth.hf.modes import first_input, hooked

ROWS = 32
"""Positions of a batch at which states are compared."""
MOST_BLOCKS = 8
"""Most blocks of one make that are tried: the output of a branch may be zero in some of them."""
UNEXPLAINED = 1e-2
"""Largest share of a change of the stream that may remain when the branch that explains it is added: rounding of the
stream, which may be ten thousand times as large as the branch."""
ROUNDED = 0.3
"""The same for a sum of three states in another order than the block's, in half precision."""
NOT_FOUND = "no two modules of a block give what it adds to its input"
"""The reason why the branches of a model are not known."""
ATTENTION = re.compile(r"attn|attention|mixer", re.I)
"""Names of attention, to tell which branch it is where the order does not."""
VALUE = re.compile(r"(^|\.)(v_proj|value|v|v_lin|wv)$")
"""Names of the projection to the value states, inside attention."""

Make = tuple[tuple[str, type], ...]
"""Names and classes of a block's children. Blocks of one make have the same parts."""


@dataclass(frozen=True)
class BlockParts:
    """Paths of the parts of a block, by the fields of `Family`."""

    design: Design | None = None
    """None for a block without branches, or with a single one."""
    attention: str | None = None
    attention_branch: str | None = None
    attention_norm: str | None = None
    mlp: str | None = None
    mlp_branch: str | None = None
    mlp_norm: str | None = None
    value: str | None = None


@torch.no_grad()
def with_branches(anatomy: Anatomy, inputs: Mapping[str, Any]) -> Anatomy:
    """Find the attention and the MLP of every block by the sums that the blocks compute.

    In a block of the `pre` design, a later module reads x' = x + A for the output A of the attention, and y = x' + M
    for the output M of the MLP. In a `parallel` block y = x + A + M. In a `post` block one norm reads x + A, and
    another one reads the sum of its output and M, and gives y. Several modules may give the same output: the outermost
    one is taken, those with weight matrices before norms, scales and dropouts.

    Args:
        anatomy: with verified blocks, whose branches are not known.
        inputs: a small batch for the whole model, as keyword arguments.

    Raises:
        FulldepthError: if the sums of a block are not found, or blocks differ in their design.
    """
    search = _Search(anatomy)
    with hooked(search.hooks()):
        anatomy.run(inputs)
    of_blocks = list(search.found.values())
    designs = {parts.design for parts in of_blocks if parts is not None and parts.design is not None}
    if None in of_blocks or len(designs) > 1:
        raise FulldepthError(NOT_FOUND)
    names = {field.name: [getattr(parts, field.name) for parts in of_blocks] for field in fields(BlockParts)}
    joined: dict[str, Any] = {
        field: OR.join(dict.fromkeys(filter(None, paths))) or None for field, paths in names.items()
    }
    joined["design"] = next(iter(designs), "pre")  # of sparse blocks, all may lack the same branch
    return replace(anatomy, family=replace(anatomy.family, **joined))


class _Search:
    """Records the calls inside a block while it runs, and looks for its parts when it ends."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.anatomy = anatomy
        self.found: dict[Make, BlockParts | None] = {_make(block): None for block in anatomy.blocks}
        """The parts of the blocks of each make; None until they are found."""
        self._tried: Counter[Make] = Counter()
        self._running: _RunningBlock | None = None
        """The block that is recorded at present."""

    def hooks(self) -> Iterator[RemovableHandle]:
        """Register the hooks, and yield them."""
        for block in dict.fromkeys(self.anatomy.blocks):
            yield block.register_forward_pre_hook(self._begin, with_kwargs=True)
            for path, module in block.named_modules():
                if path:
                    yield module.register_forward_hook(partial(self._record, path), with_kwargs=True)
            yield block.register_forward_hook(self._end)

    def _begin(self, block: nn.Module, args: Any, kwargs: Any) -> None:
        make = _make(block)
        state = first_input(args, kwargs)
        self._running = None
        if state is not None and self.found[make] is None and self._tried[make] < MOST_BLOCKS:
            self._tried[make] += 1
            self._running = _RunningBlock(state, self.anatomy)

    def _record(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._running is not None:
            self._running.add(path, module, first_input(args, kwargs), main_state(output))

    def _end(self, block: nn.Module, args: Any, output: Any) -> None:
        if self._running is not None:
            self.found[_make(block)] = self._running.parts(main_state(output))
            self._running = None


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of a module inside a block."""

    path: str
    """Name of the module, from the block."""
    module: nn.Module
    order: int
    """Number of the call, in the order in which calls end."""
    given: Tensor
    """[N, D] first positions of what the module reads; empty if that has not the stream's shape."""
    gave: Tensor
    """[N, D] likewise of what it gives."""

    @property
    def is_vector_wise(self) -> bool:
        """True for norms, scales, dropouts and activations: modules without weight matrices."""
        return all(parameter.ndim < 2 for parameter in self.module.parameters())

    @property
    def is_projection(self) -> bool:
        """True for a single weight matrix, with or without adapters."""
        return is_adapted(self.module) or (not self.is_vector_wise and not [*self.module.children()])

    @property
    def depth(self) -> int:
        """Number of modules between the block and this one."""
        return self.path.count(".")

    def holds(self, other: _Call) -> bool:
        """Return True if another module is inside this one."""
        return other.path.startswith(f"{self.path}.")


class _RunningBlock:
    """The calls of the modules inside a block while it runs."""

    def __init__(self, state: Tensor, anatomy: Anatomy) -> None:
        self.shape = state.shape
        self.x = self._first_rows(state)
        self.scale = anatomy.branch_scale
        self.sparse = anatomy.family.sparse
        self.calls: list[_Call] = []

    def _first_rows(self, state: Tensor | None) -> Tensor:
        """[N, D] copy of the first positions of a state (later modules may overwrite it); empty for another shape.

        On the CPU, as the parts of a block may be on several devices.
        """
        if state is None or state.shape[-1:] != self.shape[-1:] or state.numel() != self.shape.numel():
            return torch.empty(0)
        return state.reshape(-1, self.shape[-1])[:ROWS].to("cpu", copy=True)

    def add(self, path: str, module: nn.Module, given: Tensor | None, gave: Tensor | None) -> None:
        """Record the call of a module."""
        self.calls.append(_Call(path, module, len(self.calls), self._first_rows(given), self._first_rows(gave)))

    def parts(self, output: Tensor | None) -> BlockParts | None:
        """The parts of the block that gave this output; None if its sums are not found."""
        y = self._first_rows(output)
        if y.shape != self.x.shape:
            return None
        for reader in self._outermost(self.calls):
            attention = self._branch(self.x, reader.given, before=reader)
            if attention is not None and not attention.holds(reader):
                parts = self._post(attention, reader, y) or self._pre(attention, reader, y)
                if parts is not None:
                    return parts
        single = self._branch(self.x, y)
        if self.sparse and (single is not None or equal(self.x, y)):
            return BlockParts() if single is None else self._single(single)
        return self._parallel(y) if single is None else None

    def _post(self, attention: _Call, norm: _Call, y: Tensor) -> BlockParts | None:
        """The parts of a block that applies this norm to x + A, and another one to the sum of its output and M."""
        if not norm.is_vector_wise:
            return None
        for last in self.calls[norm.order + 1 :]:
            if last.is_vector_wise and equal(last.gave, y):
                mlp = self._branch(norm.gave, last.given, before=last, after=norm)
                if mlp is not None and not _is_swapped(attention, mlp):
                    named = self._named(attention, mlp, norm.gave, after=norm)
                    return replace(named, design="post", attention_norm=norm.path, mlp_norm=last.path)
        return None

    def _pre(self, attention: _Call, reader: _Call, y: Tensor) -> BlockParts | None:
        """The parts of a block in which this module reads x' = x + A, and y = x' + M."""
        mlp = self._branch(reader.given, y, after=attention)
        if mlp is None or _is_swapped(attention, mlp):
            return None
        return replace(self._named(attention, mlp, reader.given, after=attention), design="pre")

    def _parallel(self, y: Tensor) -> BlockParts | None:
        """The parts of a block with y = x + A + M, summed in any order, of which no module reads x + A."""
        x = self.x
        for attention in self._outputs():
            a = self.scale * attention.gave
            mlp = self._branch(x + a, y, after=attention, unexplained=ROUNDED)
            if mlp is None or mlp.holds(attention):
                continue
            m = self.scale * mlp.gave
            left = min(_distance(total, y) for total in (x + a + m, a + m + x, x + m + a))
            is_serial = any(equal(call.given, x + a) for call in self.calls)
            if left <= UNEXPLAINED * _distance(x, y) and not is_serial:
                if _is_swapped(attention, mlp):
                    attention, mlp = mlp, attention
                return replace(self._named(attention, mlp, x, after=None), design="parallel", mlp_norm=None)
        return None

    def _single(self, branch: _Call) -> BlockParts:
        """The part of a block that lacks one of its branches."""
        names = self._named(branch, branch, self.x, after=None)
        if ATTENTION.search(branch.path) or ATTENTION.search(str(names.attention)):
            return replace(names, mlp=None, mlp_branch=None, mlp_norm=None)
        return replace(names, attention=None, attention_branch=None, value=None)

    def _outputs(self) -> list[_Call]:
        """Modules that run once, give more than zeros, and may be a branch: those with matrices, then the outermost."""
        runs = Counter(call.path for call in self.calls)
        states = [call for call in self.calls if call.gave.shape == self.x.shape and bool(call.gave.any())]
        calls = [call for call in states if runs[call.path] == 1]
        return sorted(calls, key=lambda call: (call.is_vector_wise, call.depth, call.order))

    def _outermost(self, calls: Iterable[_Call]) -> list[_Call]:
        return sorted(calls, key=lambda call: (call.depth, call.order))

    def _branch(
        self,
        start: Tensor,
        end: Tensor,
        *,
        after: _Call | None = None,
        before: _Call | None = None,
        unexplained: float = UNEXPLAINED,
    ) -> _Call | None:
        """The module whose output leads from one state to another, of those that end between two calls.

        Of several that do so up to rounding, the one that leaves the least; the first of `_outputs` among equal ones.
        Differences are averaged, not compared with the largest state, beside which a branch may be small.
        """
        if start.shape != self.x.shape or end.shape != self.x.shape:
            return None
        change = _distance(start, end)
        best = None
        least = torch.inf
        for call in self._outputs() if change > 0 else ():
            if (after is not None and call.order <= after.order) or (before is not None and call.order >= before.order):
                continue
            left = _distance(start + self.scale * call.gave, end)
            if left <= unexplained * change and left < least:
                best = call
                least = left
        return best

    def _source(self, branch: _Call, state: Tensor) -> _Call:
        """The module in which a branch begins, behind the norm of the state; norms, scales and convolutions follow."""
        call = branch
        while True:
            before = self.calls[: call.order]
            givers = self._outermost(
                earlier for earlier in before if len(call.given) and equal(earlier.gave, call.given)
            )
            giver = next((earlier for earlier in givers if not earlier.holds(call)), None)
            if giver is None:
                return call
            is_norm = giver.is_vector_wise or equal(giver.given, state)
            if not call.is_vector_wise and (is_norm or call.depth > 0):
                return call
            call = giver

    def _named(self, attention: _Call, mlp: _Call, state: Tensor, after: _Call | None) -> BlockParts:
        """The paths of both branches, of which the MLP reads a state, or a norm of it, behind a call."""
        first = self._source(attention, self.x)
        last = self._source(mlp, state)
        attention_path = self._around(first, last)
        norm, mlp_path = self._reader_of(state, last, after) or (None, self._around(last, first))
        return BlockParts(
            attention=attention_path,
            attention_branch=attention.path,
            mlp=mlp_path,
            mlp_branch=mlp.path,
            mlp_norm=norm,
            value=self._value(attention_path),
        )

    def _reader_of(self, state: Tensor, last: _Call, after: _Call | None) -> tuple[str | None, str] | None:
        """The norm that reads a state for an MLP (None without one) and the MLP; None if no weights read the state.

        Args:
            state: what the MLP or its norm reads.
            last: the MLP, or its last projection. Its first one is then a module beside it, or a module holds both.
            after: the call behind which they run.
        """
        readers = [call for call in self._readers(state, after) if not call.holds(last)]
        if last in readers:
            return None, last.path
        for norm in readers:
            weighted = [call for call in self._readers(norm.gave, norm) if not call.is_vector_wise]
            if last in weighted:
                return norm.path, last.path
            if last.is_projection and weighted:
                return norm.path, weighted[0].path
        if not last.is_projection:  # the norm is not directly before it
            return next((call.path for call in readers if call.is_vector_wise), None), last.path
        return next(((None, call.path) for call in readers if not call.is_vector_wise), None)

    def _readers(self, state: Tensor, after: _Call | None) -> list[_Call]:
        """The modules that read a state behind a call, the outermost first."""
        later = self.calls if after is None else self.calls[after.order + 1 :]
        return self._outermost(call for call in later if len(state) and equal(call.given, state))

    def _around(self, call: _Call, other: _Call) -> str:
        """The path of a branch's module: for its last projection that of the module around it without the other one."""
        if not call.is_projection:
            return call.path
        names = call.path.split(".")
        names_of_other = other.path.split(".")
        shared = 0
        while shared < len(names) - 1 and names[: shared + 1] == names_of_other[: shared + 1]:
            shared += 1
        return ".".join(names[: shared + 1])

    def _value(self, attention: str) -> str | None:
        """The path of the only projection to value states inside attention; None if there is none, or several."""
        paths = [call.path for call in self.calls if call.path.startswith(f"{attention}.") and VALUE.search(call.path)]
        return paths[0] if len(set(paths)) == 1 else None


def _is_swapped(attention: _Call, mlp: _Call) -> bool:
    """Return True if the names say that the second branch is the attention, and not the first."""
    return ATTENTION.search(attention.path) is None and ATTENTION.search(mlp.path) is not None


def _distance(one: Tensor, other: Tensor) -> float:
    """Mean absolute difference of two states."""
    return float((one.double() - other.double()).abs().mean())


def _make(block: nn.Module) -> Make:
    return tuple((name, type(child)) for name, child in block.named_children())

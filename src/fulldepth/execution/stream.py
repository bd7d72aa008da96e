"""Traces one pass of a model, and verifies that blocks form the residual stream."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fulldepth.core.errors import FulldepthError, is_out_of_memory, one_line
from fulldepth.hf import Anatomy, Classifier, Head, body_inputs, logits_of, text_config
from fulldepth.hf.families import FUNCTIONS, Pool
from fulldepth.hf.finder import STACKS
from fulldepth.hf.heads import logit_factor, pool
from fulldepth.hf.model_hash import equal
from fulldepth.hf.modes import first_input, hooked
from fulldepth.hf.rounding import is_close, relative_error

LONGEST_HEAD = 4
"""Maximum number of modules of a head, the final norm included."""
POOLS: tuple[Pool, ...] = ("first", "last", "mean-patches", "mean", "first-and-mean")
"""Ways in which a head may pick or average positions between two modules."""
PATCHES = ("mean-patches", "first-and-mean")
"""Those that leave out the positions before the patches."""
NOISE = 7
"""Seed of the noise by which positions are tried that a head may not read."""


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
    predicts: bool = False
    """True if the whole model gives predictions and no last hidden state, under any names: `start_logits`."""

    def readers(self, state: Tensor) -> Iterator[Call]:
        """The calls whose input is this state."""
        return (call for call in self.calls if equal(call.given, state))


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

    def record(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        given = first_input(args, kwargs)
        gave = main_state(output)
        if given is not None and gave is not None:
            trace.calls.append(Call(path, module, given, gave))

    traced = []
    for path, module in anatomy.model.named_modules():
        *above, last = path.split(".")
        if last.isdigit() or not any(name.isdigit() for name in above):  # members of lists, and all outside blocks
            traced.append((path, module))
    with hooked(module.register_forward_hook(partial(record, path), with_kwargs=True) for path, module in traced):
        output = run(runner, body_inputs(anatomy, inputs))
    if runner is anatomy.model:
        trace.logits = logits_of(output)
        trace.predicts = isinstance(output, Mapping) and "last_hidden_state" not in output
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


def prove_stream(anatomy: Anatomy, trace: Trace) -> tuple[Anatomy, Tensor]:
    """Verify that each block reads the previous block's output.

    Every block must run; blocks that run several times (shared blocks, also in several places of the list) have one
    layer for each call. The anatomy may
    declare exceptions: trees (a block reads a sum of earlier outputs) and DETR with auxiliary losses (the final norm
    is applied between blocks).

    Args:
        anatomy: with the paths of the blocks.
        trace: one pass of the model.

    Returns:
        The anatomy with the order of the calls, and h_L, `[B, T, D]` (`[B, T, n, D]` for several streams).

    Raises:
        FulldepthError: if blocks did not run, ran out of order, work on states of several shapes or not of the batch's
            positions, or are not one after another.
    """
    blocks = list(anatomy.block_list)
    path = anatomy.family.blocks
    number = {block: index for index, block in reversed([*enumerate(blocks)])}  # one module may stand in several places
    calls = [call for call in trace.calls if call.module in number]
    order = tuple(number[call.module] for call in calls)
    silent = sorted({*number.values()} - {*order})
    if silent:
        raise FulldepthError(
            f"{len(silent)} of the {len(number)} blocks of {path} do not run (first: number {silent[0]})"
        )
    if len(order) == len(number) and list(order) != sorted(order):
        raise FulldepthError(f"the blocks of {path} run in the order {one_line(list(order), 100)}")
    _check_beginning(anatomy, trace, calls)
    shapes = {tuple(state.shape) for call in calls for state in (call.given, call.gave)}
    shape = next(iter(shapes))
    if len(shapes) > 1 or len(shape) != (4 if anatomy.has_streams else 3):
        raise FulldepthError(f"the blocks of {path} read and give states of shapes {one_line(sorted(shapes), 100)}")
    positions = trace.positions and trace.positions[:: -1 if anatomy.family.sequence_first else 1]
    if positions is not None and shape[:2] != positions:
        raise FulldepthError(
            f"the blocks of {path} work on {shape[0]} x {shape[1]} positions where the batch has {positions[0]} "
            f"sequences of {positions[1]} tokens (the model pads or rearranges them)"
        )
    ordered = anatomy if list(order) == sorted(number.values()) else replace(anatomy, order=order)
    for layer, (before, call) in enumerate(pairwise(calls), start=2):
        if ordered.part(layer, "input_norms") is None and not equal(call.given, ordered.handed_on(before.gave)):
            if call.given.shape == before.gave.shape:
                raise FulldepthError(
                    f"layer {layer} of {path} does not read what layer {layer - 1} gives (relative difference "
                    f"{relative_error(call.given, before.gave):.1e}): something else changes the stream between them"
                )
            raise FulldepthError(f"layer {layer} of {path} reads another shape than layer {layer - 1} gives")
    return ordered, calls[-1].gave


def _check_beginning(anatomy: Anatomy, trace: Trace, calls: list[Call]) -> None:
    """Raise an error if another module is part of the stack, as in models with several stages.

    Such a module has the class of a block, or is a member of another list and returns states of the stream's shape
    before the first block.
    """
    blocks = set(anatomy.block_list)
    kinds = {type(block) for block in blocks}
    inside = {module for block in blocks for module in block.modules()}
    first = trace.calls.index(calls[0])
    stack = {id(module) for module in anatomy.body.modules()} if anatomy.family.tower in STACKS else None
    for position, call in enumerate(trace.calls):
        if call.module in inside or (stack is not None and id(call.module) not in stack):
            continue
        alike = call.gave.shape == call.given.shape == calls[0].given.shape
        above = anatomy.model.get_submodule(call.path.rpartition(".")[0])
        if type(call.module) in kinds or (position < first and alike and isinstance(above, nn.ModuleList)):
            raise FulldepthError(
                f"{anatomy.family.blocks} is only a part of the stack: {call.path} ({type(call.module).__name__}) "
                "changes the stream too"
            )


def prove_end(anatomy: Anatomy, trace: Trace, last: Tensor) -> Anatomy:
    """Verify that `h_L`, or its final norm, is the body's last hidden state.

    For a family of the table, its final norm must give that state; for other families, the module that gives it is
    taken as the final norm. A map to another width behind it, as OPT-350m's to the width of its embeddings, is a part
    of the head.

    Args:
        anatomy: with verified blocks.
        trace: one pass of the model.
        last: h_L, `[B, T, D]`.

    Returns:
        The anatomy, with its final norm.

    Raises:
        FulldepthError: if modules of unknown effect stand between the last block and the end.
    """
    end = _end(anatomy, trace)
    if anatomy.final_norm is not None and is_close(anatomy.normalise(last), end):
        return anatomy
    if equal(last, end):  # CLIP's vision tower applies the final norm only to the pooled state
        return anatomy
    if anatomy.family.final_norm is not None:
        raise FulldepthError(
            f"the last block's output through {anatomy.family.final_norm} is not the model's last hidden state"
        )
    narrows = end.shape != last.shape
    for call in trace.readers(last):
        gives_end = is_close(call.gave, end) and call.module is not anatomy.body
        if gives_end and narrows:
            return anatomy
        if gives_end or (narrows and any(is_close(after.gave, end) for after in trace.readers(call.gave))):
            body = next(name for name, module in anatomy.model.named_modules() if module is anatomy.body)
            norm = call.path.removeprefix(f"{body}.") if body else call.path
            return replace(anatomy, family=replace(anatomy.family, final_norm=norm))
    raise FulldepthError("neither the last block's output nor its final norm is the model's last hidden state")


def _end(anatomy: Anatomy, trace: Trace) -> Tensor:
    """The last hidden state: the output of the outermost called module around the blocks that does not predict.

    A model with a head may call parts of its body instead of the body, as OPT does.
    """
    names = anatomy.blocks_path.split(".")
    around = [".".join(names[:count]) for count in range(len(names))]
    last = {call.path: call for call in trace.calls}
    ends = [last[path].gave for path in around if path in last]
    if "" in last and (trace.logits is not None or (trace.predicts and len(ends) > 1)):
        ends = ends[1:]
    if not ends:
        raise FulldepthError("no module around the blocks gives a last hidden state, so it is not known where they end")
    return ends[0]


def find_head(anatomy: Anatomy, trace: Trace, last: Tensor, mask: Tensor | None) -> Head | None:
    """The shortest chain of modules from `h_L` to the model's logits, found by following the tensors.

    Between two modules a head may select or average positions, and multiply states by the configuration's factor of
    the logits. Heads that compute otherwise outside of modules are not found.

    Args:
        anatomy: with verified blocks and final norm.
        trace: one pass of the model.
        last: h_L, `[B, T, D]`.
        mask: `[B, T]` of the batch; None if no position is padding.

    Returns:
        A head that gives the model's logits; None if none is found.
    """
    if trace.logits is None:
        return None
    frontier: list[_Step] = [_Step(last, (), "token")]
    leading = {1, 1 + (getattr(anatomy.config, "num_register_tokens", None) or 0)}
    factor = logit_factor(text_config(anatomy.config, decoder=True))
    for _ in range(LONGEST_HEAD):
        if factor != 1.0:  # MiniCPM3 scales the head's input, which gives the logits the same factor
            frontier += [step._replace(state=step.state * factor) for step in frontier]
        frontier += [pooled for step in frontier for pooled in _pooled(step, mask, leading)]
        frontier += [
            step._replace(state=function()(step.state), modules=(*step.modules, name))
            for step in frontier
            for name, function in (FUNCTIONS.items() if step.modules else ())
        ]
        frontier = [
            _Step(
                call.gave,
                (*step.modules, call.path),
                "inside" if step.pool == "token" and (step.state.ndim, call.gave.ndim) == (3, 2) else step.pool,
                step.leading,
            )
            for step in frontier
            for call in trace.readers(step.state)
            if call.path not in step.modules
        ]
        for step in frontier:
            for end in (step, *_pooled(step, mask, leading, late=True)):
                norm = anatomy.final_norm
                normed = norm is not None and anatomy.model.get_submodule(end.modules[0]) is norm
                modules = end.modules[1:] if normed else end.modules
                if not modules or end.state.shape != trace.logits.shape:
                    continue
                chain = Head(modules, pool=end.pool, normed=normed, leading=end.leading)
                head = _find_scales(anatomy, chain, trace.logits, last, mask)
                if head is not None:
                    return replace(head, reads=_find_pool(anatomy, head, last, mask)) if head.pool == "inside" else head
    return None


class _Step(NamedTuple):
    """A state in the search for the head, with the modules and the pooling that lead to it from h_L."""

    state: Tensor
    modules: tuple[str, ...]
    pool: Pool
    leading: int = 1


def _pooled(step: _Step, mask: Tensor | None, leading: Collection[int], *, late: bool = False) -> Iterator[_Step]:
    """A state of all positions, pooled in every way of `POOLS`; with `late` also averaged behind the modules."""
    if step.pool == "token" and step.state.ndim == 3:
        for way in POOLS:
            for count in leading if way in PATCHES else (1,):
                yield step._replace(state=pool(step.state, mask, way, count), pool=way, leading=count)
        if late:
            yield step._replace(state=pool(step.state, mask, "mean"), pool="mean-of-logits")


def _find_scales(anatomy: Anatomy, head: Head, logits: Tensor, last: Tensor, mask: Tensor | None) -> Head | None:
    """The head with the scale and soft cap that give the model's logits; None if none do.

    A configuration may hold values that its class does not use: Aya Vision does not scale as its text model would, and
    HyperCLOVA X multiplies by the value by which Granite divides.
    """
    named = _classifier(anatomy, head)
    scales = (None,) if named.scale == 1.0 else (None, 1.0, 1 / named.scale)
    caps = (True,) if named.softcap is None else (True, False)
    heads = (replace(head, scale=scale, capped=capped) for scale in scales for capped in caps)
    for candidate in heads:
        if is_close(predict(_classifier(anatomy, candidate), last, mask), logits):
            return candidate
    return None


def _find_pool(anatomy: Anatomy, head: Head, last: Tensor, mask: Tensor | None) -> Pool:
    """Find what a head that pools inside reads of a sequence without padding, by changing the other positions."""
    classifier = _classifier(anatomy, head)
    mask = torch.ones_like(last[..., 0]) if mask is None else mask
    longest = mask.sum(1).argmax()[None]
    last = last[longest]
    mask = mask[longest]
    expected = predict(classifier, last, mask)
    noise = torch.randn(last.shape, generator=torch.Generator().manual_seed(NOISE)).to(last) * last.std()
    position = (mask.long().cumsum(1) - 1).masked_fill(mask == 0, -1)  # [B, T]
    end = position == position.amax(1, keepdim=True)
    positions_read: dict[Pool, Tensor] = {"first": position == 0, "last": end, "mean-patches": position > 0}
    for way, read in positions_read.items():
        if is_close(predict(classifier, torch.where(read[..., None], last, last + noise), mask), expected):
            return way
    return "mean"


def _classifier(anatomy: Anatomy, head: Head) -> Classifier:
    family = replace(anatomy.family, heads={type(anatomy.model).__name__: head})
    return Classifier(replace(anatomy, family=family), exit_heads=False)


def predict(classifier: Classifier, last: Tensor, mask: Tensor | None) -> Tensor:
    """The logits of a head for `h_L: [B, T, D]`, in the model's own shape."""
    if classifier.per_token:
        return classifier.tokens(last)
    return classifier.sequences(last, torch.ones(last.shape[:2], device=last.device) if mask is None else mask)

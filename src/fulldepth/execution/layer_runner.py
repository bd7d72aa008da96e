"""Runs layers of a model on given states, with its own masks, positions and cache; verified against its decoding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.execution import body_inputs, capture
from fulldepth.execution.flops import attention_spans
from fulldepth.execution.layer_cache import KNOWN_LAYERS, LayerCache
from fulldepth.execution.stream import reason_of
from fulldepth.hf import Anatomy, Classifier, cache_argument, cache_in
from fulldepth.hf.modes import hooked, state_in
from fulldepth.hf.rounding import check_close, is_close

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a block besides the state: positional and keyword arguments (masks, position embeddings, ...)."""
STEPS = 3
"""Number of decoding steps compared."""
PADDING = 2
"""Positions of left padding in the second sequence."""
SHORTEST = 8
"""Minimum number of tokens per sequence."""
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "pixel_values", "pixel_mask")
"""Entries of a batch that the model's body reads."""


class LayerRunner:
    """The layers of a model as functions of a state.

    `begin` runs the model's own forward pass with its blocks replaced by recorders of their arguments: embeddings,
    masks and position embeddings are computed, the blocks are not. `run` then runs any layers on any state, with the
    arguments that the model itself would pass. Switches inside blocks take effect when a block runs.

    With a cache, layers may run later than others: after layers 1..E of one token at a time,

        runner.begin(all_those_tokens, cache)
        states = runner.run(range(E + 1, L + 1), states_of_layer_E)
        logits = runner.finish(states)
        cache.crop(positions_to_keep)

    runs layers E+1..L on all of them at once. `decoding_runner` verifies this against the model's decoding.

    Encoders and models of images run without a cache. The layers of a detector are those of its decoder, and `begin`
    runs its backbone and encoder. `keep` goes on with some of the sequences of a batch.

    Args:
        anatomy: a model in which each layer reads the previous layer's output.
        batch: a small batch on which the blocks, run one after another, are checked against the model's own states.

    Raises:
        FulldepthError: if the states differ, because the model does something else between its blocks or in them.
    """

    def __init__(self, anatomy: Anatomy, batch: Mapping[str, Tensor]) -> None:
        self.anatomy = anatomy
        self._arguments: list[Arguments] = []
        self._first: Tensor | None = None
        self._cache: LayerCache | None = None
        self._blocks = list(anatomy.blocks)  # blocks and body are searched for in the model, so only once
        self._module = anatomy.body
        self._extras: dict[nn.Module, int | None] = {}
        """Block -> number of its outputs besides the state; None if it returns the state alone."""
        self._prove(batch)

    @torch.no_grad()
    def begin(self, batch: Mapping[str, Tensor], cache: LayerCache | None = None) -> Tensor:
        """Start a batch of tokens for `run`; returns h_0, the input of the first block, `[B, T, D]`.

        Args:
            batch: `input_ids`, `[B, T]`, and `attention_mask` on the model's device (and `token_type_ids`), or
                `pixel_values`. With a cache the mask is `[B, n + T]` and includes the n positions before these tokens.
                Positions are counted without padding, as in `generate`.
            cache: from `new_cache`; a layer must hold n positions before it runs, and holds n + T afterwards. None: the
                tokens are whole sequences, without a cache.

        Raises:
            FulldepthError: if the model does not run its blocks once each, or the mask does not fit the tokens.
        """
        self._arguments = []
        self._first = None
        self._cache = cache
        start = start_of(batch) if "input_ids" in batch else 0
        if start < 0 or (cache is None and start):
            raise FulldepthError(
                f"An attention mask of {batch['attention_mask'].shape[1]} positions does not fit "
                f"{batch['input_ids'].shape[1]} tokens{'' if cache else ' without a cache'}."
            )
        if cache is not None:
            cache.start = start
        with self._blocks_replaced():
            self._body(batch)
        if self._first is None or len(self._arguments) != self.anatomy.num_layers:
            raise FulldepthError(
                f"{type(self.anatomy.model).__name__} ran {len(self._arguments)} of its {self.anatomy.num_layers} "
                "blocks; its blocks cannot be run one by one."
            )
        return self._first

    def run(self, layers: int | Sequence[int], states: Tensor) -> Tensor:
        """Run layers one after another on states of the tokens passed to `begin`; returns the last output, `[B, T, D]`.

        Models with n residual streams have states `[B, T, n, D]`.

        Args:
            layers: one 1-based layer, or several, such as `range(1, 5)` for 1 to 4.
            states: `[B, T, D]`, input of the first of them.

        Raises:
            FulldepthError: if a layer's cache does not hold exactly the positions before these tokens.
        """
        if not isinstance(layers, int):
            for layer in layers:
                states = self.run(layer, states)
                if layer != layers[-1]:
                    states = self.anatomy.handed_on(states)
            return states
        args, kwargs = self._arguments[layers - 1]
        output = self._blocks[layers - 1](states, *args, **kwargs)
        return state_in(output)

    def keep(self, batch: Mapping[str, Tensor]) -> None:
        """Go on with some of the sequences passed to `begin`, without a cache: with their masks and other arguments.

        Args:
            batch: the inputs of these sequences alone.
        """
        if any(isinstance(argument, Tensor) for argument in tree_leaves(self._arguments)):
            self.begin(batch)

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor], cache: LayerCache) -> Tensor:
        """The model's own forward pass: `[B, V]` logits of the last token; every layer adds the tokens to the cache.

        Args:
            batch: as for `begin`.
            cache: all layers of which hold the positions before these tokens.
        """
        model = self.anatomy.model
        cache.start = start_of(batch)
        inputs = with_positions(model, batch)
        if bool(inputs["attention_mask"].all()):  # as in `generate`, which makes masks quicker
            del inputs["attention_mask"]
        keep = {"logits_to_keep": 1} if "logits_to_keep" in parameters_of(type(model).forward) else {}
        logits: Tensor = model(**inputs, **{cache_argument(model): cache}, use_cache=True, **keep).logits
        return logits[:, -1]

    def finish(self, states: Tensor, layer: int | None = None) -> Tensor:
        """[B, T, V] logits of the final norm and the head for states `[B, T, D]` of any layer.

        Args:
            states: `[B, T, D]`.
            layer: 1..L, which in a multi-exit model has a head of its own; None = the last.

        Raises:
            FulldepthError: if the model has no head that predicts at every position.
        """
        head = self._classifier.at(self.anatomy.num_layers if layer is None else layer)
        return head.tokens(self.anatomy.stream(states))

    def new_cache(self) -> LayerCache:
        """An empty cache for this model.

        Raises:
            FulldepthError: if the model keeps anything but keys and values of each layer.
        """
        return LayerCache(self.anatomy.config)

    @cached_property
    def _classifier(self) -> Classifier:
        classifier = Classifier(self.anatomy)
        if not classifier.per_token:
            raise FulldepthError(f"{type(self.anatomy.model).__name__} does not predict at every position.")
        return classifier

    def _body(self, batch: Mapping[str, Tensor]) -> None:
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        if self._cache is None:
            self._module(**body_inputs(self.anatomy, inputs))
        else:
            cached = {cache_argument(self._module): self._cache, "use_cache": True}
            self._module(**with_positions(self._module, inputs), **cached)

    @contextmanager
    def _blocks_replaced(self) -> Iterator[None]:
        """Replace every block's forward by `_note`, and restore it on exit; other attributes of the blocks remain."""
        before = {block: block.__dict__.get("forward") for block in self._blocks}
        try:
            for block in before:
                block.forward = partial(self._note, block)
            yield
        finally:
            for block, forward in before.items():
                block.__dict__.pop("forward", None)
                if forward is not None:
                    block.forward = forward

    def _note(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Replacement of a block's forward: store its arguments, return its state in the block's output format.

        A block that stands for several layers is called once for each.
        """
        state = args[0] if args else kwargs.pop("hidden_states")
        index = len(self._arguments)
        if index == 0:
            self._first = state
        if index < len(self._blocks) and self._blocks[index] is block:
            self._arguments.append((args[1:], kwargs))
        extras = self._extras.get(block)
        return state if extras is None else (state, *[None] * extras)

    @torch.inference_mode(False)  # its tensors do not tell whether they were overwritten
    @torch.no_grad()
    def _prove(self, batch: Mapping[str, Tensor]) -> None:
        """Check the blocks, run one by one, against the states of the model's own pass."""
        kind = type(self.anatomy.model).__name__

        def form(module: nn.Module, args: Any, output: Any) -> None:
            self._extras[module] = len(output) - 1 if isinstance(output, tuple | list) else None

        hooks = (block.register_forward_hook(form) for block in dict.fromkeys(self._blocks))
        with hooked(hooks), capture(self.anatomy, ["residual"]) as activations:
            self._body(batch)
            expected_states = activations["residual"]
        try:
            states = self.begin(batch)
            for layer in self.anatomy.layers:
                version = states._version
                after = self.run(layer, states)
                if states._version != version or after is states:
                    raise FulldepthError(f"Layer {layer} of {kind} overwrites its input; states cannot be used twice.")
                hint = ": it reads more than the layer before, or the model does something between its layers."
                claim = f"Layer {layer} of {kind}, run by itself, misses the model's own state"
                check_close(claim, self.anatomy.stream(after), expected_states[layer], after.dtype, hint)
                states = self.anatomy.handed_on(after)
        except (AttributeError, TypeError) as error:  # the model uses a block's other outputs
            raise FulldepthError(
                f"{kind} uses what its blocks give beside the state ({error}); they cannot be run one by one."
            ) from error


def caching_layers(anatomy: Anatomy) -> list[int]:
    """1-based layers that keep keys and values: all but those that were exported without their attention."""
    gone = getattr(anatomy.config, "skipped_attention", None) or ()
    return [layer for layer in anatomy.layers if layer not in gone]


@cache
def parameters_of(forward: Callable[..., Any]) -> frozenset[str]:
    """Names of the arguments of a class's forward pass."""
    return frozenset(inspect.signature(forward).parameters)


def start_of(batch: Mapping[str, Tensor]) -> int:
    """Position of the first token of `input_ids: [B, T]`, whose `attention_mask: [B, n + T]` includes those before."""
    return batch["attention_mask"].shape[1] - batch["input_ids"].shape[1]


def positions(attention_mask: Tensor) -> Tensor:
    """[B, T] position of each token of `attention_mask: [B, T]`, counted without padding; 0 for padding."""
    counted = attention_mask.long().cumsum(-1) - 1
    return counted.masked_fill(attention_mask == 0, 0)


def with_positions(module: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The batch, with `position_ids` if the module takes them."""
    if "position_ids" not in parameters_of(type(module).forward):
        return dict(batch)
    return {**batch, "position_ids": positions(batch["attention_mask"])[:, start_of(batch) :]}


@torch.no_grad()
def decoding_runner(anatomy: Anatomy, batch: Mapping[str, Tensor]) -> LayerRunner:
    """A layer runner that is verified to decode with a cache as the model does.

    Two sequences, the second padded on the left, and then the first alone, are decoded by the model's own forward pass:
    a prefill and three steps. Three runs of the layers must give the same logits: all layers, token by token; the first
    half of the layers token by token, then the others on the three tokens at once; the latter again after the cache
    was cropped back.

    Args:
        anatomy: a verified decoder in evaluation mode, with a language-model head.
        batch: `input_ids` and `attention_mask`, `[B, T]` on the model's device; their first tokens are used.

    Raises:
        FulldepthError: if the model decodes differently (recurrent states, layers that share keys and values or read
            more than one earlier state, a decoder without a cache), with the reason.
    """
    kind = type(anatomy.model).__name__
    runner = LayerRunner(anatomy, batch)
    try:
        runner.new_cache()
        pair = _pair(batch)
        for inputs in (pair, {name: tensor[:1] for name, tensor in pair.items()}):  # masks of ones may be dropped
            expected = _decode(anatomy, inputs)
            if not bool(torch.isfinite(expected).all()):
                raise FulldepthError("its own logits are not finite for a sequence that is padded on the left")
            for name, logits in _runs(runner, inputs).items():
                check_close(f"{name} misses the model's own logits", logits, expected)
    except Exception as error:
        reason = _contradiction(anatomy, batch) or one_line(reason_of(error))
        raise FulldepthError(f"{kind} cannot be decoded layer by layer: {reason}") from error
    return runner


def _contradiction(anatomy: Anatomy, batch: Mapping[str, Tensor]) -> str | None:
    """The reason if the model's own decoding differs from its own pass over all tokens; None if it does not."""
    with suppress(Exception):
        inputs = {name: tensor[:1] for name, tensor in _pair(batch).items()}
        whole = anatomy.model(**inputs, use_cache=False).logits[0]
        if not is_close(_decode(anatomy, inputs), whole):
            window = max(span.size for span in attention_spans(anatomy.config))
            cause = f" (its cache keeps a window of {window} positions, and its attention reads more)" if window else ""
            return f"its own decoding with a cache gives other logits than its forward pass over all tokens{cause}"
    return None


def _pair(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Two sequences of the batch's tokens, the second with left padding."""
    real = batch["input_ids"][batch["attention_mask"] != 0]
    length = max(SHORTEST, batch["input_ids"].shape[1])
    ids = real.repeat(2 * length // len(real) + 1)[: 2 * length].view(2, length)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _part(inputs: Mapping[str, Tensor], start: int, end: int) -> dict[str, Tensor]:
    """The tokens from `start` to `end`, with the mask of all positions to `end`."""
    return {"input_ids": inputs["input_ids"][:, start:end], "attention_mask": inputs["attention_mask"][:, :end]}


def _real(logits: list[Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
    """[N, V] logits at the positions that are not padding."""
    return torch.cat(logits, dim=1)[inputs["attention_mask"] != 0]


def _decode(anatomy: Anatomy, inputs: Mapping[str, Tensor]) -> Tensor:
    """[N, V] the model's own logits: a prefill and single steps with the cache that the model creates.

    Raises:
        FulldepthError: unless the cache holds only keys and values, at all positions of every layer with attention.
    """
    length = inputs["input_ids"].shape[1]
    name = cache_argument(anatomy.model)
    cache = None
    logits = []
    before = 0
    for end in range(length - STEPS, length + 1):
        part = with_positions(anatomy.model, _part(inputs, before, end))
        output = anatomy.model(**part, **{name: cache}, use_cache=True)
        cache = cache_in(output)
        before = end
        if not isinstance(cache, DynamicCache):
            kept = "nothing" if cache is None else type(cache).__name__
            raise FulldepthError(f"its forward pass keeps {kept} where keys and values are expected")
        if other := {type(layer).__name__ for layer in cache.layers if type(layer) not in KNOWN_LAYERS}:
            raise FulldepthError(f"its cache has layers of type {', '.join(sorted(other))}")
        lengths = [cache.get_seq_length(index) for index in range(len(cache.layers))]
        if lengths != [end] * (count := len(caching_layers(anatomy))):
            raise FulldepthError(
                f"after {end} tokens its cache holds {lengths} positions in {len(lengths)} layers, not {end} in each "
                f"of {count}"
            )
        logits.append(output.logits)
    return _real(logits, inputs)


def _runs(runner: LayerRunner, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name of a run -> its logits `[N, V]`."""
    length = inputs["input_ids"].shape[1]
    num_layers = runner.anatomy.num_layers
    half = max(1, num_layers // 2)
    start = length - STEPS
    every = range(1, num_layers + 1)
    early = range(1, half + 1)
    late = range(half + 1, num_layers + 1)
    cache = runner.new_cache()

    def run(layers: Sequence[int], begin: int, end: int) -> Tensor:
        return runner.run(layers, runner.begin(_part(inputs, begin, end), cache))

    def check(*ran: int) -> None:
        if cache.lengths != (expected := [ran[layer - 1] for layer in caching_layers(runner.anatomy)]):
            raise FulldepthError(
                f"its layers leave {cache.lengths} positions in the cache where {expected} were run: they share "
                "keys and values, or keep them elsewhere"
            )

    prefill = runner.finish(run(every, 0, start))
    runs = {}
    for name in ("running its last layers later", "running them again after taking tokens back"):
        states = []
        for at in range(start, length):
            states.append(run(early, at, at + 1))
            check(*[at + 1] * half, *[start] * len(late))
        runner.begin(_part(inputs, start, length), cache)
        logits = runner.finish(runner.run(late, torch.cat(states, dim=1)))
        check(*[length] * num_layers)
        runs[name] = _real([prefill, logits], inputs)
        cache.crop(start)
        check(*[start] * num_layers)
    steps = [runner.finish(run(every, at, at + 1)) for at in range(start, length)]
    runs["running its layers one by one"] = _real([prefill, *steps], inputs)
    return runs

"""Verifies that a layer runner with a cache decodes as the model does, also if some layers run later."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor
from transformers import DynamicCache

from fulldepth.errors import FulldepthError, one_line
from fulldepth.execution.layer_cache import KNOWN_LAYERS
from fulldepth.execution.layer_runner import LayerRunner, positions
from fulldepth.execution.stream import check_close, is_close
from fulldepth.execution.trace import reason_of
from fulldepth.hf import Anatomy

STEPS = 3
"""Number of decoding steps compared."""
PADDING = 2
"""Positions of left padding in the second sequence."""
SHORTEST = 8
"""Minimum number of tokens per sequence."""


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
            window = getattr(anatomy.config, "sliding_window", None)
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
        FulldepthError: unless the cache holds only keys and values, at all positions of every layer.
    """
    length = inputs["input_ids"].shape[1]
    parameters = inspect.signature(anatomy.model.forward).parameters
    cache, logits, before = None, [], 0
    for end in range(length - STEPS, length + 1):
        part = _part(inputs, before, end)
        if "position_ids" in parameters:
            part["position_ids"] = positions(part["attention_mask"])[:, before:]
        output = anatomy.model(**part, past_key_values=cache, use_cache=True)
        cache, before = output.get("past_key_values"), end
        if not isinstance(cache, DynamicCache):
            raise FulldepthError(f"its forward pass keeps {type(cache).__name__}, no cache of keys and values")
        if other := {type(layer).__name__ for layer in cache.layers if type(layer) not in KNOWN_LAYERS}:
            raise FulldepthError(f"its cache has layers of type {', '.join(sorted(other))}")
        lengths = [cache.get_seq_length(index) for index in range(len(cache.layers))]
        if lengths != [end] * anatomy.num_layers:
            raise FulldepthError(
                f"after {end} tokens its cache holds {lengths} positions in {len(lengths)} layers, not {end} in each "
                f"of {anatomy.num_layers}"
            )
        logits.append(output.logits)
    return _real(logits, inputs)


def _runs(runner: LayerRunner, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name of a run -> its logits `[N, V]`."""
    length, num_layers = inputs["input_ids"].shape[1], runner.anatomy.num_layers
    half, start = max(1, num_layers // 2), length - STEPS
    every, early, late = range(1, num_layers + 1), range(1, half + 1), range(half + 1, num_layers + 1)
    cache = runner.new_cache()

    def run(layers: Sequence[int], begin: int, end: int) -> Tensor:
        return runner.run(layers, runner.begin(_part(inputs, begin, end), cache))

    def check(*expected: int) -> None:
        if cache.lengths != [*expected]:
            raise FulldepthError(
                f"its layers leave {cache.lengths} positions in the cache where {[*expected]} were run: they share "
                "keys and values, or keep them elsewhere"
            )

    prefill, runs = runner.finish(run(every, 0, start)), {}
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

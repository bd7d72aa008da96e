"""Latency of prefill and of a decoding step, for several models in alternation, and how busy other programs are.

Times of busy machines are not compared (`thresholds.BUSY`).
"""

from __future__ import annotations

import gc
import inspect
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.core.distributed import current
from fulldepth.core.errors import FulldepthError
from fulldepth.hf import Anatomy, cache_argument, cache_in, device_of

PHASES = ("prefill", "decode")


class Trial(NamedTuple):
    """Times and results of one run of prompt and decoding."""

    prefill: float
    """Seconds for the prompt."""
    decode: float
    """Seconds for one token after it, the mean over all steps."""
    cache: Any = None
    """The model's cache after all tokens; None if another program holds it."""
    logits: Tensor | None = None
    """[B, V] of the last step; None as for the cache."""


class Runs(Protocol):
    """Interface of a timed model: `Runner`, or a model in another program."""

    def run(self, ids: Tensor, context: int) -> Trial:
        """Run a prompt and the tokens after it; see `Runner.run`."""


def machine(device: torch.device) -> dict[str, Any]:
    """Description of the hardware: the device, the name of the GPU or processor, and torch's number of threads."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": str(device), "name": name, "threads": torch.get_num_threads()}


class Runner:
    """Runs a decoder as a server does: the prompt at once, then one token at a time with a growing cache.

    The decoded tokens are fixed, so that every model does the same work. Only the last position's logits are computed
    if the model supports it.

    Args:
        model: in evaluation mode.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        names = inspect.signature(type(model).forward).parameters
        self.model = model
        self._takes_positions = "position_ids" in names
        self._cache_name = cache_argument(model)
        self._options: dict[str, Any] = {
            "use_cache": True,
            **({"logits_to_keep": 1} if "logits_to_keep" in names else {}),
        }

    @torch.no_grad()
    def run(self, ids: Tensor, context: int) -> Trial:
        """Run prefill and decoding, timed separately.

        Args:
            ids: `[B, context + N]` on the model's device; the last N are decoded, at positions `context`, ... .
            context: number of tokens of the prompt.
        """
        prompt = ids[:, :context]
        steps = ids[:, context:].split(1, dim=1)
        positions: list[dict[str, Tensor]] = [
            {"position_ids": ids.new_full((len(ids), 1), context + number)} if self._takes_positions else {}
            for number in range(len(steps))
        ]
        collects = gc.isenabled()
        gc.disable()
        try:
            start = now(ids.device)
            output = self.model(input_ids=prompt, **self._options)
            cache = cache_in(output)
            if cache is None:
                raise FulldepthError(f"{type(self.model).__name__} gives no cache to decode with.")
            between = now(ids.device)
            for token, position in zip(steps, positions, strict=True):
                output = self.model(input_ids=token, **{self._cache_name: cache}, **position, **self._options)
                cache = cache_in(output)
            end = now(ids.device)
        finally:
            if collects:
                gc.enable()
        return Trial(between - start, (end - between) / len(steps), cache, output.logits[:, -1])


def check_prompt_fits(anatomy: Anatomy, context: int, new_tokens: int) -> None:
    """Check that prompt and new tokens fit into the model's positions.

    Raises:
        FulldepthError: if they do not.
    """
    limit = anatomy.max_positions
    if limit is not None and context + new_tokens > limit:
        raise FulldepthError(
            f"A context of {context} tokens and {new_tokens} new ones exceed the model's {limit} positions. Use a "
            "shorter context or fewer new tokens."
        )


def random_tokens(anatomy: Anatomy, batch: int, length: int, seed: int) -> Tensor:
    """[batch, length] random tokens on the model's device, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, anatomy.vocab_size or 1, (batch, length), generator=generator)
    return ids.to(device_of(anatomy.model))


def time_in_rounds(
    runs: Mapping[str, Runs],
    ids: Tensor,
    context: int,
    *,
    repeats: int,
    warmup: int,
    seed: int,
    advance: Callable[[int], None],
) -> dict[tuple[str, str], list[float]]:
    """Time every model once per round, in changing order, so that background load affects all of them equally.

    Args:
        runs: name -> what runs a model.
        ids: as for `Runner.run`.
        context: as for `Runner.run`.
        repeats: number of timed rounds.
        warmup: number of untimed rounds before them.
        seed: of the order.
        advance: called after each run with 1.

    Returns:
        (name, phase) -> the seconds of each round.
    """
    names = list(runs)
    times: dict[tuple[str, str], list[float]] = {(name, phase): [] for name in names for phase in PHASES}
    for number in range(-warmup, repeats):
        for index in order(len(names), number, seed):
            trial = runs[names[index]].run(ids, context)
            for phase in PHASES if number >= 0 else ():
                times[names[index], phase].append(getattr(trial, phase))
            advance(1)
    return times


def order(count: int, number: int, seed: int) -> list[int]:
    """The order of a round: a seeded cyclic order, shifted by one each round and reversed in odd rounds.

    In `count` rounds each item is first once, and neighbours precede each other equally often.
    """
    circle = np.random.default_rng(seed).permutation(count).tolist()
    start = number % count
    turned = circle[start:] + circle[:start]
    return turned if number % 2 == 0 else turned[:1] + turned[:0:-1]


def now(device: torch.device) -> float:
    """The time in seconds, after synchronising with the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


TICK = 0.02
"""CPU seconds by which the counted times of one core can be wrong: two ticks of the kernel's clock."""


class OtherLoad:
    """Share of the machine's CPU time that processes outside the run have used since this was made.

    A lower bound: what the resolution of the counters explains does not count, so a span of milliseconds is not busy.
    """

    def __init__(self) -> None:
        self._start = _times()

    def share(self) -> float:
        """In [0, 1], of all cores; all processes of a distributed run must call this together."""
        total, busy, of_run = (now - then for now, then in zip(_times(), self._start, strict=True))
        other = busy - of_run - TICK * (psutil.cpu_count() or 1)
        return min(1.0, max(0.0, other) / total) if total > 0 else 0.0


def _times() -> tuple[float, float, float]:
    """CPU seconds so far: of the machine, busy ones, those of the run's processes on it and their children."""
    machine = psutil.cpu_times()._asdict()
    total = sum(seconds for name, seconds in machine.items() if not name.startswith("guest"))
    idle = machine["idle"] + machine.get("iowait", 0.0)
    process = psutil.Process()
    of_run = sum(process.cpu_times()[:4])  # user and system, also of children that have ended
    for child in process.children(recursive=True):
        try:
            of_run += sum(child.cpu_times()[:4])
        except psutil.Error:  # it has just ended
            continue
    machine_name = platform.node()
    gathered = current().gather((machine_name, of_run))
    return total, total - idle, sum(seconds for name, seconds in gathered if name == machine_name)

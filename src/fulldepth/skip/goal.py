"""`Goal`: what blocks are removed for, and how much of it each one gives.

The gain of a block is its share of the quantity that the target counts, so that gains add up:

- `target_speedup` s: time. With D and P the seconds of a decoded token and of the prompt in the unmodified model, and w
  the `decode_share`, a model without the blocks R takes the share `1 - sum_R g` of the time,
  `g = w d / D + (1 - w) p / P`, where d and p are the seconds that the block costs. Needed: `1 - 1 / s`.
- `target_bytes` r, `target_cache` r: bytes of weights, or of keys and values at the named context. Needed: `1 - r`.
- `max_loss`: time, as much as the added loss allows.
- `blocks` k: every block counts 1. Needed: k.

Times are measured with the blocks of one kind (the same part, parameters and window) removed in all layers, in rounds
that alternate with the unmodified model; a block has an equal share of what its kind saves.

In a search, `search_with` has `goal_of` compute gains and need (`time_shares` for a target in time), which refuses what
is out of reach. `eliminate`, or `rank_blocks` for searches that rank once, removes blocks until `Goal.left` is 0 or no
candidate is left. `exchange` then looks for a set with a lower loss that still reaches the target. The speed of an
export is not measured here; `skip bench` does that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.execution.flops import Costs, Variant
from fulldepth.execution.latency import Runner, Trial, random_tokens, time_in_rounds
from fulldepth.execution.layer_cache import LayerCache
from fulldepth.execution.memory import parameter_bytes
from fulldepth.execution.scoring import Scorer
from fulldepth.hf import Anatomy, Block, cache_in, evaluating
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.loss_cache import LossCache

REACHED = 1e-9
"""Rounding below which nothing is left to gain."""
TIMED_TOKENS = 16
ROUNDS = 9
"""Tokens decoded in each round of a timing, and its rounds."""
WHOLE = "nothing removed"
"""Name of the unmodified model among those that are timed."""
QUANTITIES = {"blocks": "blocks", "max_loss": "of the time", "target_speedup": "of the time"} | {
    "target_bytes": "of the weights' bytes",
    "target_cache": "of the cache's bytes",
}


@dataclass(frozen=True)
class Goal:
    """When a search ends, and what a candidate brings it nearer."""

    target: str
    """The setting that states it."""
    gains: Mapping[Block, float]
    """Block -> its gain, above 0."""
    needed: float
    """Sum of gains that must be reached; infinite for `max_loss`."""
    most_loss: float = math.inf
    """Nats that may be added to the loss."""
    notes: Mapping[str, Any] = field(default_factory=dict)
    """For the plan: how gains were measured."""

    def gain(self, variant: Variant) -> float:
        """Sum over the removed blocks."""
        return sum(self.gains.get(block, 0.0) for block in sorted(variant))

    def left(self, variant: Variant) -> float:
        """Return the gain that is still needed; 0 once the goal is reached, and `eliminate` ends there."""
        left = self.needed - self.gain(variant)
        return left if left > REACHED else 0.0

    def round_of(self, costs: Costs, removed: Variant) -> dict[Variant, float]:
        """The candidates of a round with their gains.

        Of a gain no more counts than is left to the goal. Where blocks are counted, a candidate that removes more of
        them than are left is no candidate.
        """
        left = self.left(removed)
        gains = {variant: self.gain(variant - removed) for variant in costs.candidates(removed)}
        exact = self.target == "blocks"
        return {variant: min(gain, left) for variant, gain in gains.items() if gain > 0 and not (exact and gain > left)}

    def progress(self, variant: Variant) -> str:
        """Such as `12 of 17 % of the time`."""
        if self.target == "blocks":
            return f"{len(variant)} of {self.needed:g} blocks"
        needed = "" if math.isinf(self.needed) else f" of {100 * self.needed:.1f}"
        return f"{100 * self.gain(variant):.1f}{needed} % {QUANTITIES[self.target]}"


def count_goal(costs: Costs, blocks: int) -> Goal:
    """The goal to remove this many blocks."""
    return Goal("blocks", dict.fromkeys(costs.able, 1.0), float(blocks))


def goal_of(
    loss_cache: LossCache,
    settings: SearchSettings,
    timed: Callable[[], tuple[Mapping[str, float], float]],
) -> Goal:
    """The goal that the settings state.

    Args:
        loss_cache: of the search.
        settings: with one target, or none and a number of blocks.
        timed: gives the gain of each kind of block in time, by `time_shares`, and the share of the processor that other
            programs used meanwhile.

    Raises:
        FulldepthError: for a target that removing every candidate would not reach.
    """
    costs = loss_cache.costs
    anatomy = loss_cache.scorer.anatomy
    target = settings.target
    if target is None:
        return count_goal(costs, min(settings.num_blocks or 0, len(costs.able)))
    notes: dict[str, Any] = {}
    if target == "target_bytes":
        total = parameter_bytes(anatomy.model)
        modules = {block: module_of(anatomy, block) for block in costs.able}
        gains = {block: parameter_bytes(module) / total for block, module in modules.items() if module is not None}
    elif target == "target_cache":
        gains = cache_shares(anatomy, costs, settings.context)
    else:
        shares, other_load = timed()
        notes = {
            "time_shares": dict(shares),
            "other_load": other_load,
            "context": timed_context(anatomy, settings),
            "batch": settings.batch,
            "decode_share": settings.decode_share,
        }
        gains = {block: shares[timing_kind(anatomy, block)] for block in costs.able}
    gains = {block: gain for block, gain in gains.items() if gain > 0}
    if target == "max_loss":
        return Goal(target, gains, math.inf, float(settings.max_loss or 0), notes)
    stated = float(getattr(settings, target))
    needed = 1 - 1 / stated if target == "target_speedup" else 1 - stated
    largest_gain = sum(gains.values())
    if largest_gain < needed:
        reach = (
            f"{fastest(largest_gain):.2f} times as fast" if target == "target_speedup" else f"{1 - largest_gain:.2f}"
        )
        loss_cache.discard()
        raise FulldepthError(
            f"{settings.option(target)} {stated:g} is out of reach: without any of its {len(gains)} candidates the "
            f"model would be at {reach}. Set a nearer target, another granularity, or keep fewer layers."
        )
    return Goal(target, gains, needed, notes=notes)


def fastest(saved: float) -> float:
    """How many times as fast a model is without parts that took this share of its time, at most 1,000 times.

    Parts are timed apart, so that by noise their shares may add up to 1 or more.
    """
    return 1 / max(1 - saved, 1e-3)


def module_of(anatomy: Anatomy, block: Block) -> nn.Module | None:
    """The module that is gone without a block, beside the norm before it; None if the layer lacks the part."""
    return anatomy.blocks[block.layer - 1] if block.part == "layer" else anatomy.part(block.layer, block.part)


def timing_kind(anatomy: Anatomy, block: Block) -> str:
    """Such as `attention, 885312 weights, sliding_attention`: blocks of one kind take the same time."""
    module = module_of(anatomy, block)
    weights = 0 if module is None else sum(weight.numel() for weight in module.parameters())
    kinds = getattr(anatomy.config, "layer_types", None) or []
    window = f", {kinds[block.layer - 1]}" if kinds and block.part != "mlp" else ""
    return f"{block.part}, {weights} weights{window}"


def cache_shares(anatomy: Anatomy, costs: Costs, context: int) -> dict[Block, float]:
    """Share of each block in the keys and values of `context` tokens; windows hold no more than their length.

    Raises:
        FulldepthError: for a model whose cache holds no keys and values, or anything else, such as the state of linear
            attention.
    """
    try:
        layers = LayerCache(anatomy.config).layers
    except FulldepthError as error:
        raise FulldepthError(f"target_cache counts keys and values. {error} Set another target.") from error
    held = {
        number: width * (min(context, layer.sliding_window) if layer.is_sliding else context)
        for number, (layer, width) in enumerate(zip(layers, cached_widths(anatomy), strict=False), start=1)
    }
    total = sum(held.values())
    if not total:
        raise FulldepthError(
            f"target_cache counts keys and values, and the cache of a {type(anatomy.model).__name__} holds none. Set "
            "another target."
        )
    return {b: 0.0 if b.part == "mlp" else held.get(b.layer, 0) / total for b in costs.able}


@torch.no_grad()
def cached_widths(anatomy: Anatomy) -> list[int]:
    """Numbers that each layer caches for a token: its heads times the width of a key and a value, 0 for none."""
    with evaluating(anatomy.model):
        output = anatomy.model(random_tokens(anatomy, 1, 1, 0), use_cache=True)
    entries = getattr(cache_in(output), "layers", [])
    states = [[getattr(entry, name, None) for name in ("keys", "values")] for entry in entries]
    return [sum(state.numel() for state in pair if isinstance(state, Tensor)) for pair in states]


class SwitchedRunner(Runner):
    """Runs a model without some of its blocks."""

    def __init__(self, scorer: Scorer, removed: Variant) -> None:
        super().__init__(scorer.anatomy.model)
        self.scorer = scorer
        self.removed = removed

    def run(self, ids: Tensor, context: int) -> Trial:
        """Run as `Runner.run` does, with the variant's blocks skipped; nothing is skipped on return."""
        self.scorer.switches.skip(self.removed)
        try:
            return super().run(ids, context)
        finally:
            self.scorer.plain()


def timed_context(anatomy: Anatomy, settings: SearchSettings) -> int:
    """Tokens of the prompt with which parts are timed: the settings' context, shortened to the model's positions."""
    longest = (anatomy.max_positions or settings.context + TIMED_TOKENS) - TIMED_TOKENS
    return max(1, min(settings.context, longest))


def time_shares(scorer: Scorer, settings: SearchSettings, watcher: Watcher) -> dict[str, float]:
    """Time the model without all blocks of a kind: kind -> the gain of one block (see the docstring of this module)."""
    anatomy = scorer.anatomy
    kinds = dict[str, list[Block]]()
    context = timed_context(anatomy, settings)
    for block in scorer.costs.able:
        kinds.setdefault(timing_kind(anatomy, block), []).append(block)
    runs = {kind: SwitchedRunner(scorer, Variant(removed)) for kind, removed in {WHOLE: (), **kinds}.items()}
    ids = random_tokens(anatomy, settings.batch, context + TIMED_TOKENS, settings.seed)
    watcher.begin("Time of each part", len(runs) * (ROUNDS + 1))
    options: dict[str, Any] = {"repeats": ROUNDS, "warmup": 1, "seed": settings.seed}
    times = time_in_rounds(runs, ids, context, **options, advance=watcher.advance)
    seconds = {key: np.array(times_of_key) for key, times_of_key in times.items()}  # [rounds] each
    weights = {"decode": settings.decode_share, "prefill": 1 - settings.decode_share}
    shares = {}
    for kind, blocks in kinds.items():
        saved = sum(w * (1 - seconds[kind, phase] / seconds[WHOLE, phase]) for phase, w in weights.items())
        shares[kind] = float(np.median(saved)) / len(blocks)
    return shares

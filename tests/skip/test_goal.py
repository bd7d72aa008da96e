"""Searches with a target: mixed candidates, gains, the end, and exchanges."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import tiny_models as tm
from families import zoo
from fulldepth.core.distributed import Processes
from fulldepth.execution.flops import Costs
from fulldepth.execution.latency import Runner, Trial
from fulldepth.execution.scoring import ScoredBatch
from fulldepth.hf import Block
from fulldepth.hf.caches import CACHE
from fulldepth.skip import search
from fulldepth.skip.elimination import chain, eliminate, exchange
from fulldepth.skip.goal import Goal, count_goal
from fulldepth.skip.loss_cache import LossCache
from refusals import refused
from skip import plain
from skip.known_losses import Scorer, cache_of

OPTIONS = {"fit": False, "search": "exact", "exchanges": 0.0}
CACHED = 6
"""Tokens of a context whose cache is compared, fewer than a window holds."""


@pytest.fixture(scope="module")
def model():
    return tm.build("llama", dtype=torch.float64)


@pytest.fixture(scope="module")
def examples():
    return plain.held_out(plain.sentences(10, seed=5))


def plain_search(model, examples, gains, needed):
    """Picks of the loop that takes the candidate of the lowest added loss per gain; no more counts than is needed."""
    layers = range(1, 4)
    candidates = [{(n, "attention")} for n in layers] + [{(n, "mlp")} for n in layers]
    candidates += [one | other for one, other in zip(candidates[:3], candidates[3:], strict=True)]
    removed, picks = set(), []
    loss = plain.loss(model, examples, removed, "")
    while needed > 1e-9:
        scored = []
        for more in candidates:
            if not more & removed:
                after = plain.loss(model, examples, removed | more, "")
                scored.append(((after - loss) / min(sum(map(gains.get, more)), needed), sorted(more), after))
        _, more, loss = min(scored)
        removed |= set(more)
        picks.append(set(more))
        needed -= sum(map(gains.get, more))
    return picks, loss


def size(module):
    return sum(weight.numel() for weight in module.parameters())


def test_a_target_of_bytes_takes_the_lowest_loss_per_byte(model, examples):
    total = size(model)
    blocks = model.model.layers
    gains = {(n, "attention"): size(b.self_attn) / total for n, b in enumerate(blocks, start=1)}
    gains |= {(n, "mlp"): size(b.mlp) / total for n, b in enumerate(blocks, start=1)}
    share = 1 - 0.6 * sum(gains.values())
    picks, loss = plain_search(model, examples.heldout, gains, 1 - share)
    plan = search(model, examples, target_bytes=share, **OPTIONS)
    assert plan.granularity == "any"
    assert [set(pick) for pick in plan.picks] == picks
    assert plan.losses[-1] == pytest.approx(loss, rel=1e-6)
    assert plan.cost["target"]["reached"] == pytest.approx(sum(gains[b] for b in plan.removed))
    assert plan.cost["target"]["reached"] >= 1 - share > sum(plan.cost["target"]["gains"][:-1])


def test_a_target_of_time_counts_what_each_kind_of_part_takes(model, examples, monkeypatch):
    seconds = {"attention": 0.03, "mlp": 0.01}
    contexts = []

    def run(self, ids, context):
        contexts.append(context)
        gone = self.scorer.switches.skipped
        decode = 0.3 - sum(seconds[part] for _, part in gone)
        return Trial(1.0 - 10 * sum(seconds[part] for _, part in gone if part == "mlp"), decode, None, None)

    monkeypatch.setattr(Runner, "run", run)
    options = {"target_speedup": 1.25, "search": "last", "fit": False}
    for share, gains in ((1.0, {"attention": 0.1, "mlp": 1 / 30}), (0.5, {"attention": 0.05, "mlp": 1 / 60 + 0.05})):
        plan = search(model, examples, decode_share=share, **options)
        reached = [gains[part] for _, part in (b for pick in plan.picks for b in pick)]
        assert plan.cost["target"]["gains"] == pytest.approx(reached)
        assert sum(reached) >= 0.2 > sum(reached[:-1])
        assert {*contexts} == {plan.cost["target"]["context"]} == {model.config.max_position_embeddings - 16}


def test_kept_layers_stay_and_the_last_global_attention_too(examples, model):
    plan = search(model, examples, 4, granularity="any", keep=[2], **OPTIONS)
    assert {layer for layer, _ in plan.removed} == {1, 3}
    gemma = tm.build("gemma3")
    kinds = gemma.config.layer_types
    (last,) = [n for n, kind in enumerate(kinds, start=1) if kind == "full_attention"]
    plan = search(gemma, examples, len(kinds) - 1, granularity="attention", **OPTIONS)
    assert last not in plan.blocks


def drawn(seed, interaction):
    """A cache of random losses with an optimum that removing one by one can miss, and the losses by layers.

    The losses of its 8 rows differ by a constant.
    """
    generator, layers = np.random.default_rng(seed), range(1, 7)
    own, pairs = generator.uniform(0.1, 1, 7), interaction * generator.uniform(-1, 1, (7, 7))
    losses = {
        frozenset(s): 9 + sum(own[n] for n in s) + sum(pairs[p] for p in itertools.combinations(s, 2))
        for count in range(7)
        for s in itertools.combinations(layers, count)
    }
    return cache_of(6, lambda gone, rows: losses[gone] + 0.1 * rows, np.arange(8).reshape(2, 4), np.arange(8)), losses


def test_exchanges_lower_the_loss_to_where_no_exchange_helps():
    improved = 0
    for seed in range(5):
        cache, losses = drawn(seed, interaction=0.8)
        goal = count_goal(cache.costs, 3)
        picks, _ = eliminate(cache, goal, drop=False)
        greedy = losses[layers_of(picks)]
        found, done = exchange(cache, goal, picks, confidence=0.95, flops=math.inf)
        final = layers_of(found)
        steps = [greedy, *(losses[final] if step is done[-1] else step["loss"] - 0.35 for step in done)]
        assert len(final) == 3
        assert all(later < earlier for earlier, later in itertools.pairwise(steps))
        neighbours = [final - {back} | {out} for back in final for out in set(range(1, 7)) - final]
        # A pass scores the eight likeliest of nine exchanges.
        assert sum(losses[n] < losses[final] - 1e-12 for n in neighbours) <= 1
        before = cache.spent["flops"]
        assert exchange(cache, goal, picks, confidence=0.95, flops=0.0) == (picks, [])
        assert cache.spent["flops"] == before
        improved += bool(done)
    assert improved > 0


def layers_of(picks):
    return frozenset(n for n, _ in chain(picks)[-1])


@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_removed_as_far_as_the_most_loss_allows(seed):
    cache, losses = drawn(seed, interaction=0.0)
    order = sorted(range(1, 7), key=lambda n: losses[frozenset({n})])
    limit = losses[frozenset(order[:4])] - losses[frozenset()] - 1e-3
    goal = Goal("max_loss", dict.fromkeys(cache.costs.able, 0.1), math.inf, most_loss=limit)
    picks, _ = eliminate(cache, goal, drop=False)
    assert [layer for pick in picks for layer, _ in pick] == order[:3]


def test_most_loss_is_of_the_loss_whatever_ranks_the_candidates(model, examples):
    kinds = {"granularity": "attention", "criterion": "kl", **OPTIONS}
    free = search(model, examples, 3, **kinds)
    added = np.subtract(free.losses, free.losses[0])
    limit = added.max() - 1e-6
    within = list(itertools.takewhile(lambda nats: nats <= limit, added))
    assert 1 < len(within) < len(added)
    plan = search(model, examples, max_loss=limit, **kinds)
    assert plan.blocks == free.blocks[: len(within) - 1]
    assert plan.losses == pytest.approx(free.losses[: len(within)], rel=1e-9)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"target_speedup": 1.2, "target_bytes": 0.8}, "--target-speedup and --target-bytes"),
        ({"max_loss": 0.1, "blocks": 2}, "--max-loss and --blocks"),
        ({"max_loss": 0.1, "keep": [1, 2, 3]}, "no block outside the layers to keep"),
        ({"target_bytes": 0.001}, "--target-bytes 0.001 is out of reach"),
        ({}, "How much to remove.* --blocks or a target .--target-speedup"),
        ({"blocks": 1, "keep": [9]}, "layer 9"),
        ({"blocks": 4, "granularity": "any", "keep": [1, 2]}, "4 blocks"),
        ({"given": ["mlp 9"], "granularity": "any"}, "layer 9"),
        ({"given": ["mlp 2"], "granularity": "mlp"}, "'mlp 2' is no block of the granularity mlp"),
        ({"given": ["layer 2", "mlp 2"], "granularity": "any"}, "mlp of layer 2"),
        ({"target_speedup": 0.9}, "target_speedup"),
    ],
)
def test_targets_that_cannot_be_are_named(model, examples, options, named):
    with refused(named):
        search(model, examples, fit=False, **options)


def test_a_refused_target_leaves_the_folder_to_a_nearer_one(model, examples, tmp_path):
    with refused("out of reach"):
        search(model, examples, target_speedup=900, output=tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_a_target_of_the_cache_counts_keys_and_values(examples):
    """A window holds no more than its length; the states of linear attention are neither."""
    gemma = tm.build("gemma3")
    window, kinds = gemma.config.sliding_window, gemma.config.layer_types
    held = [min(40, window) if "sliding" in kind else 40 for kind in kinds]
    plan = search(gemma, examples, target_cache=0.9, context=40, granularity="attention", **OPTIONS)
    gains = [held[layer - 1] / sum(held) for layer in plan.blocks]
    assert plan.cost["target"]["gains"] == pytest.approx(gains)
    with refused("target_cache counts keys and values.*LinearAttentionLayer"):
        search(zoo.build("qwen3_next", "causal-lm"), examples, target_cache=0.9, **OPTIONS)


@pytest.mark.parametrize("family", ["gemma4_unified", "gemma4_text", "minicpm3"])
def test_layers_may_cache_keys_and_values_of_other_widths(family, examples):
    """Gemma 4's global layers have wider heads; the bytes are those of the model's own cache of a row."""
    model = zoo.build(family, "causal-lm")
    ids = torch.arange(3, 3 + CACHED)[None]
    cache = dict(model(ids, use_cache=True))[CACHE]
    held = [sum(state.nbytes for state in (layer.keys, layer.values) if state is not None) for layer in cache.layers]
    options = {"fit": False, "search": "last", "granularity": "layer", "context": CACHED}
    plan = search(model, examples, target_cache=1 - 0.9 * min(filter(None, held)) / sum(held), **options)
    gains = [held[layer - 1] / sum(held) for layer in plan.blocks if held[layer - 1]]
    assert plan.cost["target"]["gains"] == pytest.approx(gains)


def test_a_model_that_caches_no_keys_and_values_has_no_target_of_the_cache(examples):
    with refused("target_cache counts keys and values, and the cache of a RwkvForCausalLM holds none"):
        search(zoo.build("rwkv", "causal-lm"), examples, target_cache=0.9, granularity="layer", **OPTIONS)


def test_bytes_are_those_that_a_quantised_model_stores(examples):
    """The matrices of blocks hold a byte for each weight and a float32 for each row, everything else float32."""
    quantization = pytest.importorskip("torchao.quantization")
    model = tm.build("llama")

    def stored(module, row_bytes):
        blocks = model.model.layers.modules()
        packed = {id(part.weight) for part in blocks if isinstance(part, nn.Linear)}
        weights = {id(weight): weight for weight in module.parameters()}
        return sum(w.numel() + row_bytes * len(w) if n in packed else 4 * w.numel() for n, w in weights.items())

    attention = model.model.layers[0].self_attn
    # A byte a row more in versions of torchao that keep zero points.
    shares = [stored(attention, row_bytes) / stored(model, row_bytes) for row_bytes in (4, 5)]
    quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
    plan = search(model, examples, target_bytes=0.97, granularity="attention", fit=False, search="last")
    (gain,) = set(plan.cost["target"]["gains"])
    assert gain in [pytest.approx(share) for share in shares]


def test_an_exchange_by_another_criterion_adds_no_more_loss_than_is_allowed():
    """Of four blocks 1 and 2 are the cheapest by loss; by divergence, which chooses, 3 is cheaper than 2."""
    divergences = {1: 0.1, 2: 0.2, 3: 0.05, 4: 0.3}
    losses = {1: 0.1, 2: 0.1, 3: 2.0, 4: 2.0}

    class Both(Scorer):
        def sums(self, batch, variants, *, divergence, advance):
            def added(of_block, variant):
                return [sum(of_block[layer] for layer, _ in variant) for _ in batch.inputs["rows"]]

            return {v: {"loss": added(losses, v), "kl": added(divergences, v)} for v in variants}

    rows = np.arange(4)
    batch = ScoredBatch({"rows": rows}, torch.ones(4, 1, dtype=bool), *[torch.arange(4)] * 2, rows)
    cache = LossCache(Both(4, None), [[batch]], Processes(), criterion="kl")
    goal = Goal("max_loss", dict.fromkeys(cache.costs.able, 0.25), math.inf, most_loss=0.5)
    picks = [frozenset({Block(1, "attention")}), frozenset({Block(2, "attention")})]
    cache.need_everywhere("known", [*chain(picks), *(frozenset({block}) for block in cache.costs.able)])
    found, done = exchange(cache, goal, picks, confidence=0.95, flops=math.inf)
    assert (found, done) == (picks, [])
    allowed, done = exchange(cache, Goal("blocks", goal.gains, 2.0), picks, confidence=0.95, flops=math.inf)
    assert len(done) == 1
    assert Block(3, "attention") in chain(allowed)[-1]


def test_exchanges_keep_the_number_of_blocks(examples):
    """A model of which the greedy search removes another part of layer 1 than is best beside layer 3."""
    model = tm.build("llama", seed=1, dtype=torch.float64)
    plan, greedy = (
        search(model, examples, 3, granularity="any", **OPTIONS | {"exchanges": share}) for share in (100.0, 0.0)
    )
    assert (greedy.blocks, plan.blocks) == (["mlp 1", "layer 3"], ["attention 1", "layer 3"])
    better, worse = (plain.loss(model, examples.heldout, one.removed, "") for one in (plan, greedy))
    assert [plan.losses[-1], greedy.losses[-1]] == pytest.approx([better, worse], rel=1e-6)
    assert better < worse - 0.003


def test_goal_counts_no_more_than_is_left():
    blocks = [Block(1, "attention"), Block(1, "mlp"), Block(2, "attention"), Block(2, "mlp")]
    costs = Costs("any", (1.0,) * 2, (0.0,) * 2, (1.0,) * 2, 1.0, able=tuple(blocks))
    goal = Goal("target_bytes", dict.fromkeys(blocks, 0.2), 0.3)
    assert set(goal.round_of(costs, frozenset()).values()) == {0.2, 0.3}
    assert list(goal.round_of(costs, frozenset(blocks[:1])).values()) == pytest.approx([0.1] * 4)
    assert goal.left(frozenset(blocks[:2])) == 0


@pytest.mark.parametrize("seed", range(4))
def test_a_pool_holds_those_that_added_least_per_gain_when_last_scored(seed):
    cache, losses = drawn(seed, interaction=0.8)
    gains = dict(zip(range(1, 7), np.random.default_rng(seed).uniform(0.05, 0.4, 6), strict=True))
    goal = Goal("target_bytes", {block: gains[block.layer] for block in cache.costs.able}, 0.7)
    removed, added, order = frozenset(), {}, []
    while (left := 0.7 - sum(gains[layer] for layer in removed)) > 1e-9:

        def rate(layer, left=left, added=added):
            return added[layer] / min(gains[layer], left)

        pool = sorted({*gains} - removed, key=rate)[:2] if removed else [*gains]
        added |= {layer: losses[removed | {layer}] - losses[removed] for layer in pool}
        order.append(min(pool, key=rate))
        removed |= {order[-1]}
    picks, _ = eliminate(cache, goal, drop=False, pool=2)
    assert [layer for pick in picks for layer, _ in pick] == order

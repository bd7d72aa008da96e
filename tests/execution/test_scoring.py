"""Losses of variants against stock forward passes with zeroed weights; operations against PyTorch's own counter."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tiny_models as tm
from fulldepth.errors import FulldepthError
from fulldepth.execution.flops import Costs, Shape, Variant
from fulldepth.execution.language_model import prove
from fulldepth.execution.layer_runner import LayerRunner
from fulldepth.execution.scoring import BASE, Scorer
from fulldepth.hf import GRANULARITIES, Switches, anatomy_candidates, frozen
from fulldepth.hf.scalars import Scalars
from fulldepth.skip.selection.fit import make_batches
from fulldepth.skip.selection.search import plain_flops
from skip import plain, planned

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_neox-serial", "depth_llama"]
SETS = [set(), {1}, {1, 3}, {2, 3}, {1, 2, 3}]
VARIANTS = list(map(Variant, SETS))
ATTENTIONS = ("self_attn", "attn", "attention")


@contextmanager
def scorer_of(model, examples, granularity="attention", batch_size=4):
    batches = make_batches(examples, batch_size)
    anatomy, classifier = prove(anatomy_candidates(model)[0], batches[0].inputs)
    with Switches(anatomy, granularity) as switches:
        yield Scorer(anatomy, classifier, switches, granularity, batches[0]), batches


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_are_those_of_stock_passes_with_zeroed_branches(name, granularity):
    model, examples = tm.build(name, dtype=torch.float64), plain.sentences(4, seed=3)
    with scorer_of(model, examples, granularity) as (scorer, batches):
        found = [scorer.sums(batch, VARIANTS, divergence=True) for batch in batches]
    for variant in VARIANTS:
        for kind, oracle in (("loss", plain.loss), ("kl", plain.divergence)):
            expected = sorted(
                oracle(model, [example], variant, granularity) * example.predicted for example in examples
            )
            sums = sorted(value for of in found for value in of[variant][kind])
            assert sums == pytest.approx(expected, rel=1e-6, abs=1e-6), (variant, kind)
    assert len({sum(found[0][variant]["loss"]) for variant in VARIANTS}) == len(SETS)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox"])
def test_scaled_losses_are_those_of_the_definition(name):
    model, examples = tm.build(name, dtype=torch.float64), plain.sentences(5, seed=4, shortest=22)
    plan = planned.plan(model, [2])
    scaled = planned.scaled(model, plan)
    with scorer_of(model, examples, batch_size=5) as (scorer, (batch,)):
        states = scorer.states(batch, Variant({2}), Scalars.from_dict(plan.scalars, 3))
        base = scorer.states(batch, BASE)
        found = scorer.state_sums(states, batch, base, ("loss", "kl"))
        assert scorer.healed_sums(batch, Variant({2}), plan.scalars)["loss"] == found["loss"]
    # Factors are float32 in the plan and in the oracle; products are float64.
    expected = plain.loss(scaled, examples, (), "attention")
    assert sum(found["loss"]) / len(batch.targets) == pytest.approx(expected, rel=1e-6)
    gaps = []
    for example in examples:
        base, own = (plain.log_probabilities(of, example) for of in (model, scaled))
        gaps.append(float((base.exp() * (base - own)).sum()))
    assert sorted(found["kl"]) == pytest.approx(sorted(gaps), rel=1e-5)


def test_a_batch_gives_each_sequence_what_it_gives_alone():
    model, examples = tm.build("llama", dtype=torch.float64), plain.sentences(7, seed=5)
    with scorer_of(model, examples, batch_size=3) as (scorer, batches):
        together = sorted(value for batch in batches for value in scorer.sums(batch, [BASE])[BASE]["loss"])
        alone = sorted(scorer.sums(make_batches([e], 1)[0], [BASE])[BASE]["loss"][0] for e in examples)
    assert together == pytest.approx(alone, rel=1e-12)


@contextmanager
def stubbed(model, layers, kind):
    """Modules that cost nothing in the place of what is skipped."""

    class Nothing(nn.Module):
        def forward(self, hidden_states, **kwargs):
            return (torch.zeros_like(hidden_states), None) if kind == "attention" else torch.zeros_like(hidden_states)

    kept = []
    for layer in layers:
        block = plain.blocks_of(model)[layer - 1]
        name = next(n for n, _ in block.named_children() if n in (ATTENTIONS if kind == "attention" else ("mlp",)))
        kept.append((block, name, getattr(block, name)))
        setattr(block, name, Nothing())
    try:
        yield
    finally:
        for block, name, module in kept:
            setattr(block, name, module)


def counted(run) -> int:
    """Operations by PyTorch's counter, without the product that makes angles of positions."""
    with FlopCounterMode(display=False) as counter:
        run()
    counts = counter.get_flop_counts()
    rotary = {name: sum(of.values()) for name, of in counts.items() if name.endswith("rotary_emb")}
    return counter.get_total_flops() - sum(rotary.values())


@pytest.mark.parametrize("kind", ["attention", "mlp"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "gpt_neox", "gemma2"])
def test_operations_are_those_that_pytorch_counts(name, kind):
    model, examples = tm.build(name), plain.sentences(4, seed=6)
    model.set_attn_implementation("eager")
    with scorer_of(model, examples, kind) as (scorer, (batch,)):
        costs, shape = scorer.costs, batch.shape
        for variants in ([BASE], VARIANTS, VARIANTS[2:]):
            assert counted(lambda of=variants: scorer.sums(batch, of)) == costs.shared(variants, shape)
    plain_loop = 0
    with torch.no_grad():
        for skipped in [(), (1,), (2,), (3,), (2, 1), (2, 3)]:  # two rounds; layer 2 goes first
            with stubbed(model, skipped, kind):
                plain_loop += counted(lambda: model(**batch.inputs, use_cache=False))
    assert plain_flops(costs, [2, 1], [shape]) == plain_loop


@pytest.mark.parametrize("again", [False, True])
def test_operations_of_a_training_step_are_those_that_pytorch_counts(again):
    model, examples = tm.build("llama"), plain.sentences(4, seed=6)
    model.set_attn_implementation("eager")
    with scorer_of(model, examples) as (scorer, (batch,)), frozen(model):
        scalars = Scalars(3, {2})

        def step():
            states = scorer.states(batch, Variant({2}), scalars, checkpointing=again)
            scorer.objective(states, batch.targets).backward()

        found, expected = counted(step), scorer.costs.training(Variant({2}), batch.shape, checkpointing=again)
    # The first layer's projections have nothing to train below them.
    assert found <= expected <= 1.15 * found


def test_shared_operations_count_every_way_to_a_block_once():
    generator = random.Random(0)
    for _ in range(200):
        depth = generator.randint(1, 7)
        parts = [tuple(float(generator.randint(0, 9)) for _ in range(depth)) for _ in range(3)]
        costs = Costs(generator.choice(GRANULARITIES), *parts, head=float(generator.randint(1, 9)))
        shape = Shape(2, 5, generator.randint(0, 10))
        layers = range(1, depth + 1)
        variants = [Variant(x for x in layers if generator.random() < 0.3) for _ in range(generator.randint(0, 9))]
        expected = len(set(variants)) * shape.labelled * costs.head
        for layer in layers:
            ways = {frozenset(x for x in variant if x <= layer) for variant in variants}
            expected += sum(costs.block(layer, shape, layer in way) for way in ways)
        assert costs.shared(variants, shape) == expected


def test_what_cannot_be_replayed_is_refused():
    def once(module, args, output, calls=[]):  # noqa: B006
        calls.append(1)
        return output * len(calls)

    def in_place(module, args, kwargs):
        (args[0] if args else kwargs["hidden_states"]).add_(0)

    examples = plain.sentences(3, seed=6)
    for hook, words in ((once, "misses the model's own state"), (in_place, "in place|overwrites its input")):
        model = tm.build("llama")
        block = plain.blocks_of(model)[1]
        if hook is once:
            block.register_forward_hook(hook)
        else:
            block.register_forward_pre_hook(hook, with_kwargs=True)
        (anatomy,) = anatomy_candidates(model)
        with pytest.raises(FulldepthError, match=words):
            LayerRunner(anatomy, make_batches(examples, 3)[0].inputs)
        assert not any("forward" in vars(module) for module in model.modules())


def test_several_residual_streams_are_refused():
    with (
        pytest.raises(FulldepthError, match="several residual streams"),
        scorer_of(tm.build("depth_llama-hyper"), plain.sentences(3, seed=6)),
    ):
        pass


def test_a_pass_that_breaks_off_leaves_a_plain_model():
    model, examples = tm.build("llama"), plain.sentences(3, seed=6)
    before = model(**tm.inputs(model)).logits
    with pytest.raises(ZeroDivisionError), scorer_of(model, examples) as (scorer, (batch,)):
        scorer.sums(batch, VARIANTS, advance=lambda count: 1 // 0)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(**tm.inputs(model)).logits, before)

"""Losses of variants against stock forward passes with zeroed weights; operations against PyTorch's own counter."""

from __future__ import annotations

import copy
from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

import tiny_models as tm
from fulldepth.core.errors import FulldepthError
from fulldepth.execution import scoring
from fulldepth.execution.flops import Variant
from fulldepth.execution.layer_runner import LayerRunner
from fulldepth.execution.scoring import BASE, Scorer, make_batches, predicted
from fulldepth.execution.verify import prove
from fulldepth.hf import GRANULARITIES, Switches, anatomy_candidates, frozen
from fulldepth.hf.scalars import Block, Scalars, blocks_of
from fulldepth.skip.search import plain_flops
from refusals import refused
from skip import plain, planned

FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_neox-serial", "depth_llama"]
SETS = [set(), {1}, {1, 3}, {2, 3}, {1, 2, 3}]
MIXED = [{(1, "attention")}, {(1, "attention"), (3, "mlp")}, {(2, "attention"), (2, "mlp"), (3, "mlp")}]


def variants_of(granularity):
    """Sets of blocks of a three-layer model, the empty one first."""
    return [blocks_of(of, granularity, 3) for of in ([set(), *MIXED] if granularity == "any" else SETS)]


@contextmanager
def scorer_of(model, examples, granularity="attention", batch_size=4):
    batches = make_batches(examples, batch_size)
    anatomy, classifier = prove(anatomy_candidates(model)[0], batches[0].inputs)
    with Switches(anatomy, granularity) as switches:
        yield Scorer(anatomy, classifier, switches, batches[0]), batches


@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_are_those_of_stock_passes_with_zeroed_branches(name, granularity):
    model, examples = tm.build(name, dtype=torch.float64), plain.sentences(4, seed=3)
    variants = variants_of(granularity)
    with scorer_of(model, examples, granularity) as (scorer, batches):
        found = [scorer.sums(batch, variants, divergence=True) for batch in batches]
    for variant in variants:
        for kind, oracle in (("loss", plain.loss), ("kl", plain.divergence)):
            expected = sorted(
                oracle(model, [example], variant, granularity) * example.predicted for example in examples
            )
            sums = sorted(value for of in found for value in of[variant][kind])
            assert sums == pytest.approx(expected, rel=1e-6, abs=1e-6), (variant, kind)
    assert len({sum(found[0][variant]["loss"]) for variant in variants}) == len(variants)


@torch.no_grad()
def losses_with_zero_weights(model, examples, variant):
    """Summed losses of single sequences by a copy of a `depth_llama` whose removed branches end in zeros."""
    model = copy.deepcopy(model)
    for layer, part in variant:
        block = model.model.layers[layer - 1]
        if part != "mlp":
            block.self_attn.o_proj.weight.zero_()
        if part != "attention":
            block.mlp.down_proj.weight.zero_()
    sums = []
    for example in examples:
        logits = model(input_ids=example.input_ids[None]).logits[0, :-1]
        sums.append(float(functional.cross_entropy(logits, example.labels[1:], reduction="sum")))
    return sums


@pytest.mark.parametrize("granularity", ["attention", "layer", "any"])
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("depth_llama-tree", True),
        ("depth_llama-static", True),
        ("depth_llama-dynamic", True),
        ("depth_llama-kv", True),
        ("depth_llama-hyper", False),
    ],
)
def test_layers_that_read_more_than_the_one_before_lose_both_branches(name, whole, granularity):
    model, examples = tm.build(name, dtype=torch.float64), plain.sentences(5, seed=3)
    variants = variants_of(granularity)
    with scorer_of(model, examples, granularity, batch_size=2) as (scorer, batches):
        assert (scorer.costs.zeroes, scorer.costs.whole_passes) == (True, whole)
        found = [scorer.sums(batch, variants, divergence=True) for batch in batches]
        healed = [scorer.healed_sums(batch, variants[-1], None)["loss"] for batch in batches]
        shape = batches[0].shape
        full = scorer.costs.whole(BASE, shape)
        assert scorer.costs.whole(variants[-1], shape) == full
        assert not whole or scorer.costs.shared(variants, shape) == len(variants) * full
    for variant in variants:
        sums = sorted(value for of in found for value in of[variant]["loss"])
        assert sums == pytest.approx(sorted(losses_with_zero_weights(model, examples, variant)), rel=1e-9), variant
    assert sum(map(sum, healed)) == pytest.approx(sum(sum(of[variants[-1]]["loss"]) for of in found))
    assert len({sum(found[0][variant]["loss"]) for variant in variants}) == len(variants)
    assert not any("forward" in vars(module) or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "depth_llama-hyper"])
def test_whole_passes_give_the_losses_of_layers_run_one_by_one(name, monkeypatch):
    def refuse(*_):
        raise FulldepthError("Layer 2 misses the model's own state.")

    model, examples = tm.build(name), plain.sentences(4, seed=3)
    variants, scores = variants_of("any"), []
    for forced in (False, True):
        monkeypatch.setattr(scoring, "LayerRunner", refuse if forced else LayerRunner)
        with scorer_of(model, examples, "any") as (scorer, (batch,)):
            assert scorer.costs.whole_passes is forced
            scores.append(scorer.sums(batch, variants, divergence=True))
            if forced and name != "depth_llama-hyper":
                with refused("takes no scalars: Layer 2 misses the model's own state"):
                    scorer.healed_sums(batch, BASE, Scalars(3, (), "any"))
    for variant in variants:
        for kind in ("loss", "kl"):
            assert scores[0][variant][kind] == pytest.approx(scores[1][variant][kind], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "gpt_neox"])
def test_scaled_losses_are_those_of_the_definition(name):
    model, examples = tm.build(name, dtype=torch.float64), plain.sentences(5, seed=4, shortest=22)
    plan = planned.plan(model)
    scaled = planned.scaled(model, plan)
    with scorer_of(model, examples, batch_size=5) as (scorer, (batch,)):
        states = scorer.states(batch, Variant({Block(2, "attention")}), Scalars.from_dict(plan.scalars, 3))
        base = scorer.states(batch, BASE)
        found = scorer.state_sums(states, batch, ("loss", "kl"), predicted(scorer.classifier, base))
        assert scorer.healed_sums(batch, Variant({Block(2, "attention")}), plan.scalars)["loss"] == found["loss"]
    # Factors are float32 in the plan and in the oracle; products are float64.
    expected = plain.loss(scaled, examples, (), "attention")
    assert sum(found["loss"]) / len(batch.targets) == pytest.approx(expected, rel=1e-6)
    gaps = []
    for example in examples:
        base, own = (plain.log_probabilities(of, example) for of in (model, scaled))
        gaps.append(float((base.exp() * (base - own)).sum()))
    assert sorted(found["kl"]) == pytest.approx(sorted(gaps), rel=1e-5)


def counted(run):
    """Operations by PyTorch's counter, without the product that makes angles of positions."""
    with FlopCounterMode(display=False) as counter:
        run()
    counts = counter.get_flop_counts()
    rotary = {name: sum(of.values()) for name, of in counts.items() if name.endswith("rotary_emb")}
    return counter.get_total_flops() - sum(rotary.values())


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "attention"), ("gpt2", "mlp"), ("gpt_neox", "any"), ("gemma2", "mlp")],
)
def test_operations_are_those_that_pytorch_counts(name, kind):
    model, examples = tm.build(name), plain.sentences(4, seed=6)
    model.set_attn_implementation("eager")
    model.config.sliding_window = 64  # more than a sequence has: PyTorch also counts the positions that a window hides
    with scorer_of(model, examples, kind) as (scorer, (batch,)):
        costs, shape = scorer.costs, batch.shape
        for variants in ([BASE], variants_of(kind), variants_of(kind)[2:]):
            assert counted(lambda of=variants: scorer.sums(batch, of)) == costs.shared(variants, shape)
    if kind == "any":
        return
    rounds = [(), (1,), (2,), (3,), (2, 1), (2, 3)]  # two rounds of the plain loop; layer 2 goes first
    expected = sum(costs.whole(blocks_of(skipped, kind, 3), shape, every_position=True) for skipped in rounds)
    assert plain_flops(costs, [blocks_of([n], kind, 3) for n in (2, 1)], [shape]) == expected


@pytest.mark.parametrize("again", [False, True])
def test_operations_of_a_training_step_are_those_that_pytorch_counts(again):
    model, examples = tm.build("llama"), plain.sentences(4, seed=6)
    model.set_attn_implementation("eager")
    with scorer_of(model, examples) as (scorer, (batch,)), frozen(model):
        scalars = Scalars(3, {2})

        def step():
            states = scorer.states(batch, Variant({Block(2, "attention")}), scalars, checkpointing=again)
            scorer.objective(states, batch.targets).backward()

        costs, shape = scorer.costs, batch.shape
        expected = costs.training(Variant({Block(2, "attention")}), shape, checkpointing=again)
        # The first layer's attention has nothing to train below it: no backward pass of projections, scores and values.
        first = shape.batch * shape.length * (costs.attention[0] + 2 * shape.length * costs.keys[0])
        assert counted(step) == expected - first


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_what_cannot_be_replayed_is_refused(mode):
    calls, examples = [], plain.sentences(3, seed=6)

    def once(module, args, output):
        calls.append(1)
        return output * len(calls)

    def in_place(module, args, output):
        return args[0].add_(0)

    for hook, words in ((once, "misses the model's own state"), (in_place, "in place|overwrites its input")):
        model = tm.build("llama")
        plain.blocks_of(model)[1].register_forward_hook(hook)
        with refused(words), mode():
            LayerRunner(anatomy_candidates(model)[0], make_batches(examples, 3)[0].inputs)
        assert not any("forward" in vars(module) for module in model.modules())

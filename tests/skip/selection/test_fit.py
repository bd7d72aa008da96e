"""Training of scalars against a loop written by the definition; what moves, what must not, and when it ends."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

import tiny_models as tm
from fulldepth.data.batches import Example
from fulldepth.errors import FulldepthError
from fulldepth.execution.flops import Variant
from fulldepth.execution.language_model import prove
from fulldepth.execution.memory import AllocationTracker
from fulldepth.execution.scoring import Scorer
from fulldepth.hf import frozen
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches
from fulldepth.progress import Watcher
from fulldepth.skip.scored_batches import make_batches
from fulldepth.skip.selection.fit import fit_scales
from skip import plain, planned

LAYERS = 5


@pytest.fixture(scope="module")
def model():
    """A model with something to heal: two MLPs are too loud, two too soft."""
    model = plain.trained(LAYERS, 32, 200)
    with torch.no_grad():
        for block, change in zip(model.model.layers, (1.8, 0.4, 2.2, 0.4, 1.0), strict=True):
            block.mlp.down_proj.weight *= change
    return model


class Factors:
    """Blocks of a Llama that compute the definition with factors of their own, float64; nothing of ours."""

    def __init__(self, model, skipped):
        self.model = copy.deepcopy(model).double().requires_grad_(False)
        self.values = {}
        for layer, block in enumerate(plain.blocks_of(self.model), start=1):
            for name in planned.NAMES[2:] if layer in skipped else planned.NAMES:
                self.values[layer, name] = torch.ones((), dtype=torch.float64, requires_grad=True)
            own = dict.fromkeys(planned.NAMES, 1.0) | {n: v for (at, n), v in self.values.items() if at == layer}
            block.forward = planned.Definition("llama", block, own, "attention" if layer in skipped else "")


def of_batch(model, examples):
    """[R, V] log-probabilities and [R] targets of single unpadded passes, one after another."""
    rows, targets = [], []
    for example in examples:
        logits = model(input_ids=example.input_ids[None], use_cache=False).logits[0, :-1]
        counts = example.labels[1:] != -100
        rows.append(logits[counts].double().log_softmax(-1))
        targets.append(example.labels[1:][counts])
    return torch.cat(rows), torch.cat(targets)


def trajectory(model, skipped, train, heldout, epochs, rate, batch_size, seed):
    """Adam as Kingma and Ba write it; factors and held-out losses after every epoch."""
    factors = Factors(model, skipped)
    first = {key: torch.zeros_like(value) for key, value in factors.values.items()}
    second = {key: torch.zeros_like(value) for key, value in factors.values.items()}
    losses, kept, step = [plain.loss(factors.model, heldout, (), "attention")], [], 0
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
        for at in order.split(batch_size):
            chosen = [train[int(index)] for index in at]
            own, targets = of_batch(factors.model, chosen)
            loss = functional.nll_loss(own, targets)
            slopes = torch.autograd.grad(loss, list(factors.values.values()))
            step += 1
            for key, slope in zip(factors.values, slopes, strict=True):
                first[key] = 0.9 * first[key] + 0.1 * slope
                second[key] = 0.999 * second[key] + 0.001 * slope**2
                move = first[key] / (1 - 0.9**step) / ((second[key] / (1 - 0.999**step)).sqrt() + 1e-8)
                with torch.no_grad():
                    factors.values[key] -= rate * move
        losses.append(plain.loss(factors.model, heldout, (), "attention"))
        kept.append({key: value.detach().clone() for key, value in factors.values.items()})
    return kept, losses


@pytest.mark.parametrize("skipped", [{2, 3}, set()])
def test_the_scalars_go_where_adam_takes_them(model, skipped):
    train, heldout = plain.sentences(10, seed=21), plain.sentences(6, seed=22)
    options = {"epochs": 3, "batch_size": 4, "seed": 5}
    ours = {"learning_rate": 1e-2, "micro_batch_size": 2, "patience": 9}
    found = fit_scales(model, skipped, train, heldout, **ours, **options)
    kept, losses = trajectory(model, skipped, train, heldout, rate=1e-2, **options)
    assert found.losses == pytest.approx(losses, rel=2e-5)
    assert found.epoch == found.losses.index(min(found.losses))
    assert found.heldout_loss == found.losses[found.epoch]
    assert found.epoch, "the data must be such that something is learnt"
    for (layer, name), value in kept[found.epoch - 1].items():
        mine = found.scalars.get(layer)[name]
        assert mine.dtype == torch.float32
        assert (mine.double() - value).abs() < 1e-5, (layer, name)
    assert {(layer, name) for layer in range(1, LAYERS + 1) for name in found.scalars.get(layer)} == set(kept[0])


def test_the_best_epoch_is_kept_and_patience_ends_the_rest(model):
    train, heldout = plain.sentences(2, seed=21), plain.sentences(8, seed=33)
    told = []
    watcher = Watcher(begin=lambda title, total: told.append([title, total]), advance=told.append)
    long = fit_scales(model, {2}, train, heldout, learning_rate=0.06, epochs=12, patience=12, batch_size=3)
    best = min(range(13), key=long.losses.__getitem__)
    assert best + 3 < 12, "the rate must be such that it overshoots"
    found = fit_scales(
        model, {2}, train, heldout, learning_rate=0.06, epochs=12, patience=2, batch_size=3, watcher=watcher
    )
    ends = next(e for e in range(2, 13) if min(long.losses[: e - 1]) <= min(long.losses[e - 1 : e + 1]))
    assert found.losses == long.losses[: ends + 1]
    assert len(found.train_losses) == ends
    assert found.epoch == min(range(ends + 1), key=found.losses.__getitem__)
    assert found.heldout_loss == found.losses[found.epoch]
    assert told[0] == ["Scalars: healing", 12]
    assert sum(told[1:]) == 12
    assert found.epoch, "the data must be such that something is learnt"


def test_factors_of_a_bfloat16_model_are_float32_and_rise_above_one(model):
    model = copy.deepcopy(model).to(torch.bfloat16)
    found = fit_scales(
        model, {2, 3}, plain.sentences(16, seed=21), plain.sentences(8, seed=22), epochs=4, batch_size=8, patience=9
    )
    values = torch.stack([factor.detach() for factor in found.scalars.parameters()])
    assert values.dtype == torch.float32
    # In bfloat16 the next number above 1 is 1.0078; steps of 0.003 would never get there.
    assert values.max() > 1.003
    assert ((values > 1) & (values < 1.0078)).any()
    assert min(found.losses[1:]) < found.losses[0]
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())


@pytest.mark.parametrize(("name", "granularity"), [("llama", "attention"), ("gpt_neox", "layer")])
def test_nothing_but_the_scalars_is_trained(name, granularity):
    model = tm.build(name).train()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)
    asked = [parameter.requires_grad for parameter in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    found = fit_scales(
        model, {2}, plain.sentences(6, 21), plain.sentences(4, 22), epochs=1, batch_size=3, granularity=granularity
    )
    assert any(float((factor - 1).detach().abs().max()) > 1e-3 for factor in found.scalars.parameters()) == (
        found.epoch > 0
    )
    assert len(found.train_losses) == 1
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == asked
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())


def test_gradient_checkpointing_changes_no_result(model):
    model = copy.deepcopy(model).double()
    train, heldout = plain.sentences(9, seed=21), plain.sentences(4, seed=22)
    for options in ({}, {"granularity": "layer"}):
        results = [
            fit_scales(model, {2}, train, heldout, epochs=2, batch_size=5, checkpointing=again, **options)
            for again in (False, True)
        ]
        assert results[1].losses == pytest.approx(results[0].losses, rel=1e-12, abs=0)
        assert results[1].train_losses == pytest.approx(results[0].train_losses, rel=1e-6)  # their sum is float32
        scalars = [torch.cat([p.detach().reshape(-1) for p in found.scalars.parameters()]) for found in results]
        assert scalars[0].sub(1).abs().max() > 1e-3
        torch.testing.assert_close(scalars[1], scalars[0], rtol=0, atol=1e-12)
        assert results[1].flops > 1.2 * results[0].flops


def kept_bytes(model, checkpointing):
    """Bytes of the storages that are alive between the forward and the backward pass of a step, but the weights."""
    batch = make_batches(plain.sentences(4, seed=21), 4)[0]
    anatomy, classifier = prove(model, batch.inputs)
    scalars = Scalars(anatomy.num_layers, {2})
    with Switches(anatomy) as switches, frozen(model):
        scorer = Scorer(anatomy, classifier, switches, "attention", batch)
        tracker = AllocationTracker([*model.parameters(), *model.buffers(), *scalars.parameters()])
        with tracker:
            states = scorer.states(batch, Variant({2}), scalars, checkpointing=checkpointing)
            before = tracker.now
            states.sum().backward()
    return before, tracker.peak, batch.where.numel() * anatomy.width * 4


def test_gradient_checkpointing_keeps_one_state_a_layer():
    """What is kept grows by one state with every further layer; without checkpointing by all that is in a block."""
    (few, few_peak, state), (many, many_peak, _) = (kept_bytes(plain.fresh(n, 32).eval(), True) for n in (3, 9))
    assert many - few == 6 * state
    assert state * 6 <= many_peak - few_peak < 7 * state  # the backward pass holds one block at a time
    (few_all, *_), (many_all, *_) = (kept_bytes(plain.fresh(n, 32).eval(), False) for n in (3, 9))
    assert many_all - few_all > 15 * 6 * state
    # A whole block fits beside the states that are kept.
    assert many_peak - many < 2 * (many_all - few_all) / 6 + 4 * state


BLANK = Example(torch.arange(3, 9), torch.full((6,), -100), 0)
REFUSED = [
    ("layer 6", {"blocks": {6}}),
    ("no examples", {"train": [BLANK]}),
    ("no token counts", {"heldout": []}),
    ("epochs", {"epochs": 0}),
    ("learning_rate", {"learning_rate": -1.0}),
    ("per_channel", {"per_channel": True}),
    ("granularity", {"granularity": "head"}),
    ("BertForMaskedLM", {"model": tm.build("bert")}),
]


@pytest.mark.parametrize(("words", "changes"), REFUSED)
def test_what_cannot_be_fitted_is_refused(model, words, changes):
    given = {"blocks": {1}, "train": plain.sentences(4, 21), "heldout": plain.sentences(4, 22)}
    with pytest.raises(FulldepthError, match=words):
        fit_scales(**{"model": model, **given, **changes})

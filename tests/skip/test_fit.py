"""Training of scalars against a loop written by the definition; what moves, what must not, and when it ends."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

import tiny_models as tm
from fulldepth.core.progress import Watcher
from fulldepth.execution.flops import Variant
from fulldepth.execution.memory import AllocationTracker
from fulldepth.execution.scoring import Scorer, make_batches
from fulldepth.execution.verify import prove
from fulldepth.hf import Block, frozen
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches
from fulldepth.skip.fit import fit_scales
from refusals import refused
from skip import plain, planned
from tiny_models import seeded

LAYERS = 5
TRAIN, HELDOUT = plain.sentences(10, seed=21), plain.sentences(6, seed=22)


@pytest.fixture(scope="module")
def model():
    """A model with something to heal: two MLPs are too loud, two too soft."""
    model = plain.trained(LAYERS, 32, 200)
    with torch.no_grad():
        for block, change in zip(model.model.layers, (1.8, 0.4, 2.2, 0.4, 1.0), strict=True):
            block.mlp.down_proj.weight *= change
    return model


def trajectory(model, skipped, epochs, rate, batch_size, seed):
    """Adam as Kingma and Ba write it, on the definition in float64; factors and held-out losses."""
    model, values, factors = copy.deepcopy(model).double().requires_grad_(False), {}, {}
    for layer in range(1, LAYERS + 1):
        names = planned.NAMES[2:] if layer in skipped else planned.NAMES
        own = {name: torch.ones((), dtype=torch.float64, requires_grad=True) for name in names}
        values |= {(layer, name): value for name, value in own.items()}
        factors[layer] = {"b_att": 0.0, "s_att": 1.0} | own
    planned.scale(model, factors)
    first, second = ({key: torch.zeros_like(value) for key, value in values.items()} for _ in range(2))
    losses, kept, step = [plain.loss(model, HELDOUT, (), "attention")], [], 0
    for epoch in range(1, epochs + 1):
        order = torch.randperm(len(TRAIN), generator=seeded(seed * 1_000_003 + epoch))
        for at in order.split(batch_size):
            rows, targets = [], []
            for example in (TRAIN[int(index)] for index in at):
                counts = example.labels[1:] != -100
                rows.append(model(input_ids=example.input_ids[None], use_cache=False).logits[0, :-1][counts])
                targets.append(example.labels[1:][counts])
            loss = functional.cross_entropy(torch.cat(rows), torch.cat(targets))
            step += 1
            for key, slope in zip(values, torch.autograd.grad(loss, list(values.values())), strict=True):
                first[key] = 0.9 * first[key] + 0.1 * slope
                second[key] = 0.999 * second[key] + 0.001 * slope**2
                with torch.no_grad():
                    size = (second[key] / (1 - 0.999**step)).sqrt() + 1e-8
                    values[key] -= rate * first[key] / (1 - 0.9**step) / size
        losses.append(plain.loss(model, HELDOUT, (), "attention"))
        kept.append({key: value.detach().clone() for key, value in values.items()})
    return kept, losses


@pytest.mark.parametrize("skipped", [{2, 3}, set()])
def test_the_scalars_go_where_adam_takes_them(model, skipped):
    options = {"epochs": 3, "batch_size": 4, "seed": 5}
    found = fit_scales(model, skipped, TRAIN, HELDOUT, learning_rate=1e-2, micro_batch_size=2, patience=9, **options)
    kept, losses = trajectory(model, skipped, rate=1e-2, **options)
    assert found.losses == pytest.approx(losses, rel=2e-5)
    assert found.epoch == found.losses.index(min(found.losses)) > 0
    assert found.heldout_loss == found.losses[found.epoch]
    scalars = {(n, name): value for n in range(1, LAYERS + 1) for name, value in found.scalars.get(n).items()}
    assert scalars.keys() == kept[0].keys()
    for key, value in kept[found.epoch - 1].items():
        assert scalars[key].dtype == torch.float32
        assert (scalars[key].double() - value).abs() < 1e-5, key


def test_the_best_epoch_is_kept_and_patience_ends_the_rest(model):
    train, heldout, told = plain.sentences(2, seed=21), plain.sentences(8, seed=33), []
    watcher = Watcher(begin=lambda title, total: told.append([title, total]), advance=told.append)
    options = {"learning_rate": 0.06, "epochs": 12, "batch_size": 3}
    long = fit_scales(model, {2}, train, heldout, patience=12, **options)
    best = min(range(13), key=long.losses.__getitem__)
    assert 0 < best < 9, "the rate must be such that something is learnt, and that it overshoots"
    found = fit_scales(model, {2}, train, heldout, patience=2, watcher=watcher, **options)
    ends = next(e for e in range(2, 13) if min(long.losses[: e - 1]) <= min(long.losses[e - 1 : e + 1]))
    assert found.losses == long.losses[: ends + 1]
    assert len(found.train_losses) == ends
    assert found.heldout_loss == found.losses[found.epoch] == min(found.losses)
    assert told[0] == ["Scalars: healing", 12]
    assert sum(told[1:]) == 12


def test_only_the_scalars_of_a_bfloat16_model_are_trained_in_float32(model):
    model = copy.deepcopy(model).to(torch.bfloat16).train()
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)
    asked, before = [p.requires_grad for p in model.parameters()], copy.deepcopy(model.state_dict())
    found = fit_scales(model, {2, 3}, plain.sentences(16, 21), HELDOUT, epochs=4, batch_size=8, patience=9)
    values = torch.stack([factor.detach() for factor in found.scalars.parameters()])
    # In bfloat16 the next number above 1 is 1.0078; steps of 0.003 would never get there.
    assert ((values > 1.003) & (values < 1.0078)).any()
    assert min(found.losses[1:]) < found.losses[0]
    assert tm.same_weights(model, before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == asked
    assert model.training
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("granularity", ["attention", "layer"])
def test_gradient_checkpointing_changes_no_result(model, granularity):
    model = copy.deepcopy(model).double()
    options = {"epochs": 2, "batch_size": 5, "granularity": granularity}
    first, again = (fit_scales(model, {2}, TRAIN, HELDOUT, checkpointing=again, **options) for again in (False, True))
    assert again.losses == pytest.approx(first.losses, rel=1e-12, abs=0)
    assert again.train_losses == pytest.approx(first.train_losses, rel=1e-6)  # their sum is float32
    assert_close(list(again.scalars.parameters()), list(first.scalars.parameters()), rtol=0, atol=1e-12)
    assert first.epoch
    assert again.flops > 1.2 * first.flops


def kept_bytes(layers, checkpointing):
    """Bytes of the storages that are alive between the forward and the backward pass, their peak, those of a state."""
    model, batch = plain.fresh(layers, 32).eval(), make_batches(plain.sentences(4, seed=21), 4)[0]
    anatomy, classifier = prove(model, batch.inputs)
    scalars = Scalars(layers, {2})
    with Switches(anatomy) as switches, frozen(model):
        scorer = Scorer(anatomy, classifier, switches, batch)
        with AllocationTracker([*model.parameters(), *model.buffers(), *scalars.parameters()]) as tracker:
            states = scorer.states(batch, Variant({Block(2, "attention")}), scalars, checkpointing=checkpointing)
            before = tracker.now
            states.sum().backward()
    return before, tracker.peak, batch.where.numel() * anatomy.width * 4


def test_gradient_checkpointing_keeps_one_state_a_layer():
    """What is kept grows by one state with every further layer; without checkpointing by all that is in a block."""
    (few, few_peak, state), (many, many_peak, _) = (kept_bytes(n, True) for n in (3, 9))
    assert many - few == 6 * state
    assert state * 6 <= many_peak - few_peak < 7 * state  # the backward pass holds one block at a time
    (few_all, *_), (many_all, *_) = (kept_bytes(n, False) for n in (3, 9))
    assert many_all - few_all > 15 * 6 * state
    assert many_peak - many < 2 * (many_all - few_all) / 6 + 4 * state  # a whole block beside the states that are kept


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        ("layer 6", {"blocks": {6}}),
        ("no examples", {"train": [plain.BLANK]}),
        ("no token counts", {"heldout": []}),
        ("learning_rate", {"learning_rate": -1.0}),
        ("granularity", {"granularity": "head"}),
        ("BertForMaskedLM", {"model": tm.build("bert")}),
    ],
)
def test_what_cannot_be_fitted_is_refused(model, words, changes):
    with refused(words):
        fit_scales(**{"model": model, "blocks": {1}, "train": TRAIN, "heldout": HELDOUT, **changes})

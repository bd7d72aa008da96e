"""Scalars against the formulas in hooks on stock modules in float64, and against other numbers than those they hold."""

import copy
import math

import pytest
import torch
from torch.testing import assert_close

import tiny_models as tm
from fulldepth.execution import find_anatomy
from fulldepth.hf import GRANULARITIES, Scalars, Switches, skipping
from refusals import refused
from skip import planned
from tiny_models import seeded


def random_scalars(skipped=(), granularity="attention", seed=0, num_layers=3):
    generator = seeded(seed)
    scalars = Scalars(num_layers, skipped, granularity)
    with torch.no_grad():
        for factor in scalars.parameters():
            factor.uniform_(0.5, 1.5, generator=generator)
    return scalars


def definition(model, scalars):
    """A copy in float64 with hooks that compute the formulas, and its factors `[layer][name]`."""
    stock, factors = copy.deepcopy(model).double(), {}
    for layer in (1, 2, 3):
        own = {name: value.detach().double().requires_grad_() for name, value in scalars.get(layer).items()}
        factors[layer] = {"b_att": 0.0, "s_att": 1.0} | own
    planned.scale(stock, factors)
    return stock, factors


@pytest.mark.parametrize("skipped", [set(), {1}, {2, 3}])
@pytest.mark.parametrize("name", ["llama", "gpt_neox", "granite"])
def test_logits_and_gradients_are_those_of_the_formulas(name, skipped):
    """Serial and parallel blocks, and one that multiplies its branches."""
    model, ids = tm.build(name).requires_grad_(False), tm.inputs(tm.build("llama"))["input_ids"]
    scalars = random_scalars(skipped)
    stock, factors = definition(model, scalars)
    expected = stock(input_ids=ids, labels=ids)
    with skipping(find_anatomy(model), skipped, scalars=scalars):
        found = model(input_ids=ids, labels=ids)
    assert_close(found.logits.double(), expected.logits, atol=1e-4, rtol=1e-4)
    expected.loss.backward()
    found.loss.backward()
    for layer, own in factors.items():
        for factor, parameter in scalars.get(layer).items():
            assert parameter.grad.item() == pytest.approx(own[factor].grad.item(), rel=2e-3, abs=2e-5)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "gpt_neox", "granite", "opt", "falcon"])
def test_factors_of_one_change_no_bit(name, dtype):
    model = tm.build(name, dtype=dtype)
    with torch.no_grad():
        plain = model(**tm.inputs(model)).logits
        for granularity in GRANULARITIES:
            with skipping(find_anatomy(model), [], granularity, Scalars(3, (), granularity)):
                assert torch.equal(model(**tm.inputs(model)).logits, plain)
            with skipping(find_anatomy(model), [2], granularity):
                skipped = model(**tm.inputs(model)).logits
            with skipping(find_anatomy(model), [2], granularity, Scalars(3, [2], granularity)):
                assert torch.equal(model(**tm.inputs(model)).logits, skipped)


@pytest.mark.parametrize(("name", "reentrant"), [("llama", True), ("gpt_neox", False)])
def test_gradient_checkpointing_changes_nothing(name, reentrant):
    model = tm.build(name)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            model.train().activation_checkpointing_enable({"use_reentrant": reentrant})
            model.enable_input_require_grads()
        scalars = random_scalars([2])
        with skipping(find_anatomy(model), [2], scalars=scalars):
            inputs = tm.inputs(model)
            model(**inputs, labels=inputs["input_ids"], use_cache=False).loss.backward()
        gradients.append([factor.grad for factor in scalars.parameters()])
    assert_close(*gradients)


def test_scalars_for_another_set_are_refused():
    """When the model runs, since skipped layers and scalars are set one after the other; of another shape at once."""
    model = tm.build("llama")
    with Switches(find_anatomy(model)) as switches:
        switches.scalars = Scalars(3, [2])
        for skipped, works in (((), False), ([2], True), ([3], False)):
            switches.skip(skipped)
            if works:
                model(**tm.inputs(model))
            else:
                with refused("Layer 2"):
                    model(**tm.inputs(model))
        switches.scalars = None
        model(**tm.inputs(model))
        for scalars in (Scalars(4), Scalars(3, granularity="mlp")):
            with refused("These scalars are for .* layers with granularity"):
                switches.scalars = scalars


# The numbers by themselves.


@pytest.mark.parametrize(
    ("granularity", "left"), [("attention", planned.NAMES[2:]), ("mlp", planned.NAMES[:2]), ("layer", ()), ("any", ())]
)
def test_a_dictionary_gives_the_same_scalars_back(granularity, left):
    scalars = random_scalars({2}, granularity)
    assert (tuple(scalars.get(1)), tuple(scalars.get(2))) == (planned.NAMES, left)
    assert {factor.dtype for factor in scalars.parameters()} == {torch.float32}
    again = Scalars.from_dict(scalars.as_dict(), 3, granularity)
    assert (again.as_dict(), again.skipped) == (scalars.as_dict(), scalars.skipped)
    assert {layer for layer, _ in again.skipped} == {2}


@pytest.mark.parametrize(
    "second",
    [
        None,
        {},
        {"b_att": 1.0, "s_att": 1.0},
        {"b": 1.0},
        3.0,
        *({"s_att": value} for value in (math.nan, "1", [], [1.0])),
    ],
)
def test_a_dictionary_of_nonsense_is_refused(second):
    whole = dict.fromkeys(planned.NAMES, 1.0)
    added = isinstance(second, dict) and len(second) == 1
    mapping = {"1": whole} | ({} if second is None else {"2": whole | second if added else second})
    for wrong, layers in ((mapping, 2), ([], 2), ({"1": whole, "2": whole}, 1)):
        with refused():
            Scalars.from_dict(wrong, layers)

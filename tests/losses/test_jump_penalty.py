"""JREG's penalty (Eq. 2, 5, 6) against numpy in float64, its gradient against autograd of the plain formula."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch.testing import assert_close

from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM
from fulldepth.execution import capture, find_anatomy
from fulldepth.losses import Objective, jump_penalty, jump_weights, similarity_penalty
from fulldepth.losses.jump_penalty import Displacements
from losses.trained_step import is_value, kept, leaves, plain_jump
from refusals import refused


@pytest.fixture
def states(generator):
    """h_0..h_4: a residual stream that walks, with one huge channel."""
    steps = torch.randn(5, 3, 7, 6, generator=generator, dtype=torch.float64)
    steps[..., 2] *= 20
    return list(steps.cumsum(0))


@pytest.fixture
def mask():
    return torch.arange(7) < torch.tensor([7, 4, 1])[:, None]


def softmax(alpha, layers):
    """Weights of layers 1..L, in the plainest way."""
    exponents = np.exp(alpha * (np.arange(1, layers + 1) - layers))
    return exponents / exponents.sum()


def oracle(states, alpha, mask):
    """Token by token, float64."""
    states = [state.double().numpy() for state in states]
    counted = np.argwhere(np.ones(states[0].shape[:2], bool) if mask is None else mask.numpy())
    means = []
    for before, after in pairwise(states):
        cosines = [
            before[b, t] @ after[b, t] / (np.linalg.norm(before[b, t]) * np.linalg.norm(after[b, t]))
            for b, t in counted
        ]
        means.append(np.mean([1 - (1 + cosine) / 2 for cosine in cosines]))
    return means[-1] if np.isinf(alpha) else softmax(alpha, len(means)) @ means


@pytest.mark.parametrize(("alpha", "masked"), [(0.0, True), (1.0, False), (math.inf, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_value_is_the_papers_formula(states, mask, dtype, alpha, masked):
    states = [state.to(dtype) for state in states]
    mask = mask if masked else None
    is_value(jump_penalty(states, alpha, mask), oracle(states, alpha, mask), dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_gradient_is_that_of_the_plain_formula_without_zero_vectors(states, mask, dtype, tolerance):
    states[2][0, 3], states[4][1, 0] = 0.0, 0.0
    ours, theirs = leaves(states, dtype), leaves(states)
    value, expected = jump_penalty(ours, 0.3, mask), plain_jump(theirs, mask, 0.3)
    assert_close(value.double(), expected, rtol=0, atol=tolerance)
    torch.autograd.backward([value, expected])
    for mine, other in zip(ours, theirs, strict=True):
        assert_close(mine.grad.double(), other.grad, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "alpha"), [(torch.float64, 0.3), (torch.float64, math.inf), (torch.bfloat16, 0.3)])
def test_gradients_that_are_added_on_the_way_are_the_same(states, mask, generator, dtype, alpha):
    """A stack of matrices with a zero vector, which stays one; by `Displacements` and by autograd of the formula."""
    first, matrices = states[0].clone(), torch.randn(3, 6, 6, generator=generator, dtype=torch.float64)
    first[0, 3] = 0.0
    gradients = []
    for form in ("ours", "plain"):
        weights = matrices.to(dtype if form == "ours" else torch.float64).clone().requires_grad_()
        hidden = [first.to(weights.dtype, copy=True).requires_grad_()]
        for matrix in weights:
            hidden.append(hidden[-1] @ matrix)
        loss = hidden[-1].double().square().mean()
        if form == "ours":
            penalty = Displacements(hidden, alpha, mask)
            penalty.added_to(loss, 70.0).backward()
        else:
            expected = plain_jump(hidden, mask, alpha)
            (loss + 70.0 * expected).backward()
        gradients.append(weights.grad)
    exact = dtype == torch.float64
    assert penalty.value == pytest.approx(expected.item(), rel=1e-12 if exact else 0.02)
    if exact:
        assert_close(*gradients, rtol=1e-10, atol=1e-10)
    assert torch.cosine_similarity(*(g.double().flatten() for g in gradients), dim=0) > 0.999


@pytest.mark.parametrize("garbage", [math.nan, 3e38])
@pytest.mark.parametrize("penalty", [jump_penalty, similarity_penalty])
def test_what_does_not_count_has_no_effect(states, mask, penalty, garbage):
    clean, dirty = leaves(states, torch.float32), leaves(states, torch.float32)
    for state in dirty:
        state.data[~mask] = garbage
    value, expected = penalty(dirty, mask=mask.long()), penalty(clean, mask=mask)
    assert value == expected
    torch.autograd.backward([value, expected])
    for mine, other in zip(dirty, clean, strict=True):
        assert torch.equal(mine.grad, other.grad)
        assert not mine.grad[~mask].any()
    dirty[1].data[0, 0] = math.nan
    assert penalty(dirty, mask=mask).isnan()


def test_only_the_states_are_kept_and_a_changed_one_is_noticed(states):
    inputs = leaves(states, torch.bfloat16)
    _, saved = kept(lambda: jump_penalty(inputs))
    assert {x.data_ptr() for x in saved if x.numel() > 1} <= {state.data_ptr() for state in inputs}
    middle = [state * 1 for state in inputs]
    penalty = Displacements(middle)
    loss = penalty.added_to(middle[-1].sum(), 1.0)
    middle[3].add_(1.0)
    with refused("h_3, which the displacement penalty reads, was overwritten"):
        loss.backward()


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([torch.zeros(2, 3, 4)] * 4, 0.0),
        ([scale * torch.arange(1.0, 25).view(2, 3, 4) for scale in (1, 3, -1)], softmax(1.0, 2)[1]),
    ],
)
def test_zero_states_and_copies_have_no_gradient(states, expected):
    inputs = leaves(states, torch.float32)
    for mask, value in ((None, expected), (torch.zeros(2, 3, dtype=torch.bool), 0.0)):
        found = jump_penalty(inputs, 1.0, mask)
        found.backward()
        assert found.item() == pytest.approx(value, abs=1e-6)
        assert all(state.grad.abs().max() < 1e-6 for state in inputs)


@pytest.mark.parametrize("layers", [1, 30])
def test_weights_of_the_layers(layers):
    for alpha in (0.0, 0.1, 1e3):
        assert_allclose(jump_weights(layers, alpha), softmax(alpha, layers), rtol=1e-13, atol=0)
    assert jump_weights(layers, math.inf).tolist() == [0.0] * (layers - 1) + [1.0]


@pytest.mark.parametrize(
    ("switches", "terms"),
    [
        ({"residual": "tree", "tree": {3: [0, 1]}}, {}),  # nothing reads the output of layer 2
        ({}, {"aligned": {"weights": [1, 1, 1, 1, 0], "schedule": "always"}}),
    ],
)
def test_a_state_that_the_loss_does_not_read_gets_the_gradient_of_the_penalty_alone(switches, terms):
    """Oracle: `jump_penalty` of captured states, through the graph."""
    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    config = DepthLlamaConfig(**sizes, num_key_value_heads=2, num_hidden_layers=5, **switches)
    torch.manual_seed(0)
    model = DepthLlamaForCausalLM(config).double()
    batch = {"input_ids": torch.arange(12).view(2, 6), "labels": torch.arange(12).view(2, 6)}

    def slopes(loss):
        model.zero_grad()
        loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    with Objective(jump=0.7, **terms).attach(model) as objective:
        got = slopes(objective(model(**batch), batch)[0])
    with capture(find_anatomy(model), ["residual"], grad=True) as states, Objective(**terms).attach(model) as objective:
        loss = objective(model(**batch), batch)[0]
        expected = slopes(loss + 0.7 * jump_penalty(states["residual"]))
    assert "model.layers.2.mlp.down_proj.weight" in got
    assert_close(got, expected, rtol=1e-9, atol=1e-12)

"""Cosine regulariser of aligned training (App. B.3) against numpy in float64."""

import numpy as np
import pytest
import torch

from fulldepth.errors import FulldepthError
from fulldepth.losses.similarity_penalty import similarity_penalty

LAYERS = 4
WEIGHTS = {
    "linear": [2 * layer / (LAYERS * (LAYERS + 1)) for layer in range(1, LAYERS + 1)],
    "uniform": [1 / LAYERS] * LAYERS,
    (0.0, 2.0, 0.5, 7.0): [0.0, 2.0, 0.5, 7.0],
}


@pytest.fixture
def states(generator):
    """h_1..h_4."""
    return list(torch.randn(LAYERS, 3, 5, 6, generator=generator, dtype=torch.float64).cumsum(0) + 0.3)


@pytest.fixture
def mask():
    return torch.arange(5) < torch.tensor([5, 2, 3])[:, None]


def oracle(states, weights, mask):
    states = [state.double().numpy() for state in states]
    last, total = states[-1], 0.0
    for weight, state in zip(weights, states, strict=True):
        distances = [
            1 - state[b, t] @ last[b, t] / np.sqrt((state[b, t] @ state[b, t]) * (last[b, t] @ last[b, t]))
            for b, t in np.argwhere(mask)
        ]
        total += weight * np.mean(distances)
    return total


def leaves(states, dtype=torch.float64):
    return [state.detach().to(dtype, copy=True).requires_grad_() for state in states]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_value_is_the_papers_formula(states, mask, dtype, weights):
    states = [state.to(dtype) for state in states]
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    for counted in (mask, None):
        value = similarity_penalty(states, weights, counted)
        expected = oracle(states, WEIGHTS[weights], np.ones((3, 5)) if counted is None else counted.numpy())
        np.testing.assert_allclose(value.item(), expected, rtol=0, atol=tolerance)
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_gradient_is_that_of_the_plain_formula(states, mask):
    ours, theirs = leaves(states), leaves(states)
    similarity_penalty(ours, "linear", mask).backward()
    sum(
        weight * (1 - torch.cosine_similarity(state, theirs[-1], dim=-1))[mask].mean()
        for weight, state in zip(WEIGHTS["linear"], theirs, strict=True)
    ).backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_pooled_states(states):
    pooled = [state[:, 0] for state in states]
    expected = oracle([state[:, None] for state in pooled], WEIGHTS["linear"], np.ones((3, 1)))
    np.testing.assert_allclose(similarity_penalty(pooled).item(), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("garbage", [float("nan"), 3e38])
def test_what_does_not_count_has_no_effect(states, mask, garbage):
    clean, dirty = leaves(states, torch.float32), leaves(states, torch.float32)
    with torch.no_grad():
        for state in dirty:
            state[~mask] = garbage
    value, expected = similarity_penalty(dirty, mask=mask), similarity_penalty(clean, mask=mask)
    assert value == expected
    torch.autograd.backward([value, expected])
    for mine, other in zip(dirty, clean, strict=True):
        assert torch.equal(mine.grad, other.grad)
        assert not mine.grad[~mask].any()


@pytest.mark.parametrize("layers", [1, 3])
def test_nothing_to_compare(states, mask, layers):
    zeros = leaves([torch.zeros(2, 3, 4)] * layers)
    value = similarity_penalty(zeros)  # zero vectors have no direction: no token is left
    value.backward()
    assert value == 0
    assert not any(state.grad.any() for state in zeros)
    nobody = leaves(states[:layers])
    value = similarity_penalty(nobody, mask=torch.zeros_like(mask))
    value.backward()
    assert value == 0
    assert not any(state.grad.any() for state in nobody)


@pytest.mark.parametrize(
    ("count", "weights", "word"),
    [(0, "linear", "hidden states"), (4, "linar", "linear"), (4, [1.0, 2.0], "4 finite weights")],
)
def test_mistakes_are_refused(states, count, weights, word):
    with pytest.raises(FulldepthError, match=word):
        similarity_penalty(states[:count], weights)

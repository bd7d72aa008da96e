"""Cosine regulariser of aligned training (App. B.3) against the plain formula in float64."""

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


def plain(states, weights, mask):
    """The formula as anyone would write it."""
    return sum(
        weight * (1 - torch.cosine_similarity(state.double(), states[-1].double(), dim=-1))[mask].mean()
        for weight, state in zip(weights, states, strict=True)
    )


def leaves(states, dtype=torch.float64):
    return [state.detach().to(dtype, copy=True).requires_grad_() for state in states]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.bfloat16, 1e-6)])
def test_value_and_gradient_are_the_papers_formula(states, mask, dtype, tolerance, weights):
    states = [state.to(dtype) for state in states]
    for counted in (mask, None):
        ours, theirs = leaves(states, dtype), leaves(states)
        value = similarity_penalty(ours, weights, counted)
        expected = plain(theirs, WEIGHTS[weights], torch.ones_like(mask) if counted is None else counted)
        assert value.item() == pytest.approx(expected.item(), abs=tolerance)
        assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.autograd.backward([value, expected])
        for mine, other in zip(ours, theirs, strict=True) if dtype == torch.float64 else ():
            slope = torch.zeros_like(mine) if mine.grad is None else mine.grad  # of a layer without weight
            torch.testing.assert_close(slope, other.grad, rtol=1e-12, atol=1e-12)
    pooled = [state[:, 0] for state in states]  # [B, D]
    expected = plain(pooled, WEIGHTS[weights], torch.ones(3, dtype=torch.bool))
    assert similarity_penalty(pooled, weights).item() == pytest.approx(expected.item(), abs=tolerance)


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

"""Cosine regulariser of aligned training (App. B.3) against the plain formula in float64."""

import pytest
import torch
from torch.testing import assert_close

from fulldepth.losses.similarity_penalty import SimilarityPenalty, similarity_penalty
from losses.trained_step import is_value, leaves

LAYERS = 4
WEIGHTS = {
    "linear": [2 * layer / (LAYERS * (LAYERS + 1)) for layer in range(1, LAYERS + 1)],
    "uniform": [1 / LAYERS] * LAYERS,
    "sum": [1.0] * LAYERS,
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


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_value_and_gradient_are_the_papers_formula(states, mask, dtype, weights):
    states, everything = [state.to(dtype) for state in states], torch.ones_like(mask)
    for counted in (mask, None):
        ours, theirs = leaves(states, dtype), leaves(states)
        value = similarity_penalty(ours, weights, counted)
        expected = plain(theirs, WEIGHTS[weights], everything if counted is None else counted)
        is_value(value, expected.detach(), dtype)
        torch.autograd.backward([value, expected])
        for mine, other in zip(ours, theirs, strict=True) if dtype == torch.float64 else ():
            slope = torch.zeros_like(mine) if mine.grad is None else mine.grad  # of a layer without weight
            assert_close(slope, other.grad, rtol=1e-12, atol=1e-12)
    pooled = [state[:, 0] for state in states]  # [B, D]
    is_value(similarity_penalty(pooled, weights), plain(pooled, WEIGHTS[weights], everything[:, 0]), dtype)


@pytest.mark.parametrize("layers", [2, 5])
def test_the_range_is_that_of_the_docstring(states, layers):
    """Layers that are opposite to the last one reach its upper end, which depends on the weights."""
    last = states[-1]
    opposite = [-last] * (layers - 1) + [last]
    docstring = " ".join(similarity_penalty.__doc__.split())
    others = layers - 1
    ends = {
        "linear": ("2 (L - 1) / (L + 1) with", 2 * others / (layers + 1)),
        "uniform": ("2 (L - 1) / L with", 2 * others / layers),
        "sum": ("2 (L - 1) with", 2 * others),
    }
    for weights, (text, end) in ends.items():
        assert text in docstring
        assert f'`"{weights}"` for' in docstring
        assert similarity_penalty(opposite, weights).item() == pytest.approx(end, rel=1e-12)
        assert SimilarityPenalty(weight=1.0, weights=weights).weights == weights
    numbers = [0.5 + layer for layer in range(layers)]
    assert similarity_penalty(opposite, numbers).item() == pytest.approx(2 * sum(numbers[:-1]), rel=1e-12)


@pytest.mark.parametrize("layers", [1, 3])
def test_nothing_to_compare(states, layers):
    nobody = torch.zeros(2, 3, dtype=torch.bool)
    zeros = [torch.zeros(2, 3, 4)] * layers  # zero vectors have no direction: no token is left
    for given, counted in ((zeros, None), ([state[:2, :3] for state in states[:layers]], nobody)):
        inputs = leaves(given)
        value = similarity_penalty(inputs, mask=counted)
        value.backward()
        assert value == 0
        assert not any(state.grad.any() for state in inputs)

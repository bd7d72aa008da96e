"""Orthogonality of channels (CR, Listing 2) against the listing in float64 and closed forms."""

import sys

import pytest
import torch
from numpy.testing import assert_allclose
from scipy.stats import ortho_group
from torch.testing import assert_close

from fulldepth.losses.orthogonality_penalty import orthogonality_penalty
from fulldepth.losses.term import block_size
from losses.trained_step import is_value, kept

SHAPES = [(3, 9, 5), (3, 5, 8), (2, 3, 8), (2, 1, 4)]
"""Long, wide, so wide that the other Gram matrix is used, and one position."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """One or two sequences at a time."""
    monkeypatch.setattr(sys.modules[block_size.__module__], "CPU_BLOCK", 100)


@pytest.fixture
def states(generator):
    def make(shape, dtype=torch.float64):
        common = torch.randn(shape[0], shape[1], 1, generator=generator, dtype=torch.float64)
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 2 * common).to(dtype)

    return make


def listing(h, form="mean", eps=1e-8):
    """The paper's listing, for autograd."""
    unit = h / (h.norm(dim=1, keepdim=True) + eps)
    squares = (unit.transpose(1, 2) @ unit - torch.eye(h.shape[-1], dtype=h.dtype)).square()
    return squares.mean() if form == "mean" else squares.sum((1, 2)).mean()


@pytest.mark.parametrize("form", ["mean", "frobenius"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_value_is_the_papers_formula(states, dtype, shape, form):
    h = states(shape, dtype)
    is_value(orthogonality_penalty(h, form=form), listing(h.double(), form), dtype)


@pytest.mark.parametrize("options", [{}, {"form": "frobenius", "eps": 0.3}], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradient_is_that_of_the_listing(states, shape, options):
    h = states(shape).requires_grad_()
    (expected,) = torch.autograd.grad(listing(h, **options), h)
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        x = h.detach().to(dtype).requires_grad_()
        orthogonality_penalty(x, **options).backward()
        assert_close(x.grad.double(), expected, rtol=tolerance, atol=tolerance * max(1.0, float(expected.abs().max())))


@pytest.mark.parametrize("garbage", [float("nan"), 3e38])
def test_masked_positions_are_as_if_absent(states, garbage):
    h = states((3, 9, 5), torch.float32).requires_grad_()
    mask = torch.arange(9) < torch.tensor([9, 4, 6])[:, None]
    dirty = h.detach().masked_fill(~mask[..., None], garbage).requires_grad_()
    value = orthogonality_penalty(dirty, mask=mask)
    value.backward()
    alone = [orthogonality_penalty(h[None, i, : mask[i].sum()]) for i in range(3)]
    expected = sum(alone) / 3
    expected.backward()
    assert_close(value, expected, rtol=1e-6, atol=0)
    assert_close(dirty.grad, h.grad, rtol=1e-5, atol=1e-7)
    assert not dirty.grad[~mask].any()


def test_closed_forms():
    basis = torch.from_numpy(ortho_group.rvs(8, random_state=0))
    orthogonal = 5 * basis[None, :, :6]  # six orthogonal channels over eight positions
    assert_allclose(orthogonality_penalty(orthogonal).item(), 0, atol=1e-15)
    equal = basis[None, :, :1].expand(1, 8, 6)
    assert_allclose(orthogonality_penalty(equal).item(), 30 / 36, rtol=1e-7)
    assert_allclose(orthogonality_penalty(equal, form="frobenius").item(), 30, rtol=1e-7)


@pytest.mark.parametrize("shape", [(2, 6, 4), (2, 2, 6)])
def test_zero_channels_are_harmless(states, shape):
    zeros = torch.zeros(shape, requires_grad=True)
    value = orthogonality_penalty(zeros)
    value.backward()
    assert_allclose(value.item(), 1 / shape[2])  # G = 0: the diagonal is 1 away
    assert not zeros.grad.any()
    h = states(shape)
    h[..., 1] = 0
    h.requires_grad_()
    orthogonality_penalty(h).backward()
    assert h.grad.isfinite().all()
    assert not h.grad[..., 1].any()


def test_only_the_states_are_kept_and_autocast_changes_nothing(states):
    plain = states((3, 9, 5), torch.float32).requires_grad_()
    orthogonality_penalty(plain).backward()
    h = plain.detach().clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value, saved = kept(lambda: orthogonality_penalty(h))
    value.backward()
    storage = h.untyped_storage().data_ptr()
    assert {x.untyped_storage().data_ptr() for x in saved if x.numel() > 1} == {storage}
    assert torch.equal(value, orthogonality_penalty(plain))
    assert torch.equal(h.grad, plain.grad)

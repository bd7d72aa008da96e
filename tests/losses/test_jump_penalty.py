"""JREG's penalty (Eq. 2, 5, 6) against numpy in float64, its gradient against autograd of the plain formula."""

import math
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fulldepth.errors import FulldepthError
from fulldepth.losses.displacement import Displacements, displacement_gradient, displacement_parts
from fulldepth.losses.jump_penalty import jump_penalty, jump_weights
from fulldepth.losses.term import blocks
from fulldepth.metrics import displacement


@pytest.fixture
def states(generator):
    """h_0..h_4: a residual stream that walks, with one huge channel."""
    steps = torch.randn(5, 3, 7, 6, generator=generator, dtype=torch.float64)
    steps[..., 2] *= 20
    return list(steps.cumsum(0))


@pytest.fixture
def mask():
    return torch.arange(7) < torch.tensor([7, 4, 1])[:, None]


@pytest.fixture
def small_blocks(monkeypatch):
    """Two rows of six at a time, so that every tensor here takes several blocks."""
    monkeypatch.setattr(sys.modules[blocks.__module__], "CPU_BLOCK", 13)


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


def plain(states, alpha, mask=None):
    """The formula as anyone would write it, for autograd."""
    weights = jump_weights(len(states) - 1, alpha).tolist()
    total = 0.0
    for weight, before, after in zip(weights, *zip(*pairwise(states), strict=True), strict=True):
        psi = (1 - torch.cosine_similarity(before, after, dim=-1)) / 2
        total = total + weight * (psi if mask is None else psi[mask]).mean()
    return total


def leaves(states, dtype=torch.float64):
    return [state.detach().to(dtype, copy=True).requires_grad_() for state in states]


@pytest.mark.parametrize(("alpha", "masked"), [(0.0, True), (1.0, False), (float("inf"), True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_value_is_the_papers_formula(states, mask, small_blocks, dtype, alpha, masked):
    states = [state.to(dtype) for state in states]
    value = jump_penalty(states, alpha, mask if masked else None)
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-6
    np.testing.assert_allclose(value.item(), oracle(states, alpha, mask if masked else None), rtol=0, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_gradient_is_that_of_the_plain_formula(states, mask, small_blocks, dtype, tolerance):
    ours, theirs = leaves(states, dtype), leaves(states)
    jump_penalty(ours, 0.3, mask).backward()
    plain(theirs, 0.3, mask).backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=tolerance, atol=tolerance)


def test_half_precision_is_float32_inside(states, mask, small_blocks):
    dtype = torch.bfloat16
    halves = [state.to(dtype) for state in states]
    ours, wide = leaves(halves, dtype), leaves(halves, torch.float32)
    value, exact = jump_penalty(ours, 1.0, mask), jump_penalty(wide, 1.0, mask)
    assert torch.equal(value, exact)
    torch.autograd.backward([value, exact])
    for mine, other in zip(ours, wide, strict=True):  # a state's two gradients are rounded before they are added
        atol = float(torch.finfo(dtype).eps * other.grad.abs().max())
        torch.testing.assert_close(mine.grad.float(), other.grad, rtol=0, atol=atol)
    pairs = [(h[0].detach(), h[1].detach()) for h in (ours, wide)]
    got, exact = (displacement_gradient(*pair, displacement_parts(*pair), 0.3, "current") for pair in pairs)
    assert torch.equal(got, exact.to(dtype))


@pytest.mark.parametrize("wrt", ["previous", "current"])
@pytest.mark.parametrize("per_token", [False, True])
def test_closed_form_is_autograds_gradient(states, generator, small_blocks, wrt, per_token):
    weight = torch.randn(3, 7, generator=generator, dtype=torch.float64) if per_token else 0.7
    previous, current = leaves(states[:2])
    psi = (1 - torch.cosine_similarity(previous, current, dim=-1)) / 2
    (weight * psi).sum().backward()
    expected = previous.grad if wrt == "previous" else current.grad
    for scattered in (False, True):  # also states that are no view of [B T, D]
        if scattered:
            previous, current = (x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in (previous, current))
        parts = displacement_parts(previous, current)
        torch.testing.assert_close(parts.displacement, psi.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(parts.norm_previous, previous.detach().norm(dim=-1), rtol=1e-12, atol=0)
        got = displacement_gradient(previous, current, parts, weight, wrt)
        torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("garbage", [float("nan"), 3e38])
def test_what_does_not_count_has_no_effect(states, mask, garbage):
    clean, dirty = leaves(states, torch.float32), leaves(states, torch.float32)
    with torch.no_grad():
        for state in dirty:
            state[~mask] = garbage
    value, expected = jump_penalty(dirty, 1.0, mask.long()), jump_penalty(clean, 1.0, mask)
    assert value == expected
    torch.autograd.backward([value, expected])
    for mine, other in zip(dirty, clean, strict=True):
        assert torch.equal(mine.grad, other.grad)
        assert not mine.grad[~mask].any()


def test_no_token_counts(states, mask):
    inputs = leaves(states)
    value = jump_penalty(inputs, 1.0, torch.zeros_like(mask))
    value.backward()
    assert value == 0
    assert not any(state.grad.any() for state in inputs)


@pytest.mark.parametrize(("alpha", "dtype"), [(0.3, torch.float32), (float("inf"), torch.float64)])
def test_zero_vectors_are_left_out_as_by_the_measure(states, mask, small_blocks, dtype, alpha):
    """Layer by layer the mean of the measure's function where it is a number; the gradient is that of the rest."""
    states[2][0, 3], states[4][1, 0] = 0.0, 0.0
    inputs, oracles = leaves(states, dtype), leaves(states)
    value = jump_penalty(inputs, alpha, mask)
    psi = [displacement(*pair)[mask] for pair in pairwise(oracles)]
    means = [layer[~layer.isnan()].mean() for layer in psi]
    assert [int(layer.isnan().sum()) for layer in psi] == [0, 1, 1, 1]
    expected = sum(w * mean for w, mean in zip(jump_weights(4, alpha).tolist(), means, strict=True))
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(value.double(), expected, rtol=0, atol=tolerance)
    value.backward()
    rest = [torch.cosine_similarity(*pair, dim=-1)[mask & ~displacement(*pair).isnan()] for pair in pairwise(oracles)]
    sum(w * (1 - c).mean() / 2 for w, c in zip(jump_weights(4, alpha).tolist(), rest, strict=True)).backward()
    for state, other in list(zip(inputs, oracles, strict=True))[3 * math.isinf(alpha) :]:
        torch.testing.assert_close(state.grad.double(), other.grad, rtol=tolerance, atol=tolerance)


def test_gradients_that_are_added_on_the_way_leave_zero_vectors_out(states, mask, generator):
    """A stack of matrices, in which a zero vector stays one; against autograd of the formula on the other tokens."""
    first, matrices = states[0].clone(), torch.randn(3, 6, 6, generator=generator, dtype=torch.float64)
    first[0, 3] = 0.0
    weights = jump_weights(3, 0.3).tolist()

    def stream(matrices):
        hidden = [first.clone().requires_grad_()]
        for matrix in matrices:
            hidden.append(hidden[-1] @ matrix)
        return hidden

    (ours, plain_matrices) = (matrices.clone().requires_grad_() for _ in range(2))
    hidden = stream(ours)
    penalty = Displacements(hidden, weights, mask)
    penalty.added_to(hidden[-1].square().mean(), 0.7).backward()
    hidden, rest = stream(plain_matrices), mask.clone()
    rest[0, 3] = False
    expected = plain([state[rest][None] for state in hidden], 0.3)
    torch.testing.assert_close(penalty.value, expected, rtol=0, atol=1e-12)
    (hidden[-1].square().mean() + 0.7 * expected).backward()
    torch.testing.assert_close(ours.grad, plain_matrices.grad, rtol=1e-10, atol=1e-12)


def test_zero_states_and_copies_are_harmless(states):
    zeros = leaves([torch.zeros(2, 3, 4)] * 4, torch.float32)
    value = jump_penalty(zeros)
    value.backward()
    assert value == 0
    assert not any(state.grad.any() for state in zeros)
    copies = leaves([states[0], 3 * states[0], -states[0]], torch.float32)
    parts = displacement_parts(copies[0], copies[1])
    assert parts.cos.max() <= 1
    value = jump_penalty(copies)
    value.backward()
    np.testing.assert_allclose(value.item(), softmax(1.0, 2) @ [0, 1], atol=1e-6)
    assert all(state.grad.abs().max() < 1e-6 for state in copies)


class Largest(TorchDispatchMode):
    """The most numbers of one tensor of a dtype that any operation returned."""

    def __init__(self, dtype):
        super().__init__()
        self.dtype, self.most = dtype, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.dtype == self.dtype]
        self.most = max([self.most, *sizes])
        return result


def test_states_are_never_copied(states, mask, small_blocks):
    inputs = leaves(states, torch.bfloat16)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with Largest(torch.float32) as seen, hooks:
        jump_penalty(inputs, 1.0, mask).backward()
    assert seen.most <= 3 * mask.numel()  # three numbers per token
    ours = {state.data_ptr() for state in inputs}
    assert all(x.data_ptr() in ours or x.numel() <= mask.numel() for x in saved)


def test_a_state_overwritten_before_backward_is_noticed(states):
    inputs = leaves(states)
    middle = [state * 1 for state in inputs]
    value = jump_penalty(middle)
    middle[2].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator beside the CPU")
def test_states_on_several_devices(states, mask):
    ours, theirs = leaves(states), leaves(states)
    split = [state.to("cpu" if index < 3 else "cuda") for index, state in enumerate(ours)]
    value = jump_penalty(split, 1.0, mask)
    expected = jump_penalty(theirs, 1.0, mask)
    assert value.device.type == "cuda"
    torch.autograd.backward([value, expected])
    torch.testing.assert_close(value.cpu(), expected, rtol=1e-12, atol=0)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("layers", [1, 30])
def test_weights_of_the_layers(layers):
    for alpha in (0.0, 0.1, 1.0, 3.0, 1e3):
        np.testing.assert_allclose(jump_weights(layers, alpha), softmax(alpha, layers), rtol=1e-13, atol=0)
    assert jump_weights(layers, float("inf")).tolist() == [0.0] * (layers - 1) + [1.0]


@pytest.mark.parametrize(
    ("shapes", "options", "word"),
    [
        ([(3, 7, 6)], {}, "2 hidden states"),
        ([(3, 7, 6), (3, 7, 5), (3, 7, 6)], {}, r"\(3, 7, 5\)"),
        ([(3, 7, 6)] * 2, {"mask": torch.ones(7, dtype=torch.bool)}, "mask"),
        ([(3, 7, 6)] * 2, {"mask": torch.zeros(3, 7)}, "mask"),
        ([(3, 7, 6)] * 2, {"alpha": -1.0}, "alpha"),
        ([(3, 7, 6)] * 2, {"alpha": float("nan")}, "alpha"),
    ],
)
def test_mistakes_are_refused(shapes, options, word):
    with pytest.raises(FulldepthError, match=word):
        jump_penalty([torch.zeros(shape) for shape in shapes], **options)

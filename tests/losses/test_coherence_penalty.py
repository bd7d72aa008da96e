"""CR loss (Listing 2) against the listing's own explicit COS and SIN sums in float64, its gradient by autograd."""

import math
import sys

import pytest
import torch
from torch.testing import assert_close

from fulldepth.losses.coherence_penalty import CoherencePenalty, coherence_penalty
from fulldepth.losses.orthogonality_penalty import OrthogonalityPenalty
from fulldepth.losses.term import block_size
from losses.trained_step import is_value, kept, leaves

SHAPES = [(5, 8, 3), (2, 9, 4), (3, 24, 2), (4, 2, 2), (2, 3, 2)]
SETTINGS = [
    {"layer": 2, "num_layers": 12},
    {"layer": 8, "num_layers": 12, "energy": True},
    {"layer": 0, "num_layers": 3, "energy": True, "target": 0.6, "eps": 1e-3},
    {"layer": 4, "num_layers": 12, "sharpening": False},
    {"layer": 4, "num_layers": 12, "depth_scale": False, "energy": True},
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Few channels at a time."""
    monkeypatch.setattr(sys.modules[block_size.__module__], "CPU_BLOCK", 80)


@pytest.fixture
def pair(generator):
    """Input and output that share a part; one channel of each jumps so far that the bound cuts it."""

    def make(shape, dtype=torch.float64):
        h_in = torch.randn(shape, generator=generator, dtype=torch.float64)
        h_out = h_in + 0.8 * torch.randn(shape, generator=generator, dtype=torch.float64) + 2
        h_in[:, 1, 0] += 40
        h_out[0, 0, -1] -= 30
        return h_in.to(dtype), h_out.to(dtype)

    return make


def listing(h_in, h_out, layer, num_layers, target=0.35, energy=False, eps=1e-8, sharpening=True, depth_scale=True):
    """The listing line by line (12 -> num_layers), without its lambda, by explicit COS and SIN sums."""
    length = h_in.shape[1]
    angles = 2 * math.pi * torch.arange(length // 2 + 1).double()[:, None] * torch.arange(length) / length
    sides = []
    for h in (h_in, h_out):
        z = (h - h.mean(1, keepdim=True)) / (h.std(1, keepdim=True) + eps)
        z = z / (z.abs().amax(1, keepdim=True) / (2.0 + layer / 2)).clamp(min=1)
        p = torch.softmax(z * math.sqrt(num_layers - layer) if sharpening else z, 1)
        sides.append([torch.einsum("btd,kt->bdk", p, f(angles)) for f in (torch.cos, torch.sin)])
    (a, b), (c, d) = sides
    power_in, power_out = ((re.square() + im.square() + eps).sqrt().add(eps).sum(-1) for re, im in sides)
    excess = ((power_out / (power_in + eps)).log().square() - math.log(2) ** 2).relu()
    cross = (a * c + b * d).mean(0).square() + (b * c - a * d).mean(0).square()
    s_xx, s_yy = ((re.square() + im.square()).mean(0) + eps for re, im in sides)
    distance = (cross / (s_xx * s_yy + eps) - target).square().mean()
    scale = (num_layers - layer) * 0.1 if depth_scale else 1
    return distance * scale + (excess.mean() if energy else 0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_value_is_the_listings(pair, dtype, shape, settings):
    h_in, h_out = pair(shape, dtype)
    expected = listing(h_in.double(), h_out.double(), **settings)
    is_value(coherence_penalty(h_in, h_out, **settings), expected, dtype)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_gradient_is_that_of_the_listing(pair, shape, settings):
    inputs = leaves(pair(shape))
    expected = torch.autograd.grad(listing(*inputs, **settings), inputs)
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        ours = leaves(inputs, dtype)
        coherence_penalty(*ours, **settings).backward()
        for mine, other in zip(ours, expected, strict=True):
            assert_close(mine.grad.double(), other, rtol=tolerance, atol=tolerance * other.abs().max())
    alone = inputs[0].detach(), inputs[1]
    (mine,) = torch.autograd.grad(coherence_penalty(*alone, **settings), inputs[1])
    assert_close(mine, expected[1], rtol=1e-10, atol=1e-12)


def test_only_the_states_and_the_spectra_are_kept(pair):
    inputs = leaves(pair((5, 8, 3)), torch.float32)
    _, saved = kept(lambda: coherence_penalty(*inputs, 2, 12, energy=True))
    ours = {h.untyped_storage().data_ptr() for h in inputs}
    assert ours <= {x.untyped_storage().data_ptr() for x in saved}
    assert all(x.untyped_storage().data_ptr() in ours or x.numel() in (1, 4 * 3 * 5) for x in saved)


@pytest.mark.parametrize(("constant", "dtype"), [(0.0, torch.bfloat16), (1234.567, torch.float32)])
def test_channels_that_do_not_vary_are_harmless(pair, constant, dtype):
    still = leaves([torch.full((2, 6, 3), constant)] * 2, dtype)
    value = coherence_penalty(*still, 2, 12, energy=True)
    value.backward()
    expected = float(listing(*(h.detach().double() for h in still), 2, 12, energy=True))
    assert value.item() == pytest.approx(expected, abs=1e-6)
    assert not any(h.grad.any() for h in still)
    h_in, h_out = pair((4, 8, 3))
    h_in[1, :, 1] = h_out[2, :, 0] = constant
    inputs = leaves((h_in, h_out), dtype)
    coherence_penalty(*inputs, 2, 12, energy=True).backward()
    assert all(h.grad.isfinite().all() and h.grad.abs().max() < 1e3 for h in inputs)
    assert not inputs[0].grad[1, :, 1].any()
    assert not inputs[1].grad[2, :, 0].any()
    assert inputs[0].grad[0].any()


def test_autocast_changes_nothing(pair):
    plain = leaves(pair((5, 8, 3)), torch.float32)
    cast = leaves(plain, torch.float32)
    expected = coherence_penalty(*plain, 2, 12, energy=True)
    with torch.autocast("cpu", torch.bfloat16):
        value = coherence_penalty(*cast, 2, 12, energy=True)
    torch.autograd.backward([value, expected])
    assert torch.equal(value, expected)
    assert all(torch.equal(h.grad, other.grad) for h, other in zip(cast, plain, strict=True))


def test_the_papers_layers_at_other_depths():
    assert [*CoherencePenalty().chosen_layers(24)] == [2, 4, 6, 8, 10, 12, 14, 16]
    assert [*CoherencePenalty().chosen_layers(6)] == [2, 4]
    assert [*OrthogonalityPenalty().chosen_layers(24)] == [3, 5, 7, 9, 11, 13, 15, 17, 22]
    assert [*OrthogonalityPenalty().chosen_layers(6)] == [3, 4, 5]

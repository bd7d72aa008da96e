"""Coherence of sequence distributions (CR, Sec. 3.1 and Appendix A.3), against explicit sums of exp(-i w t)."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from fulldepth.metrics import Coherence, Setup, coherence
from fulldepth.metrics.coherence import spectra
from metrics.oracle import plain_coherence

BINS = [f"bin_{i}" for i in range(10)]


def corrected(values, n):
    return np.maximum((n * values - 1) / (n - 1), 0)


def statistics(values, n):
    """Every statistic of the table from one layer's cells."""
    values = values[~np.isnan(values)]
    bins = np.minimum((values * 10 + 1e-9).astype(int), 9)
    return {
        "mean": values.mean(),
        "mean_corrected": corrected(values, n).mean(),
        "share_0.3_0.7": ((values >= 0.3) & (values <= 0.7)).mean(),
        **{name: (bins == i).mean() for i, name in enumerate(BINS)},
    }


@pytest.mark.parametrize("length", [2, 7, 8])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.bfloat16, 1e-4)])
def test_against_explicit_sums(length, dtype, tolerance, generator):
    h_in, noise = torch.randn(2, 5, length, 3, generator=generator)
    h_in, h_out = h_in.to(dtype), (h_in + noise).to(dtype)
    expected = plain_coherence(h_in.double(), h_out.double())
    assert_allclose(coherence(h_in, h_out), expected, atol=tolerance)
    assert_allclose(coherence(h_in, h_out, corrected=True), corrected(expected, 5), atol=2 * tolerance)
    without = coherence(h_in, h_out, include_dc=False)
    assert_allclose(without[:, -(length // 2) :], expected[:, 1:], atol=tolerance)
    assert without.nanmean().item() == pytest.approx(expected[:, 1:].mean(), abs=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@given(seed=st.integers(0, 2**32 - 1), length=st.integers(2, 300))
def test_a_constant_channel_has_no_coherence(seed, length, dtype):
    rng = np.random.default_rng(seed)
    h_in, h_out = torch.tensor(rng.normal(size=(2, 5, length, 3)))
    h_out[..., 1] = torch.tensor(rng.normal(size=(5, 1)) * 10.0 ** rng.integers(-3, 4))
    value = coherence(h_in.to(dtype), h_out.to(dtype))
    assert value[1, 1:].isnan().all()
    assert not value[[0, 2]].isnan().any()


@pytest.mark.parametrize("chained", [True, False])
def test_rows_against_explicit_sums(chained, even_world, generator, same_rows, expect):
    """Where a layer reads something else than the layer before gave (a tree), attention's input is given apart."""
    residual, middle = (even_world.states[name] for name in ("residual", "attention_output"))
    read = residual[:-1] if chained else torch.randn(middle.shape, generator=generator)
    world = even_world.with_states(attention_input=read).replace(options={"chained": chained})
    expected = {}
    for site, before, after in (("residual", residual[:-1], residual[1:]), ("attention", read, middle)):
        for layer, (h_in, h_out) in enumerate(zip(before, after, strict=True), start=1):
            cells = plain_coherence(h_in.numpy(), h_out.numpy())
            for name, value in statistics(cells, 12).items():
                expected[site, layer, None, name] = (value, cells.size)
    over_layers = np.mean([expected["residual", n, None, "mean_corrected"][0] for n in (1, 2, 3)])
    expected["residual", None, None, "mean_corrected_of_layers"] = (over_layers, None)
    rows = world.rows(Coherence)
    expect(rows, expected, rtol=1e-4, atol=1e-5)
    for split in ((1,) * 12, (5, 1, 4, 2)):
        same_rows(world.rows(Coherence, split), rows)


def test_neither_padding_nor_another_length_enters_silently(world, even_world):
    with pytest.raises(ValueError, match="length"):
        world.rows(Coherence)
    with pytest.raises(ValueError, match="length"):
        even_world.rows(Coherence, right=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spectra_in_float32_against_float64(dtype, generator):
    """Outliers, huge means, tiny deviations, exact zeros of the spectrum, constant and zero channels."""
    h = torch.randn(6, 64, 9, generator=generator)
    h[:, 0, 1] *= 165
    h[:, :, 2] += 3e4
    h[:, :, 3] *= 1e-12
    h[:, :, 4] = torch.arange(64) % 2  # power at the last frequency only
    h[:, :, 5] = torch.cos(torch.arange(64) * (2 * math.pi * 3 / 64)) + 1e-6 * h[:, :, 0]
    h[:, :, 6], h[:, :, 7] = 0.1, 0
    h[:, :, 8] *= 1e25  # squares overflow float32
    h = h.to(dtype)
    phi, power = spectra(h)
    assert (phi.dtype, power.dtype) == (torch.complex64, torch.float32)
    z = h.double().transpose(1, 2)
    deviation = z.std(-1, keepdim=True)
    constant = deviation < 1e-6 * z.mean(-1, keepdim=True).abs()
    z = ((z - z.mean(-1, keepdim=True)) / (deviation + 1e-8)).masked_fill(constant, 0)
    exact = np.fft.rfft(torch.softmax(z, -1).numpy())
    size = np.abs(exact)
    real = size > 1e-14  # float64 rounding leaves about 1e-17
    assert (np.abs(phi.numpy() - exact)[real] / size[real]).max() < 3e-5
    assert (np.abs(power.numpy() - size**2)[real] / size[real] ** 2).max() < 6e-5
    assert np.abs(phi.numpy())[~real].max() < 1e-14


def test_channels_spread_over_threads_give_the_same_rows(invented, same_rows):
    world, before = invented(lengths=(9,) * 12, width=70), torch.get_num_threads()
    rows = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            rows.append(world.rows(Coherence, (5, 1, 4, 2)))
    finally:
        torch.set_num_threads(before)
    same_rows(rows[1], rows[0])


def test_the_channels_behind_an_error_are_evenly_spaced_over_all():
    channels = Coherence(Setup(1, 512, sequence_length=4, num_sequences=8)).channels
    assert (len(channels), int(channels[0]), int(channels[-1])) == (64, 0, 511)
    assert {*channels.diff().tolist()} == {8, 9}

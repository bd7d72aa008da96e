"""||W||_2 of every projection (Hopscotch, analysis), against scipy.linalg.svdvals."""

import numpy as np
import pytest
import torch
from scipy.linalg import svdvals

from fulldepth.metrics import spectral_norm


def check(weight, rel):
    """The norm is scipy's."""
    assert float(spectral_norm(weight)) == pytest.approx(svdvals(weight.double().numpy())[0], rel=rel)


@pytest.mark.parametrize("shape", [(12, 12), (40, 7), (5, 64), (1, 9)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_against_scipy(shape, dtype, generator):
    check(torch.randn(shape, generator=generator).to(dtype), 1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("gap", [0.3, 1e-3, 1e-9, 0.0])
def test_large_matrices_to_rounding(gap, dtype, generator):
    """Sizes at which Lanczos steps run: certain with a gap, by the fallback (or a multiple value) without."""
    left = torch.linalg.qr(torch.randn(300, 160, generator=generator, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(160, 160, generator=generator, dtype=torch.float64))[0]
    values = torch.cat([torch.ones(1), (1 - gap) * torch.linspace(1, 0.1, 159)])
    for scale in (1, 1e-30, 1e30) if dtype == torch.float64 else (1,):
        weight = (scale * left @ torch.diag(values.double()) @ right).to(dtype)
        tolerance = 5e-14 if gap > 1e-6 else 5e-9  # of values that close the larger is not told apart
        check(weight, tolerance)
        check(weight.T, tolerance)


@pytest.mark.parametrize("shape", [(700, 600), (1, 900), (130, 130)])
def test_random_and_degenerate_large_matrices(shape, generator):
    weight = torch.randn(shape, generator=generator)
    weight[0] *= 165
    check(weight, 5e-14)
    rank_one = torch.outer(weight[:, 0], weight[0])
    expected = float(weight[:, 0].double().norm() * weight[0].double().norm())
    assert float(spectral_norm(rank_one)) == pytest.approx(expected, rel=1e-6)
    assert float(spectral_norm(torch.zeros(shape))) == 0
    weight[0, -1] = torch.nan
    assert np.isnan(float(spectral_norm(weight)))

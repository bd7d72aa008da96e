import math

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fulldepth.metrics import METRICS, renyi_entropy
from metrics.conftest import invent
from metrics.oracle import renyi
from tiny_models import seeded


def entropy(p, alpha):
    p = p[p > 1e-12]
    return -(p * np.log(p)).sum() if alpha == 1 else math.log((p**alpha).sum()) / (1 - alpha)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("tokens", "width"), [(20, 8), (5, 8)])
def test_presets_are_their_papers_preparations(tokens, width, alpha):
    z = torch.randn(3, tokens, width, generator=seeded(0), dtype=torch.float64) + 2
    x = z.numpy()

    def of(prepared):
        p = np.linalg.svd(prepared, compute_uv=False) ** 2
        return entropy(p / p.sum(), alpha)

    centred = x - x.mean(1, keepdims=True)
    unit = centred / np.linalg.norm(centred, axis=-1, keepdims=True)
    flat = x.reshape(-1, width)
    scored = (x - flat.mean(0)) / (flat.std(0, ddof=1) + 1e-5)
    expected = {
        "lime-code": [of(one) for one in scored],
        "wei": [of(one) / math.log(width) for one in unit],
        "skean": [of(one) / math.log(min(tokens, width)) for one in unit],
    }
    for preset, values in expected.items():
        assert_allclose(renyi_entropy(z, alpha, preset), values, rtol=1e-9)


def test_the_orders_at_the_ends():
    z = torch.diag(torch.tensor([2.0, 1.0, 1.0, 0.0], dtype=torch.float64))  # shares 4/6, 1/6, 1/6
    assert float(renyi_entropy(z, 0.0)) == pytest.approx(math.log(3))
    assert float(renyi_entropy(z, math.inf)) == pytest.approx(math.log(6 / 4))


def test_a_sequence_of_zeros_has_no_entropy_and_no_part_in_the_mean():
    world = invent(seeded(0), lengths=(7, 5, 6))
    residual = world.states["residual"].clone()
    residual[:, 1] = 0
    rows = world.with_states(residual=residual).rows(METRICS["renyi_entropy"], (3,))
    for layer in range(4):
        row = rows["residual", layer, None, "mean:plain:2"]
        kept = [renyi(residual[layer, n, : world.mask[n].sum()].double().numpy(), 2.0) for n in (0, 2)]
        assert (row.value, row.count) == (pytest.approx(sum(kept) / 2, rel=1e-5), 2)

"""Strengths of ridges against a search in numpy."""

import numpy as np
import pytest
import torch

from fulldepth.skip import least_squares as module


@pytest.mark.parametrize(("seed", "strength"), [(29, 0.03), (47, 0.001), (185, 0.1), (304, 0.3)])
def test_the_strength_is_the_best_of_all_where_the_sum_has_several_minima(seed, strength):
    """Four tokens and twelve inputs, against a search over all strengths in numpy, float64."""
    generator = np.random.default_rng(seed)
    inputs = generator.normal(size=(2, 4, 12))
    stream = generator.normal(size=(2, 4, 6))
    wanted = stream + inputs @ generator.normal(size=(12, 6)) / 4 + generator.normal(size=(2, 4, 6))
    weight = 1 / np.linalg.norm(stream, axis=-1, keepdims=True)
    a, gap = weight * inputs, weight * (wanted - stream)
    gram = a[0].T @ a[0]
    shares = {}
    for tried in module.STRENGTHS:
        change = np.linalg.solve(gram + tried * np.diag(gram).mean() * np.eye(12), a[0].T @ gap[0])
        shares[tried] = np.square(a[1] @ change - gap[1]).sum() / np.square(gap[1]).sum()
    parts = module.RidgeSums(), module.RidgeSums()
    for part, *values in zip(parts, inputs, stream, wanted, strict=True):
        part.add(*map(torch.tensor, values))
    chosen, left, _ = module.best_change(*parts)
    assert chosen == strength == min(shares, key=shares.get)
    assert left == pytest.approx(shares[strength])

"""||h_{l-1}|| / ||h_l - h_{l-1}|| (aligned training, Fig. 11), against plain loops."""

import math

import numpy as np
import pytest
import torch

from fulldepth.metrics import NormRatio, norm_ratio


def ratio(x, y):
    return math.sqrt(math.fsum(a * a for a in x)) / math.sqrt(
        math.fsum((b - a) ** 2 for a, b in zip(x, y, strict=True))
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_against_loops(dtype, generator):
    h_in, step = torch.randn(2, 3, 5, 16, generator=generator)
    h_in, h_out = (300 * h_in).to(dtype), (300 * (h_in + step)).to(dtype)
    pairs = zip(h_in.double().flatten(0, 1).tolist(), h_out.double().flatten(0, 1).tolist(), strict=True)
    np.testing.assert_allclose(norm_ratio(h_in, h_out).flatten(), [ratio(x, y) for x, y in pairs], rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_against_loops(world_name, dtype, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    world = world.with_states(residual=world.states["residual"].to(dtype))
    expected = {}
    for view in ("", ":no-first") if world.first_tokens else ("",):
        states = world.tokens(view=view)
        for layer in range(1, len(states)):
            values = [ratio(x, y) for x, y in zip(states[layer - 1], states[layer], strict=True)]
            expected["residual", layer, None, f"mean{view}"] = (np.mean(values), len(values))
    expect(any_split(NormRatio, world), expected)

"""Weights of Hyper-Connections by stream, against plain loops and the network that they start as."""

import numpy as np
import pytest
import torch

from fulldepth.metrics import StreamMixing, stream_mixing

STATISTICS = ("input", "kept", "given", "output")


def by_loops(token):
    """[n][4] of one token's rows [to the branch, to stream 0, ..., from the branch]."""
    found = []
    for i, (to_branch, *to_streams, from_branch) in enumerate(token):
        given = sum(weight for j, weight in enumerate(to_streams) if j != i)
        found.append([to_branch, to_streams[i], given, from_branch])
    return found


@pytest.mark.parametrize("shape", [(4, 6), (2, 5, 4, 6), (1, 3), (3, 2, 1, 3)])
def test_against_loops(shape, generator):
    mixing = torch.randn(shape, generator=generator, dtype=torch.float64)
    tokens = mixing.reshape(-1, *shape[-2:]).tolist()
    np.testing.assert_allclose(stream_mixing(mixing), np.mean([by_loops(t) for t in tokens], axis=0), atol=1e-14)


@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_against_loops(world_name, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    positions, expected = list(world.positions()), {}
    for branch in ("attention", "mlp"):
        for layer, mixing in world.coefficients[f"{branch}_mixing"].items():
            tokens = [mixing[n, t].tolist() for n, t in positions] if mixing.ndim == 4 else [mixing.tolist()]
            for stream, values in enumerate(np.mean([by_loops(token) for token in tokens], axis=0)):
                for statistic, value in zip(STATISTICS, values, strict=True):
                    expected[f"{branch}_stream_{stream}", layer, None, statistic] = (value, len(positions))
    expect(any_split(StreamMixing, world), expected)

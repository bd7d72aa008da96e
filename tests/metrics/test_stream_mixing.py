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


def test_only_counted_tokens_are_averaged(generator):
    mixing = torch.randn(2, 3, 2, 4, generator=generator, dtype=torch.float64)
    counted = torch.tensor([[True, False, False], [False, True, True]])
    chosen = [by_loops(mixing[b, t].tolist()) for b, t in ((0, 0), (1, 1), (1, 2))]
    np.testing.assert_allclose(stream_mixing(mixing, counted), np.mean(chosen, axis=0), atol=1e-14)


def test_copies_of_a_pre_norm_network():
    """alpha = [e_1 | I], beta = 1: the branch reads stream 1 alone, no stream flows into another."""
    start = torch.cat([torch.eye(3)[:, 1:2], torch.eye(3), torch.ones(3, 1)], dim=1)
    assert stream_mixing(start).tolist() == [[0, 1, 0, 1], [1, 1, 0, 1], [0, 1, 0, 1]]


@pytest.mark.parametrize("shape", [(4, 5), (4, 4, 6), (6,)])
def test_another_shape_is_refused(shape):
    with pytest.raises(ValueError, match="mixing must be"):
        stream_mixing(torch.ones(shape))


def test_a_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"counted must be \(2, 3\), got \(3, 2\)"):
        stream_mixing(torch.ones(2, 3, 2, 4), torch.ones(3, 2, dtype=torch.bool))


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

"""Figures of memories and streams: what is drawn are the table's numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fulldepth import figures
from fulldepth.results import tabulate

LAYERS, HEADS = 5, 3


def weight(layer, source):
    return (1 + math.sin(layer + 3 * source)) / 2


def rows(signed=False):
    """Retrieval rows of layers 2..5; `signed`: masses that are no shares."""
    found = []
    for layer in range(2, LAYERS + 1):
        for statistic, factor in (("share", 1.0), ("mean", -2.0 if signed else 1.0 + 1e-7)):
            for source in range(layer):
                value = factor * weight(layer, source)
                found.append(("retrieval_weight", "routing", layer, source, statistic, value, 960, "1"))
            for head in range(HEADS):
                value = factor * weight(layer, 10 + head)
                found.append(("retrieval_weight", f"head_{head}", layer, layer - 1, statistic, value, 960, "1"))
        found.append(("expected_retrieval", "routing", layer, None, "value", 0.4 * layer, 960, "layers"))
    return found


def mixing(streams=2):
    return [
        ("stream_mixing", f"{branch}_stream_{i}", layer, None, statistic, shift + i - layer, 96, "1")
        for shift, statistic in enumerate(("input", "kept", "given", "output"))
        for branch in ("attention", "mlp")
        for i in range(streams)
        for layer in range(1, LAYERS + 1)
    ]


def test_retrieval_is_a_triangle():
    drawn = figures.build(tabulate(rows()), {})
    assert list(drawn) == ["retrieval_weight", "expected_retrieval", "self_retrieval"]
    (cells,) = drawn["retrieval_weight"].data
    expected = [[weight(r, m) if m < r else None for r in range(2, LAYERS + 1)] for m in range(LAYERS)]
    assert [list(row) for row in cells.z] == expected
    assert (list(cells.x), list(cells.y)) == ([2, 3, 4, 5], ["emb", "1", "2", "3", "4"])
    assert (cells.zmin, cells.zmax) == (0, max(weight(r, m) for r in range(2, LAYERS + 1) for m in range(r)))
    newest = [weight(r, r - 1) for r in range(2, LAYERS + 1)]
    assert f"lowest {min(newest):.2f}" in drawn["retrieval_weight"].layout.meta["alt"]


def test_signed_weights_are_a_second_reading():
    drawn = figures.build(tabulate(rows(signed=True)), {})
    assert [name for name in drawn if name.startswith("retrieval")] == ["retrieval_weight", "retrieval_weight:mean"]
    (cells,) = drawn["retrieval_weight:mean"].data
    assert cells.z[1][2] == -2 * weight(4, 1)
    assert cells.zmin == -cells.zmax == min(-2 * weight(r, m) for r in range(2, LAYERS + 1) for m in range(r))
    assert drawn["retrieval_weight"].layout.meta["variant"] == "Share of absolute weight"


def test_expected_retrieval_stands_beside_plain_attention():
    drawn = figures.build(tabulate(rows()), {"model": {"num_layers": LAYERS}})["expected_retrieval"]
    expected, plain = drawn.data
    assert list(expected.x) == list(plain.x) == [2, 3, 4, 5]
    np.testing.assert_allclose(expected.y, [0.8, 1.2, 1.6, 2.0])
    assert list(plain.y) == [1, 2, 3, 4]
    assert drawn.layout.meta["alt"] == "Expected state: lowest 0.80 at layer 2, highest 2.00 at layer 5."


def test_self_retrieval_by_head():
    (cells,) = figures.build(tabulate(rows()), {})["self_retrieval"].data
    np.testing.assert_allclose(cells.z, [[weight(r, 10 + h) for r in range(2, LAYERS + 1)] for h in range(HEADS)])
    assert list(cells.y) == ["0", "1", "2"]


@pytest.mark.parametrize("streams", [2, 12])
def test_streams_stand_in_order(streams):
    drawn = figures.build(tabulate(mixing(streams)), {})
    assert list(drawn) == ["stream_mixing", *(f"stream_mixing:{name}" for name in ("output", "kept", "given"))]
    for name, shift in (("stream_mixing", 0), ("stream_mixing:output", 3)):
        (cells,) = drawn[name].data
        assert list(cells.y) == [f"{branch} {i}" for branch in ("Attention", "MLP") for i in range(streams)]
        np.testing.assert_allclose(
            cells.z, [[shift + i - r for r in range(1, 6)] for _ in "ab" for i in range(streams)]
        )
        assert cells.zmin == -cells.zmax


def test_what_is_missing_leaves_a_gap_or_no_figure():
    table = tabulate(rows())
    table.loc[(table.site == "routing") & (table.layer == 3) & (table.other == 1), "value"] = math.nan
    table.loc[table.measure == "expected_retrieval", "value"] = math.inf
    drawn = figures.build(table, {})
    assert "expected_retrieval" not in drawn
    assert drawn["retrieval_weight"].data[0].z[1][1] is None
    assert "NaN" not in drawn["retrieval_weight"].to_json()
    assert list(figures.build(table[table.site == "head_1"], {})) == ["self_retrieval"]
    assert figures.build(table[table.layer < 0], {}) == {}

"""The layer from which the prediction no longer changes (aligned training, Sec. 2.2), against plain loops."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fulldepth.metrics import Saturation, saturation_layer


def settles(predictions):
    """The smallest 1-based layer from which all later predictions are the last one."""
    for layer in range(1, len(predictions) + 1):
        if all(p == predictions[-1] for p in predictions[layer - 1 :]):
            return layer
    raise AssertionError("the last layer always agrees with itself")


@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=st.integers(0, 2)))
def test_against_loops(predictions):
    got = saturation_layer(torch.tensor(predictions))
    assert got.tolist() == [settles(column) for column in predictions.T.tolist()]
    renamed = torch.tensor([7, 5, 9])[torch.tensor(predictions)]
    assert saturation_layer(renamed).tolist() == got.tolist(), "only equality of predictions matters"


def test_rows_against_loops(world, any_split, expect):
    known = world.targets != -100
    top = world.logits[:, known].numpy().argmax(-1)
    layers = [settles(list(column)) for column in top[1:].T]  # the embeddings are no layer
    total, expected = len(layers), {}
    for layer in range(1, world.layers + 1):
        here = layers.count(layer)
        so_far = sum(1 for found in layers if found <= layer)
        expected["residual", layer, None, "count"] = (here, None)
        expected["residual", layer, None, "share"] = (here / total, None)
        expected["residual", layer, None, "cumulative"] = (so_far / total, None)
    median = next(n for n in (1, 2, 3) if expected["residual", n, None, "cumulative"][0] >= 0.5)
    expected["residual", None, None, "median"] = (median, total)
    rows = any_split(Saturation, world)
    expect(rows, expected)
    assert rows["residual", world.layers, None, "cumulative"].value == 1
    assert rows["residual", 1, None, "count"].unit == "tokens"
    assert {row.count for row in rows.values()} <= {total, *(layers.count(n) for n in set(layers))}

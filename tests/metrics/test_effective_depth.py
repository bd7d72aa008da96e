"""Epsilon-effective depth (aligned training, Def. 1), against plain loops."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import accuracy_score

from fulldepth.metrics import EffectiveDepth, effective_depth

accuracies = hnp.arrays(np.float64, st.integers(1, 12), elements=st.floats(0, 1))


def depth(accuracy, bar):
    for layer, value in enumerate(accuracy, start=1):
        if value >= bar:
            return layer
    return len(accuracy)


@given(accuracies, st.floats(0, 1))
def test_absolute_against_loops(accuracy, eps):
    assert effective_depth(torch.tensor(accuracy), eps) == depth(accuracy, 1 - eps)


@given(accuracies, st.floats(0.001, 1))
def test_relative_to_the_last_layer(accuracy, eps):
    assert effective_depth(torch.tensor(accuracy), eps, relative=True) == depth(accuracy, (1 - eps) * accuracy[-1])


def test_rows_against_loops(world, any_split):
    known = world.targets != -100
    logits = 8 * world.logits.clone()
    logits[2:][:, known] += 20 * torch.nn.functional.one_hot(world.targets[known], 5)
    logits[2, :, ::3] = -logits[2, :, ::3]
    world = world.replace(logits=logits)
    accuracy = [accuracy_score(world.targets[known], x[known].numpy().argmax(-1)) for x in logits[1:]]
    assert accuracy[1] < 1
    rows = any_split(EffectiveDepth, world)
    absolute = {"eps=0.01": 0.01, "eps=0.05": 0.05, "eps=0.1": 0.1, "eps=0.2": 0.2}
    assert rows.keys() >= {("residual", None, None, name) for name in (*absolute, "relative_eps=0.05")}
    depths = {key: row for key, row in rows.items() if not key[3].startswith(("low_of_", "high_of_"))}
    for (site, layer, other, statistic), row in depths.items():
        assert (site, layer, other, row.unit) == ("residual", None, None, "layers")
        kind, eps = statistic.split("=")
        bar = (1 - float(eps)) * (accuracy[-1] if kind == "relative_eps" else 1)
        assert row.value == depth(accuracy, bar), statistic
        assert row.count == int(known.sum())

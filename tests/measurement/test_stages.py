"""Plain modules with named stages, against numpy on states from the module itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import fulldepth
from fulldepth.errors import FulldepthError

WIDTHS = (7, 12, 12, 12, 5)
"""Channels of what stage 1 reads and of what stages 1..4 give."""


class Net(nn.Module):
    def __init__(self, widths=WIDTHS, classes=3):
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(widths))
        self.norm, self.out = nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes)

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return self.out(self.norm(x))

    @property
    def head(self):
        return nn.Sequential(self.norm, self.out)


def data(width, samples=60, classes=3):
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(samples) % classes
    return torch.randn(samples, width, generator=generator) + labels[:, None], labels


def states(net, inputs):
    found = [inputs]
    with torch.no_grad():
        for stage in net.stages:
            found.append(stage(found[-1]))
    return [h.double().numpy() for h in found]


def cka(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    return np.linalg.norm(x.T @ y) ** 2 / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)


def cosine(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    return ((x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)).mean()


def accuracies(net, layers, labels):
    with torch.no_grad():
        return [float((net.head(torch.tensor(h).float()).argmax(-1) == labels).double().mean()) for h in layers]


def measured(net, given, **options):
    return fulldepth.measure(net, given, stages=[*net.stages], progress=False, batch_size=16, **options)


def test_stages_of_one_width_have_every_number():
    net = Net((12, 12, 12, 12, 12))
    inputs, labels = data(12)
    results = measured(net, (inputs, labels.numpy()), head=net.head)
    expected, table = states(net, inputs), results.table.set_index(["measure", "statistic", "layer", "other"]).value
    for layer in range(5):
        assert table["cka", "biased", layer, 4] == pytest.approx(cka(expected[layer], expected[4]), abs=1e-6)
        assert table["cosine", "mean", layer, 4] == pytest.approx(cosine(expected[layer], expected[4]), abs=1e-6)
    rows = results.table[results.table.statistic == "mean"]
    found = rows[rows.measure == "lens_accuracy"].sort_values("layer").value.tolist()
    assert found == pytest.approx(accuracies(net, expected, labels))
    for layer in range(1, 5):
        before, after = expected[layer - 1], expected[layer]
        angle = (before * after).sum(1) / np.linalg.norm(before, axis=1) / np.linalg.norm(after, axis=1)
        value = rows[(rows.measure == "displacement") & (rows.layer == layer)].value.item()
        assert value == pytest.approx((1 - (1 + angle) / 2).mean(), abs=1e-6)
    assert {"saturation", "effective_depth", "nc1", "norm_ratio", "jump_rate"} <= set(results.table.measure)
    assert any("no Transformer" in line for line in results.meta["warnings"])


def test_stages_of_other_widths_keep_what_exists(tmp_path):
    net = Net()
    inputs, labels = data(7)
    labels[:4] = -1
    results = measured(net, torch.utils.data.TensorDataset(inputs, labels), head=net.head, output=tmp_path / "out")
    expected, table = states(net, inputs), results.table
    pairs = table[(table.measure == "cka") & (table.statistic == "biased")].set_index(["layer", "other"]).value
    assert pairs[0, 4] == pytest.approx(cka(expected[0], expected[4]), abs=1e-6)
    layers = {name: sorted(set(table[table.measure == name].layer.dropna())) for name in set(table.measure)}
    assert layers["displacement"] == layers["norm_ratio"] == [2, 3]
    assert layers["lens_accuracy"] == [4]
    assert "saturation" not in layers
    cosines = table[(table.measure == "cosine") & (table.statistic == "mean")]
    assert {(a, b) for a, b in zip(cosines.layer, cosines.other, strict=True) if a != b} == {
        (a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b
    }
    h, y = expected[3][4:], labels[4:].numpy()
    means = np.stack([h[y == k].mean(0) for k in range(3)])
    within = sum(np.outer(v - means[k], v - means[k]) for v, k in zip(h, y, strict=True)) / len(h)
    between = sum(np.outer(m - h.mean(0), m - h.mean(0)) for m in means) / 3
    nc1 = table[(table.measure == "nc1") & (table.layer == 3) & (table.statistic == "value")].value.item()
    assert nc1 == pytest.approx(np.trace(within @ np.linalg.pinv(between, rcond=1e-6)) / 3, rel=1e-3)
    assert (tmp_path / "out" / "report.html").exists()


def test_feature_maps_are_read_as_one_vector():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    net = nn.Sequential(body, nn.Flatten(), nn.Linear(4 * 64, 3))
    inputs = torch.randn(40, 1, 8, 8)
    results = fulldepth.measure(
        net,
        (inputs, torch.arange(40) % 3),
        stages=["0.0", "0.1"],
        head=net[1:],
        progress=False,
        measures=["cka", "cosine"],
    )
    with torch.no_grad():
        one, two = body[0](inputs).flatten(1).double().numpy(), body(inputs).flatten(1).double().numpy()
    table = results.table.set_index(["measure", "statistic", "layer", "other"]).value
    assert table["cosine", "mean", 1, 2] == pytest.approx(cosine(one, two), abs=1e-6)
    assert table["cka", "biased", 1, 2] == pytest.approx(cka(one, two), abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": ["stages.1", "stages.0"]}, "run in the order"),
        ({"stages": ["stages.0", "nothing"]}, "not a part"),
        ({"stages": ["stages.0"]}, "at least two"),
        ({"stages": ["stages.0", "stages.1"], "head": "out"}, "head"),
        ({"stages": ["stages.0", "stages.1"], "token_policy": "eos"}, "needs text"),
        ({}, "stages named"),
    ],
)
def test_refusals(options, message):
    with pytest.raises(FulldepthError, match=message):
        fulldepth.measure(Net(), data(7), progress=False, **options)


@pytest.mark.parametrize(
    "given",
    [(torch.randn(4, 7), torch.rand(4)), (torch.randn(4, 7), torch.arange(3)), "text", [], (torch.randn(0, 7),)],
)
def test_refused_data(given):
    with pytest.raises(FulldepthError):
        measured(Net(), given)

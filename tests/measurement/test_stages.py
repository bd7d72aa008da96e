"""Plain modules with named stages, against numpy on states from the module itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import fulldepth
from fulldepth.errors import FulldepthError
from metrics.oracle import cosines, nc1, plain_cka, psi

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


@torch.no_grad()
def states(stages, inputs):
    """[N, D] float64 what stage 1 reads and every stage gives."""
    found = [inputs]
    for stage in stages:
        found.append(stage(found[-1]))
    return [h.flatten(1).double().numpy() for h in found]


def measured(net, given, **options):
    return fulldepth.measure(net, given, stages=[*net.stages], progress=False, batch_size=16, **options)


def keyed(results):
    return results.table.set_index(["measure", "statistic", "layer", "other"]).value


def test_stages_of_one_width_have_every_number():
    net = Net((12, 12, 12, 12, 12))
    inputs, labels = data(12)
    results = measured(net, (inputs, labels.numpy()), head=net.head)
    h, table = states(net.stages, inputs), keyed(results)
    for layer in range(5):
        assert table["cka", "biased", layer, 4] == pytest.approx(plain_cka(h[layer], h[4], False), abs=1e-6)
        assert table["cosine", "mean", layer, 4] == pytest.approx(cosines(h[layer], h[4], center=True).mean(), abs=1e-6)
    right = [(net.head(torch.tensor(x).float()).argmax(-1) == labels).double().mean().item() for x in h]
    np.testing.assert_allclose(results.values("lens_accuracy", "mean"), right)
    np.testing.assert_allclose(
        results.values("displacement", "mean", "residual"), [psi(x, y).mean() for x, y in pairwise(h)], atol=1e-6
    )
    assert {"saturation", "effective_depth", "nc1", "norm_ratio", "jump_rate"} <= set(results.table.measure)
    assert any("no Transformer" in line for line in results.meta["warnings"])


def test_stages_of_other_widths_keep_what_exists(tmp_path):
    net = Net()
    inputs, labels = data(7)
    labels[:4] = -1
    results = measured(net, torch.utils.data.TensorDataset(inputs, labels), head=net.head, output=tmp_path / "out")
    h, table = states(net.stages, inputs), results.table
    assert keyed(results)["cka", "biased", 0, 4] == pytest.approx(plain_cka(h[0], h[4], False), abs=1e-6)
    layers = {name: sorted(set(table[table.measure == name].layer.dropna())) for name in set(table.measure)}
    assert layers["displacement"] == layers["norm_ratio"] == [2, 3]
    assert layers["lens_accuracy"] == [4]
    assert "saturation" not in layers
    pairs = table.query("measure == 'cosine' and layer != other")
    assert set(zip(pairs.layer, pairs.other, strict=True)) == {(a, b) for a in (1, 2, 3) for b in (1, 2, 3) if a != b}
    found = results.values("nc1", "value")[3]
    assert found == pytest.approx(nc1(h[3][4:], labels[4:].numpy()), rel=1e-3)
    assert (tmp_path / "out" / "report.html").exists()


def test_feature_maps_are_read_as_one_vector():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1))
    net = nn.Sequential(body, nn.Flatten(), nn.Linear(4 * 64, 3))
    inputs = torch.randn(40, 1, 8, 8)
    options = {"stages": ["0.0", "0.1"], "head": net[1:], "progress": False, "measures": ["cka", "cosine"]}
    table = keyed(fulldepth.measure(net, (inputs, torch.arange(40) % 3), **options))
    _, one, two = states(body, inputs)
    assert table["cosine", "mean", 1, 2] == pytest.approx(cosines(one, two, center=True).mean(), abs=1e-6)
    assert table["cka", "biased", 1, 2] == pytest.approx(plain_cka(one, two, False), abs=1e-6)


GOOD = {"stages": ["stages.0", "stages.1"]}


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        (data(7), {"stages": ["stages.1", "stages.0"]}, "order"),
        (data(7), {"stages": ["stages.0", "nothing"]}, "nothing"),
        (data(7), GOOD | {"head": "out"}, "head"),
        (data(7), GOOD | {"token_policy": "eos"}, "eos"),
        (data(7), {}, "stages"),
        ((torch.randn(4, 7), torch.rand(4)), GOOD, None),
        ((torch.randn(4, 7), torch.arange(3)), GOOD, None),
        ("text", GOOD, None),
    ],
)
def test_refusals(given, options, words):
    with pytest.raises(FulldepthError, match=words):
        fulldepth.measure(Net(), given, progress=False, **options)

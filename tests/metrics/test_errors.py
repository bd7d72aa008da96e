"""Standard errors, influences and intervals of all measures, against jackknives and formulas in plain loops."""

import numpy as np
import pytest
import scipy.stats
import torch
from torch.testing import assert_close

from fulldepth.core.uncertainty import error_of
from fulldepth.metrics import (
    METRICS,
    Coherence,
    Displacement,
    EffectiveDepth,
    JumpRate,
    LensAccuracy,
    LensLoss,
    Saturation,
    coherence,
)
from fulldepth.metrics.standard_errors import influence_of_channel_mean, leave_one_out
from metrics.oracle import jackknife, of_ratio, psi

RAGGED = (9, 4, 7, 9, 2, 6, 9, 3, 8, 5, 9, 2, 6, 7, 3, 9, 9, 4, 8, 6)
DOCUMENTS = (3, 3, 3, 3, 8, 8, 1, 7, 7, 7, 7, 7, 2, 4, 4, 5, 6, 6, 9, 9)
"""Nine documents of one to five windows: the identities of the clusters of `RAGGED`."""


def errors(rows):
    """Those of the rows that are standard errors: (layer, statistic) of the residual stream -> value."""
    found = {key: row.value for key, row in rows.items() if "standard_error" in key[3]}
    return {key[1::2]: value for key, value in found.items() if key[0] == "residual"}


@pytest.fixture
def ragged(invented):
    return invented(lengths=RAGGED).replace(options={"clusters": DOCUMENTS})


def displacements(world, view=""):
    """Of each sequence `[N, L]` sums of displacements, and its number of tokens `[N]`."""
    sums, counts = np.zeros((len(world.mask), world.layers)), np.zeros(len(world.mask))
    states = world.states["residual"].double().numpy()
    for n, t in world.positions(view):
        sums[n] += psi(states[:-1, n, t], states[1:, n, t])
        counts[n] += 1
    return sums, counts


def lens(world):
    """Of each sequence `[L+1, N]` right predictions and losses, and `[N]` its positions with a target."""
    known = world.targets != -100
    targets = world.targets.clamp(min=0)
    right = ((world.logits.argmax(-1) == targets) & known).sum(-1)
    logits = world.logits.double()
    losses = -logits.log_softmax(-1).gather(-1, targets.expand(len(logits), -1, -1)[..., None])[..., 0]
    return right.numpy(), (losses * known).sum(-1).numpy(), known.sum(1).numpy()


@pytest.fixture
def any_split_of(same_rows):
    """The errors of one batch, equal to those of batches of unlike sizes in another order."""

    def check(world, measure):
        whole = world.rows(measure, (20,))
        order = np.random.default_rng(0).permutation(20)
        same_rows(world.rows(measure, (3, 1, 9, 7), order=order, left=2), whole)
        return errors(whole)

    return check


def test_displacement_and_jump_rate_against_loops(ragged, any_split_of):
    expected = {}
    for view in ("", ":no-first"):
        sums, counts = displacements(ragged, view)
        for layer in range(1, ragged.layers + 1):
            expected[layer, "standard_error" + view] = of_ratio(DOCUMENTS, sums[:, layer - 1], counts)
    assert any_split_of(ragged, Displacement) == pytest.approx(expected, rel=1e-4)
    sums, counts = displacements(ragged)
    rises = {layer: sums[:, layer - 1] - sums[:, layer - 2] for layer in range(2, ragged.layers + 1)}
    limit = {layer: scipy.stats.t(8).ppf(0.975) * of_ratio(DOCUMENTS, rises[layer], counts) for layer in rises}
    added = {layer: rises[layer] * (rises[layer].sum() / counts.sum() > -limit[layer]) for layer in rises}
    rates = {
        (first, "standard_error"): 100 * of_ratio(DOCUMENTS, sum(added[at] for at in added if at >= first), counts)
        for first in rises
    }
    assert min(rises[3].sum(), rises[2].sum()) < 0 < max(rates.values()), "a clamped difference is among them"
    assert any_split_of(ragged, JumpRate) == pytest.approx(rates, rel=1e-4, abs=1e-6)


def test_lens_measures_against_loops(ragged, any_split_of):
    right, losses, counts = lens(ragged)
    for measure, sums in ((LensAccuracy, right), (LensLoss, losses)):
        expected = {(n, "standard_error"): of_ratio(DOCUMENTS, sums[n], counts) for n in range(4)}
        assert any_split_of(ragged, measure) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("count", [3, 20])
def test_coherence_against_loops(invented, count):
    world = invented(lengths=(9,) * count)
    states = world.states["residual"]

    def of_layer(kept, layer):
        return float(coherence(states[layer - 1, kept], states[layer, kept], corrected=True).nanmean())

    def of_all(kept):
        return np.mean([of_layer(kept, n) for n in (1, 2, 3)])

    name = "standard_error_of_mean_corrected"
    expected = {(n, name): jackknife(range(count), lambda kept, n=n: of_layer(kept, n), groups=16) for n in (1, 2, 3)}
    expected[None, f"{name}_of_layers"] = jackknife(range(count), of_all, groups=16)
    rows = world.rows(Coherence, (count,))
    assert errors(rows) == pytest.approx(expected, rel=1e-4)
    total = rows["residual", None, None, "mean_corrected_of_layers"].value
    assert total == pytest.approx(of_all(range(count)), abs=1e-5)


def test_fewer_than_three_clusters_have_no_error(invented):
    world = invented(lengths=(9,) * 4).replace(options={"clusters": (1, 1, 5, 5)})
    for measure in (Displacement, JumpRate, LensAccuracy, LensLoss, Coherence, Saturation, EffectiveDepth):
        rows = world.rows(measure, (4,))
        assert rows, measure
        assert errors(rows) == {}, measure
        assert not [key for key in rows if key[3].startswith(("low_", "high_"))], measure


def test_every_error_of_a_table_is_that_of_its_influences(invented):
    world = invented(lengths=(9,) * 20).replace(options={"clusters": DOCUMENTS})
    stated = set()
    for name in METRICS.keys() - {"spectral_norm", "average_precision", "cka", "layer_effect"}:
        metric = METRICS[name](world.setup())
        for observation in world.observations((5, 15)):
            metric.update(observation)
        rows = {row[:5]: row.value for row in metric.rows()}
        influences = {influence[:5]: influence.values for influence in metric.influences()}
        assert influences.keys() <= rows.keys(), name
        for (*place, statistic), value in rows.items():
            if statistic.startswith("standard_error"):
                of = statistic.removeprefix("standard_error_of_")
                of = of.replace("standard_error", "value" if name == "jump_rate" else "mean")
                assert value == pytest.approx(float(error_of(influences[*place, of])), rel=1e-9, abs=1e-15)
                stated.add(name)
    assert stated >= {
        "displacement",
        "jump_rate",
        "coherence",
        "lens_accuracy",
        "lens_loss",
        "linear_lens_loss",
        "renyi_entropy",
    }


@pytest.mark.parametrize(("shared", "most"), [(1.0, 1.1), (0.1, 1.2), (0.0, 1.7)])
def test_a_sample_of_channels_gives_the_error_over_all(shared, most):
    """Channels that have something in common or nothing: the error is right, or somewhat too large, never too small."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(300, 16, 1)) * shared + rng.normal(size=(300, 16, 512))  # draws, sequences, channels
    without = torch.tensor(leave_one_out(values[:, :, ::8].transpose(1, 0, 2)) / 15)  # [16, draws, 64]
    influence, error = influence_of_channel_mean(without, 512)
    assert 0.9 < float(error.square().mean().sqrt()) / values.mean((1, 2)).std() < most
    assert_close(torch.tensor(error_of(influence.numpy())), error)

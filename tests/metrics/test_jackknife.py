"""Standard errors over sequences, against a jackknife in plain loops, the closed form of a mean, and coverage."""

import math

import numpy as np
import pytest
import torch

from fulldepth.metrics import (
    Coherence,
    Displacement,
    EffectiveDepth,
    JumpRate,
    LensAccuracy,
    LensLoss,
    Saturation,
    coherence,
    effective_depth,
    jump_rate,
    saturation_layer,
)
from fulldepth.metrics.jackknife import error_of_channel_mean, group_sizes, leave_one_out, standard_error

RAGGED = (9, 4, 7, 9, 2, 6, 9, 3, 8, 5, 9, 2, 6, 7, 3, 9, 9, 4, 8, 6)
"""Twenty sequences: four groups of two and twelve of one."""


def jackknife(count, estimate):
    """The delete-m jackknife of Busing et al. (1999), Eq. 5 and 6, in loops.

    `estimate` takes the indices of the sequences that are kept.
    """
    everything = list(range(count))
    groups = min(count, 16)
    members = [[i for i in everything if i % groups == g] for g in range(groups)]
    whole = estimate(everything)
    replicates = [estimate([i for i in everything if i not in removed]) for removed in members]
    shares = [count / len(removed) for removed in members]
    centre = groups * whole - sum((1 - 1 / h) * value for h, value in zip(shares, replicates, strict=True))
    terms = [(h * whole - (h - 1) * value - centre) ** 2 / (h - 1) for h, value in zip(shares, replicates, strict=True)]
    return math.sqrt(sum(terms) / groups)


def errors(rows):
    """Those of the rows that are standard errors: (layer, statistic) of the residual stream -> value."""
    found = {key: row.value for key, row in rows.items() if "standard_error" in key[3]}
    return {key[1::2]: value for key, value in found.items() if key[0] == "residual"}


@pytest.fixture
def ragged(invented):
    return invented(lengths=RAGGED)


def mean_psi(world, kept, view=""):
    """[L] mean displacements of some sequences."""
    places = [(n, t) for n, t in world.positions(view) if n in kept]
    states = world.states["residual"].double().numpy()
    tokens = np.stack([states[:, n, t] for n, t in places], axis=1)
    cosine = (tokens[:-1] * tokens[1:]).sum(-1) / np.prod(np.linalg.norm([tokens[:-1], tokens[1:]], axis=-1), axis=0)
    return ((1 - cosine) / 2).mean(1)


def lens(world, kept):
    """Of some sequences, `[L+1, M]` logits' top class, and `[M]` targets and losses `[L+1, M]`."""
    known = (world.targets != -100) & torch.isin(torch.arange(len(world.targets)), torch.tensor(kept))[:, None]
    logits = world.logits[:, known].double()
    targets = world.targets[known]
    losses = -logits.log_softmax(-1).gather(-1, targets.expand(len(logits), -1)[..., None])[..., 0]
    return logits.argmax(-1), targets, losses


def test_groups_are_of_equal_size_as_far_as_possible():
    for count in (1, 2, 15, 16, 17, 40, 256):
        groups = min(count, 16)
        assert group_sizes(count).tolist() == np.bincount(np.arange(count) % groups).tolist()
    assert len(group_sizes(0)) == 1


@pytest.mark.parametrize("count", [2, 7, 16, 64])
def test_the_error_of_a_mean_has_a_closed_form(count):
    values = np.random.default_rng(count).normal(size=count)
    groups = min(count, 16)
    sums = torch.tensor([values[g::groups].sum() for g in range(groups)])
    sizes = group_sizes(count)
    got = standard_error(sums.sum() / count, leave_one_out(sums) / leave_one_out(sizes), sizes)
    of_groups = [values[g::groups].mean() for g in range(groups)]
    assert float(got) == pytest.approx(np.std(of_groups, ddof=1) / math.sqrt(groups), rel=1e-9)


def test_displacement_and_jump_rate_against_loops(ragged, any_split):
    expected = {}
    for view in ("", ":no-first"):
        for layer in range(1, ragged.layers + 1):
            value = jackknife(20, lambda kept, at=layer - 1, view=view: mean_psi(ragged, kept, view)[at])
            expected[layer, "standard_error" + view] = value
    assert errors(any_split_of(ragged, Displacement)) == pytest.approx(expected, rel=1e-4)
    rates = {
        (layer, "standard_error"): jackknife(20, lambda kept, at=layer: jump_rate(mean_psi(ragged, kept), at))
        for layer in range(2, ragged.layers + 1)
    }
    assert errors(any_split_of(ragged, JumpRate)) == pytest.approx(rates, rel=1e-4, abs=1e-6)


def any_split_of(world, measure):
    """The rows of batches of unlike sizes, equal to those of a single batch and of another order."""
    whole = world.rows(measure, (20,))
    order = torch.tensor(np.random.default_rng(0).permutation(20))
    metric = measure(world.setup())
    for observation in world.observations((3, 1, 9, 7), order=order, left=2):
        metric.update(observation)
    shuffled = {(row.site, row.layer, row.other, row.statistic): row for row in metric.rows()}
    assert shuffled.keys() == whole.keys()
    for key, row in whole.items():
        assert shuffled[key].value == pytest.approx(row.value, rel=1e-6, abs=1e-7), key
    return whole


def test_lens_measures_against_loops(ragged):
    def hits(kept):
        top, targets, _ = lens(ragged, kept)
        return (top == targets).double().mean(1)

    accuracy = {(n, "standard_error"): jackknife(20, lambda kept, n=n: float(hits(kept)[n])) for n in range(4)}
    assert errors(any_split_of(ragged, LensAccuracy)) == pytest.approx(accuracy, rel=1e-9)
    loss = {
        (n, "standard_error"): jackknife(20, lambda kept, n=n: float(lens(ragged, kept)[2][n].mean())) for n in range(4)
    }
    assert errors(any_split_of(ragged, LensLoss)) == pytest.approx(loss, rel=1e-4)
    depth = jackknife(20, lambda kept: effective_depth(hits(kept)[1:], 0.05, relative=True))
    got = errors(any_split_of(ragged, EffectiveDepth))
    assert got[None, "standard_error_of_relative_eps=0.05"] == pytest.approx(depth, abs=1e-9)


def test_the_median_saturation_layer_against_loops(ragged):
    logits = ragged.logits.clone()
    logits[1:, :10] = logits[-1, :10]  # half of the sequences settle at once: the median is at stake
    world = ragged.replace(logits=logits)

    def median(kept):
        layers = saturation_layer(lens(world, kept)[0][1:]).tolist()
        return next(n for n in (1, 2, 3) if 2 * sum(layer <= n for layer in layers) >= len(layers))

    rows = any_split_of(world, Saturation)
    assert rows["residual", None, None, "median"].value == median(range(20))
    expected = jackknife(20, median)
    assert expected > 0
    assert errors(rows) == {(None, "standard_error_of_median"): pytest.approx(expected, rel=1e-9)}


@pytest.mark.parametrize("count", [3, 12, 20])
def test_coherence_against_loops(invented, count):
    world = invented(lengths=(9,) * count)
    states = world.states["residual"]

    def of_layer(kept, layer):
        return float(coherence(states[layer - 1, kept], states[layer, kept], corrected=True).nanmean())

    name = "mean_corrected"
    expected = {
        (n, f"standard_error_of_{name}"): jackknife(count, lambda kept, n=n: of_layer(kept, n)) for n in (1, 2, 3)
    }
    overall = jackknife(count, lambda kept: np.mean([of_layer(kept, n) for n in (1, 2, 3)]))
    rows = world.rows(Coherence, (count,))
    assert errors(rows) == pytest.approx({**expected, (None, f"standard_error_of_{name}_of_layers"): overall}, rel=1e-4)
    total = rows["residual", None, None, f"{name}_of_layers"].value
    assert total == pytest.approx(np.mean([of_layer(range(count), n) for n in (1, 2, 3)]), abs=1e-5)
    again = errors(world.rows(Coherence, (1,) * count))
    assert again == pytest.approx(errors(rows), rel=1e-6, abs=1e-8)


def test_a_constant_channel_weighs_in_the_error_as_it_does_in_the_mean(invented):
    world = invented(lengths=(9,) * 12)
    residual = world.states["residual"].clone()
    residual[1, :, :, 2] = 0.1
    kept = list(range(12))

    def of_layer(kept):
        return float(coherence(residual[0, kept], residual[1, kept], corrected=True).nanmean())

    got = errors(world.with_states(residual=residual).rows(Coherence))
    assert got[1, "standard_error_of_mean_corrected"] == pytest.approx(jackknife(len(kept), of_layer), rel=1e-4)


def test_too_few_sequences_have_no_standard_error(invented):
    alone = invented(lengths=(9,))
    for measure in (Displacement, JumpRate, Saturation, EffectiveDepth, LensAccuracy):
        assert errors(alone.rows(measure, (1,))) == {}, measure
    two = invented(lengths=(9, 9))
    assert errors(two.rows(Displacement, (2,)))
    assert errors(two.rows(Coherence, (2,))) == {}, "without one of two sequences there is no coherence"


def test_intervals_cover_the_truth():
    """A ratio of sums over 40 sequences, 2,000 times; 2.13 is the 97.5 % point of t with 15 degrees of freedom."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(5, 50, size=(2000, 40))
    offsets = rng.normal(size=(2000, 40))  # tokens of one sequence have something in common
    sums = tokens * (0.3 + offsets) + np.sqrt(tokens) * rng.normal(size=(2000, 40))
    grouped = [torch.tensor(np.stack([x[:, g::16].sum(1) for g in range(16)])) for x in (sums, tokens)]
    whole = torch.tensor(sums.sum(1) / tokens.sum(1))
    error = standard_error(whole, leave_one_out(grouped[0]) / leave_one_out(grouped[1]), group_sizes(40))
    covered = ((whole - 0.3).abs() <= 2.13 * error).double().mean()
    assert 0.92 < float(covered) < 0.98
    assert float(error.square().mean().sqrt()) == pytest.approx(float(whole.std()), rel=0.05)


@pytest.mark.parametrize(("shared", "most"), [(1.0, 1.1), (0.1, 1.2), (0.0, 1.7)])
def test_a_sample_of_channels_gives_the_error_over_all(shared, most):
    """Channels that have something in common or nothing: the error is right, or somewhat too large, never too small."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(300, 16, 1)) * shared + rng.normal(size=(300, 16, 512))  # draws, sequences, channels
    kept = torch.tensor(values[:, :, ::8])
    whole, without = kept.mean(1), leave_one_out(kept.movedim(1, 0)) / 15
    error = error_of_channel_mean(whole, without, group_sizes(16), 512)
    truth = values.mean((1, 2)).std()
    assert 0.9 < float(error.square().mean().sqrt()) / truth < most

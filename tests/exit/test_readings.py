"""Rules, the choice of a threshold and what is said of it, against plain code and exhaustive search."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from exit import plain
from fulldepth.core.uncertainty import median_ratio, quantile
from fulldepth.execution.decoding import certainty
from fulldepth.exit.readings import Exit, Readings, calibrated, candidates, no_advice, splits
from fulldepth.exit.served import SpeedUp
from fulldepth.exit.sweep import ExitRow, drop_sentence
from fulldepth.metrics.standard_errors import Mean
from metrics.oracle import of_ratio
from refusals import refused
from tiny_models import seeded

RULES = ("confidence", "margin", "entropy", "patience")


def readings(logits, targets, per_sequence=1, clusters=None):
    """The readings of `logits: [L+1, N, C]`."""
    count = len(targets)
    return Readings(
        logits.argmax(-1),
        {rule: torch.stack([certainty(layer, rule) for layer in logits]) for rule in RULES[:3]},
        torch.arange(count) // per_sequence,
        torch.arange(count) // per_sequence if clusters is None else clusters,
        torch.stack([-layer.log_softmax(-1)[torch.arange(count), targets] for layer in logits]),
        targets,
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    layers=st.integers(1, 6),
    classes=st.integers(2, 5),
    scale=st.sampled_from([0.0, 1.0, 5.0, 1e3]),
    rule=st.sampled_from(RULES),
    threshold=st.one_of(st.sampled_from([1e-9, 0.5, 1.0, 1 / 3, 2 / 3]), st.floats(0.01, 1.0)),
    data=st.data(),
)
def test_layers_are_those_of_a_plain_loop(seed, layers, classes, scale, rule, threshold, data):
    logits = scale * torch.randn(layers, 9, classes, dtype=torch.float64, generator=seeded(seed))
    min_layer = data.draw(st.integers(1, layers))
    values = torch.stack([certainty(layer, "margin" if rule == "patience" else rule) for layer in logits])
    assert bool(((values >= -1e-12) & (values <= 1)).all())

    def left(threshold):
        return Exit(rule, threshold, min_layer, layers).layers(values, logits.argmax(-1))

    got = left(threshold)
    margins = [] if rule == "patience" else (values - threshold).abs().flatten().tolist()
    if min(margins, default=1.0) > 1e-9:  # rounding decides nothing
        expected = [plain.leave(logits[:, i].tolist(), rule, threshold, min_layer) for i in range(9)]
        assert got.tolist() == expected
    assert int(got.min()) >= min(min_layer, layers)
    assert left(1.0).tolist() == [layers] * 9
    assert bool((left(threshold / 2) <= got).all())


def world(seed, count=400, layers=4, classes=3):
    """Readings whose later layers are better and surer."""
    generator = seeded(seed)
    targets = torch.randint(classes, (count,), generator=generator)
    signal = F.one_hot(targets, classes).double()
    noise = torch.randn(layers + 1, count, classes, dtype=torch.float64, generator=generator)
    strength = torch.linspace(0.2, 2.5, layers + 1, dtype=torch.float64)[:, None, None]
    return readings(strength * signal * 2 + noise, targets)


@pytest.mark.parametrize("rule", RULES)
def test_the_threshold_is_the_lowest_that_keeps_the_accuracy(rule):
    data = world(0)
    target = 0.02
    tried = sorted(candidates(data, rule, 1, [0.5, 0.9]), reverse=True)
    drops = {t: ExitRow.of(data, Exit(rule, t, 1, 4)).scores["drop"].value for t in tried}
    fine = [t for index, t in enumerate(tried) if all(drops[u] <= target for u in tried[: index + 1])]
    assert calibrated(data, rule, 1, [0.5, 0.9], target) == min(fine)
    assert drops[1.0] == 0


def test_no_threshold_is_chosen_where_none_keeps_the_accuracy():
    """Every layer but the last is sure of a wrong class."""
    targets = torch.zeros(50, dtype=torch.int64)
    logits = torch.zeros(4, 50, 3, dtype=torch.float64)
    logits[:3, :, 1], logits[3, :, 0] = 40.0, 40.0
    assert calibrated(readings(logits, targets), "confidence", 1, [0.5, 0.99], 0.01) == 1.0


def test_one_sequence_has_no_two_parts():
    with refused("two or more"):
        splits(readings(torch.randn(3, 5, 3), torch.randint(3, (5,)), per_sequence=5), 0.5, 0)


CLASSIFIER, LANGUAGE = (SimpleNamespace(anatomy=SimpleNamespace(classifies=classifies)) for classifies in (True, False))


def made(correct, target, clusters=None):
    """Readings whose layers 0..L are right where `correct: [L+1, N]` says so, of binary targets."""
    prediction = torch.where(torch.as_tensor(correct), torch.as_tensor(target), 1 - torch.as_tensor(target))
    logits = F.one_hot(prediction, 2).double()
    return readings(logits, torch.as_tensor(target), clusters=clusters)


def guesses(rng, count, accuracy, share=0.6):
    """A model of one layer that is right with this probability; `share` of the targets are of class 0."""
    target = torch.as_tensor(rng.random(count) > share).long()
    return made(torch.as_tensor(rng.random((2, count)) < accuracy), target)


@pytest.mark.parametrize(("share", "chosen"), [(0.001, 1), (0.3, 6), (0.999, 19)])
def test_the_share_is_that_of_the_part_that_a_threshold_is_chosen_on(share, chosen):
    """Of 20 documents of two sequences each; both parts have one at least."""
    whole = readings(torch.randn(3, 40, 3), torch.randint(3, (40,)), clusters=torch.arange(40) // 2)
    parts = {name: {*part.cluster.tolist()} for name, part in splits(whole, share, 0).items()}
    assert {name: len(documents) for name, documents in parts.items()} == {"calibration": chosen, "report": 20 - chosen}
    assert parts["calibration"] | parts["report"] == {*range(20)}


def test_nothing_is_advised_at_chance():
    data = guesses(np.random.default_rng(1), 400, 0.61)
    target, right = data.target.numpy(), data.correct[-1].numpy()
    constant = target == np.bincount(target).argmax()
    assert float(data.frequent.mean()) == pytest.approx(constant.mean())
    assert data.lead.value == pytest.approx(right.mean() - constant.mean())
    for subject in (CLASSIFIER, LANGUAGE):
        said = no_advice(subject, data)
        assert f"{100 * right.mean():.1f} ± " in said
        assert f"({constant.mean():.1%})" in said
    assert no_advice(CLASSIFIER, guesses(np.random.default_rng(1), 400, 0.9)) is None
    assert no_advice(CLASSIFIER, made(torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 1])))  # no error
    every = made(torch.ones(2, 9, dtype=torch.bool), torch.zeros(9, dtype=torch.int64))
    assert no_advice(CLASSIFIER, every).startswith("The full model is right on 100.0 %, not measurably more than")


def test_the_error_of_the_lead_is_paired_over_clusters():
    """The formula for a ratio of sums over clusters, in a loop; fewer clusters than groups."""
    rng = np.random.default_rng(3)
    clusters = np.sort(rng.integers(0, 25, 300))
    data = guesses(rng, 300, 0.8)
    data = made(data.correct, data.target, torch.as_tensor(clusters))
    target = data.target.numpy()
    lead = data.correct[-1].numpy().astype(float) - (target == np.bincount(target).argmax())
    assert data.lead.error == pytest.approx(of_ratio(clusters, lead, np.ones(300)))


def test_the_first_layer_that_is_enough_against_a_loop():
    data = world(0, count=300)
    right = data.correct.double().numpy()
    for share in (0.8, 0.95, 1.0):
        plain, low, high = data.depth(share)
        quality = right.mean(1)
        assert plain == next(layer for layer in range(1, 5) if quality[layer] >= share * quality[4] - 1e-12)
        for end, sign in ((low, -1), (high, 1)):
            bounds = []
            for layer in range(1, 4):
                mean = data.shortfall(layer, share)
                assert mean.value == pytest.approx((share * right[4] - right[layer]).mean())
                bounds.append(mean.value + sign * quantile(32) * np.hypot(mean.error, 1 / 300))
            assert end == next((layer for layer, bound in enumerate(bounds, start=1) if bound <= 1e-12), 4)
        assert low <= plain <= high


def test_equal_predictions_of_few_samples_do_not_prove_that_nothing_is_lost():
    drop = Mean.of(torch.zeros(50), torch.arange(50))
    assert drop.value == drop.error == 0
    assert drop.interval == pytest.approx((-quantile(32) / 50, quantile(32) / 50))
    assert "No measurable drop" in drop_sentence(drop, 0.01)
    assert "above 1 points" in drop_sentence(Mean.of(torch.zeros(5000), torch.arange(5000)), 0.01)
    lossy = Mean.of((torch.arange(500) % 5 == 0).double(), torch.arange(500))
    assert "20.0 points" in drop_sentence(lossy)


def test_parts_are_divided_by_the_hash_of_clusters():
    """Windows of a document stay together, and the same documents are chosen in every order of the rows."""
    clusters = torch.as_tensor(np.random.default_rng(0).integers(0, 2**62, 20)).repeat_interleave(3)
    logits, target = torch.randn(3, 60, 3), torch.randint(3, (60,))
    order = torch.randperm(60, generator=seeded(0))
    chosen = []
    for rows in (torch.arange(60), order):
        parts = splits(readings(logits[:, rows], target[rows], clusters=clusters[rows]), 0.5, 0)
        one, other = (set(parts[name].cluster.tolist()) for name in ("calibration", "report"))
        assert len(one) == len(other) == 10
        assert not one & other
        chosen.append(one)
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize(
    ("ratio", "rounds", "load", "verdict"),
    [
        (1.5, 9, 0.0, "differs"),
        (1.0, 9, 0.0, "no-difference"),
        (1.5, 8, 0.0, "few-rounds"),
        (1.5, 9, 0.2, "busy"),
    ],
)
def test_times_differ_only_beyond_their_interval(ratio, rounds, load, verdict):
    own = [1 + 0.01 * (at % 3 - 1) for at in range(rounds)]
    full = [ratio] * rounds
    speedup = SpeedUp.of(full, own, load)
    assert speedup.verdict == verdict == speedup.document()["timing"]
    assert ("1.50 times" in speedup.sentence()) == (verdict == "differs")
    assert speedup.document()["measured_speedup"] == median_ratio(full, own).value
    assert (speedup.document()["measured_speedup_interval"] is None) == (rounds < 9)


def test_a_low_threshold_is_not_accepted_beyond_one_that_misses():
    """Ten samples leave surely and wrong, ten less surely and right where the full model is wrong: together no loss."""
    targets = torch.zeros(20, dtype=torch.int64)
    early = torch.zeros(20, 2, dtype=torch.float64)
    early[:10, 1], early[10:, 0] = math.log(0.95 / 0.05), math.log(0.6 / 0.4)
    full = torch.zeros(20, 2, dtype=torch.float64)
    full[:10, 0], full[10:, 1] = 9.0, 9.0
    data = readings(torch.stack([early, early, full]), targets)
    assert data.accuracy(data.all_at(1)) == data.accuracy(data.all_at(2)) == 0.5
    assert calibrated(data, "confidence", 1, [0.9, 0.5], 0.02) > 0.9

"""What is said of early exit: the floor under advice, intervals of drops, verdicts on times, parts of the data."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from early_exit.test_rules import readings, world
from fulldepth.early_exit import Mean, SpeedUp, drop_sentence, no_advice, splits
from fulldepth.uncertainty import median_ratio, quantile

CLASSIFIER = SimpleNamespace(classifies=True)


def made(correct, target, clusters=None):
    """Readings whose layers 0..L are right where `correct: [L+1, N]` says so, of binary targets."""
    prediction = torch.where(torch.as_tensor(correct), torch.as_tensor(target), 1 - torch.as_tensor(target))
    logits = torch.nn.functional.one_hot(prediction, 2).double()
    return readings(logits, torch.as_tensor(target), clusters=clusters)


def guesses(rng, count, accuracy, share=0.6):
    """A model of one layer that is right with this probability; `share` of the targets are of class 0."""
    target = torch.as_tensor(rng.random(count) > share).long()
    return made(torch.as_tensor(rng.random((2, count)) < accuracy), target)


def test_nothing_is_advised_at_chance():
    data = guesses(np.random.default_rng(1), 400, 0.61)
    target, right = data.target.numpy(), data.correct[-1].numpy()
    constant = target == np.bincount(target).argmax()
    assert data.chance.value == pytest.approx(constant.mean())
    assert data.lead.value == pytest.approx(right.mean() - constant.mean())
    said = no_advice(CLASSIFIER, data)
    assert said.startswith(f"The full model is right on {100 * right.mean():.1f} ± ")
    assert said.endswith(
        f"%, not measurably more than always answering the most frequent class ({constant.mean():.1%}): nothing is "
        "advised."
    )
    tokens = no_advice(SimpleNamespace(classifies=False), data)
    assert "always predicting the most frequent token" in tokens
    assert no_advice(CLASSIFIER, guesses(np.random.default_rng(1), 400, 0.9)) is None
    assert "no standard error" in no_advice(CLASSIFIER, made(torch.ones(2, 2, dtype=torch.bool), torch.tensor([0, 1])))


def test_the_error_of_the_lead_is_paired_over_clusters():
    """The formula for a ratio of sums over clusters, in a loop; fewer clusters than groups."""
    rng = np.random.default_rng(3)
    clusters = np.sort(rng.integers(0, 25, 300))
    data = guesses(rng, 300, 0.8)
    data = made(data.correct, data.target, torch.as_tensor(clusters))
    target = data.target.numpy()
    lead = data.correct[-1].numpy().astype(float) - (target == np.bincount(target).argmax())
    squares = [((lead - lead.mean())[clusters == c].sum()) ** 2 for c in np.unique(clusters)]
    count = len(squares)
    assert data.lead.error == pytest.approx((count / (count - 1) * sum(squares)) ** 0.5 / len(lead))


def test_models_at_chance_are_rarely_advised():
    """The model is as good as the constant prediction, so about 2.5 % are beyond 2 standard errors."""
    rng = np.random.default_rng(5)
    advised = sum(no_advice(CLASSIFIER, guesses(rng, 200, 0.6)) is None for _ in range(400))
    assert advised <= 0.05 * 400


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


@pytest.mark.parametrize("order", ["sorted", "shuffled", "alternating"])
def test_the_interval_of_a_drop_covers_the_truth(order):
    """30 documents of 12 tokens, with an effect of the document on the drop; in any order of the rows."""
    rng, covered, truth = np.random.default_rng(7), 0, 0.02
    for _ in range(400):
        lost = truth + rng.normal(0, 0.03, 30)  # of each document
        difference = (rng.random((30, 12)) < 0.05 + lost[:, None]).astype(float) - (rng.random((30, 12)) < 0.05)
        clusters = np.repeat(rng.integers(0, 2**62, 30), 12)
        rows = {"sorted": np.arange(360), "shuffled": rng.permutation(360), "alternating": np.arange(360).reshape(30, 12).T.ravel()}[order]  # fmt: skip  # noqa: E501
        values, groups = torch.from_numpy(difference.ravel()[rows]), torch.from_numpy(clusters[rows])
        low, high = Mean.of(values, groups).interval
        covered += low <= truth <= high
    assert 0.9 <= covered / 400 <= 0.985


def test_equal_predictions_of_few_samples_do_not_prove_that_nothing_is_lost():
    drop = Mean.of(torch.zeros(50), torch.arange(50))
    assert drop.value == drop.error == 0
    assert drop.interval == pytest.approx((-quantile(32) / 50, quantile(32) / 50))
    assert drop_sentence(drop, 0.01).startswith("No measurable drop of accuracy (0.0 points, 95 % interval")
    many = Mean.of(torch.zeros(5000), torch.arange(5000))
    assert drop_sentence(many, 0.01).startswith("No drop of accuracy above 1 points")
    lossy = Mean.of((torch.arange(500) % 5 == 0).double(), torch.arange(500))
    low, high = (100 * end for end in lossy.interval)
    assert drop_sentence(lossy) == f"Accuracy drop 20.0 points (95 % interval {low:.1f} to {high:.1f})"


def test_parts_are_divided_by_the_hash_of_clusters():
    """Windows of a document stay together, and the same documents are chosen in every order of the rows."""
    clusters = torch.as_tensor(np.random.default_rng(0).integers(0, 2**62, 20)).repeat_interleave(3)
    logits, target = torch.randn(3, 60, 3), torch.randint(3, (60,))
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0))
    chosen = []
    for rows in (torch.arange(60), order):
        parts = splits(readings(logits[:, rows], target[rows], clusters=clusters[rows]), 0.5, 0)
        one, other = (set(parts[name].cluster.tolist()) for name in ("calibration", "report"))
        assert len(one) == len(other) == 10
        assert not one & other
        chosen.append(one)
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize(
    ("ratio", "rounds", "load", "verdict", "said"),
    [
        (1.5, 9, 0.0, "differs", "It is 1.50 times as fast as the full model (95 % interval 1."),
        (1.0, 9, 0.0, "no-difference", "No measurable difference in time"),
        (1.5, 8, 0.0, "few-rounds", "8 timed rounds are too few"),
        (1.5, 9, 0.2, "busy", "The machine was busy (20% of its processor); times are not compared."),
    ],
)
def test_times_differ_only_beyond_their_interval(ratio, rounds, load, verdict, said):
    own = [1 + 0.01 * (at % 3 - 1) for at in range(rounds)]
    full = [ratio] * rounds
    speedup = SpeedUp.of(full, own, load)
    assert speedup.verdict == verdict == speedup.document()["timing"]
    assert speedup.sentence().startswith(said)
    assert speedup.document()["measured_speedup"] == median_ratio(full, own).value
    assert (speedup.document()["measured_speedup_interval"] is None) == (rounds < 9)
    assert SpeedUp.of([], [], load) is None

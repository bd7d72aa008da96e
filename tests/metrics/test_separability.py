"""Linear separability of look-alike tokens (LIME, Sec. 5.3), against a scikit-learn pipeline."""

import numpy as np
import pytest
import torch
from scipy.stats import ortho_group
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fulldepth.metrics import Separability, separability


def oracle(features, labels, folds=5, seed=0):
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=10_000, tol=1e-8))
    split = StratifiedKFold(folds, shuffle=True, random_state=seed)
    scores = cross_val_score(probe, np.asarray(features, np.float64), np.asarray(labels), cv=split)
    return scores.mean(), scores.std()


def words(generator, per_word, width, distance):
    labels = torch.arange(3).repeat_interleave(per_word)
    centres = distance * torch.randn(3, width, generator=generator)
    return centres[labels] + torch.randn(len(labels), width, generator=generator), labels


@pytest.mark.parametrize("distance", [0.3, 0.8])
@pytest.mark.parametrize(("folds", "seed"), [(5, 0), (3, 7)])
def test_against_scikit_learn(distance, folds, seed, generator):
    features, labels = words(generator, 60, 6, distance)
    got = separability(features, labels, folds=folds, seed=seed)
    np.testing.assert_allclose([float(x) for x in got], oracle(features, labels, folds, seed), atol=1e-9)


def test_what_lies_apart_is_separable_and_what_does_not_is_not(generator):
    features, labels = words(generator, 40, 6, 50.0)
    assert [float(x) for x in separability(features, labels)] == [1.0, 0.0]
    noise = torch.randn(600, 4, generator=generator)
    assert float(separability(noise, torch.arange(600) % 3)[0]) == pytest.approx(1 / 3, abs=0.08)


def test_a_frequent_word_does_not_buy_accuracy(generator):
    features = torch.randn(500, 4, generator=generator)
    labels = (torch.arange(500) >= 450).long()
    assert float(separability(features, labels)[0]) == pytest.approx(0.5, abs=0.15)


def test_neither_scale_nor_shift_of_a_channel_matters(generator):
    features, labels = words(generator, 50, 5, 0.7)
    gains = torch.tensor([1e-3, 1.0, 10.0, 1e3, 5.0])
    expected = [float(x) for x in separability(features.double(), labels)]
    assert [float(x) for x in separability(features.double() * gains + 100, labels)] == pytest.approx(expected)
    mean, _ = separability(features.double() @ torch.tensor(ortho_group.rvs(5, random_state=0)), labels)
    assert float(mean) == pytest.approx(expected[0], abs=0.1), "standardising makes a rotation matter, but little"


def test_fewer_occurrences_than_folds_are_refused(generator):
    with pytest.raises(ValueError, match=r"fold|occur"):
        separability(torch.randn(9, 3, generator=generator), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1]), folds=5)


def test_rows_against_scikit_learn(invented, generator, any_split, same_rows):
    world = invented(lengths=(20,) * 12)
    words_at = torch.full((12, 20), -1)
    words_at[:, 1::2] = torch.arange(120).reshape(12, 10) % 3
    world = world.replace(words=words_at)
    rows = any_split(Separability, world, atol=1e-9)
    same_rows(world.rows(Separability, (4, 8), order=range(11, -1, -1)), rows, atol=1e-9)
    layers = {"residual": range(world.layers + 1), "value": range(1, world.layers + 1)}
    assert rows.keys() == {(s, n, None, k) for s, each in layers.items() for n in each for k in ("mean", "std")}
    where = words_at >= 0
    for (site, layer, _, statistic), row in rows.items():
        h = world.states[site][layer if site == "residual" else layer - 1][where]
        expected = oracle(h, words_at[where])[statistic == "std"]
        assert row.value == pytest.approx(expected, abs=1e-6), (site, layer, statistic)
        assert row.count == 120

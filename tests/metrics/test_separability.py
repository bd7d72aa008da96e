"""Linear separability of look-alike tokens (LIME, Sec. 5.3), against a scikit-learn pipeline."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from sklearn.linear_model import LogisticRegression
from sklearn.manifold import TSNE
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fulldepth.metrics import Separability, separability
from fulldepth.metrics.separability import word_map
from tiny_models import seeded


def oracle(features, labels, folds=5, seed=0):
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=10_000, tol=1e-8))
    split = StratifiedKFold(folds, shuffle=True, random_state=seed)
    scores = cross_val_score(probe, np.asarray(features, np.float64), np.asarray(labels), cv=split)
    return scores.mean(), scores.std()


def words(generator, per_word, width, distance):
    labels = torch.arange(3).repeat_interleave(per_word)
    centres = distance * torch.randn(3, width, generator=generator)
    return centres[labels] + torch.randn(len(labels), width, generator=generator), labels


@pytest.mark.parametrize(("distance", "folds", "seed"), [(0.3, 5, 0), (0.8, 3, 7)])
def test_against_scikit_learn(distance, folds, seed, generator):
    features, labels = words(generator, 60, 6, distance)
    got = separability(features, labels, folds=folds, seed=seed)
    assert_allclose([float(x) for x in got], oracle(features, labels, folds, seed), atol=1e-9)


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


def test_maps_keep_the_words_of_neighbours(invented, generator):
    """Each word has as many places; occurrences of words that can be told apart are neighbours of their own kind."""
    world = invented(lengths=(20,) * 12)
    words_at = torch.arange(240).reshape(12, 20) % 3
    apart = 20 * torch.randn(3, world.states["residual"].shape[-1], generator=generator)[words_at]
    states = {**world.states, "residual": world.states["residual"] + apart}
    world = world.replace(words=words_at, states=states)
    measure = Separability(world.setup())
    for observation in world.observations((4, 8)):
        measure.update(observation)
    measure.rows()
    layers = {(entry["site"], entry["layer"]) for entry in measure.maps}
    assert {("residual", 0), ("residual", world.layers), ("value", 1), ("value", world.layers)} <= layers
    for entry in measure.maps:
        places = np.concatenate([np.stack([word["x"], word["y"]], 1) for word in entry["words"]])
        labels = np.repeat(range(3), [len(word["x"]) for word in entry["words"]])
        assert [word["word"] for word in entry["words"]] == list(world.setup().words)
        assert np.bincount(labels).tolist() == [80, 80, 80]
        if entry["site"] == "residual":
            near = KNeighborsClassifier(2).fit(places, labels)  # a point is the nearest to itself
            assert near.score(places, labels) == 1


def test_a_map_is_that_of_scikit_learn(generator):
    features, _ = words(generator, 12, 6, 2.0)
    expected = TSNE(perplexity=35 / 3, init="pca", random_state=3).fit_transform(
        StandardScaler().fit_transform(features.double().numpy())
    )
    assert_allclose(word_map(features, seed=3), expected, rtol=1e-6)


def test_of_frequent_words_as_many_are_used_as_of_the_rarest():
    """Classes apart by less than their spread, 100 to 20: unbalanced, a constant answer would be right in 83 %."""
    labels = torch.tensor([0] * 100 + [1] * 20)
    features = torch.randn(120, 4, generator=seeded(1))
    mean, std = separability(features, labels, seed=3)
    generator = np.random.default_rng(3)
    chosen = np.sort(np.r_[generator.choice(100, 20, False), 100 + generator.choice(20, 20, False)])
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=10_000, tol=1e-8))
    split = StratifiedKFold(5, shuffle=True, random_state=3)
    scores = cross_val_score(probe, features.double().numpy()[chosen], labels.numpy()[chosen], cv=split)
    assert (mean, std) == pytest.approx((scores.mean(), scores.std()), abs=1e-9)
    assert mean < 0.8  # unbalanced, 100 of 120 are right without a probe

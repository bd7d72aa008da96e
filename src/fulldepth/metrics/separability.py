"""Linear separability of look-alike words (LIME, Sec. 5.3)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.manifold import TSNE
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from fulldepth.metrics.base import Measure, Observation, Row, Setup
from fulldepth.metrics.reservoir import Reservoir

FOLDS = 5
OCCURRENCES = 500
"""Maximum number of stored occurrences of a word, chosen by a seeded hash."""
MAPPED = 100
"""Maximum number of occurrences of a word on a map."""
PERPLEXITY = 30
"""Perplexity of t-SNE, less for few occurrences."""
MAPS = 4
"""Layers of a site that are mapped, from the first to the last."""
SOLVERS = ("lbfgs", "newton-cg")
"""The second is slower and is used if the line search of the first fails."""


def separability(features: Tensor, labels: Tensor, folds: int = FOLDS, seed: int = 0) -> tuple[float, float]:
    """Cross-validated accuracy of a linear probe, in [0, 1]; chance is one over the number of classes.

    L2-penalised multinomial logistic regression (C = 1) fitted to convergence on standardised features, with mean and
    standard deviation estimated inside each fold; stratified, shuffled folds; every class is subsampled to the size of
    the smallest.

    Args:
        features: one row per occurrence, `[N, D]`.
        labels: class of each occurrence, `[N]`.
        folds: number of folds, at least 2.
        seed: seed of the subsampling and of the folds.

    Returns:
        Mean and (population) standard deviation of the accuracy over folds, unit 1; NaN if a feature is not finite or
        no solver converges.

    Raises:
        ValueError: if the shapes do not match, or there are fewer than two classes, two folds, or `folds` samples of
            some class.

    Source: "LIME: layer-integrated memory", Sec. 5.3 (there with an unconverged probe and unbalanced classes).
    """
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"expected features [N, D] and labels [N], got {tuple(features.shape)} and {tuple(labels.shape)}"
        )
    x = features.detach().double().cpu().numpy()
    y = labels.cpu().numpy()
    classes, sizes = np.unique(y, return_counts=True)
    if len(classes) < 2 or folds < 2 or sizes.min() < folds:
        raise ValueError(
            f"expected at least 2 classes, 2 folds and as many samples of each class as folds, "
            f"got {folds} folds and class sizes {sizes.tolist()}"
        )
    if not np.isfinite(x).all():
        return math.nan, math.nan
    balanced = _balanced(y, seed)
    splits = StratifiedKFold(folds, shuffle=True, random_state=seed)
    for solver in SOLVERS:
        probe = make_pipeline(StandardScaler(), LogisticRegression(solver=solver, max_iter=10_000))
        with warnings.catch_warnings(), suppress(ConvergenceWarning):
            warnings.simplefilter("error", ConvergenceWarning)
            scores = cross_val_score(probe, x[balanced], y[balanced], cv=splits, error_score="raise")
            return float(scores.mean()), float(scores.std())
    return math.nan, math.nan


def word_map(features: Tensor, seed: int = 0) -> np.ndarray:
    """Places of occurrences in the plane, `[N, 2]`, by t-SNE of standardised features `[N, D]`, started from PCA.

    Source: van der Maaten and Hinton, "Visualizing Data using t-SNE" (2008); LIME, Fig. 6 and 15.
    """
    standardised = StandardScaler().fit_transform(features.detach().double().cpu().numpy())
    perplexity = min(PERPLEXITY, (len(standardised) - 1) / 3)
    return np.asarray(TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(standardised))


def _balanced(labels: np.ndarray, seed: int) -> np.ndarray:
    """Return ascending indices of a random sample with as many members of every class as the smallest class has."""
    generator = np.random.default_rng(seed)
    classes, sizes = np.unique(labels, return_counts=True)
    indices = [generator.choice(np.flatnonzero(labels == label), sizes.min(), replace=False) for label in classes]
    return np.sort(np.concatenate(indices))


class Separability(Measure):
    """Linear separability of `Setup.words`, in the residual stream of layers 0..L and the value states of layers 1..L.

    Occurrences are used regardless of the token policy: at most 500 of each word are stored, and as many of each word
    are used as the rarest has. No rows for fewer than two words, or if a word has fewer occurrences than folds.
    """

    name = "separability"
    units = dict.fromkeys(("mean", "std"), "1")
    sites = ("residual", "value")
    needs = frozenset({"words"})

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        shapes = {"residual": (setup.num_layers + 1, setup.width)}
        if setup.value_width:
            shapes["value"] = (setup.num_layers, setup.value_width)
        capacity = min(OCCURRENCES, setup.num_sequences * setup.sequence_length or OCCURRENCES)
        self.by_site = {
            site: [Reservoir(capacity, shape, setup.seed, setup.device) for _ in setup.words]
            for site, shape in shapes.items()
        }
        """Site -> one reservoir for each word."""
        self.reservoirs = nn.ModuleList(reservoir for reservoirs in self.by_site.values() for reservoir in reservoirs)
        self.maps: list[dict[str, Any]] = []
        """`word_map` of some layers, after `rows`: site, layer, and for each word the coordinates `x` and `y`."""

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        if observation.words is None:
            raise ValueError("this observation does not say where words end; separability needs it")
        mask = observation.attention_mask
        words = observation.words.to(mask.device)
        for site, reservoirs in self.by_site.items():
            if site not in observation.states:
                continue
            for word, reservoir in enumerate(reservoirs):
                where = (words == word) & mask
                reservoir.update(observation.select(site, where).transpose(0, 1), observation.keys_at(where))

    def compute(self) -> list[tuple[str, int, float, float, int]]:
        """Site, layer, mean and standard deviation of the accuracy, and the total number of occurrences used."""
        results = []
        self.maps = []
        for site, reservoirs in self.by_site.items():
            samples = [reservoir.compute().features for reservoir in reservoirs]  # each [N, S, D]
            rarest = min(map(len, samples), default=0)
            if len(samples) < 2 or rarest < FOLDS:
                continue
            labels = torch.cat([torch.full((len(sample),), word) for word, sample in enumerate(samples)])
            features = torch.cat(samples)
            first = self.setup.num_layers + 1 - features.shape[1]
            for index in range(features.shape[1]):
                mean, std = separability(features[:, index], labels, FOLDS, self.setup.seed)
                results.append((site, first + index, mean, std, rarest * len(samples)))
            for index in sorted({round(at) for at in np.linspace(0, features.shape[1] - 1, MAPS)}):
                occurrences = [sample[: min(rarest, MAPPED), index] for sample in samples]
                if all(bool(states.isfinite().all()) for states in occurrences):
                    self.maps.append({"site": site, "layer": first + index, "words": self._places(occurrences)})
        return results

    def _places(self, samples: Sequence[Tensor]) -> list[dict[str, Any]]:
        """The words with the coordinates of their occurrences, to three decimals, for a page."""
        places = np.split(word_map(torch.cat(list(samples)), self.setup.seed), len(samples))
        return [
            {"word": word, "x": [round(float(x), 3) for x, _ in place], "y": [round(float(y), 3) for _, y in place]}
            for word, place in zip(self.setup.words, places, strict=True)
        ]

    def rows(self) -> list[Row]:
        """Two rows for each site and layer."""
        return [
            self.row(statistic, value, count, layer, site=site)
            for site, layer, mean, std, count in self.compute()
            for statistic, value in (("mean", mean), ("std", std))
        ]

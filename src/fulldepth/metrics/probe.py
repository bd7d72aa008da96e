"""Accuracy of a linear probe on another set of samples: how well a layer's features transfer."""

from __future__ import annotations

import math
import warnings

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from fulldepth.metrics.separability import SOLVERS


def probe_accuracy(
    features: Tensor, labels: Tensor, test_features: Tensor, test_labels: Tensor, seed: int = 0
) -> tuple[float, float]:
    r"""Class-balanced accuracy, on a test set, of a linear classifier that is fitted to frozen features, in [0, 1].

    L2-penalised multinomial logistic regression (C = 1), fitted to convergence on features that are standardised by the
    training set. Every class of the training set is subsampled to the size of the smallest. The accuracy is the mean
    over classes of the share `p_k` of their `n_k` test samples that are classified correctly; its standard error is
    :math:`\frac{1}{K} \sqrt{\sum_k p_k (1 - p_k) / n_k}`.

    Args:
        features: of the training set, `[N, D]`.
        labels: class of each, `[N]`.
        test_features: `[M, D]`.
        test_labels: `[M]`; classes that the training set has too.
        seed: of the subsampling.

    Returns:
        Accuracy and standard error, unit 1; NaN if a feature is not finite or no solver converges.

    Raises:
        ValueError: if shapes do not match, the training set has fewer than two classes, or the test set is empty or has
            a class that the training set lacks.

    Source: "Representation progression and aligned training", App. B.4 (linear classifier on a frozen body).
    """
    for samples, classes_of in ((features, labels), (test_features, test_labels)):
        if samples.ndim != 2 or classes_of.shape != samples.shape[:1] or samples.shape[1] != features.shape[1]:
            raise ValueError(
                f"expected features [N, D] and labels [N], got {tuple(samples.shape)} and {tuple(classes_of.shape)}"
            )
    x, y = features.detach().double().cpu().numpy(), labels.cpu().numpy()
    test_x, test_y = test_features.detach().double().cpu().numpy(), test_labels.cpu().numpy()
    classes, sizes = np.unique(y, return_counts=True)
    if len(classes) < 2 or not len(test_y) or not set(test_y.tolist()) <= set(classes.tolist()):
        raise ValueError(
            f"expected at least 2 classes and test samples of these classes alone, got {classes.tolist()} and "
            f"{sorted(set(test_y.tolist()))}"
        )
    if not (np.isfinite(x).all() and np.isfinite(test_x).all()):
        return math.nan, math.nan
    draw = np.random.default_rng(seed)
    chosen = np.sort(
        np.concatenate([draw.choice(np.flatnonzero(y == label), sizes.min(), replace=False) for label in classes])
    )
    predicted = _predict(x[chosen], y[chosen], test_x)
    if predicted is None:
        return math.nan, math.nan
    shares = [
        (float((predicted[test_y == label] == label).mean()), int((test_y == label).sum()))
        for label in np.unique(test_y)
    ]
    variance = sum(share * (1 - share) / count for share, count in shares)
    return sum(share for share, _ in shares) / len(shares), math.sqrt(variance) / len(shares)


def _predict(x: np.ndarray, y: np.ndarray, test: np.ndarray) -> np.ndarray | None:
    """Predicted classes; None if no solver converges."""
    for solver in SOLVERS:
        probe = make_pipeline(StandardScaler(), LogisticRegression(solver=solver, max_iter=10_000))
        with warnings.catch_warnings():
            warnings.simplefilter("error", ConvergenceWarning)
            try:
                predicted: np.ndarray = probe.fit(x, y).predict(test)
            except ConvergenceWarning:
                continue
            return predicted
    return None

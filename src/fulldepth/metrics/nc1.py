"""NC1: within-class variability collapse of features (aligned training, footnote 5)."""

from __future__ import annotations

import torch
from torch import Tensor

from fulldepth.metrics.base import OfLayers


def nc1(features: Tensor, labels: Tensor) -> Tensor:
    r"""Within-class variability relative to the spread of the class means, in [0, inf); 0 = collapsed.

    .. math::
        \frac{1}{K} \operatorname{tr}(\Sigma_W \Sigma_B^\dagger), \quad
        \Sigma_W = \frac{1}{N} \sum_i (h_i - \bar h_{y_i})(h_i - \bar h_{y_i})^\top, \quad
        \Sigma_B = \frac{1}{K} \sum_k (\bar h_k - \bar h)(\bar h_k - \bar h)^\top

    The global mean is over samples, so classes may differ in size. The rank of `Sigma_B` is below K; its pseudo-inverse
    is computed from the singular values of the centred class means, `[K, D]`, in float64, with numpy's cut-off for a
    Hermitian D x D matrix. No D x D matrix is formed.

    Args:
        features: one row per sample, `[N, D]`.
        labels: class of each sample, `[N]`.

    Returns:
        0-d float64, unit 1; NaN if all class means coincide (for instance if all samples share one [CLS] embedding).

    Raises:
        ValueError: if the shapes do not match or there are fewer than two classes.

    Source: "Representation progression and aligned training", footnote 5.
    """
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"expected features [N, D] and labels [N], got {tuple(features.shape)} and {tuple(labels.shape)}"
        )
    classes, membership = labels.to(features.device).unique(return_inverse=True)
    if len(classes) < 2:
        raise ValueError(f"nc1 compares classes and needs at least two, got {len(classes)}")
    features = features.double()
    eps = torch.finfo(torch.float64).eps
    rounding = len(features) * eps * features.abs().max()
    features = features - features.mean(0)
    means = features.new_zeros(len(classes), features.shape[1]).index_add_(0, membership, features)
    means /= membership.bincount()[:, None]
    _, spread, directions = torch.linalg.svd(means.nan_to_num(), full_matrices=False)
    if not (features.isfinite().all() and spread[0] > rounding):
        return features.new_tensor(torch.nan)
    between = spread.square() / len(classes)  # the eigenvalues of Sigma_B
    real = between > between[0] * features.shape[1] * eps
    within = ((features - means[membership]) @ directions[real].T).square().mean(0)
    return (within / between[real]).sum() / len(classes)


class Nc1(OfLayers):
    """NC1 of layers 0..L over the labelled tokens of the shared reservoir; no rows for fewer than two classes."""

    name = "nc1"
    needs = frozenset({"labels"})

    def compute(self) -> tuple[list[float], int]:
        """NC1 of layers 0..L, and the number of tokens."""
        sample = self.setup.reservoir("residual").compute()
        labels = sample.labels.reshape(-1)
        labelled = labels >= 0
        if len(labels[labelled].unique()) < 2:
            return [], 0
        layers = range(self.setup.num_layers + 1)
        values = [float(nc1(sample.features[labelled, layer], labels[labelled])) for layer in layers]
        return values, int(labelled.sum())

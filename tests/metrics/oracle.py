"""Formulas of the measures in float64, by SciPy, scikit-learn and plain loops.

Of fulldepth only `deal` is used, which says what sequences are left out together.
"""

import cmath
import math
from itertools import pairwise

import numpy as np
import scipy.special
from scipy.spatial.distance import pdist
from scipy.stats import entropy as shannon
from sklearn.metrics import accuracy_score, log_loss
from sklearn.metrics.pairwise import paired_cosine_distances, rbf_kernel

from fulldepth.core.uncertainty import deal


def cosines(x, y, center=False):
    """[...] of vectors [..., D], without their means over the first axis if asked."""
    x, y = np.broadcast_arrays(*((h - h.mean(0) for h in (x, y)) if center else (x, y)))
    distances = paired_cosine_distances(*(h.reshape(-1, h.shape[-1]) for h in (x, y)))
    return 1 - distances.reshape(x.shape[:-1])


def psi(x, y):
    """[...] displacements (JREG, Eq. 2)."""
    return (1 - cosines(x, y)) / 2


def steps(states):
    """[L, ...] displacements of layers 1 to L of states [L+1, ..., D]."""
    return psi(states[:-1], states[1:])


def ratio(x, y):
    """[...] norm ratios."""
    return np.linalg.norm(x, axis=-1) / np.linalg.norm(y - x, axis=-1)


def matrix_of_cosines(states, center=True):
    return [[cosines(x, y, center).mean() for y in states] for x in states]


def mmd(x, y, bandwidth=None):
    s = bandwidth or np.median(pdist(np.concatenate([x, y])))
    within, across = (
        [rbf_kernel(a, b, gamma=1 / (2 * s * s)).mean() for a, b in ab] for ab in ([(x, x), (y, y)], [(x, y)])
    )
    return sum(within) - 2 * sum(across)


def nc1(x, labels):
    """tr(Sigma_W pinv(Sigma_B)) / K"""
    classes = np.unique(labels)
    means = {k: x[labels == k].mean(0) for k in classes}
    within = sum(np.outer(h - means[k], h - means[k]) for h, k in zip(x, labels, strict=True)) / len(x)
    between = sum(np.outer(m - x.mean(0), m - x.mean(0)) for m in means.values()) / len(classes)
    return np.trace(within @ np.linalg.pinv(between, rcond=1e-10, hermitian=True)) / len(classes)


def renyi(z, alpha):
    """Of one sequence [T, D], from the T x T Gram."""
    p = np.linalg.eigvalsh(z @ z.T).clip(min=0)
    p = p[p > 1e-14 * p.sum()] / p.sum()
    return shannon(p) if alpha == 1 else math.log(np.sum(p**alpha)) / (1 - alpha)


def accuracy(logits, targets):
    known = targets != -100
    return accuracy_score(targets[known], logits[known].argmax(-1))


def loss(logits, targets):
    known = targets != -100
    chances = scipy.special.softmax(logits[known], axis=-1)
    return log_loss(targets[known], chances, labels=range(logits.shape[-1]))


def settles(predictions):
    """The smallest 1-based layer from which all later predictions are the last one."""
    return next(n for n in range(1, len(predictions) + 1) if len(set(predictions[n - 1 :])) == 1)


def of_lens(logits, targets):
    """Accuracies [L+1], losses [L+1], and how many positions settle at layers 1..L, from logits [L+1, N, V]."""
    settled = [settles(column) for column in logits[1:].argmax(-1).T.tolist()]
    counts = np.bincount(settled, minlength=len(logits))[1:]
    return [accuracy(layer, targets) for layer in logits], [loss(layer, targets) for layer in logits], counts


def zeta(mean_psi, start):
    return 100 * sum(max(0.0, after - before) for before, after in list(pairwise(mean_psi))[start - 2 :])


def hsic_1(k, m):
    """Unbiased HSIC of two Gram matrices with zeroed diagonals (Song et al., 2012), as written."""
    n, one = len(k), np.ones(len(k))
    product = (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return (np.trace(k @ m) + product - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))


def plain_cka(x, y, debiased):
    """Linear CKA (aligned training, Eq. 3), or its unbiased form."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if not debiased:
        x, y = x - x.mean(0), y - y.mean(0)
        return np.sum((y.T @ x) ** 2) / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    k, m = (g - np.diag(np.diag(g)) for g in (x @ x.T, y @ y.T))
    return hsic_1(k, m) / np.sqrt(hsic_1(k, k) * hsic_1(m, m))


def spectrum(h):
    """[K] characteristic function of one sequence of one channel."""
    h = [float(x) for x in h]
    mean = math.fsum(h) / len(h)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in h) / (len(h) - 1))
    weights = [math.exp((x - mean) / (deviation + 1e-8)) for x in h]
    phi = []
    for k in range(len(h) // 2 + 1):
        w = 2 * math.pi * k / len(h)
        phi.append(sum(p * cmath.exp(-1j * w * t) for t, p in enumerate(weights)) / math.fsum(weights))
    return np.array(phi)


def plain_coherence(h_in, h_out):
    """[D, K] of [B, T, D], one channel at a time, by explicit sums."""
    rows = []
    for d in range(h_in.shape[-1]):
        x = np.array([spectrum(sequence[:, d]) for sequence in h_in])
        y = np.array([spectrum(sequence[:, d]) for sequence in h_out])
        cross = (x * y.conj()).mean(0)
        rows.append(np.abs(cross) ** 2 / ((np.abs(x) ** 2).mean(0) * (np.abs(y) ** 2).mean(0)))
    return np.array(rows)


def members(clusters, groups=32):
    """The sequences of each group."""
    group = deal(clusters, groups=groups)
    return [np.flatnonzero(group == g).tolist() for g in range(group.max() + 1)]


def jackknife(clusters, estimate, groups=32):
    """Delete-a-group jackknife in loops; `estimate` takes the indices of the sequences that are kept."""
    everything = range(len(clusters))
    without = [estimate([i for i in everything if i not in out]) for out in members(clusters, groups)]
    count, centre = len(without), sum(without) / len(without)
    return np.sqrt((count - 1) / count * sum((value - centre) ** 2 for value in without))


def of_ratio(clusters, sums, weights):
    """Cluster-robust error of a ratio of sums, in loops; `sums` and `weights` of each sequence."""
    theta, total = sum(sums) / sum(weights), sum(weights)
    squares = [sum(sums[i] - theta * weights[i] for i in group) ** 2 for group in members(clusters)]
    return math.sqrt(len(squares) / (len(squares) - 1) * sum(squares)) / total

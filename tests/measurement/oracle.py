"""The measures once more, in plain numpy float64 and straight from transformers: nothing here comes from fulldepth."""

from __future__ import annotations

import copy

import numpy as np
import torch


@torch.no_grad()
def taps(model, blocks, inputs, **modules):
    """[L+1, B, T, D] states between the blocks, and what each of `modules` (name -> path in a block) read."""
    layers = model.get_submodule(blocks)
    found = {name: {} for name in ("states", *modules)}

    def keep(module, name, index):
        def hook(_, args, kwargs):
            found[name][index] = (args[0] if args else kwargs["hidden_states"]).double().numpy().copy()

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    def keep_last(_, args, output):
        found["states"][len(layers)] = (output[0] if isinstance(output, tuple) else output).double().numpy().copy()

    handles = [layers[-1].register_forward_hook(keep_last)]
    for index, block in enumerate(layers):
        handles.append(keep(block, "states", index))
        handles += [keep(block.get_submodule(path), name, index) for name, path in modules.items()]
    model(**inputs)
    for handle in handles:
        handle.remove()
    arrays = {name: np.stack([values[n] for n in sorted(values)]) for name, values in found.items()}
    return arrays.pop("states"), arrays


@torch.no_grad()
def exits(model, blocks, inputs):
    """[L+1, B, T or 1, V] logits of the model cut off after 0..L blocks: what stopping at a layer really predicts."""
    parent, _, name = blocks.rpartition(".")
    count = len(model.get_submodule(blocks))
    found = []
    for depth in range(count + 1):
        cut = copy.deepcopy(model)
        setattr(cut.get_submodule(parent), name, cut.get_submodule(blocks)[:depth])
        for part in (cut, cut.get_submodule(parent)):
            part.config.num_hidden_layers = depth
        found.append(cut(**inputs).logits.double().numpy())
    return np.stack(found)


def cosines(a, b):
    """[...] cosine of vectors `[..., D]`."""
    return (a * b).sum(-1) / (np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1))


def psi(h_in, h_out):
    """[...] displacement (JREG, Eq. 2)."""
    return 1 - (1 + cosines(h_in, h_out)) / 2


def jump(mean_psi, layer):
    """zeta_layer in per cent (JREG, Eq. 3), from mean displacements of layers 1..L."""
    return 100 * sum(max(0.0, mean_psi[k - 1] - mean_psi[k - 2]) for k in range(layer, len(mean_psi) + 1))


def cka_debiased(x, y):
    """Song et al. 2012, Eq. 5, written out with whole Grams."""

    def hsic(k, m):
        n = len(k)
        k, m = k - np.diag(np.diag(k)), m - np.diag(np.diag(m))
        one = np.ones(n)
        total = np.trace(k @ m) + (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
        return (total - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))

    k, m = x @ x.T, y @ y.T
    return hsic(k, m) / np.sqrt(hsic(k, k) * hsic(m, m))


def cka_biased(x, y):
    """Eq. 3 of the paper on representation progression."""
    x, y = x - x.mean(0), y - y.mean(0)
    return np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))


def coherence_cells(h_in, h_out):
    """[D, K] coherence of `[B, T, D]`, by the sum of the definition rather than a fast transform."""
    length = h_in.shape[1]

    def phi(h):
        z = (h - h.mean(1, keepdims=True)) / (h.std(1, ddof=1, keepdims=True) + 1e-8)
        p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        waves = np.exp(-2j * np.pi * np.outer(np.arange(length), np.arange(length // 2 + 1)) / length)
        return np.einsum("btd,tk->bdk", p, waves)

    a, b = phi(h_in), phi(h_out)
    cross = (a * b.conj()).mean(0)
    return np.abs(cross) ** 2 / ((np.abs(a) ** 2).mean(0) * (np.abs(b) ** 2).mean(0))


def entropy(z):
    """Matrix-based Renyi entropy of order 1 of `[T, D]`, in nats."""
    eigenvalues = np.linalg.eigvalsh(z @ z.T)
    p = eigenvalues[eigenvalues > 1e-12 * eigenvalues.max()]
    p = p / p.sum()
    return float(-(p * np.log(p)).sum())


def nc1(x, labels):
    """(1/K) tr(Sigma_W pinv(Sigma_B)) (footnote 5 of the paper on representation progression)."""
    classes = np.unique(labels)
    means = {c: x[labels == c].mean(0) for c in classes}
    deviations = np.stack([row - means[c] for row, c in zip(x, labels, strict=True)])
    between = np.stack([means[c] - x.mean(0) for c in classes])
    within, between = deviations.T @ deviations / len(x), between.T @ between / len(classes)
    return float(np.trace(within @ np.linalg.pinv(between)) / len(classes))


def mmd(x, y):
    """Squared MMD, V-statistic, RBF with the median pooled distance as bandwidth."""
    pooled = np.concatenate([x, y])
    distance = np.linalg.norm(pooled[:, None] - pooled[None], axis=-1)
    scale = np.median(distance[~np.eye(len(pooled), dtype=bool)])
    kernel = np.exp(-(distance**2) / (2 * scale**2))
    n = len(x)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


def log_softmax(logits):
    """Over the last axis."""
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))

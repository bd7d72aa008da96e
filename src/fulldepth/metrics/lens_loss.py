"""Layer-wise loss: cross-entropy of the last layer's classifier on every layer (JREG, App. K)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fulldepth.metrics.base import Readout
from fulldepth.metrics.lens_accuracy import LensMean
from fulldepth.targets import IGNORE


def lens_loss(logits: Tensor, targets: Tensor) -> Tensor:
    r"""Mean cross-entropy in nats, in [0, inf).

    .. math:: \frac{1}{N} \sum_i \log \sum_v e^{z_{iv}} - z_{i y_i}

    Computed by log-sum-exp in float32 or float64, so that confident wrong predictions have a finite loss.

    Args:
        logits: a layer's states after final norm and head, `[..., V]`.
        targets: class or token, `[...]`; -100 is ignored.

    Returns:
        0-d float64, unit nats; NaN if no position has a target.

    Raises:
        ValueError: if the shapes do not match.

    Source: "JREG: final-layer jumps", App. K: the loss if inference stopped at this layer.
    """
    if logits.shape[:-1] != targets.shape:
        expected = tuple(logits.shape[:-1])
        raise ValueError(f"logits {tuple(logits.shape)} need targets {expected}, got {tuple(targets.shape)}")
    logits = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.double().sum() / (targets != IGNORE).sum()


class LensLoss(LensMean):
    """Cross-entropy of the last layer's classifier on layers 0..L, over the positions that have a target."""

    name = "lens_loss"
    units = dict.fromkeys(("mean", "standard_error"), "nats")

    def reading(self, lens: Readout) -> Tensor:
        """Cross-entropy in nats."""
        return lens.loss

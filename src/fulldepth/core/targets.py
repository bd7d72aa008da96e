"""Defines the ignored label, and shifts labels to next-token targets."""

from torch import Tensor
from torch.nn.functional import pad

IGNORE = -100
"""Label of a position or sequence without a target, as `ignore_index` of `torch.nn.functional.cross_entropy`."""


def next_targets(labels: Tensor) -> Tensor:
    """Targets of a causal model, which predicts the next token at each position.

    Args:
        labels: `[..., T]`, each at its own token, as transformers takes them.

    Returns:
        `[..., T]`: the label of the next token, `IGNORE` at the end.
    """
    return pad(labels[..., 1:], (0, 1), value=IGNORE)

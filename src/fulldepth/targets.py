"""Labels: the value of a position that has none, and their shift to the positions that predict them."""

from torch import Tensor
from torch.nn.functional import pad

IGNORE = -100
"""Label of a position or sequence that does not count, as in `torch.nn.functional.cross_entropy`."""


def next_targets(labels: Tensor) -> Tensor:
    """Targets of a causal model, which predicts at each position the token that follows.

    Args:
        labels: `[..., T]`, each at its own token, as transformers takes them.

    Returns:
        `[..., T]`: the label of the next token, `IGNORE` at the end.
    """
    return pad(labels[..., 1:], (0, 1), value=IGNORE)

"""Position embeddings that no token uses."""

from __future__ import annotations

from torch import nn


def unused_positions(model: nn.Module) -> int:
    """Rows of the table of positions before the first token's: in RoBERTa and its kin positions start after the index
    of the padding token; 0 in other models.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and type(module) is nn.Embedding and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0

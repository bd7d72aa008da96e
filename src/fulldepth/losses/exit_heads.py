"""`add_exit_heads`: gives a model a head for every layer, for multi-exit training."""

from __future__ import annotations

from torch import nn

from fulldepth import hf
from fulldepth.execution import find_anatomy


def add_exit_heads(model: nn.Module, seed: int = 0) -> None:
    """Give each of layers 1..L-1 a linear head of its own; call it before the optimiser is made.

    A head is the model's own one with another matrix `[C, D]`, without bias, in its last linear layer; the final norm,
    the pooling and the pooler before it are shared. `(L - 1) C D` parameters are added (Table 1); in a language model C
    is the size of the vocabulary. A detector's decoder layers also get a matrix `[4, D]` each in the box head. They are
    part of the model's `parameters()` and `state_dict()`. `save_pretrained` leaves them out, so that the checkpoint
    stays an ordinary one; `DepthTrainer` and `fulldepth.hf.save_exit_heads` write them beside it.

    Args:
        model: a language model, a classifier of texts or images, or a detector of transformers, with or without
            wrappers.
        seed: of the heads' weights.

    Raises:
        FulldepthError: if the model has no head, its head does not end in a linear layer, or it has exit heads.

    Source: "Representation progression and aligned training", Sec. 3.1 and Table 1 (multiple classifiers).
    """
    hf.add_exit_heads(find_anatomy(model), seed)  # type: ignore[arg-type]

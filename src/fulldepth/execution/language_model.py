"""Verifies that a model is a causal language model with a known anatomy."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError
from fulldepth.execution.verify import verify
from fulldepth.hf import Anatomy, Classifier, anatomy_candidates, device_of


def prove(model: PreTrainedModel | Anatomy, inputs: Mapping[str, Tensor]) -> tuple[Anatomy, Classifier]:
    """The anatomy of a language model, verified on a batch, and its head.

    Args:
        model: in evaluation mode.
        inputs: `input_ids` and `attention_mask`, `[B, T]`; the first two sequences are used.

    Raises:
        FulldepthError: if it is not a causal language model, or its anatomy cannot be verified.
    """
    candidates = [model] if isinstance(model, Anatomy) else anatomy_candidates(model)
    owner = check_task(candidates[0]).model
    verified = verify(candidates, {name: tensor[:2].to(device_of(owner)) for name, tensor in inputs.items()})
    if verified.classifier is None:
        raise FulldepthError(f"{type(owner).__name__} has no prediction head.")
    return verified.anatomy, verified.classifier


def check_task(anatomy: Anatomy) -> Anatomy:
    """Return the anatomy if its model is a causal language model.

    Raises:
        FulldepthError: for other models.
    """
    if anatomy.task != "causal-lm":
        raise FulldepthError(
            f"{type(anatomy.model).__name__} is no causal language model: it does not predict the next token at every "
            "position."
        )
    return anatomy

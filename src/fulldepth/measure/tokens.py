"""Token policies: which positions count. Padding never does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fulldepth.data import MASKED_SHARE
from fulldepth.errors import FulldepthError
from fulldepth.hf import Anatomy

SENTENCES = {
    "all": "Every token counts; statistics marked :no-first leave out the first token of each sequence.",
    "no-first": "Every token but the first of each sequence counts.",
    "last": "Only the last token of each sequence counts.",
    "cls": "Only the first token ([CLS]) of each sequence counts.",
    "eos": "Only the end-of-sequence token of each sequence counts.",
}


MASKED = (
    f" The lens measures have a forward pass of their own, over the same text with {100 * MASKED_SHARE:.0f} % of its "
    "tokens masked, and read the masked positions; every other measure reads the text unmasked."
)
"""What is added to the sentence of a masked language model."""


def sentence(policy: str, masked_pass: bool) -> str:
    """What the result says about a policy, and about the text that the measures read."""
    return SENTENCES[policy] + (MASKED if masked_pass else "")


def resolve(policy: str, anatomy: Anatomy) -> str:
    """The policy asked for, or what `auto` means for this model."""
    if policy != "auto":
        return policy
    if anatomy.task in ("causal-lm", "masked-lm"):
        return "all"
    if anatomy.family.name == "clip-text":
        return "eos"
    if anatomy.family.name == "detr":
        return "all"
    if anatomy.head is not None and anatomy.head.pool == "last":
        return "last"
    return "cls" if anatomy.task != "representation" or anatomy.family.modality == "images" else "all"


def counted(policy: str, attention_mask: Tensor, token_ids: Tensor | None, eos: int | None) -> Tensor:
    """[B, T] bool: the positions that a policy counts.

    Args:
        policy: a key of `SENTENCES`.
        attention_mask: `[B, T]` bool, False = padding (on either side).
        token_ids: `[B, T]`, for `eos`.
        eos: id of the end-of-sequence token, for `eos`.

    Raises:
        FulldepthError: if `eos` is asked for and a sequence has none.
    """
    if policy == "all":
        return attention_mask
    position = attention_mask.long().cumsum(1) - 1
    first = attention_mask & (position == 0)
    if policy == "cls":
        return first
    if policy == "no-first":
        return attention_mask & ~first
    if policy == "last":
        return attention_mask & (position == attention_mask.sum(1, keepdim=True) - 1)
    if token_ids is None or eos is None:
        raise FulldepthError("--tokens eos needs text and a model whose configuration names its eos_token_id.")
    is_eos = attention_mask & (token_ids.to(attention_mask.device) == eos)
    if not bool(is_eos.any(1).all()):
        raise FulldepthError(f"--tokens eos: some sequences hold no end-of-sequence token (id {eos}).")
    last_eos = torch.where(is_eos, position, -1).argmax(1)
    return torch.zeros_like(attention_mask).scatter_(1, last_eos[:, None], True)


def how_many(policy: str, lengths: Sequence[int]) -> int:
    """Tokens that a policy counts in sequences of these lengths."""
    if policy == "all":
        return sum(lengths)
    if policy == "no-first":
        return sum(length - 1 for length in lengths)
    return len(lengths)

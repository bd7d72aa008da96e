"""Token policies: which positions count. Padding never counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulldepth.data import MASKED_SHARE, Batch, Sequences
from fulldepth.errors import FulldepthError
from fulldepth.hf import Anatomy

SENTENCES = {
    "all": "Every token counts; statistics marked :no-first leave out the first token of each sequence.",
    "no-first": "Every token but the first of each sequence counts.",
    "last": "Only the last token of each sequence counts.",
    "cls": "Only the first token of each sequence counts.",
    "eos": "Only the end-of-sequence token of each sequence counts.",
    "patches": "Every patch of each image counts; a class token and other tokens before the patches do not.",
    "mean": "Each sequence counts as one vector, the mean over all its tokens.",
    "mean-patches": "Each image counts as one vector, the mean over its patches, without the tokens before them.",
}
POOLED = ("mean", "mean-patches")
"""Policies that make one vector of each sequence."""
OF_POOL = {"first": "cls", "last": "last", "mean": "mean", "mean-patches": "mean-patches", "first-and-mean": "cls"}
"""Pooling of a head (`Head.feature`) -> the policy that counts what it reads."""


MASKED = (
    f"The lens measures have a forward pass of their own, over the same text with {100 * MASKED_SHARE:.0f} % of its "
    "tokens masked, and read the masked positions; every other measure reads the text unmasked."
)
"""Appended to the sentence for a masked language model."""

FIRST: dict[Any, str] = {
    ("images", True): "Only the first token ([CLS]) of each image counts.",
    ("images", False): "Only the first patch of each image counts; the model has no [CLS] token.",
    ("text", True): "Only the first token ([CLS]) of each sequence counts.",
}
"""(modality, whether the first token is [CLS]) -> what the policy `cls` counts."""


@dataclass(frozen=True)
class Openings:
    """How the sequences begin."""

    bos: str
    """The BOS token as text."""
    begin_with_bos: int | None
    """Number of sequences whose first token is the BOS token; None without a BOS token or without text."""
    sequences: int

    @property
    def sentence(self) -> str:
        """A sentence on how many sequences begin with the BOS token; empty if there is none."""
        if self.begin_with_bos is None:
            return ""
        count, all_of_them = self.begin_with_bos, self.begin_with_bos == self.sequences
        amount = "No sequence begins" if not count else "Every sequence begins" if all_of_them else ""
        amount = amount or f"{count} of {self.sequences} sequences begin{'s' if count == 1 else ''}"
        return f"{amount} with the BOS token ({self.bos})."

    @property
    def mixed(self) -> bool:
        """Whether some sequences begin with the BOS token and others do not."""
        return self.begin_with_bos is not None and 0 < self.begin_with_bos < self.sequences


def openings(sequences: Sequences, bos: int | None, name: str) -> Openings:
    """How the sequences begin, for the BOS token's id and text (`name`)."""
    if bos is None:
        return Openings(name, None, len(sequences))
    begin = 0
    for batch in sequences.batches(256):
        if batch.token_ids is None:
            return Openings(name, None, len(sequences))
        begin += int((batch.token_ids[:, 0] == bos).sum())
    return Openings(name, begin, len(sequences))


def leading_tokens(batch: Batch, anatomy: Anatomy, positions: int) -> int | None:
    """Number of tokens before the first patch of an image: a model without a class token has as many `positions` in
    its residual stream as there are patches. None if unknown, and for text.
    """
    pixels, patch = batch.inputs.get("pixel_values"), getattr(anatomy.config, "patch_size", None)
    if pixels is None or pixels.ndim not in (3, 4):
        return None
    if pixels.ndim == 3:  # cut into patches already
        patches = int(pixels.shape[1])
    elif isinstance(patch, int | list | tuple):
        height, width = (patch, patch) if isinstance(patch, int) else tuple(patch)[:2]
        patches = (pixels.shape[2] // height) * (pixels.shape[3] // width)
    else:
        return None
    return positions - patches if positions >= patches else None


def resolve(policy: str, anatomy: Anatomy, class_token: bool | None = None) -> str:
    """The requested policy, or what `auto` means for this model.

    `class_token`: whether its sequences begin with one; images that do not count as a whole.
    """
    family, head = anatomy.family, anatomy.head
    if policy != "auto":
        return policy
    if anatomy.task in ("causal-lm", "masked-lm", "seq2seq-lm"):
        chosen = "all"
    elif family.counted_tokens is not None:
        chosen = family.counted_tokens
    elif head is not None and head.feature in OF_POOL:
        chosen = OF_POOL[head.feature]
    else:
        chosen = "cls" if anatomy.task != "representation" or family.modality == "images" else "all"
    without = family.modality == "images" and class_token is False
    return {"cls": "all", "mean-patches": "mean"}.get(chosen, chosen) if without else chosen


def counted(policy: str, attention_mask: Tensor, token_ids: Tensor | None, eos: int | None, leading: int = 0) -> Tensor:
    """[B, T] bool: the positions that a policy counts.

    Args:
        policy: a key of `SENTENCES`.
        attention_mask: `[B, T]` bool, False = padding (on either side).
        token_ids: `[B, T]`, for `eos`.
        eos: id of the end-of-sequence token, for `eos`.
        leading: tokens before the first patch, for `patches` and `mean-patches`.

    Raises:
        FulldepthError: if the policy is `eos` and a sequence has no end-of-sequence token.
    """
    if policy in ("all", "mean"):
        return attention_mask
    position = attention_mask.long().cumsum(1) - 1
    if policy in ("patches", "mean-patches"):
        return attention_mask & (position >= leading)
    first = attention_mask & (position == 0)
    if policy == "cls":
        return first
    if policy == "no-first":
        return attention_mask & ~first
    if policy == "last":
        return attention_mask & (position == attention_mask.sum(1, keepdim=True) - 1)
    if token_ids is None or eos is None:
        raise FulldepthError("--token-policy eos needs text and a model whose configuration names its eos_token_id.")
    is_eos = attention_mask & (token_ids.to(attention_mask.device) == eos)
    if not bool(is_eos.any(1).all()):
        raise FulldepthError(f"--token-policy eos: some sequences hold no end-of-sequence token (id {eos}).")
    last_eos = torch.where(is_eos, position, -1).argmax(1)
    return torch.zeros_like(attention_mask).scatter_(1, last_eos[:, None], True)


def how_many(policy: str, lengths: Sequence[int], leading: int = 0) -> int:
    """Number of tokens that a policy counts in sequences of these lengths; of pooled ones, of sequences."""
    if policy == "all":
        return sum(lengths)
    if policy == "no-first":
        return sum(length - 1 for length in lengths)
    if policy == "patches":
        return sum(length - leading for length in lengths)
    return len(lengths)

"""Token policies: which positions count. Padding never counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError
from fulldepth.data import MASKED_SHARE, Batch, Sequences
from fulldepth.hf import Anatomy
from fulldepth.subject import Subject
from fulldepth.subject.open import small_batch

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
class Counting:
    """Which positions of a subject's sequences count."""

    policy: str
    """The token policy, with `auto` resolved."""
    begin_with_bos: int | None
    """Number of sequences whose first token is the BOS token; None without a BOS token or without text."""
    openings: str
    """That number as a sentence; empty if there is none."""
    class_token: bool | None = None
    """Whether the sequences begin with a class token; None if unknown."""
    leading: int = 0
    """Tokens before the first patch of an image; 0 for text."""
    eos: int | None = None
    """Id of the end-of-sequence token."""
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, subject: Subject, requested: str) -> Counting:
        """Find the tokens that a requested policy counts in a subject's sequences.

        Raises:
            FulldepthError: if it needs images cut into patches, and these are none.
        """
        anatomy = subject.anatomy
        tokenizer = subject.tokenizer
        first = small_batch(subject.sequences)
        leading = leading_tokens(first, anatomy, subject.verified.positions)
        class_token = None if leading is None else leading > 0
        if first.token_ids is not None:
            cls_id = getattr(tokenizer, "cls_token_id", None)
            class_token = cls_id is not None and bool((first.token_ids[:, 0] == cls_id).all())
        policy = resolve(requested, anatomy, class_token)
        if policy in ("patches", "mean-patches") and leading is None:
            raise FulldepthError(f"--token-policy {policy} needs images cut into patches of one known size.")
        bos = getattr(anatomy.config if tokenizer is None else tokenizer, "bos_token_id", None)
        count, sentence = openings(subject.sequences, bos, getattr(tokenizer, "bos_token", None) or f"id {bos}")
        warnings = []
        if 0 < (count or 0) < len(subject.sequences) and policy in ("all", "cls"):
            warnings.append(
                f"{sentence} In a model that uses its first token as an attention sink, the sequences with it "
                "and those without it are unlike."
            )
        eos = getattr(tokenizer, "eos_token_id", None)
        eos = getattr(anatomy.config, "eos_token_id", None) if eos is None else eos
        if requested == "auto" and policy == "eos":
            ids = first.token_ids
            if ids is None or eos is None or not bool((ids == eos).any(1).all()):
                warnings.append(
                    "The tokenizer adds no end-of-sequence token, so the last token of each sequence counts."
                )
                policy = "last"
        return cls(policy, count, sentence, class_token, leading or 0, eos, tuple(warnings))


def openings(sequences: Sequences, bos: int | None, name: str) -> tuple[int | None, str]:
    """The entries `begin_with_bos` and `openings` of a counting, for the BOS token's id and text (`name`)."""
    if bos is None:
        return None, ""
    count = 0
    total = len(sequences)
    for batch in sequences.batches(256):
        if batch.token_ids is None:
            return None, ""
        count += int((batch.token_ids[:, 0] == bos).sum())
    opening = f"{count} of {total} sequences begin{'s' if count == 1 else ''}"
    amount = {0: "No sequence begins", total: "Every sequence begins"}.get(count, opening)
    return count, f"{amount} with the BOS token ({name})."


def leading_tokens(batch: Batch, anatomy: Anatomy, positions: int) -> int | None:
    """Number of tokens before the first patch of an image: a model without a class token has as many `positions` in
    its residual stream as there are patches. None if unknown, and for text.
    """
    pixels = batch.inputs.get("pixel_values")
    patch = getattr(anatomy.config, "patch_size", None)
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
    family = anatomy.family
    head = anatomy.head
    if policy != "auto":
        return policy
    if anatomy.task in ("causal-lm", "masked-lm", "seq2seq-lm"):
        policy_name = "all"
    elif family.counted_tokens is not None:
        policy_name = family.counted_tokens
    elif head is not None and head.feature in OF_POOL:
        policy_name = OF_POOL[head.feature]
    else:
        policy_name = "cls" if anatomy.task != "representation" or family.modality == "images" else "all"
    without = family.modality == "images" and class_token is False
    return {"cls": "all", "mean-patches": "mean"}.get(policy_name, policy_name) if without else policy_name


def counted_positions(
    policy: str, attention_mask: Tensor, token_ids: Tensor | None, eos: int | None, leading: int = 0
) -> Tensor:
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
    position = attention_mask.long().cumsum(1) - 1
    places = {
        **dict.fromkeys(("all", "mean"), position >= 0),
        **dict.fromkeys(("patches", "mean-patches"), position >= leading),
        "cls": position == 0,
        "no-first": position > 0,
        "last": position == attention_mask.sum(1, keepdim=True) - 1,
    }
    if policy in places:
        return attention_mask & places[policy]
    if token_ids is None or eos is None:
        raise FulldepthError("--token-policy eos needs text and a model whose configuration names its eos_token_id.")
    is_eos = attention_mask & (token_ids.to(attention_mask.device) == eos)
    if not bool(is_eos.any(1).all()):
        raise FulldepthError(f"--token-policy eos: some sequences hold no end-of-sequence token (id {eos}).")
    last_eos = torch.where(is_eos, position, -1).argmax(1)
    return torch.zeros_like(attention_mask).scatter_(1, last_eos[:, None], True)


def how_many(policy: str, lengths: Sequence[int], leading: int = 0) -> list[int]:
    """Number of tokens that a policy counts in each of the sequences of these lengths; 1 for a pooled one."""
    left_out = {"all": 0, "no-first": 1, "patches": leading}.get(policy)
    return [1 if left_out is None else length - left_out for length in lengths]

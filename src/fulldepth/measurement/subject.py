"""Subject of a measurement: a verified model and the data prepared for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel

from fulldepth.data import Batch, Sequences
from fulldepth.errors import FulldepthError
from fulldepth.execution import Verified
from fulldepth.execution.batching import batched
from fulldepth.hf import Anatomy, Checkpoint, anatomy_candidates, device_of, first_broken_weight
from fulldepth.measurement import tokens
from fulldepth.settings.measure import MeasureSettings
from fulldepth.subjects import open_checkpoint, prove, sequences_for, small_batch, tokenizer_for


@dataclass
class Subject:
    """A verified model with its data."""

    checkpoint: Checkpoint
    verified: Verified
    sequences: Sequences
    tokenizer: Any
    policy: str
    """The token policy, with `auto` resolved."""
    device: torch.device
    """Device of the inputs and accumulators."""
    openings: tokens.Openings
    """How the sequences begin."""
    class_token: bool | None = None
    """Whether they begin with a class token; None if unknown."""
    leading: int = 0
    """Tokens before the first patch of an image; 0 for text."""
    warnings: tuple[str, ...] = ()

    @property
    def kinds_of_tokens(self) -> int | None:
        """Number of distinct tokens in the data, without special tokens; None for images."""
        return self.openings.kinds

    @property
    def anatomy(self) -> Anatomy:
        """The model's anatomy."""
        return self.verified.anatomy

    @property
    def eos(self) -> int | None:
        """Id of the end-of-sequence token."""
        own = getattr(self.tokenizer, "eos_token_id", None)
        return own if own is not None else getattr(self.anatomy.config, "eos_token_id", None)

    def describe_tokens(self, masked_pass: bool) -> dict[str, Any]:
        """The token policy's entry in `results.json`.

        Args:
            masked_pass: whether the lens uses a separate pass over masked text.
        """
        sentence = tokens.sentence(self.policy, self.anatomy.family.modality, self.class_token)
        return {
            "name": self.policy,
            "sentence": " ".join(
                filter(None, (sentence, self.openings.sentence, tokens.MASKED if masked_pass else ""))
            ),
            "begin_with_bos": self.openings.begin_with_bos,
        }

    def fitting(self, table: pd.DataFrame) -> tuple[pd.DataFrame, list[dict[str, str]]]:
        """The rows of a table whose numbers exist for this model, and the measures left out in part, with reasons."""
        return table, []

    def describe(self) -> dict[str, Any]:
        """The model's entry in `results.json`."""
        return self.verified.describe(self.checkpoint)


def prepare_subject(
    model: str | Path | PreTrainedModel | Checkpoint,
    data: Any,
    settings: MeasureSettings,
    *,
    tokenizer: Any,
    device: str | None,
) -> Subject:
    """Load the model, prepare the data for it, and verify its anatomy on the first batch.

    Raises:
        FulldepthError: if the model or the data are invalid or do not fit each other.
    """
    checkpoint = open_checkpoint(model, settings, device, settings.device_map)
    broken = first_broken_weight(checkpoint.model)
    if broken:
        raise FulldepthError(f"{checkpoint.name} has NaN or infinite weights (first: {broken}).")
    candidates = anatomy_candidates(checkpoint.model, tower=settings.tower, override=settings.anatomy)
    tokenizer = tokenizer_for(checkpoint, candidates[0], data, settings, tokenizer)
    sequences = sequences_for(checkpoint, candidates[0], data, tokenizer, settings, settings.words)
    where = device_of(checkpoint.model)
    first = small_batch(sequences)
    verified = prove(candidates, first, where, checkpoint.model.dtype, optional=_optional(settings))
    sequences, batching = batched(verified.anatomy, sequences, where)
    cls = getattr(tokenizer, "cls_token_id", None)
    class_token = tokens.opens_with_class_token(first, verified.anatomy, verified.positions, cls)
    policy = tokens.resolve(settings.tokens, verified.anatomy, class_token)
    leading = tokens.leading_tokens(first, verified.anatomy, verified.positions)
    if policy in ("patches", "mean-patches") and leading is None:
        raise FulldepthError(f"--tokens {policy} needs images that the model cuts into patches of one known size.")
    openings = _openings(sequences, tokenizer, verified.anatomy)
    warnings = [] if batching is None else [batching]
    if openings.mixed and policy in ("all", "cls"):
        warnings.append(
            f"{openings.sentence} In a model that uses its first token as an attention sink, the sequences with it "
            "and those without it are unlike."
        )
    subject = Subject(checkpoint, verified, sequences, tokenizer, policy, where, openings, class_token, leading or 0)
    if settings.tokens == "auto" and policy == "eos" and not _ends(first, subject.eos):
        warnings.append("The tokenizer adds no end-of-sequence token, so the last token of each sequence counts.")
        subject.policy = "last"
    return replace(subject, warnings=tuple(warnings))


def _optional(settings: MeasureSettings) -> set[str]:
    """Parts of the model whose verification is optional: all except those that the settings describe."""
    described = settings.anatomy or {}
    parts = {"head": {"head"}, "branches": {"attention", "mlp"}}
    return {part for part, names in parts.items() if not any(described.get(name) is not None for name in names)}


def _ends(batch: Batch, eos: int | None) -> bool:
    """Whether every sequence of a batch contains the end-of-sequence token."""
    return batch.token_ids is not None and eos is not None and bool((batch.token_ids == eos).any(1).all())


def _openings(sequences: Sequences, tokenizer: Any, anatomy: Anatomy) -> tokens.Openings:
    """How the sequences begin, according to the tokenizer or, without one, the model's configuration."""
    bos = getattr(tokenizer if tokenizer is not None else anatomy.config, "bos_token_id", None)
    name = getattr(tokenizer, "bos_token", None) or f"id {bos}"
    return tokens.openings(sequences, bos, name, getattr(tokenizer, "all_special_ids", ()))

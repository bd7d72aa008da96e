"""Subject of a measurement: a verified model and the data prepared for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel

import fulldepth.architectures  # noqa: F401  # registers this package's models with transformers
from fulldepth.data import Batch, Sequences, input_texts, open_source, prepare, prepare_translation
from fulldepth.data.corruptions import corrupted
from fulldepth.errors import FulldepthError
from fulldepth.execution import Verified, verify
from fulldepth.execution.batching import batched, model_inputs
from fulldepth.hf import (
    Anatomy,
    Checkpoint,
    anatomy_candidates,
    device_of,
    first_broken_weight,
    load_processor,
    open_model,
    open_tokenizer,
)
from fulldepth.measurement import tokens
from fulldepth.settings.measure import MeasureSettings

DEFAULT_LENGTH = 256
IMAGES = ("images", "objects")
PROVEN_POSITIONS = 16
"""Tokens of each of two sequences that the proofs at load run on."""


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
    checkpoint = open_checkpoint(model, settings, device)
    broken = first_broken_weight(checkpoint.model)
    if broken:
        raise FulldepthError(f"{checkpoint.name} has NaN or infinite weights (first: {broken}).")
    candidates = anatomy_candidates(checkpoint.model, tower=settings.tower, override=settings.anatomy)
    tokenizer = tokenizer if tokenizer is not None else _tokenizer(checkpoint, candidates[0], data, settings)
    sequences = sequences_for(checkpoint, candidates[0], data, tokenizer, settings)
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


def small_batch(sequences: Sequences) -> Batch:
    """The first two sequences, or one if a batch axis of size two could be confused with positions."""
    first = sequences.collate(range(min(2, len(sequences))))
    square = first.attention_mask is not None and first.attention_mask.shape == (2, 2)
    return sequences.collate([0]) if square else first


def prove(
    candidates: Sequence[Anatomy], batch: Batch, device: torch.device, dtype: torch.dtype, *, optional: Collection[str]
) -> Verified:
    """`verify` on the beginnings of a batch's sequences, and on all of them only if a part is not proven there.

    Sequence classifiers may need a token at the end, so they and models of images always run on all of it.

    Args:
        candidates: as for `verify`.
        batch: from `small_batch`.
        device: of the inputs.
        dtype: the model's precision.
        optional: as for `verify`.
    """
    inputs = model_inputs(batch.inputs, device, dtype)
    ids = batch.token_ids
    if ids is not None and ids.shape[1] > PROVEN_POSITIONS and candidates[0].task in ("causal-lm", "masked-lm"):
        beginnings = {
            name: value[:, :PROVEN_POSITIONS] if value.shape[:2] == ids.shape else value
            for name, value in inputs.items()
        }
        with suppress(FulldepthError):  # the message of the whole batch counts
            verified = verify(candidates, beginnings, optional=optional)
            if not verified.unproven:
                return replace(verified, positions=ids.shape[1])
    return verify(candidates, inputs, optional=optional)


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


def open_checkpoint(
    model: str | Path | PreTrainedModel | Checkpoint, settings: MeasureSettings, device: str | None
) -> Checkpoint:
    """The model as passed in, or loaded according to the settings."""
    if isinstance(model, Checkpoint):
        return model
    return open_model(
        model,
        exit_heads=True,
        dtype=settings.dtype,
        device=device,
        device_map=settings.device_map,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )


def _tokenizer(checkpoint: Checkpoint, anatomy: Anatomy, data: Any, settings: MeasureSettings) -> Any:
    """The named tokenizer, or the one saved with or beside the model; None if no text is read."""
    if isinstance(data, Sequences) or anatomy.family.modality != "text":
        return None
    return open_tokenizer(
        checkpoint, settings.tokenizer or None, revision=settings.revision, trust_remote_code=settings.trust_remote_code
    )


def sequences_for(
    checkpoint: Checkpoint, anatomy: Anatomy, data: Any, tokenizer: Any, settings: MeasureSettings
) -> Sequences:
    """The data, prepared for this model."""
    if isinstance(data, Sequences):
        return data
    source = open_source(data, split=settings.split, skip_bad=settings.skip_bad)
    if settings.corrupt is not None:
        source = corrupted(source, settings.corrupt, settings.seed)
    if anatomy.family.modality == "text" and source.kind in IMAGES:
        raise FulldepthError(f"{source.name} holds images, but {type(checkpoint.model).__name__} reads text.")
    if anatomy.family.modality == "images" and source.kind not in IMAGES:
        raise FulldepthError(f"{source.name} holds {source.kind}, but {type(checkpoint.model).__name__} reads images.")
    if anatomy.family.tower == "encoder" and source.kind == "pairs":
        source = input_texts(source)
    positions = anatomy.max_positions
    length = settings.sequence_length or min(DEFAULT_LENGTH, positions or DEFAULT_LENGTH)
    if anatomy.family.tower == "decoder":
        return prepare_translation(
            source,
            tokenizer=tokenizer,
            start=_start(checkpoint.model.config),
            max_sequences=settings.max_sequences,
            sequence_length=length,
            vocab_size=anatomy.vocab_size,
        )
    classifies = anatomy.task in ("text-classification", "image-classification", "detection")
    processor = None
    if source.kind in IMAGES:
        trusted = settings.trust_remote_code
        processor = load_processor(
            checkpoint.name, anatomy.config, revision=checkpoint.revision, trust_remote_code=trusted
        )
    return prepare(
        source,
        task=anatomy.task,
        tokenizer=tokenizer,
        processor=processor,
        max_sequences=settings.max_sequences,
        sequence_length=length,
        max_positions=positions if anatomy.family.modality == "text" else None,
        vocab_size=anatomy.vocab_size,
        label2id=_labels(checkpoint.model.config) if classifies else None,
        words=tuple(settings.words),
        truncate=settings.truncate,
        seed=settings.seed,
    )


def _start(config: Any) -> int | None:
    """The first token that a decoder reads."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    return next((getattr(config, name) for name in names if getattr(config, name, None) is not None), None)


def _labels(config: Any) -> Mapping[str, int] | None:
    """The model's class names, if it has any."""
    return getattr(config, "label2id", None) or None

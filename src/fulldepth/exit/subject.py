"""Subject of a sweep: a verified model and the data prepared for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import fulldepth.architectures  # noqa: F401  # registers this package's models with transformers
from fulldepth.data import Sequences, open_source, prepare
from fulldepth.errors import FulldepthError
from fulldepth.execution import Verified, verify
from fulldepth.execution.batching import batched, model_inputs
from fulldepth.hf import (
    Anatomy,
    Checkpoint,
    Classifier,
    anatomy_candidates,
    depth_of,
    device_of,
    first_broken_weight,
    load_processor,
    open_model,
    open_tokenizer,
)
from fulldepth.settings.exit import ExitSettings

DEFAULT_LENGTH = 256
CLASSIFIES = ("text-classification", "image-classification")
PREDICTS = ("causal-lm", "masked-lm")
BATCH = {True: 64, False: 8}
"""Whether a model classifies -> sequences in a batch, unless set."""


@dataclass(frozen=True)
class Subject:
    """A verified model with its data."""

    checkpoint: Checkpoint
    verified: Verified
    classifier: Classifier
    sequences: Sequences
    device: torch.device
    batch_size: int
    warnings: tuple[str, ...] = ()

    @property
    def anatomy(self) -> Anatomy:
        """The model's anatomy."""
        return self.verified.anatomy

    @property
    def num_layers(self) -> int:
        """L."""
        return self.anatomy.num_layers

    @property
    def classifies(self) -> bool:
        """Whether the model predicts one class for a sequence or an image."""
        return self.anatomy.task in CLASSIFIES

    def inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A batch's inputs on the model's device and in its precision."""
        return model_inputs(inputs, self.device, self.checkpoint.model.dtype)

    def describe(self) -> dict[str, Any]:
        """The model's entry in `results.json`."""
        return self.verified.describe(self.checkpoint)


def open_checkpoint(model: str | Path | PreTrainedModel, settings: ExitSettings) -> Checkpoint:
    """The model as passed in, or loaded according to the settings.

    Raises:
        FulldepthError: if it cannot be loaded, or has NaN or infinite weights.
    """
    if settings.min_layer > 1 and not isinstance(model, PreTrainedModel):
        _check_min_layer(settings, depth_of(model, settings.revision, settings.trust_remote_code))
    checkpoint = open_model(
        model,
        exit_heads=True,
        dtype=settings.dtype,
        device=settings.device,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )
    broken = first_broken_weight(checkpoint.model)
    if broken:
        raise FulldepthError(f"{checkpoint.name} has NaN or infinite weights (first: {broken}).")
    return checkpoint


def prepare_subject(checkpoint: Checkpoint, data: Any, settings: ExitSettings, tokenizer: Any = None) -> Subject:
    """Prepare the data for a model in evaluation mode, and verify its anatomy and head on the first sequences.

    Raises:
        FulldepthError: if the model predicts no classes, the data do not fit it or have no labels, or its head cannot
            be verified.
    """
    candidates = anatomy_candidates(checkpoint.model)
    guess = candidates[0]
    check_task(guess)
    sequences = _sequences(checkpoint, guess, data, tokenizer, settings)
    if not sequences.num_targets:
        raise FulldepthError(_nothing_to_predict(guess, sequences))
    _check_min_layer(settings, guess.num_layers)
    device = device_of(checkpoint.model)
    first = sequences.collate(range(min(2, len(sequences))))
    if first.attention_mask is not None and first.attention_mask.shape == (2, 2):
        first = sequences.collate([0])  # a batch axis of size two could be confused with positions
    inputs = model_inputs(first.inputs, device, checkpoint.model.dtype)
    verified = verify(candidates, inputs, optional=("branches",))
    if verified.classifier is None:
        raise FulldepthError(f"{type(checkpoint.model).__name__} has no head that could be applied to its layers.")
    sequences, note = batched(verified.anatomy, sequences, device)
    batch_size = settings.batch_size or BATCH[guess.task in CLASSIFIES]
    warnings = (*sequences.warnings, *(() if note is None else (note,)))
    return Subject(checkpoint, verified, verified.classifier, sequences, device, batch_size, warnings)


def _check_min_layer(settings: ExitSettings, depth: int | None) -> None:
    if depth is not None and settings.min_layer > depth:
        raise FulldepthError(f"min_layer is {settings.min_layer}, but the model has {depth} layers.")


def check_task(anatomy: Anatomy) -> None:
    """Refuse models that predict neither tokens nor one class.

    Raises:
        FulldepthError: with the reason.
    """
    name, config = type(anatomy.model).__name__, anatomy.model.config
    if anatomy.task == "detection":
        raise FulldepthError(
            f"{name} is a detector, for which there is no rule of early exit. `fulldepth measure` gives the average "
            "precision of every decoder layer, which is that of a decoder that stops there."
        )
    if anatomy.task not in CLASSIFIES + PREDICTS:
        raise FulldepthError(
            f"{name} predicts neither tokens nor a class, so no layer can be left early. Expected a language model or "
            "a classifier of texts or images."
        )
    problem = getattr(config, "problem_type", None)
    if anatomy.task in CLASSIFIES and (
        getattr(config, "num_labels", 2) < 2 or problem in ("regression", "multi_label_classification")
    ):
        raise FulldepthError(
            f"{name} does not predict one class out of several (num_labels {config.num_labels}, problem_type "
            f"{problem}); the rules of early exit compare the probabilities of classes."
        )


def _nothing_to_predict(anatomy: Anatomy, sequences: Sequences) -> str:
    """The reason why the data have no targets."""
    if anatomy.task in CLASSIFIES:
        return (
            f"{sequences.name} has no labels, and {type(anatomy.model).__name__} predicts classes. Give texts with "
            "labels ({'text': ..., 'label': ...}), or images in class folders."
        )
    return f"{sequences.name} has no token to predict: {sequences.no_targets or 'its texts are too short'}."


def _sequences(
    checkpoint: Checkpoint, anatomy: Anatomy, data: Any, tokenizer: Any, settings: ExitSettings
) -> Sequences:
    """The data, prepared for this model."""
    if isinstance(data, Sequences):
        return data
    source = open_source(data, split=settings.split)
    kind, trusted = type(checkpoint.model).__name__, settings.trust_remote_code
    reads_images = anatomy.family.modality == "images"
    if reads_images != (source.kind == "images"):
        raise FulldepthError(
            f"{source.name} holds {source.kind}, but {kind} reads {'images' if reads_images else 'text'}."
        )
    processor = None
    if reads_images:
        processor = load_processor(
            checkpoint.name, anatomy.config, revision=checkpoint.revision, trust_remote_code=trusted
        )
    else:
        named = tokenizer if tokenizer is not None else settings.tokenizer
        tokenizer = open_tokenizer(checkpoint, named, revision=settings.revision, trust_remote_code=trusted)
    positions = anatomy.max_positions
    return prepare(
        source,
        task=anatomy.task,
        tokenizer=tokenizer,
        processor=processor,
        max_sequences=settings.max_sequences,
        sequence_length=settings.sequence_length or min(DEFAULT_LENGTH, positions or DEFAULT_LENGTH),
        max_positions=None if reads_images else positions,
        vocab_size=anatomy.vocab_size,
        label2id=(getattr(checkpoint.model.config, "label2id", None) or None) if anatomy.task in CLASSIFIES else None,
        truncate=settings.truncate,
        seed=settings.seed,
    )

"""Subject of early exit: a verified model and the data prepared for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.data import Sequences
from fulldepth.execution import Verified, subject
from fulldepth.execution.batching import batched, model_inputs
from fulldepth.hf import (
    Anatomy,
    Checkpoint,
    Classifier,
    anatomy_candidates,
    checkpoint_of,
    depth_of,
    device_of,
    no_single_class,
)
from fulldepth.settings.exit import ExitSettings, LayerReadingSettings

CLASSIFIES = ("text-classification", "image-classification")


@dataclass(frozen=True)
class ExitSubject:
    """A verified model with its data."""

    checkpoint: Checkpoint
    verified: Verified
    classifier: Classifier
    sequences: Sequences
    device: torch.device
    batch_size: int
    warnings: tuple[str, ...]

    @property
    def anatomy(self) -> Anatomy:
        """The model's anatomy."""
        return self.verified.anatomy

    @property
    def classifies(self) -> bool:
        """Whether the model predicts one class for a sequence or an image, so that samples that leave are removed from
        the batch, and time is measured.
        """
        return self.anatomy.task in CLASSIFIES

    def inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A batch's inputs on the model's device and in its precision."""
        return model_inputs(inputs, self.device, self.checkpoint.model.dtype)


def open_checkpoint(model: str | Path | PreTrainedModel, settings: LayerReadingSettings) -> Checkpoint:
    """The model as passed in, or loaded according to the settings.

    Raises:
        FulldepthError: if it cannot be loaded, or has NaN or infinite weights.
    """
    if not isinstance(model, PreTrainedModel):  # before weights are loaded
        _check_min_layer(settings, depth_of(checkpoint_of(model), settings.revision, settings.trust_remote_code))
    checkpoint = subject.open_checkpoint(model, settings)
    checkpoint.check_weights()
    return checkpoint


def prepare_subject(
    checkpoint: Checkpoint, data: Any, settings: LayerReadingSettings, tokenizer: Any = None
) -> ExitSubject:
    """Prepare the data for a model in evaluation mode, and verify its anatomy and head on the first sequences.

    Raises:
        FulldepthError: if the model predicts no classes, the data do not fit it or have no labels, or its head cannot
            be verified.
    """
    model, candidates = checkpoint.model, anatomy_candidates(checkpoint.model)
    guess, kind = candidates[0], type(model).__name__
    classifies = guess.task in CLASSIFIES
    if not classifies and guess.task not in ("causal-lm", "masked-lm"):
        raise FulldepthError(
            f"{kind} predicts neither tokens nor a class, so no layer can be left early. Expected a language model, or "
            "a classifier of texts or images."
        )
    if classifies and (reason := no_single_class(model.config)):
        raise FulldepthError(f"{kind} {reason}; the rules of early exit compare the probabilities of classes.")
    tokenizer = subject.tokenizer_for(checkpoint, guess, data, settings, tokenizer)
    sequences = subject.sequences_for(checkpoint, guess, data, tokenizer, settings)
    if not sequences.num_targets:
        raise FulldepthError(
            f"{sequences.name} has no labels, and {kind} predicts classes. Give texts with labels ({{'text': ..., "
            "'label': ...}), or images in class folders."
            if classifies
            else f"{sequences.name} has no token to predict: {sequences.no_targets or 'its texts are too short'}."
        )
    _check_min_layer(settings, guess.num_layers)
    device, first = device_of(model), subject.small_batch(sequences)
    verified = subject.prove(candidates, first, device, model.dtype, optional=("branches",))
    if verified.classifier is None:
        raise FulldepthError(f"{kind} has no head that could be applied to its layers.")
    sequences, note = batched(verified.anatomy, sequences, device)
    warnings = (*checkpoint.warnings, *sequences.warnings, *(() if note is None else (note,)))
    batch_size = settings.batch_size or (64 if classifies else 8)
    return ExitSubject(checkpoint, verified, verified.classifier, sequences, device, batch_size, warnings)


def _check_min_layer(settings: LayerReadingSettings, depth: int | None) -> None:
    if isinstance(settings, ExitSettings) and depth is not None and settings.min_layer > depth:
        raise FulldepthError(f"min_layer is {settings.min_layer}, but the model has {depth} layers.")

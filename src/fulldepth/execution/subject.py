"""Opens a checkpoint, prepares data for it, and proves its anatomy on their first sequences."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

import fulldepth.architectures  # noqa: F401  # registers this package's models with transformers
from fulldepth.core.errors import FulldepthError
from fulldepth.data import Batch, Sequences, Source, input_texts, open_source, prepare
from fulldepth.data.labelled import usable_rows
from fulldepth.execution.batching import model_inputs
from fulldepth.execution.verify import Verified, verify
from fulldepth.hf import (
    Anatomy,
    Checkpoint,
    load_processor,
    no_single_class,
    open_model,
    open_tokenizer,
    text_config,
)
from fulldepth.settings.loading import LoadingSettings, ReadingSettings

DEFAULT_LENGTH = 256
WHOLE = 1 << 20
"""Tokens up to which a classifier without a limit of positions reads a text."""
IMAGES = ("images", "objects")
"""Kinds of sources whose records are images."""
CLASSES = ("text-classification", "image-classification", "detection")
"""Tasks whose labels follow the model's names of classes."""
STARTS = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
"""Settings that name a decoder's first token, in order of preference."""
SAMPLE = {"max_sequences", "skip_bad", "seed", "order", "bos", "one_per_row", "score"}
"""Settings that state which sequences are prepared."""
PROVEN_POSITIONS = 16
"""Tokens of each of two sequences that the proofs at load run on."""


def open_checkpoint(
    model: str | Path | PreTrainedModel | Checkpoint,
    settings: LoadingSettings,
    device: str | None = None,
    device_map: str | Mapping[str, Any] | None = None,
) -> Checkpoint:
    """The model as passed in, or loaded according to the settings, with its exit heads.

    Args:
        model: a loaded model, a checkpoint folder, a GGUF file, `package:NAME` or a Hub name.
        settings: precision, device, revision.
        device: in place of the settings'.
        device_map: spreads a large model over devices.
    """
    if isinstance(model, Checkpoint):
        return model
    return open_model(
        model,
        exit_heads=True,
        dtype=settings.dtype,
        device=settings.device if device is None else device,
        device_map=device_map,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )


def tokenizer_for(
    checkpoint: Checkpoint, anatomy: Anatomy, data: Any, settings: LoadingSettings, tokenizer: Any = None
) -> Any:
    """The tokenizer as passed in, the named one, or the one saved with or beside the model; None if no text is read."""
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer
    if isinstance(data, Sequences) or anatomy.family.modality != "text":
        return None
    named = tokenizer or settings.tokenizer or None
    return open_tokenizer(checkpoint, named, revision=settings.revision, trust_remote_code=settings.trust_remote_code)


def sequences_for(
    checkpoint: Checkpoint,
    anatomy: Anatomy,
    data: Any,
    tokenizer: Any,
    settings: ReadingSettings,
    words: Sequence[str] = (),
) -> Sequences:
    """The data, prepared for this model.

    Raises:
        FulldepthError: if they cannot be read, or the model does not read their kind.
    """
    if isinstance(data, Sequences):
        return data
    source, config = _source(checkpoint, anatomy, data, settings), checkpoint.model.config
    positions, task = anatomy.max_positions, anatomy.task
    length = settings.sequence_length or min(DEFAULT_LENGTH, positions or DEFAULT_LENGTH)
    truncate = settings.truncate
    if task == "text-classification" and source.kind == "labelled-text":
        most = positions or WHOLE
        length = settings.sequence_length or most
        truncate |= settings.sequence_length is not None and length <= most  # the length that was asked for
    pad, processor = getattr(text_config(config), "pad_token_id", None), None
    if source.kind in IMAGES:
        trusted = settings.trust_remote_code
        processor = load_processor(
            checkpoint.name, anatomy.config, revision=checkpoint.revision, trust_remote_code=trusted
        )
    return prepare(
        source,
        task="seq2seq-lm" if anatomy.family.tower == "decoder" else task,
        tokenizer=tokenizer,
        processor=processor,
        sequence_length=length,
        max_positions=positions if anatomy.family.modality == "text" else None,
        vocab_size=anatomy.vocab_size,
        pad_id=pad if task == "text-classification" and isinstance(pad, int) else None,
        start=next((token for name in STARTS if (token := getattr(config, name, None)) is not None), None),
        words=tuple(words),
        truncate=truncate,
        **settings.model_dump(include=SAMPLE),
    )


def read_source(data: Any, settings: ReadingSettings) -> Source:
    """The records that a sample of the settings' size needs.

    Raises:
        FulldepthError: as `open_source`.
    """
    return open_source(
        data,
        split=settings.split,
        skip_bad=settings.skip_bad,
        limit=settings.max_sequences,
        seed=settings.seed,
        order=settings.order,
        window=None if settings.one_per_row else settings.sequence_length or DEFAULT_LENGTH,
    )


def _source(checkpoint: Checkpoint, anatomy: Anatomy, data: Any, settings: ReadingSettings) -> Source:
    """The records of the data, of a kind that the model reads; bad ones are refused or left out."""
    source = read_source(data, settings)
    reads, kind = anatomy.family.modality, "images" if source.kind in IMAGES else source.kind
    if (reads == "images") != (kind == "images"):
        raise FulldepthError(f"{source.name} holds {kind}, but {type(checkpoint.model).__name__} reads {reads}.")
    if anatomy.family.tower == "encoder" and source.kind == "pairs":
        source = input_texts(source)
    names: dict[int, str] = {}
    if anatomy.task in CLASSES and no_single_class(config := checkpoint.model.config) is None:
        names = {int(index): name for name, index in (getattr(config, "label2id", None) or {}).items()}
    return usable_rows(
        source,
        tuple(names.get(index, str(index)) for index in range(max(names) + 1)) if names else None,
        most=settings.max_sequences,
        seed=settings.seed,
        skip_bad=settings.skip_bad,
    )


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

"""Training on labelled rows, classes or boxes: the rows, tokenizer or image processor, and the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Sampler

from fulldepth.data import Source, open_source, prepare
from fulldepth.data.labelled import (
    Collator,
    LabelledRows,
    Rows,
    check_classes,
    check_rows,
    held_out,
    in_epochs,
)
from fulldepth.data.sequences import Picture
from fulldepth.data.sources import Record
from fulldepth.errors import FulldepthError
from fulldepth.execution.stream import is_close, relative_error
from fulldepth.fingerprint import Fingerprint
from fulldepth.hf import evaluating, load_processor
from fulldepth.losses import DepthTrainer
from fulldepth.progress import Watcher
from fulldepth.targets import IGNORE
from fulldepth.training.augmentation import Augmentation
from fulldepth.training.classes import data_classes
from fulldepth.training.loading import LoadingMixin
from fulldepth.training.model import WEIGHTS, build_config, special_tokens
from fulldepth.training.optimiser import GroupsMixin
from fulldepth.training.resume import ResumeMixin
from fulldepth.training.settings import TrainSettings
from fulldepth.training.sharding import ShardsMixin


class EpochSampler(Sampler[int]):
    """A run's order of the items, with the epoch in the key; see `LabelledRows`."""

    def __init__(self, order: Any, size: int) -> None:
        self.order, self.size = order, size

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        return in_epochs(self.order, self.size)


class LabelledTrainer(ResumeMixin, ShardsMixin, LoadingMixin, GroupsMixin, DepthTrainer):
    """Trainer for labelled rows."""

    train_collator: Any = None
    """Makes the batches of training; `data_collator` those of evaluations."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        data: Any = self.train_dataset if train_dataset is None else train_dataset
        return EpochSampler(super()._get_train_sampler(data), len(data))

    def get_train_dataloader(self) -> Any:
        """The data loader of training, whose images are augmented."""
        given, self.data_collator = self.data_collator, self.train_collator
        try:
            return super().get_train_dataloader()
        finally:
            self.data_collator = given


Build = Callable[[Any], tuple[Any, Any]]
"""Configuration -> model and objective."""


class LabelledData(NamedTuple):
    """The rows of a run."""

    train: Rows
    validation: Rows
    classes: tuple[str, ...]
    warnings: list[str]


def labelled_data(settings: TrainSettings) -> LabelledData:
    """The rows to train and validate on, checked.

    Raises:
        FulldepthError: if there are none, or a row is bad and `data.skip_bad` is not set.
    """
    data, skip = settings.data, settings.data.skip_bad
    source = open_source(data.name, config=data.config, split=data.split, held_out=False, skip_bad=skip)
    classes = data_classes(source, settings)
    rows, warnings = _checked(source, settings, classes)
    if data.validation is not None:
        other = open_source(data.validation, skip_bad=skip, limit=settings.most_validation, seed=settings.seed)
        sampled = len(other) == settings.most_validation  # a rare class may be in none of its rows
        train, (validation, more) = rows, _checked(other, settings, classes, every=not sampled)
        warnings += more
    else:
        least = 1 if settings.task == "detection" else len(classes)
        most = min(max(least, round(len(rows.digests) * data.validation_share)), settings.most_validation)
        chosen = held_out(rows, most, settings.seed)
        train, validation = rows.select(np.flatnonzero(~chosen)), rows.select(np.flatnonzero(chosen))
    return LabelledData(train, validation, classes, warnings)


def _checked(
    source: Source, settings: TrainSettings, classes: tuple[str, ...], *, every: bool = True
) -> tuple[Rows, list[str]]:
    """The valid rows, and warnings. With `every`, each class needs a row; what a detector needs, it says itself."""
    skip = settings.data.skip_bad
    rows = check_rows(source, settings.task, classes, skip_bad=skip)
    return rows, rows.warnings + (
        [] if settings.task == "detection" else check_classes(rows, skip_bad=skip or not every)
    )


def _label(record: Record) -> int:
    return IGNORE if record.label is None else record.label


def image_trainer(
    settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher, build: Build
) -> tuple[Any, dict[str, Any]]:
    """The trainer of an image classifier, and facts about its data.

    Args:
        settings: of the run.
        folder: the run folder.
        arguments: of the trainer.
        watcher: receives messages.
        build: (configuration) -> (model, objective).
    """
    watcher.say(f"Reading {settings.data.name}")
    data = labelled_data(settings)
    config = build_config(settings.model, task=settings.task, classes=data.classes)
    processor = load_processor(settings.processor or settings.model.checkpoint or folder, config)
    return picture_trainer(settings, arguments, data, config, processor, build)


def picture_trainer(
    settings: TrainSettings, arguments: Any, data: LabelledData, config: Any, processor: Any, build: Build
) -> tuple[Any, dict[str, Any]]:
    """The trainer of a model of images, and facts about its data.

    Args:
        settings: of the run.
        arguments: of the trainer.
        data: rows with images.
        config: of the model.
        processor: makes pixel values of images.
        build: (configuration) -> (model, objective).

    Raises:
        FulldepthError: if the model takes another number of channels.
    """
    train, validation = (
        LabelledRows([Picture(r.image, _label(r), r.objects) for r in rows.source.records])  # type: ignore[arg-type]
        for rows in (data.train, data.validation)
    )
    collator = Collator(processor=processor, dtype=WEIGHTS[settings.precision])
    reads = getattr(config, "backbone_config", None) or config
    channels, wanted = collator([train[0]])["pixel_values"].shape[1], getattr(reads, "num_channels", 3)
    if channels != wanted:
        raise FulldepthError(
            f"Images are read with {channels} channels (RGB), and the model takes {wanted} (model.num_channels)."
        )
    described = Fingerprint(json.dumps(processor.to_dict(), sort_keys=True, default=str))
    parts = (train, validation)
    trainer, facts = _trainer(settings, arguments, build(config), data, parts, collator, processor, described)
    if settings.augmentation.changes:
        augment = Augmentation(settings.augmentation, processor, settings.seed)
        trainer.train_collator = replace(collator, augment=augment)
    return trainer, facts


def text_trainer(
    settings: TrainSettings,
    arguments: Any,
    watcher: Watcher,
    build: Build,
    make_tokenizer: Callable[[Iterable[str]], Any],
) -> tuple[Any, dict[str, Any]]:
    """The trainer of a text classifier, and facts about its data.

    Args:
        settings: of the run.
        arguments: of the trainer.
        watcher: receives messages.
        build: (configuration) -> (model, objective).
        make_tokenizer: (training texts) -> tokenizer of the run.

    Raises:
        FulldepthError: if data, tokenizer and model do not fit each other.
    """
    watcher.say(f"Reading {settings.data.name}")
    data = labelled_data(settings)
    texts = [text for record in data.train.source.records for text in (record.text, record.second) if text]
    tokenizer = _with_padding(make_tokenizer(texts))
    pad_id = tokenizer.pad_token_id
    config = build_config(
        settings.model,
        task=settings.task,
        vocab_size=len(tokenizer),
        positions=settings.sequence_length,
        special_tokens={**special_tokens(tokenizer), "pad_token_id": pad_id},
        classes=data.classes,
    )
    described = Fingerprint(settings.task)
    parts, warnings = [], []
    for rows in (data.train, data.validation):
        prepared = prepare(
            rows.source,
            task=settings.task,
            tokenizer=tokenizer,
            max_sequences=len(rows.source),
            sequence_length=settings.sequence_length,
            vocab_size=getattr(config.get_text_config(), "vocab_size", None),
            truncate=settings.data.truncate,
            skip_bad=settings.data.skip_bad,
        )
        for example in prepared.examples:
            described.add(example.input_ids.numpy().astype("<i8").tobytes())
        parts.append(LabelledRows(prepared.examples))
        warnings += prepared.warnings
    collator, built = Collator(pad_id=pad_id), build(config)
    warnings += _check_padding(built[0], parts[0], collator)
    data = data._replace(warnings=[*data.warnings, *warnings])
    return _trainer(settings, arguments, built, data, tuple(parts), collator, tokenizer, described)


@torch.no_grad()
def _check_padding(model: Any, rows: LabelledRows, collator: Collator) -> list[str]:
    """A warning if the logits of the shortest row change in a batch with the longest, where it is padded.

    FNet and ConvBERT mix padding into the tokens; XLNet's classifier reads the last position.
    """
    ends = sorted(range(len(rows)), key=lambda index: len(rows[index].example.input_ids))
    shortest, longest = rows[ends[0]], rows[ends[-1]]
    with evaluating(model):
        alone, padded = (model(**collator(batch)).logits[:1] for batch in ([shortest], [shortest, longest]))
    if is_close(padded, alone):
        return []
    return [
        f"The logits of {type(model).__name__} change by {relative_error(padded, alone):.1e} (relative) when a text is "
        "padded to the longest of its batch, as in training; measure and exit do not pad it."
    ]


def _trainer(
    settings: TrainSettings,
    arguments: Any,
    built: tuple[Any, Any],
    data: LabelledData,
    parts: tuple[Any, ...],
    collator: Collator,
    processing: Any,
    described: Fingerprint,
) -> tuple[Any, dict[str, Any]]:
    model, objective = built
    for rows in (data.train, data.validation):
        for digest, record in zip(rows.digests, rows.source.records, strict=True):
            described.add(digest + str(record.label if record.objects is None else record.objects).encode())
    trainer = LabelledTrainer(
        model,
        arguments,
        objective=objective,
        settings=settings,
        train_dataset=parts[0],
        eval_dataset=parts[1],
        data_collator=collator,
        processing_class=processing,
    )
    trainer.train_collator = collator
    facts = {"hash": str(described), "train_sequences": len(parts[0]), "warnings": data.warnings}
    return trainer, {**facts, "classes": len(data.classes), "documents": len(parts[0]) + len(parts[1])}


def _with_padding(tokenizer: Any) -> Any:
    """The tokenizer with a padding token: its own, else that of the end of a text."""
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise FulldepthError("The tokenizer has no padding token and no end-of-text token to pad with.")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer

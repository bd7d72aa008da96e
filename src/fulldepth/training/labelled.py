"""Training data with classes or boxes: rows, their tokenizer or image processor, and random changes of images."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import Fingerprint
from fulldepth.core.progress import Watcher
from fulldepth.data import ImageRecord, Source, TextRecord, open_source, prepare
from fulldepth.data.batches import image_shapes
from fulldepth.data.labelled import (
    Collator,
    LabelledRows,
    check_rows,
    held_out,
    listed,
    name_classes,
)
from fulldepth.execution.stream import run
from fulldepth.hf import evaluating, image_config, load_processor
from fulldepth.hf.rounding import is_close, relative_error
from fulldepth.settings.train import AugmentationSettings, DataSettings, TrainSettings
from fulldepth.training.model import WEIGHTS, build_config, check_options, special_tokens
from fulldepth.training.text import padding_token, run_tokenizer
from fulldepth.training.trainer import RunData

DETECTS = ("aligned", "similarity", "jump")
"""Terms that a detector can be trained with; other terms read attention over positions of a sequence."""
EDGE = 800
"""Pixels of the shorter edge that images are scaled to."""
RATIO = 5 / 3
"""Largest ratio of the longer edge to `EDGE` (DETR's 1333 / 800)."""


def class_names(settings: TrainSettings, source: Source | None = None) -> tuple[str, ...]:
    """Return the names of a run's classes, from its training source; for a detector, the data's categories.

    Without a source they come from `model.num_labels`, or the data are opened; no image is read.

    Raises:
        FulldepthError: if `model.num_labels` is not a possible number of classes, the data cannot be opened or have no
            classes, or the numbers differ.
    """
    declared = (settings.model.model_extra or {}).get("num_labels")
    data = settings.data
    detects = settings.task == "detection"
    least = 1 if detects else 2
    if declared is not None and (type(declared) is not int or declared < least):
        raise FulldepthError(
            f"model.num_labels is {one_line(repr(declared), 60)}. Expected a whole number of at least {least}, the "
            f"number of classes for task: {settings.task}."
        )
    if source is None:
        if declared is not None:
            return tuple(f"LABEL_{number}" for number in range(declared))
        try:
            source = training_source(data)
        except FulldepthError as error:
            raise FulldepthError(
                f"{error} To go on without the data, state the number of classes with model.num_labels=N."
            ) from error
    if not detects:
        return name_classes(source, declared)
    if declared not in (None, len(source.class_names)):
        raise FulldepthError(
            f"{source.name} names {len(source.class_names)} classes, but model.num_labels is {declared}. Leave it out."
        )
    return source.class_names


def training_source(data: DataSettings) -> Source:
    """Open the labelled rows of a run, as they are in the data."""
    return open_source(data.name, config=data.config, split=data.split, held_out=False, skip_bad=data.skip_bad)


def labelled_data(settings: TrainSettings) -> tuple[list[Source], list[str]]:
    """Return the checked rows for training and validation, and warnings.

    Raises:
        FulldepthError: if there are no rows, or a row is bad and `data.skip_bad` is not set.
    """
    data = settings.data
    skip = settings.data.skip_bad
    detects = settings.task == "detection"
    warnings = list[str]()

    def checked(source: Source, *, every: bool) -> Source:
        """Return the valid rows. With `every`, each class of a classifier needs a row."""
        rows = check_rows(source, settings.task, classes, skip_bad=skip)
        warnings.extend(rows.warnings)
        labels = {record.label for record in rows.records}
        missing = [name for number, name in enumerate(classes) if number not in labels]
        if missing and not detects:
            sentence = f"{source.name} has no row for {len(missing)} of the {len(classes)} classes ({listed(missing)})."
            if every and not skip:
                raise FulldepthError(f"{sentence} Add rows of every class, or set data.skip_bad.")
            warnings.append(sentence)
        return replace(rows, warnings=())

    source = training_source(data)
    classes = class_names(settings, source)
    train = checked(source, every=True)
    if data.validation is not None:
        other = open_source(data.validation, skip_bad=skip, limit=settings.most_validation, seed=settings.seed)
        # a sample of the rows may lack a rare class
        return [train, checked(other, every=len(other) != settings.most_validation)], warnings
    least = 1 if detects else len(classes)
    count = min(max(least, round(len(train) * data.validation_share)), settings.most_validation)
    validates = held_out(train, count, settings.seed)
    return [train.select(np.flatnonzero(validates == part)) for part in (False, True)], warnings


def image_data(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> RunData:
    """Open images with classes or boxes. The arguments are those of `packed_data`.

    Raises:
        FulldepthError: if data, model or method do not fit the task.
    """
    detects = settings.task == "detection"
    start = settings.model.checkpoint
    for name in settings.objective.terms if detects else ():
        if name not in DETECTS:
            raise FulldepthError(
                f"task: detection cannot be trained with {name}. Available: {', '.join(DETECTS)}, or the loss of the "
                "last decoder layer alone (method: baseline)."
            )
    watcher.say(f"Reading {settings.data.name}")
    parts, warnings = labelled_data(settings)
    config = build_config(settings.model, task=settings.task, classes=parts[0].class_names)
    if detects:
        warnings += _check_detection(config, parts)
    edge = settings.data.image_size or (None if start or settings.processor else EDGE)
    if detects and edge:  # it also makes the pixel mask
        size = {"shortest_edge": edge, "longest_edge": round(edge * RATIO)}
        processor: Any = transformers.DetrImageProcessorPil(size=size, do_convert_annotations=True)
    else:
        processor = load_processor(settings.processor or start or folder, image_config(config))
    if detects and getattr(processor, "do_center_crop", False):
        raise FulldepthError(
            f"The image processor of {settings.processor or start}, a {type(processor).__name__}, crops images "
            "(do_center_crop), and boxes would not follow. Name another one with processor=FOLDER, or set "
            "data.image_size instead."
        )
    train, validation = (LabelledRows(rows.records) for rows in parts)
    collator = Collator(processor=processor, dtype=WEIGHTS[settings.precision])
    _, channels, height, width = collator([train[0]])["pixel_values"].shape
    wanted = getattr(getattr(config, "backbone_config", None) or image_config(config), "num_channels", 3)
    if channels != wanted:
        raise FulldepthError(
            f"Images are read with {channels} channels (RGB), but the model takes {wanted} (model.num_channels)."
        )
    records = parts[1].of(ImageRecord) if detects else []
    shapes = image_shapes(records, [record.image().size for record in records], processor)
    if settings.augmentation.changes:
        edges = (width, height)
        train.change = partial(changed, settings=settings.augmentation, edges=edges, seed=settings.seed)
    return RunData(
        config,
        processor,
        train,
        validation,
        _facts(parts, Fingerprint(json.dumps(processor.to_dict(), sort_keys=True, default=str))),
        collator,
        warnings,
        shapes,
    )


def _check_detection(config: Any, parts: Sequence[Source]) -> list[str]:
    """Refuse data without objects, a model with too few queries, and a model whose loss differs from the method's.

    Returns:
        A warning if a class is in no training image, else nothing.
    """
    queries = getattr(config, "num_queries", math.inf)
    for rows, part in zip(parts, ("training", "validation"), strict=True):
        objects = max(
            (record.objects.targets for record in rows.of(ImageRecord) if record.objects is not None), default=0
        )
        if not objects:
            raise FulldepthError(
                f"{rows.name} has no object in any {part} image (crowds do not count). Name images with boxes as "
                "data.name and data.validation, or hold out more (data.validation_share)."
            )
        if objects > queries:
            raise FulldepthError(
                f"An image has {objects} objects, but the model has {queries} queries (model.num_queries); it needs at "
                "least one query for each object."
            )
    if getattr(config, "auxiliary_loss", False):
        raise FulldepthError(
            "model.auxiliary_loss makes transformers add a loss of every layer, and normalise the states between the "
            "layers. Leave it out; for the losses of all layers use method=aligned (unweighted with "
            "objective.aligned.weights=sum)."
        )
    train = parts[0]
    boxed = {index for record in train.of(ImageRecord) if record.objects for index in record.objects.classes}
    missing = [name for index, name in enumerate(train.class_names) if index not in boxed]
    return [f"No training image has an object of {len(missing)} classes (first: {missing[0]})."] if missing else []


def text_data(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> RunData:
    """Open texts with classes. The arguments are those of `packed_data`.

    Raises:
        FulldepthError: if data, tokenizer and model do not fit each other.
    """
    check_options(settings.model, settings.task)  # before a tokenizer is trained
    watcher.say(f"Reading {settings.data.name}")
    parts, warnings = labelled_data(settings)
    texts = [text for record in parts[0].of(TextRecord) for text in record.texts]
    tokenizer = run_tokenizer(settings, folder, arguments, watcher, texts)
    pad_id = padding_token(tokenizer)
    config = build_config(
        settings.model,
        task=settings.task,
        vocab_size=len(tokenizer),
        positions=settings.sequence_length,
        special_tokens={**special_tokens(tokenizer), "pad_token_id": pad_id},
        classes=parts[0].class_names,
    )
    described = Fingerprint(settings.task)
    examples = []
    for rows in parts:
        prepared = prepare(
            rows,
            task=settings.task,
            tokenizer=tokenizer,
            max_sequences=len(rows),
            sequence_length=settings.sequence_length,
            vocab_size=getattr(config.get_text_config(), "vocab_size", None),
            truncate=settings.data.truncate,
            skip_bad=settings.data.skip_bad,
        )
        for example in prepared.examples:
            described.add(example.input_ids.numpy().astype("<i8").tobytes())
        examples.append(LabelledRows(prepared.examples))
        warnings += prepared.warnings
    train, validation = examples
    facts = _facts(parts, described)
    return RunData(config, tokenizer, train, validation, facts, Collator(pad_id=pad_id), warnings=warnings)


@torch.no_grad()
def padding_warning(model: Any, rows: LabelledRows, collator: Collator) -> list[str]:
    """Return a warning if padding the shortest row to the length of the longest changes its logits.

    FNet and ConvBERT mix padding into the tokens; XLNet's classifier reads the last position.

    Raises:
        FulldepthError: if the model fails on these rows.
    """
    ends = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    shortest = rows[ends[0]]
    longest = rows[ends[-1]]
    with evaluating(model):
        alone, padded = (run(model, collator(batch)).logits[:1] for batch in ([shortest], [shortest, longest]))
    if is_close(padded, alone):
        return []
    return [
        f"The logits of {type(model).__name__} change by {relative_error(padded, alone):.1e} (relative) when a text is "
        "padded to the longest of its batch, as in training; measure and exit do not pad it."
    ]


def _facts(parts: Sequence[Source], described: Fingerprint) -> dict[str, Any]:
    """Return facts for the record. Their hash covers the rows and `described`, which covers what is made from them."""
    for rows in parts:
        for record in rows.records:
            objects = record.objects if isinstance(record, ImageRecord) else None
            described.add(record.digest + str(record.label if objects is None else objects).encode())
    return {
        "hash": str(described),
        "train_sequences": len(parts[0]),
        "classes": len(parts[0].class_names),
        "documents": sum(map(len, parts)),
        "clusters": sum(map(len, parts)),
        "unit": "image" if isinstance(parts[0].records[0], ImageRecord) else "row",
    }


def changed(
    record: ImageRecord, key: int, *, settings: AugmentationSettings, edges: Sequence[int], seed: int
) -> ImageRecord:
    """Return a randomly changed training image: mirrored with its boxes, then rotated and shifted over black.

    The random numbers follow from seed and key (epoch and index) alone, so they do not depend on batches, processes,
    workers or resuming.

    Args:
        record: an image as in the data.
        key: the item's key, as in `LabelledRows`.
        settings: the changes; images with boxes are only mirrored (`flip`).
        edges: width and height of the model's input; shifts are in pixels of this size.
        seed: the run's seed.
    """
    random = np.random.default_rng([seed, key])
    flips = random.random() < 0.5
    angle = random.uniform(-settings.rotation, settings.rotation)
    shift = random.integers(-settings.crop, settings.crop, 2, endpoint=True)
    record = record.mirrored() if settings.flip and flips else record

    def moved(image: Image.Image) -> Image.Image:
        pixels = (round(part * size / edge) for part, size, edge in zip(shift.tolist(), image.size, edges, strict=True))
        return image.rotate(angle, Image.Resampling.BILINEAR, translate=tuple(pixels))

    if settings.crop or settings.rotation:
        return replace(record, image=record.image.changed(moved))
    return record

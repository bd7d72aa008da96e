"""Labelled rows to train on, with classes or boxes: the rows, their tokenizer or image processor, and random changes of
images.
"""

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
from fulldepth.data import DataRecord, Source, open_source, prepare
from fulldepth.data.labelled import (
    Collator,
    LabelledRows,
    check_rows,
    held_out,
    listed,
    name_classes,
)
from fulldepth.execution.stream import is_close, relative_error
from fulldepth.hf import evaluating, load_processor
from fulldepth.settings.train import AugmentationSettings, DataSettings, TrainSettings
from fulldepth.training.model import WEIGHTS, build_config, special_tokens
from fulldepth.training.text import run_tokenizer
from fulldepth.training.trainer import RunData

DETECTS = ("aligned", "similarity", "jump")
"""Terms that a detector can be trained with; the others read attention over positions of a sequence."""
EDGE = 800
RATIO = 5 / 3
"""Longest edge over the shorter one that images are scaled to (DETR's 1333 / 800)."""


def class_names(settings: TrainSettings, source: Source | None = None) -> tuple[str, ...]:
    """Names of the classes of a run, from its training source; a detector's are those of the data's categories.

    Without a source they come from `model.num_labels`, or the data are opened; no image is read.

    Raises:
        FulldepthError: if `model.num_labels` is no number of classes that the task can have, the data are not at hand,
            or they have no classes, or not as many as declared.
    """
    declared = (settings.model.model_extra or {}).get("num_labels")
    data = settings.data
    detects = settings.task == "detection"
    least = 1 if detects else 2
    if declared is not None and (type(declared) is not int or declared < least):
        raise FulldepthError(
            f"model.num_labels is {one_line(repr(declared), 60)}. Expected a whole number of at least {least}: the "
            f"classes of task: {settings.task}."
        )
    if source is None:
        if declared is not None:
            return tuple(f"LABEL_{number}" for number in range(declared))
        try:
            source = training_source(data)
        except FulldepthError as error:
            raise FulldepthError(
                f"{error} Without the data, model.num_labels=N states the number of classes."
            ) from error
    if not detects:
        return name_classes(source, declared)
    if declared not in (None, len(source.class_names)):
        raise FulldepthError(f"{source.name} names {len(source.class_names)} classes; model.num_labels is {declared}.")
    return source.class_names


def training_source(data: DataSettings) -> Source:
    """The labelled rows of a run, as they are in the data."""
    return open_source(data.name, config=data.config, split=data.split, held_out=False, skip_bad=data.skip_bad)


def labelled_data(settings: TrainSettings) -> tuple[list[Source], list[str]]:
    """The rows to train and to validate on, checked, and warnings.

    Raises:
        FulldepthError: if there are none, or a row is bad and `data.skip_bad` is not set.
    """
    data = settings.data
    skip = settings.data.skip_bad
    detects = settings.task == "detection"
    warnings = list[str]()

    def checked(source: Source, *, every: bool) -> Source:
        """The valid rows. With `every`, each class needs a row; a detector needs less."""
        rows = check_rows(source, settings.task, classes, skip_bad=skip)
        warnings.extend(rows.warnings)
        labels = {record.label for record in rows.records}
        missing = [name for number, name in enumerate(classes) if number not in labels]
        if missing and not detects:
            lacks = f"{source.name} has no row of {len(missing)} of the {len(classes)} classes ({listed(missing)})."
            if every and not skip:
                raise FulldepthError(f"{lacks} Give rows of every class, or set data.skip_bad.")
            warnings.append(lacks)
        return replace(rows, warnings=())

    source = training_source(data)
    classes = class_names(settings, source)
    train = checked(source, every=True)
    if data.validation is not None:
        other = open_source(data.validation, skip_bad=skip, limit=settings.most_validation, seed=settings.seed)
        # a rare class may be in none of the rows of a sample
        return [train, checked(other, every=len(other) != settings.most_validation)], warnings
    least = 1 if detects else len(classes)
    most = min(max(least, round(len(train) * data.validation_share)), settings.most_validation)
    chosen = held_out(train, most, settings.seed)
    return [train.select(np.flatnonzero(chosen == part)) for part in (False, True)], warnings


def image_data(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> RunData:
    """Images with classes or boxes; arguments as for `packed_data`.

    Raises:
        FulldepthError: if data, model or method do not fit the task.
    """
    detects = settings.task == "detection"
    start = settings.model.checkpoint
    for name in settings.objective.terms if detects else ():
        if name not in DETECTS:
            raise FulldepthError(
                f"task: detection cannot be trained with {name}. It can with {', '.join(DETECTS)}, and with the loss "
                "of the last decoder layer alone (method: baseline)."
            )
    watcher.say(f"Reading {settings.data.name}")
    parts, warnings = labelled_data(settings)
    config = build_config(settings.model, task=settings.task, classes=parts[0].class_names)
    if detects:
        warnings += _check_detection(config, parts)
    edge = settings.data.image_size or (None if start else EDGE)
    if detects and edge:  # it also makes the pixel mask
        size = {"shortest_edge": edge, "longest_edge": round(edge * RATIO)}
        processor: Any = transformers.DetrImageProcessorPil(size=size, do_convert_annotations=True)
    else:
        processor = load_processor(settings.processor or start or folder, config)
    train, validation = (LabelledRows(rows.records) for rows in parts)
    collator = Collator(processor=processor, dtype=WEIGHTS[settings.precision])
    _, channels, height, width = collator([train[0]])["pixel_values"].shape
    wanted = getattr(getattr(config, "backbone_config", None) or config, "num_channels", 3)
    if channels != wanted:
        raise FulldepthError(
            f"Images are read with {channels} channels (RGB), and the model takes {wanted} (model.num_channels)."
        )
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
    )


def _check_detection(config: Any, parts: Sequence[Source]) -> list[str]:
    """Refuse data without objects, and a model that cannot learn them or whose own loss is another one than the
    method's; a warning if classes occur in no training image.
    """
    queries = getattr(config, "num_queries", math.inf)
    for rows, part in zip(parts, ("training", "validation"), strict=True):
        most = max((r.objects.targets for r in rows.records if r.objects is not None), default=0)
        if not most:
            raise FulldepthError(
                f"{rows.name} has no object in any {part} image (crowds do not count). Give images with boxes "
                "as data.name and data.validation, or hold out more (data.validation_share)."
            )
        if most > queries:
            raise FulldepthError(f"An image has {most} objects, and the model {queries} queries (model.num_queries).")
    if getattr(config, "auxiliary_loss", False):
        raise FulldepthError(
            "model.auxiliary_loss makes transformers add a loss of every layer, and normalise the states between the "
            "layers. Leave it out: method=aligned has the losses, with objective.aligned.weights=sum unweighted."
        )
    train = parts[0]
    boxed = {index for record in train.records if record.objects for index in record.objects.classes}
    missing = [name for index, name in enumerate(train.class_names) if index not in boxed]
    return [f"No training image has an object of {len(missing)} classes (first: {missing[0]})."] if missing else []


def text_data(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> RunData:
    """Texts with classes; arguments as for `packed_data`.

    Raises:
        FulldepthError: if data, tokenizer and model do not fit each other.
    """
    watcher.say(f"Reading {settings.data.name}")
    parts, warnings = labelled_data(settings)
    texts = [text for record in parts[0].records for text in (record.text, record.second) if text]
    tokenizer = run_tokenizer(settings, folder, arguments, watcher, texts)
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise FulldepthError("The tokenizer has no padding token and no end-of-text token to pad with.")
        tokenizer.pad_token = tokenizer.eos_token
    pad_id = tokenizer.pad_token_id
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
    """A warning if the logits of the shortest row change in a batch with the longest, where it is padded.

    FNet and ConvBERT mix padding into the tokens; XLNet's classifier reads the last position.
    """
    ends = sorted(range(len(rows)), key=lambda index: len(rows[index]))
    shortest = rows[ends[0]]
    longest = rows[ends[-1]]
    with evaluating(model):
        alone, padded = (model(**collator(batch)).logits[:1] for batch in ([shortest], [shortest, longest]))
    if is_close(padded, alone):
        return []
    return [
        f"The logits of {type(model).__name__} change by {relative_error(padded, alone):.1e} (relative) when a text is "
        "padded to the longest of its batch, as in training; measure and exit do not pad it."
    ]


def _facts(parts: Sequence[Source], described: Fingerprint) -> dict[str, Any]:
    """For the record; the rows are added to the fingerprint of what is made of them."""
    for rows in parts:
        for record in rows.records:
            described.add(record.digest + str(record.label if record.objects is None else record.objects).encode())
    return {
        "hash": str(described),
        "train_sequences": len(parts[0]),
        "classes": len(parts[0].class_names),
        "documents": sum(map(len, parts)),
        "clusters": sum(map(len, parts)),
        "unit": "image" if parts[0].records[0].image is not None else "row",
    }


def changed(
    record: DataRecord, key: int, *, settings: AugmentationSettings, edges: Sequence[int], seed: int
) -> DataRecord:
    """A randomly changed training image: mirrored with its boxes, then rotated and shifted over black.

    The random numbers follow from seed and key (epoch and index) alone, so they do not depend on batches, processes,
    workers or resuming.

    Args:
        record: an image as in the data.
        key: as in `LabelledRows`.
        settings: of images with boxes `flip` alone.
        edges: width and height of the model's input, in whose pixels shifts are counted.
        seed: of the run.
    """
    random = np.random.default_rng([seed, key])
    flips = random.random() < 0.5
    angle = random.uniform(-settings.rotation, settings.rotation)
    shift = random.integers(-settings.crop, settings.crop, 2, endpoint=True)
    record = record.mirrored() if settings.flip and flips else record

    def moved(image: Image.Image) -> Image.Image:
        pixels = (round(part * size / edge) for part, size, edge in zip(shift.tolist(), image.size, edges, strict=True))
        return image.rotate(angle, Image.Resampling.BILINEAR, translate=tuple(pixels))

    if record.image is not None and (settings.crop or settings.rotation):
        return replace(record, image=record.image.changed(moved))
    return record

"""Training of detectors: images with boxes, image processor and trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import transformers

from fulldepth.data import Source, image_content, open_source
from fulldepth.data.labelled import check_kind
from fulldepth.data.labels import align_objects
from fulldepth.data.sequences import Picture, collate_images
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.fingerprint import Fingerprint
from fulldepth.hf import load_processor
from fulldepth.losses import DepthTrainer, use_set_loss
from fulldepth.progress import Watcher
from fulldepth.training.classes import declared_classes
from fulldepth.training.loading import LoadingMixin
from fulldepth.training.model import build_config
from fulldepth.training.optimiser import GroupsMixin
from fulldepth.training.resume import ResumeMixin
from fulldepth.training.settings import TrainSettings
from fulldepth.training.sharding import ShardsMixin

TERMS = ("aligned", "similarity", "jump")
"""Terms that can be trained with; the others read attention over positions of a sequence."""
HASHED = 1000
"""Images, evenly spread, whose content is part of the hash of the data; the boxes of all are."""
EDGE = 800
RATIO = 5 / 3
"""Longest edge over the shorter one that images are scaled to (DETR's 1333 / 800)."""


class DetectionTrainer(ResumeMixin, ShardsMixin, LoadingMixin, GroupsMixin, DepthTrainer):
    """Trainer for images with boxes."""


class DetectionData(NamedTuple):
    """The images of a run."""

    train: list[Picture]
    validation: list[Picture]
    classes: tuple[str, ...]
    hash: str
    warnings: list[str]


def detection_trainer(
    settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher, build: Callable[[Any], tuple[Any, Any]]
) -> tuple[Any, dict[str, Any]]:
    """The trainer of a detector, and facts about its data.

    Args:
        settings: of the run.
        folder: the run folder.
        arguments: of the trainer.
        watcher: receives messages.
        build: (configuration) -> (model, objective).

    Raises:
        FulldepthError: if data, model or method do not fit detection.
    """
    _check_method(settings)
    watcher.say(f"Reading {settings.data.name}")
    data = detection_data(settings)
    config = build_config(settings.model, task="detection", classes=data.classes)
    _check_config(config, data)
    processor = _processor(settings, folder, config)
    model, objective = build(config)
    use_set_loss(model)
    anatomy = find_anatomy(model)
    if anatomy.family.backbone is not None:  # transformers freezes all of its own ResNet, by names that timm has
        anatomy.body.get_submodule(anatomy.family.backbone).requires_grad_(True)
    trainer = DetectionTrainer(
        model,
        arguments,
        objective=objective,
        settings=settings,
        train_dataset=data.train,
        eval_dataset=data.validation,
        data_collator=partial(collate, processor=processor),
        processing_class=processor,
    )
    described = Fingerprint(data.hash, json.dumps(processor.to_dict(), sort_keys=True, default=str))
    count = len(data.train)
    facts = {"hash": str(described), "train_sequences": count, "documents": count + len(data.validation)}
    return trainer, {**facts, "classes": len(data.classes), "warnings": data.warnings}


def detection_data(settings: TrainSettings) -> DetectionData:
    """The images to train and validate on.

    Raises:
        FulldepthError: if there are none, they have no boxes, or an entry is bad and `data.skip_bad` is not set.
    """
    data = settings.data
    source = _source(data.name, data.config, data.split, skip_bad=data.skip_bad, held_out=False)
    if (declared := declared_classes(settings)) not in (None, len(source.class_names)):
        raise FulldepthError(f"{source.name} names {len(source.class_names)} classes; model.num_labels is {declared}.")
    train, warnings = _pictures(source, source.class_names)
    if data.validation is not None:
        other = _source(data.validation, None, None, skip_bad=data.skip_bad, held_out=True)
        validation, more = _pictures(other, source.class_names)
        warnings += more
        order = np.random.default_rng(settings.seed).permutation(len(validation))
        validation = [validation[index] for index in sorted(order[: settings.most_validation])]
    else:
        if len(train) < 2:
            raise FulldepthError(f"{source.name} has a single image, and one must be held out for validation.")
        order = np.random.default_rng(settings.seed).permutation(len(train))
        held_out = max(1, min(round(data.validation_share * len(train)), settings.most_validation))
        validation = [train[index] for index in sorted(order[:held_out])]
        train = [train[index] for index in sorted(order[held_out:])]
    boxed = {index for picture in train for index in _of(picture).classes}
    if not boxed:
        raise FulldepthError(f"{source.name} has no box in any training image.")
    missing = [name for index, name in enumerate(source.class_names) if index not in boxed]
    if missing:
        warnings.append(f"No training image has an object of {len(missing)} classes (first: {missing[0]}).")
    return DetectionData(train, validation, source.class_names, _hash(train, validation), warnings)


def _source(name: str, config: str | None, split: str | None, *, skip_bad: bool, held_out: bool) -> Source:
    source = open_source(name, config=config, split=split, held_out=held_out, skip_bad=skip_bad)
    check_kind(source, "detection")
    return source


def _pictures(source: Source, classes: Sequence[str]) -> tuple[list[Picture], list[str]]:
    """The images with their objects in the numbering of `classes`, and warnings."""
    objects, labels = align_objects(source, {name: index for index, name in enumerate(classes)})
    pictures = [
        Picture(record.image, objects=each)
        for record, each in zip(source.records, objects, strict=True)
        if record.image is not None
    ]
    return pictures, [*source.warnings, *labels.warnings]


def _of(picture: Picture) -> Any:
    assert picture.objects is not None
    return picture.objects


def _hash(train: Sequence[Picture], validation: Sequence[Picture]) -> str:
    """Of the boxes of all images, and of the content of some."""
    fingerprint = Fingerprint("detection", str(len(train)))
    everything = [*train, *validation]
    step = max(1, len(everything) // HASHED)
    for index, picture in enumerate(everything):
        fingerprint.add(repr(picture.objects).encode())
        if index % step == 0:
            fingerprint.add(image_content(picture.load))
    return str(fingerprint)


def collate(pictures: Sequence[Picture], processor: Any) -> dict[str, Any]:
    """`pixel_values`, `pixel_mask` and `labels` (a list, see `Batch.objects`) of some images."""
    batch = collate_images(pictures, range(len(pictures)), processor=processor)
    return {**batch.inputs, "labels": batch.objects}


def _processor(settings: TrainSettings, folder: Path, config: Any) -> Any:
    """The checkpoint's image processor, or DETR's with the settings' size; it also makes the pixel mask."""
    size = settings.data.image_size
    if size is None and settings.model.checkpoint is not None:
        return load_processor(settings.model.checkpoint, config)
    edge = size or EDGE
    return transformers.DetrImageProcessorPil(
        size={"shortest_edge": edge, "longest_edge": round(edge * RATIO)}, do_convert_annotations=True
    )


def _check_method(settings: TrainSettings) -> None:
    """Refuse objectives that a detector's decoder cannot be trained with."""
    options = settings.objective.terms
    for name in options:
        if name not in TERMS:
            raise FulldepthError(
                f"task: detection cannot be trained with {name}. It can with {', '.join(TERMS)}, and with the loss of "
                "the last decoder layer alone (method: baseline)."
            )
    aligned = options.get("aligned")
    if isinstance(aligned, dict) and aligned.get("positions", 1.0) != 1.0:
        raise FulldepthError("aligned.positions samples the tokens of a text; detection matches all queries.")


def _check_config(config: Any, data: DetectionData) -> None:
    """Refuse a model that cannot learn the data, or whose own loss is another one than the method's."""
    if getattr(config, "auxiliary_loss", False):
        raise FulldepthError(
            "model.auxiliary_loss makes transformers add a loss of every layer, and normalise the states between the "
            "layers. Leave it out: method=aligned has the losses, with objective.aligned.weights=sum unweighted."
        )
    queries = getattr(config, "num_queries", None)
    most = max(sum(not crowd for crowd in _of(picture).crowd) for picture in (*data.train, *data.validation))
    if isinstance(queries, int) and most > queries:
        raise FulldepthError(f"An image has {most} objects, and the model {queries} queries (model.num_queries).")

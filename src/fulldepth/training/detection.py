"""Training of detectors: checks of method, boxes and configuration, and the image processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.hf import load_processor
from fulldepth.losses import use_set_loss
from fulldepth.progress import Watcher
from fulldepth.training.labelled import Build, LabelledData, labelled_data, picture_trainer
from fulldepth.training.model import build_config
from fulldepth.training.settings import TrainSettings

TERMS = ("aligned", "multi_exit", "similarity", "jump")
"""Terms that can be trained with; the others read attention over positions of a sequence."""
EDGE = 800
RATIO = 5 / 3
"""Longest edge over the shorter one that images are scaled to (DETR's 1333 / 800)."""


def detection_trainer(
    settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher, build: Build
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
    data = labelled_data(settings)
    data.warnings.extend(_check_boxes(data))
    config = build_config(settings.model, task="detection", classes=data.classes)
    _check_config(config, data)
    processor = _processor(settings, folder, config)

    def built(config: Any) -> tuple[Any, Any]:
        model, objective = build(config)
        use_set_loss(model)
        anatomy = find_anatomy(model)
        if anatomy.family.backbone is not None:  # transformers freezes all of its own ResNet, by names that timm has
            anatomy.body.get_submodule(anatomy.family.backbone).requires_grad_(True)
        return model, objective

    return picture_trainer(settings, arguments, data, config, processor, built)


def _check_boxes(data: LabelledData) -> list[str]:
    """A warning if classes occur in no training image.

    Raises:
        FulldepthError: if no training image has an object other than crowds, or no image that is held out has.
    """
    for rows, part in ((data.train, "training"), (data.validation, "validation")):
        if not any(record.objects.targets for record in rows.source.records if record.objects is not None):
            raise FulldepthError(
                f"{rows.source.name} has no object in any {part} image (crowds do not count). Give images with boxes "
                "as data.name and data.validation, or hold out more (data.validation_share)."
            )
    boxed = {index for record in data.train.source.records if record.objects for index in record.objects.classes}
    missing = [name for index, name in enumerate(data.classes) if index not in boxed]
    return [f"No training image has an object of {len(missing)} classes (first: {missing[0]})."] if missing else []


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


def _check_config(config: Any, data: LabelledData) -> None:
    """Refuse a model that cannot learn the data, or whose own loss is another one than the method's."""
    if getattr(config, "auxiliary_loss", False):
        raise FulldepthError(
            "model.auxiliary_loss makes transformers add a loss of every layer, and normalise the states between the "
            "layers. Leave it out: method=aligned has the losses, with objective.aligned.weights=sum unweighted."
        )
    queries = getattr(config, "num_queries", None)
    records = (*data.train.source.records, *data.validation.source.records)
    most = max(record.objects.targets for record in records if record.objects is not None)
    if isinstance(queries, int) and most > queries:
        raise FulldepthError(f"An image has {most} objects, and the model {queries} queries (model.num_queries).")

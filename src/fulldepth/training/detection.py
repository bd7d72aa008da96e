"""Training of detectors: checks of method, boxes and configuration, and the evaluation of every decoder layer."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import transformers

from fulldepth.distributed import add_up, current
from fulldepth.errors import FulldepthError
from fulldepth.execution import capture, find_anatomy
from fulldepth.hf import Classifier, DetectionHeads, load_processor
from fulldepth.losses import use_detection_loss
from fulldepth.metrics import AveragePrecision, Detections, Observation, Setup, displacement
from fulldepth.progress import Watcher
from fulldepth.settings.train import TrainSettings
from fulldepth.training.evaluation import Evaluation, Evaluator, profile_of
from fulldepth.training.labelled import LabelledData, labelled_data, picture_trainer
from fulldepth.training.model import build_config, build_model

TERMS = ("aligned", "multi_exit", "similarity", "jump")
"""Terms that can be trained with; the others read attention over positions of a sequence."""
EDGE = 800
RATIO = 5 / 3
"""Longest edge over the shorter one that images are scaled to (DETR's 1333 / 800)."""


def detection_trainer(
    settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher
) -> tuple[Any, dict[str, Any]]:
    """The trainer of a detector, and facts about its data.

    Args:
        settings: of the run.
        folder: the run folder.
        arguments: of the trainer.
        watcher: receives messages.

    Raises:
        FulldepthError: if data, model or method do not fit detection.
    """
    for name, options in settings.objective.terms.items():
        if name not in TERMS:
            raise FulldepthError(
                f"task: detection cannot be trained with {name}. It can with {', '.join(TERMS)}, and with the loss of "
                "the last decoder layer alone (method: baseline)."
            )
        if isinstance(options, dict) and options.get("positions", 1.0) != 1.0:
            raise FulldepthError(f"{name}.positions samples the tokens of a text; detection matches all queries.")
    watcher.say(f"Reading {settings.data.name}")
    data = labelled_data(settings)
    config = build_config(settings.model, task="detection", classes=data.classes)
    _check(config, data)
    model = build_model(config, settings)
    use_detection_loss(model)
    anatomy = find_anatomy(model)
    if anatomy.family.backbone is not None:  # transformers freezes all of its own ResNet, by names that timm has
        anatomy.body.get_submodule(anatomy.family.backbone).requires_grad_(True)
    if settings.data.image_size is None and settings.model.checkpoint is not None:
        processor: Any = load_processor(settings.model.checkpoint, config)
    else:  # it also makes the pixel mask
        edge = settings.data.image_size or EDGE
        processor = transformers.DetrImageProcessorPil(
            size={"shortest_edge": edge, "longest_edge": round(edge * RATIO)}, do_convert_annotations=True
        )
    return picture_trainer(settings, arguments, data, model, processor)


def _check(config: Any, data: LabelledData) -> None:
    """Refuse data without objects, and a model that cannot learn them or whose own loss is another one than the
    method's; note classes that occur in no training image.
    """
    for rows, part in ((data.train, "training"), (data.validation, "validation")):
        if not any(record.objects.targets for record in rows.source.records if record.objects is not None):
            raise FulldepthError(
                f"{rows.source.name} has no object in any {part} image (crowds do not count). Give images with boxes "
                "as data.name and data.validation, or hold out more (data.validation_share)."
            )
    boxed = {index for record in data.train.source.records if record.objects for index in record.objects.classes}
    if missing := [name for index, name in enumerate(data.classes) if index not in boxed]:
        data.warnings.append(f"No training image has an object of {len(missing)} classes (first: {missing[0]}).")
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


class DetectionEvaluator(Evaluator):
    """Evaluates a detector on held-out images: its loss, and the `AveragePrecision` of every decoder layer."""

    @torch.no_grad()
    def __call__(self, model: Any) -> Evaluation:
        """Evaluate `model`; its training mode is restored. Every process must call this.

        The loss is the mean over batches, weighted by their numbers of objects.
        """
        anatomy = find_anatomy(model)
        layers, weight = anatomy.num_layers, next(model.parameters())
        one_cluster = (0,) * len(self.data)  # no standard errors, which take time
        precision = AveragePrecision(Setup(layers, 1, num_sequences=len(self.data), clusters=one_cluster))
        sums = torch.zeros(2, layers + 1, dtype=torch.float64, device=weight.device)  # loss, then displacements
        training, first = model.training, current().rank * self.batch_size
        model.eval()
        try:
            with capture(anatomy, ["residual"]) as activations:
                for batch, counts in self.share(weight.device):
                    objects = sum(int((~target["crowd"]).sum()) for target in batch["labels"])
                    loss = model(**batch).loss
                    states = [state.to(weight.dtype) for state in activations["residual"]]
                    activations.clear()
                    heads = DetectionHeads(Classifier(anatomy)).after_forward()
                    read = [heads.read(state, layer) for layer, state in enumerate(states[1:], start=1)]
                    if counts:
                        logits, boxes = (torch.stack([each[part].float() for each in read]) for part in (0, 1))
                        mask = torch.ones(logits.shape[1:3], dtype=torch.bool)
                        images = torch.arange(first, first + len(mask))
                        found = Detections(logits, boxes, batch["labels"])
                        precision.update(Observation({}, mask, mask, images, detections=found))
                        psi = torch.stack(
                            [displacement(a.float(), b.float()).flatten().double() for a, b in pairwise(states)]
                        )  # [L, B Q]
                        turned = torch.stack([psi.nan_to_num().sum(1), psi.isfinite().double().sum(1)])
                        sums += torch.cat([sums.new_tensor([[float(loss) * objects], [objects]]), turned], dim=1)
                    first += current().world * self.batch_size
        finally:
            model.train(training)
        add_up(sums)
        with warnings.catch_warnings():  # a process may have had no batches
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
            rows = precision.rows()
        profile, rates = profile_of(sums[:, 1:])
        (ap50,) = (row.value for row in rows if row.statistic == "ap50" and row.layer == layers)
        return Evaluation(
            float(sums[0, 0] / sums[1, 0]),
            round(float(sums[1, 0])),
            profile,
            round(float(sums[1, 1:].max())),
            [rate for rate in rates if math.isfinite(rate)],
            unit="1",
            rows=rows,
            shown=[f"AP50 {ap50:.1%}"],
        )

"""Evaluation during training: loss, displacement profile, a classifier's accuracies and a detector's precision."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor
from torch.nn.functional import one_hot

from fulldepth.core.distributed import add_up, current
from fulldepth.core.targets import IGNORE
from fulldepth.data.batches import batches_of_equals
from fulldepth.execution import capture, find_anatomy, read_layers
from fulldepth.hf import Anatomy, Classifier, DetectionHeads, evaluating
from fulldepth.losses import Task
from fulldepth.metrics import AveragePrecision, Detections, Observation, Row, Setup, displacement, jump_rate, macro_f1


@torch.no_grad()
def evaluate_held_out(
    model: Any,
    data: Sequence[Any],
    collate: Callable[[list[Any]], Mapping[str, Any]],
    batch_size: int,
    shapes: Sequence[Hashable] = (),
) -> tuple[list[Row], list[str]]:
    """Evaluate a model on held-out items, which the processes share; every process must call this.

    The training mode of the model is restored. A detector's loss is the mean over batches, weighted by their numbers of
    objects.

    Args:
        model: the model to evaluate.
        data: items for `collate`.
        collate: function that makes a batch from items.
        batch_size: items in one forward pass, at most.
        shapes: shape of each image after processing, of which a batch holds one; empty if all have one shape.

    Returns:
        Rows of the run's table, and texts with numbers besides the loss for the line that a run prints. The first row
        is the loss (mean cross-entropy in nats, or a detector's own loss); others are accuracies, macro F1 and losses
        by layer, precisions, displacements and jump rates.
    """
    anatomy = find_anatomy(model)
    task = Task.of(model)
    device = next(model.parameters()).device
    layers = anatomy.num_layers
    detects = task.name == "detection"
    one_cluster = (0,) * len(data)  # no standard errors, which take time
    precision = AveragePrecision(Setup(layers, 1, num_sequences=len(data), clusters=one_cluster)) if detects else None
    sums: dict[str, Tensor] = {}
    rank = current().rank
    world = current().world
    groups = batches_of_equals(shapes or (None,) * len(data), batch_size)
    with evaluating(model), capture(anatomy, ["residual"]) as activations:
        for first in range(0, len(groups), world):
            counts = first + rank < len(groups)  # with sharding all processes run equally many batches
            group = groups[first + rank if counts else 0]
            batch = send_to_device(dict(collate([data[index] for index in group])), device)
            outputs = model(**batch, **({} if detects else {"use_cache": False}))
            states = list(activations["residual"])
            for name, value in _batch_sums(anatomy, task, outputs, batch, states).items():
                value = value.to(device, torch.float64)
                sums[name] = sums.get(name, 0) + (value if counts else torch.zeros_like(value))
            if counts and precision is not None:
                heads = DetectionHeads(Classifier(anatomy))
                dtype = next(anatomy.model.parameters()).dtype
                read = [heads.read(state.to(dtype), layer) for layer, state in enumerate(states[1:], start=1)]
                logits, boxes = (torch.stack(part).float() for part in zip(*read, strict=True))  # [L, B, Q, C or 4]
                mask = torch.ones(logits.shape[1:3], dtype=torch.bool)
                detections = Detections(logits, boxes, batch["labels"])
                precision.update(Observation({}, mask, mask, torch.tensor(group), detections=detections))
            activations.clear()
    for total in sums.values():
        add_up(total)
    tokens = float(sums["tokens"])
    targets = float(sums["targets"])
    rows = list[Row]()
    texts = list[str]()

    def add(measure: str, value: Any, layer: int | None = None, unit: str = "1", count: float = targets) -> None:
        site = "model" if layer is None else "residual"
        statistic = {"jump_rate": "value", "lens_f1": "macro"}.get(measure, "mean")
        rows.append(Row(measure, site, layer, None, statistic, float(value), round(count), unit))

    add("validation_loss", sums["loss"] / targets, unit="1" if detects else "nats")
    if sums["rest"]:  # balance of experts, with the model's factor
        add("validation_auxiliary_loss", sums["rest"] / targets)
    if task.classifies:
        accuracy = float(sums["correct"]) / targets
        add("validation_accuracy", accuracy)
        texts.append(f"accuracy {accuracy:.2%}")
        by_layer = sums["correct_by_layer"].tolist(), sums["loss_by_layer"].tolist()
        for layer, (number, loss) in enumerate(zip(*by_layer, strict=True)):  # aligned training, Eq. 2
            add("lens_accuracy", number / targets, layer)
            add("lens_loss", loss / targets, layer, "nats")
        for layer, f1 in enumerate(macro_f1(sums["hits"], sums["predicted"], sums["true"]).tolist()):  # Fig. 8 and 21
            add("lens_f1", f1, layer)
    if precision is not None:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # a process may have had no batches
            rows += precision.rows()
        texts += [f"AP50 {row.value:.1%}" for row in rows if row.statistic == "ap50" and row.layer == layers]
    psi = (sums["displacement"] / sums["defined"]).cpu()  # [L], NaN where no token has a direction
    for layer, value in enumerate(psi.tolist(), start=1):
        add("displacement", value, layer, count=tokens)
    for back in range(min(3, layers - 1)):
        rate = jump_rate(psi, -1 - back)
        if math.isfinite(rate):
            add("jump_rate", rate, layers - back, "%", tokens)
            if back == 0:
                texts.append(f"jump rate {rate:.2f} %")
    return rows, texts


def _batch_sums(
    anatomy: Anatomy, task: Task, outputs: Any, batch: Mapping[str, Any], states: list[Tensor]
) -> dict[str, Tensor]:
    """Return sums over a batch.

    They are displacements [L] and the numbers of defined ones [L], tokens, cross-entropy, the rest of the loss, and
    targets (objects for a detector). For a classifier also the rows that the model classifies correctly, the correct
    rows and losses of its head on layers 0..L [L + 1], and by class their hits and predictions [L + 1, K] and the true
    rows [K].
    """
    loss = task.loss(outputs)
    targets = task.targets(batch)
    last = states[-1]
    if targets is None:
        targets = torch.stack([(~target["crowd"]).sum() for target in batch["labels"]]).sum()
    auxiliary = task.auxiliary(outputs)
    rest = torch.zeros_like(loss) if auxiliary is None else auxiliary.to(loss.device)
    counted = task.counted(batch, last)
    pairs = pairwise(state.to(last.device) for state in states)
    psi = torch.stack([displacement(a, b)[counted].double() for a, b in pairs])  # [L, N], NaN at zero vectors
    sums = {
        "displacement": psi.nansum(-1),
        "defined": (~psi.isnan()).sum(-1),
        "tokens": counted.sum(),
        "loss": torch.where(targets > 0, (loss.double() - rest) * targets, 0.0),  # a mean over no target is NaN
        "rest": rest.double() * targets,
        "targets": targets,
    }
    if task.classifies:
        labels = batch["labels"]
        classifier = Classifier(anatomy)
        mask = classifier.sample_mask(batch, counted)
        read = read_layers(classifier, torch.stack([state.to(last.device) for state in states]), labels, mask)
        sums["correct"] = ((outputs.logits.argmax(-1) == labels) & (labels != IGNORE)).sum()
        sums["correct_by_layer"] = read.correct.double().sum(1)  # [L + 1]
        sums["loss_by_layer"] = read.loss.double().sum(1)  # [L + 1], nats
        assert read.predicted is not None, "a classifier's head predicts classes"
        assert read.target is not None, "a classifier's rows have labels"
        predicted, true = (one_hot(classes, outputs.logits.shape[-1]) for classes in (read.predicted, read.target))
        sums |= {"hits": (predicted * true).sum(1), "predicted": predicted.sum(1), "true": true.sum(0)}
    return sums


def tracked(rows: Sequence[Row], means: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Name -> number of one evaluation, as trackers show it; values that are not finite are left out.

    `eval_loss` (validation loss, nats), `eval_accuracy` (of classifiers), `eval_displacement_layer_1` to `L`,
    `eval_zeta_L`, `eval_zeta_L-1` and `eval_zeta_L-2` (jump rates, per cent) are over the validation sequences.
    `cross_entropy` (nats, on the training data) and `penalty_NAME` (without its weight) are means over the steps since
    the last evaluation. Trackers replace the prefix `eval_` by `eval/` and put `train/` before the others.

    Args:
        rows: rows from `evaluate_held_out`.
        means: part of the loss -> (sum, count) since the last evaluation.
    """
    numbers = dict[str, float]()
    depth = sum(row.measure == "displacement" for row in rows)
    for row in rows:
        back = f"-{depth - (row.layer or 0)}".removesuffix("-0")
        names = {
            "validation_loss": "loss",
            "validation_accuracy": "accuracy",
            "displacement": f"displacement_layer_{row.layer}",
            "jump_rate": f"zeta_L{back}",
        }
        if row.measure in names:
            numbers[f"eval_{names[row.measure]}"] = row.value
    for name, (total, count) in means.items():
        numbers["cross_entropy" if name == "ce" else f"penalty_{name}"] = total / count
    return {name: value for name, value in numbers.items() if math.isfinite(value)}

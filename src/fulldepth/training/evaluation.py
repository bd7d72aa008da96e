"""Evaluation during training: loss, displacement profile, a classifier's accuracies and a detector's precision."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from fulldepth.distributed import add_up, current
from fulldepth.execution import capture, find_anatomy, read_layers
from fulldepth.hf import Anatomy, Classifier, DetectionHeads
from fulldepth.losses import Task
from fulldepth.metrics import AveragePrecision, Detections, Observation, Row, Setup, displacement, jump_rate
from fulldepth.targets import IGNORE


@dataclass(frozen=True)
class Evaluation:
    """Results of a model on the validation data."""

    loss: float
    """Mean cross-entropy in nats; of a detector its own loss."""
    rows: list[Row]
    """Of the run's table: loss, accuracies, precisions, displacements and jump rates."""
    shown: list[str]
    """Further numbers for the line that a run prints."""

    def value(self, measure: str, layer: int | None = None) -> float | None:
        """A number of the rows; None without it."""
        return next((row.value for row in self.rows if (row.measure, row.layer) == (measure, layer)), None)


@torch.no_grad()
def evaluate(
    model: Any, data: Sequence[Any], collate: Callable[[list[Any]], Mapping[str, Any]], batch_size: int
) -> Evaluation:
    """Evaluate a model on held-out items, which the processes share; every process must call this.

    The training mode of the model is restored. A detector's loss is the mean over batches, weighted by their numbers of
    objects.

    Args:
        model: to evaluate.
        data: items for `collate`.
        collate: makes a batch of items.
        batch_size: items in one forward pass.
    """
    anatomy, task, device = find_anatomy(model), Task.of(model), next(model.parameters()).device
    layers, detects = anatomy.num_layers, task.name == "detection"
    options = {} if detects else {"use_cache": False}
    one_cluster = (0,) * len(data)  # no standard errors, which take time
    precision = AveragePrecision(Setup(layers, 1, num_sequences=len(data), clusters=one_cluster)) if detects else None
    size = 2 * layers + 4 + (layers + 2 if task.classifies else 0)
    sums = torch.zeros(size, dtype=torch.float64, device=device)
    training = model.training
    model.eval()
    try:
        with capture(anatomy, ["residual"]) as activations:
            for start, counts in _share(len(data), batch_size):
                items = [data[index] for index in range(start, min(start + batch_size, len(data)))]
                batch = send_to_device(dict(collate(items)), device)
                outputs = model(**batch, **options)
                states = list(activations["residual"])
                row = _sums(task, outputs, batch, states)
                if task.classifies:
                    row = torch.cat([row, _correct(anatomy, task, outputs, batch, states)])
                if counts:
                    sums += row
                    if precision is not None:
                        precision.update(_detected(anatomy, batch, states, start))
                activations.clear()
    finally:
        model.train(training)
    add_up(sums)
    tokens, loss, rest, targets, *correct = sums[2 * layers :].tolist()
    rows, shown = list[Row](), list[str]()

    def add(measure: str, value: float, layer: int | None = None, unit: str = "1", count: float = targets) -> None:
        site, statistic = "model" if layer is None else "residual", "value" if measure == "jump_rate" else "mean"
        rows.append(Row(measure, site, layer, None, statistic, value, round(count), unit))

    add("validation_loss", loss / targets, unit="1" if detects else "nats")
    if rest and task.auxiliary_weight is not None:  # balance of experts, with the model's factor
        add("validation_auxiliary_loss", rest / targets)
    if correct:
        add("validation_accuracy", correct[0] / targets)
        shown.append(f"accuracy {correct[0] / targets:.2%}")
    for layer, number in enumerate(correct[1:]):  # by the last layer's classifier (aligned training, Eq. 2)
        add("lens_accuracy", number / targets, layer)
    if precision is not None:
        with warnings.catch_warnings():  # a process may have had no batches
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
            rows += precision.rows()
        shown += [f"AP50 {row.value:.1%}" for row in rows if row.statistic == "ap50" and row.layer == layers]
    psi = (sums[:layers] / sums[layers : 2 * layers]).cpu()  # NaN where no token has a direction
    for layer, value in enumerate(psi.tolist(), start=1):
        add("displacement", value, layer, count=tokens)
    rates = [jump_rate(psi, -1 - back) for back in range(min(3, layers - 1))]
    for back, rate in enumerate(rates):
        if math.isfinite(rate):
            add("jump_rate", rate, layers - back, "%", tokens)
    shown += [f"jump rate {rate:.2f} %" for rate in rates[:1] if math.isfinite(rate)]
    return Evaluation(loss / targets, rows, shown)


def _share(count: int, batch_size: int) -> Iterator[tuple[int, bool]]:
    """First items of this process's batches, and whether each counts: with sharding all processes run equally many."""
    rank, world = current().rank, current().world
    starts = range(0, count, batch_size)
    for first in range(0, len(starts), world):
        counts = first + rank < len(starts)
        yield (starts[first + rank] if counts else 0), counts


def _sums(task: Task, outputs: Any, batch: Mapping[str, Any], states: list[Tensor]) -> Tensor:
    """[2 L + 4]: sum of displacements and number of defined ones by layer; then tokens, sum of cross-entropy, sum of
    the rest of the loss, targets (of a detector objects).
    """
    loss, targets = task.loss(outputs), task.targets(batch)
    if targets is None:
        targets = torch.stack([(~target["crowd"]).sum() for target in batch["labels"]]).sum()
    auxiliary = task.auxiliary(outputs)
    rest = torch.zeros_like(loss) if auxiliary is None else auxiliary.to(loss.device)
    device = states[-1].device
    counted = task.counted(batch, states[-1])
    profile = [displacement(a.to(device), b.to(device))[counted].double() for a, b in pairwise(states)]
    undefined = [psi.isnan() for psi in profile]  # at zero vectors; excluded, as in every measure
    sums = [psi.masked_fill(out, 0.0).sum() for psi, out in zip(profile, undefined, strict=True)]
    counts = [(~out).sum() for out in undefined]
    total = torch.where(targets > 0, (loss.double() - rest) * targets, 0.0)  # a mean over no target is NaN
    totals = [counted.sum(), total, rest.double() * targets, targets]
    return torch.stack([value.to(loss.device, torch.float64) for value in (*sums, *counts, *totals)])


def _correct(anatomy: Anatomy, task: Task, outputs: Any, batch: Mapping[str, Tensor], states: list[Tensor]) -> Tensor:
    """[L + 2]: number of correctly classified rows, by the model and by its classifier on layers 0..L."""
    labels = batch["labels"]
    own = ((outputs.logits.argmax(-1) == labels) & (labels != IGNORE)).sum()
    classifier = Classifier(anatomy).after_forward()
    mask = classifier.sample_mask(batch, task.counted(batch, states[-1]))
    read = read_layers(classifier, torch.stack([s.to(states[-1].device) for s in states]), labels, mask)
    return torch.cat([own.view(1).double(), read.correct.to(own.device).double().sum(1)])


def _detected(anatomy: Anatomy, batch: Mapping[str, Any], states: list[Tensor], first: int) -> Observation:
    """Boxes and classes that every decoder layer finds in a batch, whose first image has the number `first`."""
    heads = DetectionHeads(Classifier(anatomy)).after_forward()
    dtype = next(anatomy.model.parameters()).dtype
    read = [heads.read(state.to(dtype), layer) for layer, state in enumerate(states[1:], start=1)]
    logits, boxes = (
        torch.stack([each[part].float() for each in read]) for part in (0, 1)
    )  # [L, B, Q, C], [L, B, Q, 4]
    mask = torch.ones(logits.shape[1:3], dtype=torch.bool)
    images = torch.arange(first, first + len(mask))
    return Observation({}, mask, mask, images, detections=Detections(logits, boxes, batch["labels"]))


def tracked(evaluation: Evaluation, means: Mapping[str, tuple[float, float] | list[float]]) -> dict[str, float]:
    """Numbers of one evaluation by name, as trackers show them; values that are not finite are left out.

    `eval_loss` (validation loss, nats), `eval_accuracy` (of classifiers), `eval_displacement_layer_1` to `L`,
    `eval_zeta_L`, `eval_zeta_L-1` and `eval_zeta_L-2` (jump rates, per cent) are of the validation sequences.
    `cross_entropy` (nats, on the training data) and `penalty_NAME` (without its weight) are means over the steps since
    the last evaluation. Trackers replace the prefix `eval_` by `eval/` and put `train/` before the others.

    Args:
        evaluation: on the held-out sequences.
        means: part of the loss -> (sum, count) since the last evaluation.
    """
    numbers = {"eval_loss": evaluation.loss}
    depth = sum(row.measure == "displacement" for row in evaluation.rows)
    for row in evaluation.rows:
        if row.measure == "validation_accuracy":
            numbers["eval_accuracy"] = row.value
        elif row.measure == "displacement":
            numbers[f"eval_displacement_layer_{row.layer}"] = row.value
        elif row.measure == "jump_rate" and row.layer is not None:
            numbers[f"eval_zeta_L-{depth - row.layer}".removesuffix("-0")] = row.value
    for name, (total, count) in means.items():
        numbers["cross_entropy" if name == "ce" else f"penalty_{name}"] = total / count if count else math.nan
    return {name: value for name, value in numbers.items() if math.isfinite(value)}

"""Evaluation of a detector during training: set loss and average precision of every decoder layer."""

from __future__ import annotations

import math
import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fulldepth.distributed import add_up, current
from fulldepth.execution import capture, find_anatomy
from fulldepth.hf import Classifier, DetectionHeads
from fulldepth.metrics import (
    AveragePrecision,
    DetectionLoss,
    Detections,
    Observation,
    SetLoss,
    Setup,
    displacement,
    jump_rate,
)
from fulldepth.training.evaluation import Evaluation, Evaluator


class DetectionEvaluator(Evaluator):
    """Evaluates a detector on held-out images: see `AveragePrecision` and `DetectionLoss`."""

    @torch.no_grad()
    def __call__(self, model: Any) -> Evaluation:
        """Evaluate `model`; its training mode is restored. Every process must call this."""
        anatomy = find_anatomy(model)
        layers, weight = anatomy.num_layers, next(model.parameters())
        one_cluster = (0,) * len(self.data)  # no standard errors, which take time
        options = SetLoss.of(model.config)
        setup = Setup(layers, 1, num_sequences=len(self.data), clusters=one_cluster, set_loss=options)
        precision, loss = AveragePrecision(setup), DetectionLoss(setup)
        turned = torch.zeros(2, layers, dtype=torch.float64)
        training, first = model.training, current().rank * self.batch_size
        model.eval()
        try:
            with capture(anatomy, ["residual"]) as activations:
                for batch, counts in self._share(weight.device):
                    labels = batch.pop("labels")
                    model(**batch)
                    states = [state.to(weight.dtype) for state in activations["residual"]]
                    activations.clear()
                    heads = DetectionHeads(Classifier(anatomy)).after_forward()
                    read = [heads.read(state, layer) for layer, state in enumerate(states[1:], start=1)]
                    if counts:
                        logits, boxes = (torch.stack([each[part].float() for each in read]) for part in (0, 1))
                        observation = _observation(Detections(logits, boxes, labels), first)
                        precision.update(observation)
                        loss.update(observation)
                        turned += _turned([state.float() for state in states])
                    first += current().world * self.batch_size
        finally:
            model.train(training)
        add_up(turned)
        return _evaluation(precision, loss, turned)


def _observation(detections: Detections, first: int) -> Observation:
    """The detections of consecutive images; `first` is the index of the first one."""
    count, queries = detections.logits.shape[1:3]
    mask = torch.ones(count, queries, dtype=torch.bool)
    return Observation({}, mask, mask, torch.arange(first, first + count), detections=detections)


def _turned(states: list[Tensor]) -> Tensor:
    """[2, L] sums of the displacements of queries by each layer, and how many are defined."""
    values = torch.stack([displacement(a, b).flatten().double() for a, b in pairwise(states)]).cpu()  # [L, B Q]
    return torch.stack([values.nan_to_num().sum(1), values.isfinite().double().sum(1)])


def _evaluation(precision: AveragePrecision, loss: DetectionLoss, turned: Tensor) -> Evaluation:
    with warnings.catch_warnings():  # a process may have had no batches
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
        rows = [*precision.rows(), *loss.rows()]
    values = {(row.measure, row.statistic, row.layer): row for row in rows}
    layers = turned.shape[1]
    total, ap50 = values["detection_loss", "mean", layers], values["average_precision", "ap50", layers]
    psi = [s / count if count else math.nan for s, count in turned.T.tolist()]
    rates = [
        jump_rate(torch.tensor(psi, dtype=torch.float64), start) for start in range(-1, -min(3, layers - 1) - 1, -1)
    ]
    return Evaluation(
        total.value,
        total.count,
        psi,
        round(float(turned[1].max())),
        [rate for rate in rates if math.isfinite(rate)],
        unit="1",
        rows=list(rows),
        shown=[f"AP50 {ap50.value:.1%}"],
    )

"""Evaluation during training: loss, displacement profile and a classifier's accuracies on the held-out data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from fulldepth.distributed import add_up, current
from fulldepth.execution import capture, find_anatomy, read_layers
from fulldepth.hf import Anatomy, Classifier
from fulldepth.losses import Task
from fulldepth.metrics import Row, displacement, jump_rate
from fulldepth.targets import IGNORE


@dataclass(frozen=True)
class Evaluation:
    """Results of a model on the validation data."""

    loss: float
    """Mean cross-entropy in nats."""
    targets: int
    displacement: list[float]
    """Mean displacement of layers 1..L over the tokens with nonzero states; NaN where there are none."""
    tokens: int
    jump_rates: list[float]
    """zeta_L, zeta_{L-1}, zeta_{L-2} in per cent; fewer in models of fewer layers."""
    accuracy: float | None = None
    """Share of the rows whose top class is their label; None for other tasks than classification."""
    lens_accuracy: list[float] = field(default_factory=list)
    """The same by the last layer's classifier on layers 0..L (aligned training, Eq. 2)."""
    auxiliary: float | None = None
    """Mean of the rest of the model's loss (balance of experts), with the model's factor; None if it has none."""
    unit: str = "nats"
    """Of the loss."""
    rows: list[Row] = field(default_factory=list)
    """Further rows of the table."""
    shown: list[str] = field(default_factory=list)
    """Further numbers for the line that a run prints."""


class Evaluator:
    """Evaluates a model on held-out sequences, which the processes share.

    Args:
        data: items for `collate`.
        collate: makes a batch of items: `input_ids`, `labels` and, if there is padding, `attention_mask`.
        batch_size: sequences in one forward pass.
    """

    def __init__(self, data: Sequence[Any], collate: Callable[[list[Any]], Mapping[str, Any]], batch_size: int) -> None:
        self.data, self.collate, self.batch_size = data, collate, batch_size

    @torch.no_grad()
    def __call__(self, model: Any) -> Evaluation:
        """Evaluate `model`; its training mode is restored."""
        anatomy: Anatomy = find_anatomy(model)
        device = next(model.parameters()).device
        task = Task.of(model)
        classifies = task.name.endswith("-classification")
        size = 2 * anatomy.num_layers + 4 + (anatomy.num_layers + 2 if classifies else 0)
        sums = torch.zeros(size, dtype=torch.float64, device=device)
        training = model.training
        model.eval()
        try:
            with capture(anatomy, ["residual"]) as activations:
                for batch, counts in self.share(device):
                    outputs = model(**batch, use_cache=False)
                    states = list(activations["residual"])
                    row = _sums(task, outputs, batch, states)
                    if classifies:
                        row = torch.cat([row, _correct(anatomy, task, outputs, batch, states)])
                    if counts:
                        sums += row
                    activations.clear()
        finally:
            model.train(training)
        add_up(sums)
        layers = anatomy.num_layers
        tokens, loss, rest, targets, *correct = sums[2 * layers :].tolist()
        psi, rates = profile_of(sums[: 2 * layers].view(2, layers))
        shares = [number / targets for number in correct]
        auxiliary = rest / targets if rest and task.auxiliary_weight is not None else None
        return Evaluation(
            loss / targets,
            round(targets),
            psi,
            round(tokens),
            rates,
            shares[0] if shares else None,
            shares[1:],
            auxiliary,
        )

    def share(self, device: torch.device) -> Iterator[tuple[dict[str, Any], bool]]:
        """This process's batches, and whether each counts: with sharding all processes must run equally many."""
        rank, world = current().rank, current().world
        starts = range(0, len(self.data), self.batch_size)
        for first in range(0, len(starts), world):
            counts = first + rank < len(starts)
            start = starts[first + rank] if counts else 0
            items = [self.data[i] for i in range(start, min(start + self.batch_size, len(self.data)))]
            yield send_to_device(dict(self.collate(items)), device), counts


def _sums(task: Task, outputs: Any, batch: Mapping[str, Tensor], states: list[Tensor]) -> Tensor:
    """[2 L + 4]: sum of displacements and number of defined ones by layer; then tokens, sum of cross-entropy, sum of
    the rest of the loss, targets.
    """
    loss, targets = task.loss(outputs), task.targets(batch)
    auxiliary = task.auxiliary(outputs)
    rest = torch.zeros_like(loss) if auxiliary is None else auxiliary.to(loss.device)
    assert targets is not None
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


def profile_of(sums: Tensor) -> tuple[list[float], list[float]]:
    """Mean displacement of layers 1..L, NaN where none is defined, and the jump rates of the last up to three.

    Args:
        sums: `[2, L]` sums of displacements and their number.
    """
    psi = [total / count if count else math.nan for total, count in sums.T.tolist()]
    starts = range(-1, -min(3, len(psi) - 1) - 1, -1)
    return psi, [jump_rate(torch.tensor(psi, dtype=torch.float64), start) for start in starts]


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
    if evaluation.accuracy is not None:
        numbers["eval_accuracy"] = evaluation.accuracy
    for layer, value in enumerate(evaluation.displacement, start=1):
        numbers[f"eval_displacement_layer_{layer}"] = value
    for back, value in enumerate(evaluation.jump_rates):
        numbers[f"eval_zeta_L{f'-{back}' if back else ''}"] = value
    for name, (total, count) in means.items():
        numbers["cross_entropy" if name == "ce" else f"penalty_{name}"] = total / count if count else math.nan
    return {name: value for name, value in numbers.items() if math.isfinite(value)}

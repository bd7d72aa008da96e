"""Early exit as it is served: a model's layers run one by one, and samples that leave are removed from the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fulldepth.early_exit.rules import Exit
from fulldepth.early_exit.subject import Subject
from fulldepth.execution.layer_runner import LayerRunner


class EarlyExit:
    """Runs a classifier or a detector layer by layer, and removes samples as soon as they leave.

    Of a detector only the layers of the decoder can be saved: its backbone and encoder run for every image.

    Args:
        subject: the model, with data for the check of its layers.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        first = subject.sequences.collate(range(min(2, len(subject.sequences))))
        self.runner = LayerRunner(subject.anatomy, subject.inputs(first.inputs))

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor], exit: Exit) -> tuple[tuple[Tensor, ...], Tensor]:
        """What the model answers, and `[B]` the layer after which each sample left.

        Args:
            inputs: a batch on the model's device.
            exit: when to leave.

        Returns:
            `[B, C]` logits; of a detector `[B, Q, C+1]` logits and `[B, Q, 4]` boxes.
        """
        runner, anatomy, last = self.runner, self.subject.anatomy, exit.num_layers
        states = runner.begin(inputs)
        count = len(next(iter(inputs.values())))
        rows = torch.arange(count, device=states.device)
        left = torch.full_like(rows, last)
        answers: list[Tensor] = []
        rule = exit.decision()
        for layer in range(1, last + 1):
            output = runner.run(layer, states)
            states = anatomy.handed_on(output)
            if layer < last and (layer < exit.min_layer or exit.is_full):
                continue
            stream = anatomy.stream(output)
            logits = self.logits(layer, stream, inputs)
            leaves = rule.leaves(logits) if layer < last else torch.ones_like(rows, dtype=torch.bool)
            if not bool(leaves.any()):
                continue
            answers = _filled(answers, rows[leaves], self.answer(layer, stream[leaves], logits[leaves]), count)
            left[rows[leaves]] = layer
            stays = ~leaves
            if not bool(stays.any()):
                break
            rows, states = rows[stays], anatomy.select(states, stays)
            inputs = {name: value[stays] for name, value in inputs.items()}
            rule.keep(stays)
            runner.keep(stays, inputs)
        return tuple(answers), left

    @torch.no_grad()
    def full(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the model's own forward pass answers, as `run`."""
        output = self.subject.checkpoint.model(**inputs)
        return (output.logits, output.pred_boxes) if self.subject.detects else (output.logits,)

    def logits(self, layer: int, states: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N, C], or [N, Q, C+1], of a layer's residual stream `[N, T, D]`."""
        if self.subject.detects:
            return self.subject.heads.classes(states, layer)
        mask = inputs.get("attention_mask")
        if mask is None:
            mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        classifier = self.subject.classifier
        return classifier.at(layer).sequences(states, classifier.sample_mask(inputs, mask))

    def answer(self, layer: int, states: Tensor, logits: Tensor) -> tuple[Tensor, ...]:
        """What samples that leave after a layer take with them; of a detector also the boxes."""
        if not self.subject.detects:
            return (logits,)
        return logits, self.subject.heads.boxes(states, layer)


def _filled(answers: list[Tensor], rows: Tensor, parts: Sequence[Tensor], count: int) -> list[Tensor]:
    """Answers of all samples `[B, ...]` with those of some rows set."""
    answers = answers or [part.new_zeros((count, *part.shape[1:])) for part in parts]
    for answer, part in zip(answers, parts, strict=True):
        answer[rows] = part
    return answers

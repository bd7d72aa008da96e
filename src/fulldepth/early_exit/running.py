"""Early exit as it is served: a model's layers run one by one, and samples that leave are removed from the batch."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fulldepth.early_exit.rules import Exit
from fulldepth.early_exit.subject import Subject
from fulldepth.execution.layer_runner import LayerRunner


class EarlyExit:
    """Runs a classifier layer by layer, and removes samples as soon as they leave.

    Args:
        subject: the model, with data for the check of its layers.
    """

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        first = subject.sequences.collate(range(min(2, len(subject.sequences))))
        self.runner = LayerRunner(subject.anatomy, subject.inputs(first.inputs))

    @torch.no_grad()
    def run(self, inputs: Mapping[str, Tensor], exit: Exit) -> tuple[Tensor, Tensor]:
        """`[B, C]` logits, and `[B]` the layer after which each sample left.

        Args:
            inputs: a batch on the model's device.
            exit: when to leave.
        """
        runner, anatomy, last = self.runner, self.subject.anatomy, exit.num_layers
        states = runner.begin(inputs)
        count = len(next(iter(inputs.values())))
        rows = torch.arange(count, device=states.device)
        left = torch.full_like(rows, last)
        answers: Tensor | None = None
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
            if answers is None:
                answers = logits.new_zeros((count, logits.shape[1]))
            answers[rows[leaves]] = logits[leaves]
            left[rows[leaves]] = layer
            stays = ~leaves
            if not bool(stays.any()):
                break
            rows, states = rows[stays], anatomy.select(states, stays)
            inputs = {name: value[stays] for name, value in inputs.items()}
            rule.keep(stays)
            runner.keep(inputs)
        assert answers is not None  # every sample leaves after the last layer
        return answers, left

    @torch.no_grad()
    def full(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """`[B, C]` logits of the model's own forward pass."""
        logits: Tensor = self.subject.checkpoint.model(**inputs).logits
        return logits

    def logits(self, layer: int, states: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """[N, C] of a layer's residual stream `[N, T, D]`."""
        mask = inputs.get("attention_mask")
        if mask is None:
            mask = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
        classifier = self.subject.classifier
        return classifier.at(layer).sequences(states, classifier.sample_mask(inputs, mask))

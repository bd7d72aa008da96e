"""Prevents optimiser steps whose loss or gradient is not finite, and says where they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fulldepth.distributed import any_process
from fulldepth.errors import FulldepthError
from fulldepth.execution import capture, find_anatomy
from fulldepth.hf import first_broken_weight


class StepGuard:
    """Prevents optimiser steps whose loss or gradient is not finite on any process: the weights stay as they were.

    Args:
        model: returns the model, in which the failing layer is searched.
    """

    def __init__(self, model: Callable[[], Any]) -> None:
        self.model = model
        self._micro_batches: list[tuple[Tensor, Mapping[str, Tensor], dict[str, Any]]] = []

    def add(self, loss: Tensor, parts: Mapping[str, Tensor], inputs: dict[str, Any]) -> None:
        """Add a micro-batch of the next step: its loss, the parts of it, and the inputs of the model."""
        self._micro_batches.append((loss.detach(), parts, inputs))

    def check(self, number: int, norm: Tensor | float | None) -> None:
        """Check a step before the optimiser takes it; every process must call this.

        Args:
            number: 1-based number of the step.
            norm: gradient norm; None = unknown, or checked elsewhere.

        Raises:
            FulldepthError: if the step is not finite.
        """
        batches, self._micro_batches = self._micro_batches, []
        losses = torch.stack([loss.float().to(batches[-1][0].device) for loss, _, _ in batches])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[union-attr]
        gradient = torch.as_tensor(0.0 if norm is None else norm, device=losses.device)
        finite = torch.stack([losses.isfinite().all(), gradient.isfinite()])
        loss_fails, gradient_fails = any_process((~finite).float()).tolist()
        if loss_fails:
            raise FulldepthError(f"Step {number}: {self._reason(batches)} The step was not taken.")
        if gradient_fails:
            raise FulldepthError(
                f"Step {number}: the loss is finite, but its gradient is not. A smaller learning rate or float32 "
                "usually helps. The step was not taken."
            )

    def _reason(self, batches: list[Any]) -> str:
        """Description of what is not finite and where it originates."""
        broken = [batch for batch in batches if not bool(torch.isfinite(batch[0]))]
        if not broken:
            return "the loss of another process is not finite."
        _, parts, inputs = broken[0]
        names = [name for name, value in parts.items() if not bool(torch.isfinite(value))]
        where = first_layer(self.model(), inputs)
        return f"the loss is not finite. Terms: {', '.join(names) or 'their weighted sum'}. {where}"


@torch.no_grad()
def first_layer(model: Any, inputs: dict[str, Any]) -> str:
    """Description of the first non-finite weight or state, found by a new forward pass."""
    broken = first_broken_weight(model)
    if broken is not None:
        return f"The weight {broken} is not finite."
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return "The layer was not looked for, because the weights are sharded."
    anatomy = find_anatomy(model)
    with capture(anatomy, ["residual"]) as activations:
        model(**inputs)
        states = activations["residual"]
    for layer, state in enumerate(states):
        if not bool(torch.isfinite(state).all()):
            return f"The first state that is not finite: {'the embeddings' if layer == 0 else f'layer {layer}'}."
    return "Every layer's state is finite; the head or the loss is not."

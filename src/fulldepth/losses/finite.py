"""Prevents optimiser steps whose loss or gradient is not finite, without synchronising with an accelerator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fulldepth.distributed import any_process
from fulldepth.errors import FulldepthError
from fulldepth.execution import capture, find_anatomy
from fulldepth.hf import first_broken_weight

STREAMS = ("cuda", "xpu")
"""Asynchronous devices: reading a number from them waits for all pending work."""


class MicroBatch(NamedTuple):
    """Loss, terms and inputs of one micro-batch, from which the origin of a non-finite loss is found."""

    loss: Tensor
    parts: Mapping[str, Tensor]
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Step:
    """An optimiser step whose flags are being copied to the host."""

    number: int
    flags: Tensor
    """[2] on the host: 1 if the loss, or the gradient, is not finite; valid after `event`."""
    event: Any
    micro_batches: list[MicroBatch]


class StepGuard:
    """Prevents optimiser steps whose loss or gradient is not finite on any process.

    Two flags on the device mark a loss and a gradient that are not finite. A fused optimiser reads them on the device
    and skips this step and all later ones; the host reads them while the next step runs, and then raises an error. With
    other optimisers, and on synchronous devices (CPUs), the host reads the flags before the step. In both cases the
    weights stay as they were before the failed step.

    Args:
        model: returns the model, in which the failing layer is searched.
    """

    def __init__(self, model: Callable[[], Any]) -> None:
        self.model = model
        self.late: bool | None = None
        """Whether flags are read one step late; None = if the device and the optimiser support it."""
        self._micro_batches: list[MicroBatch] = []
        self._flags: Tensor | None = None
        self._waiting: Step | None = None
        self._optimizer: Any = None

    def add(self, loss: Tensor, parts: Mapping[str, Tensor], inputs: dict[str, Any]) -> None:
        """Add a micro-batch of the next step."""
        self._micro_batches.append(MicroBatch(loss.detach(), parts, inputs))

    def before_step(self, number: int, norm: Tensor | float | None, optimizer: Any) -> None:
        """Check a step; call on every process once its gradients are complete.

        Args:
            number: 1-based number of the step.
            norm: gradient norm; None = unknown, or checked elsewhere.
            optimizer: the optimiser that takes the step.

        Raises:
            FulldepthError: if this step or, if flags are read late, the previous one is not finite.
        """
        while hasattr(optimizer, "optimizer"):  # accelerate's wrapper
            optimizer = optimizer.optimizer
        flags = self._collect(norm)
        step = Step(number, flags, None, self._micro_batches)
        self._micro_batches = []
        late = flags.device.type in STREAMS if self.late is None else self.late
        if not (late and getattr(optimizer, "_step_supports_amp_scaling", False)):  # set by fused optimisers
            return self._read(step)
        self._flags = flags = flags if self._flags is None else torch.maximum(flags, self._flags)
        self._optimizer, optimizer.found_inf = optimizer, flags.amax()
        host = flags.to("cpu", non_blocking=True)
        event = torch.accelerator.current_stream().record_event() if flags.device.type in STREAMS else None
        before, self._waiting = self._waiting, Step(number, host, event, step.micro_batches)
        if before is not None:
            self._read(before)
        return None

    def check(self) -> None:
        """Read pending flags; called before weights are saved or evaluated, and at the end.

        Raises:
            FulldepthError: if a step was not finite.
        """
        step, self._waiting = self._waiting, None
        if step is not None:
            self._read(step)
        self._release()

    def check_losses(self, number: int) -> None:
        """Check the losses immediately, for optimisers that step during the backward pass.

        Raises:
            FulldepthError: if one is not finite.
        """
        self._read(Step(number, self._collect(None), None, self._micro_batches))

    def _collect(self, norm: Tensor | float | None) -> Tensor:
        """[2] float32: 1 if the loss, or the gradient, is not finite on any process."""
        losses = [batch.loss for batch in self._micro_batches]
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[union-attr]
        device = losses[-1].device if losses else getattr(norm, "device", torch.device("cpu"))
        gradient = torch.as_tensor(0.0 if norm is None else norm, device=device)
        total = (
            torch.stack([(loss * 0).to(device, torch.float32) for loss in losses]).sum()
            if losses
            else (gradient * 0).float()
        )
        return any_process((~torch.isfinite(torch.stack([total, (gradient * 0).float()]))).float())

    def _read(self, step: Step) -> None:
        if step.event is not None:
            step.event.synchronize()
        loss, gradient = step.flags.tolist()
        if loss or gradient:
            self._forget()
            raise FulldepthError(f"Step {step.number}: {self._reason(step, bool(loss))} The step was not taken.")

    def _forget(self) -> None:
        self._flags = self._waiting = None
        self._micro_batches = []
        self._release()

    def _release(self) -> None:
        """Remove the flag from the optimiser, so that it takes steps again."""
        vars(self._optimizer or self).pop("found_inf", None)
        self._optimizer = None

    def _reason(self, step: Step, loss: bool) -> str:
        """Description of what is not finite and where it originates."""
        if not loss:
            return "the loss is finite, but its gradient is not. A smaller learning rate or float32 usually helps."
        broken = [batch for batch in step.micro_batches if not bool(torch.isfinite(batch.loss))]
        if not broken:
            return "the loss of another process is not finite."
        names = [name for name, value in broken[0].parts.items() if not bool(torch.isfinite(value))]
        where = first_layer(self.model(), broken[0].inputs)
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

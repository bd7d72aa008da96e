"""`DepthTrainer`: transformers' Trainer with an `Objective`, and the mixin that gives it to any other Trainer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from fulldepth.capture import capture, find_anatomy
from fulldepth.errors import FulldepthError
from fulldepth.hf import first_broken_weight
from fulldepth.losses.objective import IGNORE, Objective, Portion


class Tally:
    """Running means of a loss's parts; stays on the device until it is read."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, parts: dict[str, Tensor]) -> None:
        """One more micro-batch."""
        for name, value in parts.items():
            value = value.detach().double() if value.device.type != "mps" else value.detach()
            self._sums[name] = self._sums[name] + value if name in self._sums else value
            self._counts[name] = self._counts.get(name, 0) + 1

    def take(self) -> dict[str, tuple[float, int]]:
        """Name -> (sum, count) since the last time; starts anew."""
        taken = {name: (float(total), self._counts[name]) for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return taken


class ObjectiveMixin:
    """Put before a Trainer class to give it `objective=`: `class MyTrainer(ObjectiveMixin, SFTTrainer): ...`.

    The cross-entropy is the Trainer's own, whatever it does to compute it; the objective adds its penalties and counts
    optimiser steps. Accumulated micro-batches and processes enter with their share of the step's tokens, so that the
    gradient is that of one large batch (CR's and orthogonality's batch means: of each micro-batch; CR's over all
    processes). A loss that is not finite stops the run before it reaches the weights.

    Args:
        objective: an `Objective` that is not attached yet; None = cross-entropy alone.

    Raises:
        FulldepthError: in training, if the loss or a gradient is not finite (with the step, the term and the layer).
    """

    def __init__(self, *args: Any, objective: Objective | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        me: Any = self
        if me.args.n_gpu > 1:
            raise FulldepthError(
                "Several GPUs in one process (DataParallel) are not supported; start one process per GPU with torchrun."
            )
        self.depth_objective = objective or Objective()  # a Trainer's own `objective` is the number of a search
        self.tallies = {"log": Tally()}
        """Means of the loss's parts; `log` goes to the Trainer's logs, add others to read them at other times."""
        self._tokens: Tensor | None = None
        if self.depth_objective.terms:
            self.depth_objective.attach(me.accelerator.unwrap_model(me.model))

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Also counts the tokens that penalties see in this optimiser step."""
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[misc]
        self._tokens = None
        if items is not None and {"jump", "similarity"} & set(self.depth_objective.terms):
            self._tokens = self._over_processes(sum(_count_tokens(sample) for sample in samples), device)
        return samples, items

    def _over_processes(self, count: Any, device: torch.device) -> Tensor:
        """A count over all processes, divided by their number (data parallelism averages gradients)."""
        me: Any = self
        count = torch.as_tensor(count, device=device)
        if not me.args.average_tokens_across_devices or me.args.world_size == 1:
            return count
        return me.accelerator.gather(count).sum() / me.accelerator.num_processes

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The Trainer's loss plus the objective's penalties (in evaluation, the Trainer's loss alone)."""
        kept = dict(inputs)  # some Trainers take entries out
        parent: Any = super()
        if return_outputs or not model.training:
            return parent.compute_loss(model, inputs, return_outputs, num_items_in_batch=num_items_in_batch)
        me: Any = self
        step = self.depth_objective.step = me.state.global_step + 1
        base = parent.compute_loss(model, inputs, False, num_items_in_batch=num_items_in_batch)
        portion = self._portion(num_items_in_batch, base.device)
        if self.depth_objective.terms:
            loss, parts = self.depth_objective(base, kept, portion)
        else:
            loss, parts = base, {"ce": base.detach()}
        if not bool(torch.isfinite(loss.detach())):
            raise FulldepthError(self._diagnosis(step, parts, kept))
        self._note(parts, kept, portion)
        return loss

    def _portion(self, items: Any, device: torch.device) -> Portion:
        """This micro-batch's part of the step: the Trainer divides by the accumulation itself unless it had `items`."""
        me: Any = self
        scaled = me.loss_is_scaled_for_ga
        if scaled is None:
            scaled = (me.model_accepts_loss_kwargs and items is not None) or me.compute_loss_func is not None
        if not scaled or items is None:
            return Portion()
        world = me.accelerator.num_processes if me.args.average_tokens_across_devices else 1
        targets = torch.as_tensor(items, device=device) / world
        return Portion(1 / me.current_gradient_accumulation_steps, self._tokens, targets)

    def _note(self, parts: dict[str, Tensor], inputs: dict[str, Any], portion: Portion) -> None:
        """Put the parts on every tally, the cross-entropy as the mean over this micro-batch's targets."""
        if portion.targets is not None:
            targets = (inputs["labels"][..., 1:] != IGNORE).sum().clamp(min=1)
            parts = {**parts, "ce": parts["ce"] * portion.targets / targets}
        for tally in self.tallies.values():
            tally.add(parts)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Also logs the mean of each part since the last time (this process's own)."""
        if "loss" in logs:
            means = {name: total / count for name, (total, count) in self.tallies["log"].take().items()}
            logs = {**logs, **{f"loss_{name}": value for name, value in means.items()}}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Refuses a step whose gradient is not finite; a scaler for float16 skips such steps itself."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[misc]
        me: Any = self
        if norm is not None and me.accelerator.scaler is None and not bool(torch.isfinite(torch.as_tensor(norm))):
            step = me.state.global_step + 1
            raise FulldepthError(
                f"Step {step}: the loss is finite, but its gradient is not. The step was not taken. A smaller learning "
                "rate or float32 usually helps."
            )
        return norm

    def _diagnosis(self, step: int, parts: dict[str, Tensor], inputs: dict[str, Any]) -> str:
        """Where a loss that is not finite comes from."""
        bad = [name for name, value in parts.items() if not bool(torch.isfinite(value))]
        me: Any = self
        where = _first_layer(me.accelerator.unwrap_model(me.model), inputs)
        return (
            f"Step {step}: the loss is not finite. Terms: {', '.join(bad) or 'their weighted sum'}. {where} "
            "The step was not taken."
        )


class DepthTrainer(ObjectiveMixin, Trainer):
    """transformers' `Trainer` with `objective=`; everything else as there."""


def _count_tokens(sample: Any) -> Tensor | int:
    """Tokens of a micro-batch that penalties count."""
    mask = sample.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.sum()
    return next(value.shape[0] * value.shape[1] for value in sample.values() if isinstance(value, Tensor))


@torch.no_grad()
def _first_layer(model: Any, inputs: dict[str, Any]) -> str:
    """The first state of a fresh forward pass that is not finite, in words."""
    broken = first_broken_weight(model)
    if broken is not None:
        return f"The weight {broken} is not finite."
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return "The layer was not looked for, because the weights are sharded."
    anatomy = find_anatomy(model)
    with capture(anatomy, ["residual"]) as tape:
        model(**inputs)
        states = tape["residual"]
    for layer, state in enumerate(states):
        if not bool(torch.isfinite(state).all()):
            return f"The first state that is not finite: {'the embeddings' if layer == 0 else f'layer {layer}'}."
    return "Every layer's state is finite; the head or the loss is not."

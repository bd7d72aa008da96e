"""`DepthTrainer`: transformers' Trainer with an `Objective`, and a mixin for any other Trainer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction
from transformers import Trainer
from transformers.trainer_utils import has_length

from fulldepth.core.distributed import any_process
from fulldepth.core.errors import FulldepthError
from fulldepth.execution import capture, find_anatomy
from fulldepth.hf import (
    first_broken_weight,
    has_exit_heads,
    has_weights,
    load_checkpoint,
    needs_own_class,
    restore_exit_heads,
    save_exit_heads,
)
from fulldepth.losses.aligned_loss import add_exit_heads
from fulldepth.losses.objective import Objective, per_batch_terms, times
from fulldepth.losses.task import Task
from fulldepth.losses.term import Portion, joined_sequences, nodes_of, step_counts

AnyTrainer: Any = object
"""Stands for the Trainer class that a mixin is combined with."""


class Tally:
    """Running weighted sums of a loss's parts, on the device until they are read.

    Args:
        sums: name -> (sum, sum of weights) to start from.
    """

    def __init__(self, sums: Mapping[str, Sequence[float]] | None = None) -> None:
        self._sums: dict[str, Sequence[Any]] = dict(sums or {})

    def add(self, parts: dict[str, Tensor], factors: Mapping[str, Tensor | float]) -> None:
        """Add a micro-batch's parts, which are detached, with their shares of the optimiser step as weights."""
        for name, value in parts.items():
            total, weight = self._sums.get(name, (0.0, 0.0))
            factor = torch.as_tensor(factors[name], device=value.device)
            if value.device.type != "mps":
                value = value.double()
                factor = factor.double()
            self._sums[name] = total + times(factor, value), weight + factor

    def read(self) -> dict[str, tuple[float, float]]:
        """Return name -> (sum, sum of weights) since `take`."""
        return {name: (float(total), float(weight)) for name, (total, weight) in self._sums.items() if weight}

    def take(self) -> dict[str, tuple[float, float]]:
        """Return name -> (sum, sum of weights) since the last call, and reset."""
        taken = self.read()
        self._sums = {}
        return taken


class ObjectiveMixin(AnyTrainer):
    """Mixin that gives a Trainer class `objective=`: `class MyTrainer(ObjectiveMixin, SFTTrainer): ...`.

    The cross-entropy is the model's own; the objective adds its penalties and counts optimiser steps. The parts of a
    loss are weighted by the share that a micro-batch or process has of the step: cross-entropy by targets, penalties by
    tokens (for images, by images), auxiliary losses by sequences. The gradient is therefore that of one large batch,
    except that the batch means of CR and orthogonality are per micro-batch, those of CR over all processes. With these
    two terms, a shorter last batch of an epoch is dropped, on any number of processes (but not of a stream). Unlike in
    the stock Trainer no model class receives `num_items_in_batch`; `Task.targets` counts targets for all classes.

    Evaluation reports the cross-entropy, without auxiliary losses.

    A step whose loss or gradient is not finite does not change the weights and ends the run.

    Args:
        objective: an `Objective`, attached here unless it is attached already (`attach(model, tower="decoder")`). None
            = cross-entropy alone.
        group_options: arguments of the model's `parameter_groups`, if its class has it, besides the Trainer's learning
            rate and weight decay: for `depth_llama` `router_learning_rate` and `decay`.

    Raises:
        FulldepthError: for `group_options` if the model's class has no `parameter_groups`; in training, if the loss or
            a gradient is not finite (with the step, the term and the layer), the data contain no whole batch for a term
            that needs one, or the collator joins the sequences of its batch to one row; for label smoothing, a
            `compute_loss_func` or a `loss_type`; for a model with another loss function beside a term that replaces its
            cross-entropy; for exit heads with `ddp_find_unused_parameters=True`.
    """

    optimizer_cls_and_kwargs: Any
    loss_is_scaled_for_ga: Any

    def __init__(
        self,
        *args: Any,
        objective: Objective | None = None,
        group_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        config = getattr(kwargs.get("model", args[0] if args else None), "config", None)
        self._initial_use_cache = getattr(config, "use_cache", None)
        super().__init__(*args, **kwargs)
        if self.args.n_gpu > 1:
            raise FulldepthError(
                "Several GPUs in one process (DataParallel) are not supported; start one process per GPU with torchrun."
            )
        # A Trainer's attribute `objective` is the result of a hyperparameter search
        self.depth_objective = objective = objective or Objective()
        self.tallies = {"log": Tally()}
        """Means of the loss's parts: `log` for the Trainer's logs; a caller may add others."""
        self._step_counts: dict[str, Tensor] = {}
        model = self.accelerator.unwrap_model(self.model)
        if not objective.attached:
            objective.task = Task.of(model)
        elif objective.anatomy is not None and objective.anatomy.blocks[0] not in model.modules():
            raise FulldepthError("The objective is attached to another model than the Trainer's; detach() it first.")
        assert objective.task is not None
        self.task = objective.task
        self.group_options = dict(group_options or {})
        if self.group_options and not hasattr(model, "parameter_groups"):
            raise FulldepthError(
                f"{type(model).__name__} has no parameter groups of its own, so group_options have no effect; leave "
                "them out."
            )
        self._auxiliary: Tensor | None = None
        if self.task.auxiliary_weight is not None:
            model.register_forward_hook(self._note_auxiliary)
        self.model_accepts_loss_kwargs = False  # micro-batches are weighted here, see `_portion`
        if self.label_smoother or self.compute_loss_func or getattr(self.args, "loss_type", "nll") != "nll":
            raise FulldepthError(
                "The objective adds to the model's own loss, which label_smoothing_factor, compute_loss_func or "
                "loss_type replaces. Leave it out."
            )
        if (replaced := objective.replaces) and not self.task.keeps_loss(model):
            raise FulldepthError(
                f"{replaced[0]} replaces the cross-entropy, but the model's loss function was replaced too. Leave one "
                "out."
            )
        self._micro_batches: list[tuple[Tensor, dict[str, Tensor], dict[str, Any]]] = []
        self._reached: Tensor | None = None
        """[trained parameters] 1 where the loss of a micro-batch of this step depends on them; None without DDP."""
        if objective.needs_exit_heads and self.args.ddp_find_unused_parameters:
            raise FulldepthError(
                "With ddp_find_unused_parameters=True, DDP takes the exit heads for unused, because the model's output "
                "does not depend on them. Leave it out."
            )
        ddp: Any = self.accelerator.ddp_handler
        if ddp is not None and self.args.ddp_find_unused_parameters is None:
            ddp.find_unused_parameters = False  # `_with_every_parameter` finds them
        self._completes_loss = ddp is not None and not ddp.find_unused_parameters
        self.args.logging_nan_inf_filter = False  # it would read every loss, which `_require_finite` does
        if objective.needs_exit_heads and not has_exit_heads(model):
            if self.optimizer is not None:
                raise FulldepthError(
                    "The optimiser was made before the model's exit heads, and would not train them; call "
                    "add_exit_heads(model) before making it."
                )
            add_exit_heads(model, self.args.seed)
        if objective.terms and not objective.attached:
            objective.attach(model)

    def parameter_groups(self, model: Any) -> list[dict[str, Any]] | None:
        """Return groups for the optimiser: the model's `parameter_groups` without frozen parameters.

        None, which means the Trainer's groups, if the model's class has no such method.
        """
        if not hasattr(model, "parameter_groups"):
            return None
        groups = model.parameter_groups(self.args.learning_rate, self.args.weight_decay, **self.group_options)
        trained = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
        return [group for group in trained if group["params"]]

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Make the Trainer's optimiser over `parameter_groups`, unless it chooses its parameters itself (GaLore)."""
        plain = self.accelerator.unwrap_model(self.model if model is None else model)
        groups = self.parameter_groups(plain) if self.optimizer is None else None
        given = self.optimizer_cls_and_kwargs
        if groups is not None:
            kind, options = given or self.get_optimizer_cls_and_kwargs(self.args, plain)
            takes_groups = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
            if takes_groups and not {"params", "model", "optimizer_dict"} & options.keys():
                self.optimizer_cls_and_kwargs = kind, {**options, "params": groups}
        try:
            return super().create_optimizer(model)
        finally:
            self.optimizer_cls_and_kwargs = given

    def get_train_dataloader(self) -> Any:
        """Make the Trainer's loader; it drops a shorter last batch if a term is a function of the whole batch.

        Raises:
            FulldepthError: if there is such a term and the data contain less than one batch.
        """
        terms = per_batch_terms(self.depth_objective.terms)
        if not terms:
            return super().get_train_dataloader()
        given = self.args.dataloader_drop_last
        self.args.dataloader_drop_last = True
        try:
            loader = super().get_train_dataloader()
        finally:
            self.args.dataloader_drop_last = given  # evaluation uses all examples
        if has_length(loader) and not len(loader):
            raise FulldepthError(
                f"The training data hold {len(self.train_dataset)} examples; {' and '.join(terms)} needs whole "
                f"batches: at least {self._train_batch_size * self.args.world_size} examples."
            )
        return loader

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """Get the Trainer's batches, and count this optimiser step's sequences, tokens and targets where possible.

        The counts are means over processes, because data parallelism averages gradients.
        """
        samples, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        gather = self.args.average_tokens_across_devices
        self._step_counts = step_counts(self.task, samples, device, gather=gather)
        return samples, items

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the Trainer's loss plus the objective's penalties; in evaluation, the cross-entropy alone."""
        batch = dict(inputs)  # some Trainers remove entries
        result = super().compute_loss(model, inputs, return_outputs)
        base, outputs = result if return_outputs else (result, None)
        auxiliary = self._auxiliary
        self._auxiliary = None
        cross_entropy = base if auxiliary is None else base - auxiliary.to(base.device)
        if return_outputs or not model.training:
            return (cross_entropy, outputs) if return_outputs else cross_entropy
        terms = per_batch_terms(self.depth_objective.terms)
        if terms and "position_ids" in batch and self.task.sequences(batch) == 1 < self._train_batch_size:
            raise joined_sequences(" and ".join(terms))  # shorter batches are left out, so this row is several examples
        self.depth_objective.step = self.state.global_step + 1
        portion = self._portion(batch)
        self.loss_is_scaled_for_ga = portion.targets is not None
        loss, parts = self.depth_objective.combine(cross_entropy, auxiliary, batch, portion)
        self._micro_batches.append((loss.detach(), parts, batch))
        if self.is_deepspeed_enabled or "lomo" in self.args.optim:  # the backward pass takes the step
            self._require_finite(None)
        for tally in self.tallies.values():
            tally.add(parts, self.depth_objective.factors)
        copied = self.args.world_size > 1 and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        return self._with_every_parameter(loss) if copied and self._completes_loss else loss

    def _trained(self) -> list[Tensor]:
        """Return the parameters that are trained."""
        model = self.accelerator.unwrap_model(self.model)
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    def _with_every_parameter(self, loss: Tensor) -> Tensor:
        """Return the loss plus 0 times the parameters that it does not depend on, because DDP waits for all gradients.

        DINOv2's mask token, for example, is for pretraining only. Under reentrant checkpointing, which hides what the
        loss depends on, the loss stays as it is.
        """
        trained = self._trained()
        leaves = leaves_of(loss)
        if leaves is None:
            return loss
        reached = torch.tensor([float(parameter in leaves) for parameter in trained], device=loss.device)
        self._reached = reached if self._reached is None else self._reached.maximum(reached)
        for parameter in trained:
            if parameter not in leaves:
                loss = loss + 0.0 * parameter.sum().to(loss.device, loss.dtype)
        return loss

    def _drop_zero_gradients(self) -> None:
        """Remove the gradients of parameters that no loss of this step depends on, in any process.

        The optimiser then leaves them as they are, as in a run of one process.
        """
        if self._reached is None:
            return
        reached = any_process(self._reached).tolist()
        self._reached = None
        for parameter, counts in zip(self._trained(), reached, strict=True):
            if not counts:
                parameter.grad = None

    def _note_auxiliary(self, model: nn.Module, args: Any, output: Any) -> None:
        """Store the auxiliary loss of a forward pass, because not all Trainers return the output."""
        self._auxiliary = self.task.auxiliary(output)

    def _portion(self, inputs: dict[str, Any]) -> Portion:
        """Return this micro-batch's portion of the step.

        Without a count of targets (detection) the Trainer divides the loss by the number of micro-batches.
        """
        counts = self._step_counts
        if not counts:
            return Portion()
        divided = 1 if "targets" in counts else self.current_gradient_accumulation_steps
        share: Any = divided / self.current_gradient_accumulation_steps
        if "sequences" in counts:
            share = divided * self.task.sequences(inputs) / counts["sequences"]  # type: ignore[operator]
        tokens, targets = (counts[name] / divided if name in counts else None for name in ("tokens", "targets"))
        return Portion(share, tokens, targets)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log the Trainer's numbers, and the mean of each part over this process's steps since the last call."""
        if "loss" in logs:
            sums = self.tallies["log"].take()
            logs = logs | {f"loss_{name}": total / weight for name, (total, weight) in sums.items()}
        super().log(logs, *args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save as the Trainer does, but with the model's initial `use_cache`, and write exit heads beside the model."""
        passed = state_dict and dict(state_dict)  # transformers removes the heads from it
        model = self.accelerator.unwrap_model(self.model)
        if self._initial_use_cache is not None:  # the Trainer turns the cache of generation off
            model.config.use_cache = self._initial_use_cache
        try:
            super()._save(output_dir, state_dict=passed)
        finally:
            if self._initial_use_cache is not None:
                model.config.use_cache = self.args.use_cache
        if self.args.should_save:
            save_exit_heads(model, output_dir or self.args.output_dir, state_dict)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Load the Trainer's checkpoint and the exit heads of a multi-exit model.

        Checkpoints that the Trainer would not load, or not wholly, are loaded by the model's class: weights that
        transformers saves under other names (ViT, some experts), and models without skipped parts.
        """
        load = partial(super()._load_from_checkpoint, resume_from_checkpoint, *args, **kwargs)
        self._load_wholly(Path(resume_from_checkpoint), load)

    def _load_best_model(self) -> None:
        """Load the best checkpoint of `load_best_model_at_end` as one to resume from, with its exit heads."""
        best = Path(self.state.best_model_checkpoint)
        if has_weights(best):
            self._load_wholly(best, super()._load_best_model)
        else:
            super()._load_best_model()  # warns that this machine does not have it

    def _load_wholly(self, checkpoint: Path, load: Callable[[], None]) -> None:
        """Call the Trainer's `load` of a checkpoint and restore the exit heads, or load by the model's class."""
        model = self.accelerator.unwrap_model(self.model)
        whole = not (self.is_fsdp_enabled or self.is_deepspeed_enabled) and has_weights(checkpoint)
        if whole and needs_own_class(model, checkpoint):
            load_weights(model, checkpoint)
            return
        load()
        if has_exit_heads(model):
            restore_exit_heads(model, checkpoint)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        """Return the Trainer's norm; raise an error if the loss or gradient is not finite.

        A float16 scaler skips steps with such gradients itself.
        """
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._drop_zero_gradients()
        self.depth_objective.drop_idle_gradients(self.state.global_step + 1)
        self._require_finite(norm if self.accelerator.scaler is None else None)
        return norm

    def _require_finite(self, norm: Tensor | float | None) -> None:
        """Refuse a step whose losses or gradient norm are not finite on any process, before it is taken.

        A norm of None is not checked.
        """
        step = self.state.global_step + 1
        batches = self._micro_batches
        self._micro_batches = []
        losses = torch.stack([loss.float().to(batches[-1][0].device) for loss, _, _ in batches])
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # type: ignore[union-attr]
        gradient = torch.as_tensor(0.0 if norm is None else norm, device=losses.device)
        finite = torch.stack([losses.isfinite().all(), gradient.isfinite()])
        loss_fails, gradient_fails = any_process((~finite).float()).tolist()
        if loss_fails:
            reason = "the loss of another process is not finite."
            for loss, parts, inputs in batches:
                if not torch.isfinite(loss):
                    names = [name for name, value in parts.items() if not torch.isfinite(value)]
                    where = first_broken_layer(self.accelerator.unwrap_model(self.model), inputs)
                    reason = f"the loss is not finite. Terms: {', '.join(names) or 'their weighted sum'}. {where}"
                    break
            raise FulldepthError(f"Step {step}: {reason} The step was not taken.")
        if gradient_fails:
            raise FulldepthError(
                f"Step {step}: the loss is finite, but its gradient is not. A smaller learning rate or float32 usually "
                "helps. The step was not taken."
            )


@torch.no_grad()
def first_broken_layer(model: Any, inputs: dict[str, Any]) -> str:
    """Describe the first non-finite weight or state, found by a new forward pass."""
    if (broken := first_broken_weight(model)) is not None:
        return f"The weight {broken} is not finite."
    if any(hasattr(parameter, "device_mesh") for parameter in model.parameters()):
        return "The layer is not known, because the weights are sharded."
    with capture(find_anatomy(model), ["residual"]) as activations:
        model(**inputs)
        for layer, state in enumerate(activations["residual"]):
            if not torch.isfinite(state).all():
                return f"The first state that is not finite: {'the embeddings' if layer == 0 else f'layer {layer}'}."
    return "Every layer's state is finite; the head or the loss is not."


def leaves_of(loss: Tensor) -> set[Tensor] | None:
    """Return the leaves of the graph of a loss, such as parameters, that its backward pass gives a gradient.

    None if they are not known: reentrant checkpointing builds a part of the graph in the backward pass.
    """
    leaves = set[Tensor]()
    for node in nodes_of(loss):
        if getattr(node, "_forward_cls", None) is CheckpointFunction:
            return None
        if hasattr(node, "variable"):
            leaves.add(node.variable)
    return leaves


def load_weights(model: Any, checkpoint: str | Path) -> None:
    """Copy the weights and exit heads of an ordinary checkpoint into a model that is not sharded."""
    source = load_checkpoint(checkpoint, dtype=model.dtype, device="cpu").model.state_dict()
    model.load_state_dict(source, strict=not has_exit_heads(model))
    if has_exit_heads(model):
        restore_exit_heads(model, checkpoint)


class DepthTrainer(ObjectiveMixin, Trainer):
    """transformers' `Trainer` with `objective=`."""

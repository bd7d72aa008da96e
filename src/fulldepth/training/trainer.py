"""What a run adds to a Trainer: parameter groups, schedule, order of the items, sharding by FSDP2, and resuming."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedConfig, default_data_collator
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from fulldepth.data import ShuffledSampler, flatten_windows
from fulldepth.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.losses import DepthTrainer, per_batch_terms
from fulldepth.losses.trainer import AnyTrainer, load_weights
from fulldepth.settings.train import TrainSettings
from fulldepth.training.arguments import make_objective
from fulldepth.training.model import built_once

FORKS = "TOKENIZERS_PARALLELISM"


def parameter_groups(model: Any, settings: TrainSettings) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group; no group is empty.

    A model's own method `parameter_groups` is used if it has one (`DepthLlamaForCausalLM`). For other models
    `decay: matrices` leaves vectors and embeddings without weight decay.

    Raises:
        FulldepthError: for `decay: routers` if the model has no dynamic or kv router, and for `backbone_learning_rate`
            if it has no backbone.
    """
    if hasattr(model, "parameter_groups"):
        groups = model.parameter_groups(
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            router_learning_rate=settings.router_learning_rate,
            decay=settings.decay,
        )
    else:
        embedding_ids = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter in model.parameters():
            if parameter.requires_grad:
                is_matrix = parameter.ndim >= 2 and id(parameter) not in embedding_ids
                (decayed if is_matrix or settings.decay == "all" else others).append(parameter)
        rate = settings.learning_rate
        groups = [
            {"params": decayed, "weight_decay": settings.weight_decay, "lr": rate, "name": "decay"},
            {"params": others, "weight_decay": 0.0, "lr": rate, "name": "no decay"},
        ]
        if settings.backbone_learning_rate is not None:
            groups = _with_backbone(model, groups, settings.backbone_learning_rate)
    if settings.decay == "routers" and "router_decay" not in {group["name"] for group in groups}:
        raise FulldepthError(
            "decay=routers would let nothing decay: it names dynamic and kv routers, and this model has none."
        )
    return [group for group in groups if group["params"]]


def _with_backbone(model: Any, groups: list[dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    """The groups, each divided into the backbone's parameters, with their own learning rate, and all others."""
    anatomy = find_anatomy(model)
    if anatomy.family.backbone is None:
        raise FulldepthError(f"backbone_learning_rate is for detectors; {type(model).__name__} has no backbone.")
    inside = {id(p) for p in anatomy.body.get_submodule(anatomy.family.backbone).parameters()}
    divided = []
    for group in groups:
        outer, inner = ([p for p in group["params"] if (id(p) in inside) is chosen] for chosen in (False, True))
        divided.append({**group, "params": outer})
        divided.append({**group, "params": inner, "lr": rate, "name": f"backbone, {group['name']}"})
    return divided


def multistep(settings: TrainSettings, step: int) -> float:
    """Factor of the learning rate at a 0-based step: a linear warm-up, then a tenth from each milestone on."""
    if step < settings.warmup_length:
        return step / settings.warmup_length
    factor: float = 0.1 ** sum(step >= round(share * settings.steps) for share in settings.milestones)
    return factor


def window_collator(settings: TrainSettings) -> Callable[[list[Any]], dict[str, Any]]:
    """The collator of windows: one row per window, or one row in all where flash attention must separate documents.

    Raises:
        FulldepthError: if a penalty needs each window in a row of its own.
    """
    if settings.data.across_documents or settings.attention != "flash_attention_2":
        return default_data_collator
    for name in per_batch_terms(settings.objective.terms):
        raise FulldepthError(
            f"With attention=flash_attention_2 and data.across_documents=false a batch is one long row, and "
            f"{name} is a function of each sequence. Use attention=sdpa, or across_documents=true."
        )
    return flatten_windows


@dataclass(frozen=True)
class RunData:
    """What a run learns from: items, how batches are made of them, and facts about them."""

    config: PreTrainedConfig
    """Of the model that fits the data."""
    processing: Any
    """Tokenizer or image processor, saved with every checkpoint."""
    train: Any
    validation: Any
    facts: dict[str, Any]
    """For the record, with `hash`: of everything that determines the items."""
    collator: Any = None
    """Makes batches; None = the Trainer's own."""
    train_collator: Any = None
    """Makes the batches of training, if they differ from those of evaluations."""
    warnings: list[str] = field(default_factory=list)
    trainer: Any = None
    """Class of the trainer; None = `RunTrainer`."""


class RunMixin(AnyTrainer):
    """Put before a Trainer with an objective: takes objective, parameter groups, schedule and order of the items from
    the settings of a run.

    Training is one pass of `steps * global_batch_size` items. Every step is a full batch, also across epoch boundaries.
    Batches do not depend on the numbers of processes, workers and micro-batches, or on resuming.

    Checkpoints of sharded weights have the files of other checkpoints, so any number of processes can resume from them,
    with or without sharding.
    """

    lr_scheduler: Any
    data_collator: Any

    def __init__(self, model: Any, arguments: Any, data: RunData, settings: TrainSettings) -> None:
        self.settings, self.train_collator = settings, data.train_collator
        super().__init__(
            model,
            arguments,
            objective=make_objective(settings),
            train_dataset=data.train,
            eval_dataset=data.validation,
            data_collator=data.collator,
            processing_class=data.processing,
        )

    @property
    def plain_model(self) -> Any:
        """The model without the wrappers of torch.compile and DDP."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def parameter_groups(self, model: Any) -> list[dict[str, Any]]:
        """The parameter groups by the run's settings."""
        return parameter_groups(model, self.settings)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The Trainer's schedule, or a multistep one, which transformers lacks."""
        if self.settings.schedule == "multistep" and self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, partial(multistep, self.settings))
        return super().create_scheduler(num_training_steps, optimizer)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        settings: TrainSettings = self.settings
        items = len(self.train_dataset if train_dataset is None else train_dataset)
        return ShuffledSampler(items, seed=settings.seed, length=settings.steps * settings.global_batch_size)

    def get_train_dataloader(self) -> Any:
        """The Trainer's data loader, by the collator of training, with workers that ignore SIGTERM."""
        given, self.data_collator = self.data_collator, self.train_collator or self.data_collator
        try:
            loader = super().get_train_dataloader()
        finally:
            self.data_collator = given
        inner = getattr(loader, "base_dataloader", loader)  # accelerate's adapter forwards attribute reads, not writes
        inner.worker_init_fn = partial(_start_worker, inner.worker_init_fn)
        return loader

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, without the warnings of tokenizers in workers, which tokenise nothing."""
        before = os.environ.get(FORKS)
        os.environ.setdefault(FORKS, "false")
        try:
            return super().train(*args, **kwargs)
        finally:
            if before is None:
                os.environ.pop(FORKS, None)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        sharded = plugin is not None
        if plugin is not None:
            plugin.cpu_ram_efficient_loading = built_once(self.plain_model, self.settings)
            if resume_from_checkpoint and (self.args.process_index == 0 or not plugin.cpu_ram_efficient_loading):
                load_weights(self.plain_model, resume_from_checkpoint)  # before they are sharded
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if sharded:
            self._require_shards()
        return prepared

    def _require_shards(self) -> None:
        """Check that every weight is sharded and belongs to the optimiser."""
        stepped = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise FulldepthError(f"fsdp is on, but {name} is not sharded: this version of accelerate copies it.")
            if parameter.requires_grad and id(parameter) not in stepped:
                raise FulldepthError(f"fsdp is on, but the optimiser has lost {name} when the weights were sharded.")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """As the Trainer; a sharded model is saved as one of its own class, with its code, and a tied weight once."""
        if not (self.is_fsdp_enabled and self.args.should_save):
            super()._save(output_dir, state_dict=state_dict)
            return
        model = self.plain_model
        every, first = (dict(model.named_parameters(remove_duplicate=once)) for once in (False, True))
        kept = {name: tensor for name, tensor in state_dict.items() if name in first or name not in every}
        sharded = type(model)
        model.__class__ = next(kind for kind in sharded.__mro__ if not issubclass(kind, FSDPModule))
        try:
            super()._save(output_dir, state_dict=kept)
        finally:
            model.__class__ = sharded

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As the Trainer; the states of sharded weights are put together in the first process."""
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        states, whole = self.optimizer.state_dict(), dict[int, dict[str, Any]]()
        for index, moments in states["state"].items():
            whole[index] = {}
            for name, value in moments.items():
                gathered = value.full_tensor() if isinstance(value, DTensor) else value
                whole[index][name] = gathered.cpu() if self.args.should_save else None
        if self.args.should_save:
            torch.save({**states, "state": whole}, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if not self.is_fsdp_enabled:  # else they were loaded before they were sharded
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            self._load_sharded_states(Path(checkpoint))

    def _load_sharded_states(self, checkpoint: Path) -> None:
        """Load the optimiser's states, of which each process keeps its shards, and the schedule."""
        read = partial(torch.load, map_location="cpu", weights_only=True)
        states = read(checkpoint / OPTIMIZER_NAME, mmap=True)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, moments in states["state"].items():
            parameter = parameters[index]
            for name, value in moments.items():
                if value.shape == parameter.shape and value.ndim:
                    moments[name] = distribute_tensor(
                        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
                    )
        self.optimizer.load_state_dict(states)
        self.lr_scheduler.load_state_dict(read(checkpoint / SCHEDULER_NAME))


class RunTrainer(RunMixin, DepthTrainer):
    """Trainer of a run."""


def _start_worker(start: Callable[[int], None] | None, number: int) -> None:
    """Ignore SIGTERM: schedulers send it to every process, and a dying worker would end the run before it saves."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if start is not None:
        start(number)

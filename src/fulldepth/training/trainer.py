"""The Trainer of a run: its objective, arguments, parameter groups, schedule, order of items, and sharding."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, patch_environment
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedConfig, TrainingArguments, default_data_collator
from transformers.integrations.integration_utils import get_available_reporting_integrations
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from fulldepth.core import launch
from fulldepth.core.errors import FulldepthError, unknown
from fulldepth.core.processor import check_bfloat16
from fulldepth.data import ShuffledSampler, flatten_windows
from fulldepth.data.labelled import EpochSampler, LabelledRows
from fulldepth.execution import find_anatomy
from fulldepth.hf import checkpoint_of, pick_device
from fulldepth.losses import METHODS, TERMS, DepthTrainer, Objective, per_batch_terms
from fulldepth.losses.trainer import load_weights
from fulldepth.settings.train import ObjectiveSettings, TrainSettings
from fulldepth.training.lora import load_adapters, save_adapters
from fulldepth.training.model import built_once

EMBEDDED = re.compile("embed|token|position|bias")
"""In the names of parameters that are no module's `weight`: the embeddings of positions and of added tokens in ViT."""
MOST_WORKERS = 4
"""Default maximum for each training process. Few suffice, because reading a window is a copy from the page cache."""
SAME = ("learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "seed")
"""Settings that have the same name in the Trainer's arguments."""
SMALL_RUN = 1 << 24
"""Tokens below which a run starts no workers by default: starting them takes longer than reading all tokens."""


def resolved(settings: TrainSettings) -> TrainSettings:
    """Return the settings with values filled in that depend on others.

    These are the method's terms (options under `objective` take precedence, those that are not given there keep the
    method's values), the last checkpoint of a run folder in `model.checkpoint`, and the task's
    `data.validation_sequences`. The losses of all layers alternate with the last layer's in training from scratch, and
    are used at every step in fine-tuning and in detection (aligned training, App. B.3, B.5 and C.2). A term that is
    switched off stays None, so that resolving the result changes nothing.

    Raises:
        FulldepthError: for an unknown method or term, for an option or value that a term refuses, for terms in addition
            to the loss of frozen features, and for exit heads beside adapters.
    """
    if settings.method not in METHODS:
        raise unknown("method", settings.method, METHODS)
    given = settings.objective.model_dump(exclude_unset=True)
    known = (*TERMS, "energy_warmup")
    for name in given:
        if name not in known:
            raise unknown("setting", f"objective.{name}", [f"objective.{key}" for key in known])
    preset = METHODS[settings.method]
    start = settings.model.checkpoint
    if start is not None or settings.task == "detection":
        preset = {
            name: {**options, "schedule": "always"} if "schedule" in options else options
            for name, options in preset.items()
        }
    on = with_options(preset, given)
    data = settings.data.model_copy(update={"validation_sequences": settings.most_validation})
    model = settings.model.model_copy(update={"checkpoint": None if start is None else checkpoint_of(start)})
    changes: dict[str, Any] = {"objective": ObjectiveSettings(**on), "data": data, "model": model}
    if settings.freezes_features:
        changes["clip"] = 0.0
        if {name: options for name, options in on.items() if name in TERMS and options is not None} != preset:
            raise FulldepthError(
                f"method: {settings.method} trains with the sum of the heads' cross-entropies alone. Leave out "
                f"{', '.join(f'objective.{name}' for name in given)}."
            )
    complete = settings.model_copy(update=changes)
    if make_objective(complete).needs_exit_heads and settings.lora.rank:
        raise FulldepthError(
            "lora.rank trains adapters alone, so the heads of multi_exit would stay as they are. Leave out lora.rank "
            "or multi_exit (method: multi-exit)."
        )
    return complete


def with_options(terms: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the terms of a method with options that were given for them; None for a term that is switched off.

    Args:
        terms: term -> its options.
        given: term -> options that override those of the same term or add one; a number is its `weight`, None
            switches it off.
    """
    combined: dict[str, Any] = dict(terms)
    for name, value in given.items():
        if name in terms and value is not None:
            options = value if isinstance(value, Mapping) else {"weight": value}
            combined[name] = {**terms[name], **options}
        else:
            combined[name] = value
    return combined


def make_objective(settings: TrainSettings) -> Objective:
    """Make the objective that the settings describe.

    Raises:
        FulldepthError: for an unknown option of a term.
    """
    return Objective(energy_warmup=settings.objective.energy_warmup, **settings.objective.terms)


def training_arguments(settings: TrainSettings, folder: Path) -> Any:
    """Make the Trainer's arguments for a run; under torchrun this also joins the other processes.

    Args:
        settings: the run's settings.
        folder: the run folder.

    Raises:
        FulldepthError: if batch sizes do not divide, these processes cannot shard, or the device or tracker is absent.
    """
    installed = get_available_reporting_integrations()
    for name in settings.report_to:
        if name not in (*installed, "all", "none"):
            raise unknown("installed tracker", name, installed)
    micro, accumulation = batch_split(settings, launch.world())
    on_cpu = pick_device(settings.device).type == "cpu"
    if on_cpu and settings.precision != "float32":
        check_bfloat16()
    schedule = {"cosine": "cosine_with_min_lr", "linear": "linear"}.get(settings.schedule, "constant_with_warmup")
    more = dict[str, Any]()
    if settings.schedule == "cosine":
        more["lr_scheduler_kwargs"] = {"min_lr_rate": settings.min_learning_rate / settings.learning_rate}
    if settings.fsdp:
        options = {"fsdp_version": 2, "reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT"}
        more |= {"fsdp": True, "fsdp_config": {**options, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        lr_scheduler_type=schedule,
        warmup_steps=settings.warmup_length,
        max_grad_norm=settings.clip,
        bf16=settings.precision == "autocast",
        torch_compile=settings.compile,
        use_cpu=on_cpu,
        save_strategy="no",
        logging_strategy="steps" if settings.report_to else "no",
        logging_steps=settings.log_every,
        report_to=settings.report_to or "none",
        disable_tqdm=True,
        dataloader_num_workers=worker_count(settings, launch.local_world()),
        dataloader_pin_memory=not on_cpu,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        activation_checkpointing=settings.gradient_checkpointing,
        activation_checkpointing_kwargs={"use_reentrant": False},
        **{name: getattr(settings, name) for name in SAME},
        **more,
    )
    if settings.fsdp:
        if arguments.distributed_state.distributed_type in (DistributedType.NO, DistributedType.MULTI_CPU):
            raise FulldepthError(
                "fsdp needs accelerators in several processes; start them with torchrun, or train with fsdp=false."
            )
        # Gradients are summed in float32, and outputs keep their type; accelerate's policy would use bfloat16 for both.
        gathered = torch.bfloat16 if settings.precision == "autocast" else None
        policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)
        arguments.fsdp_plugin_args["mixed_precision_policy"] = policy
    return arguments


def batch_split(settings: TrainSettings, world: int) -> tuple[int, int]:
    """Return (sequences per forward pass, accumulated passes) for each of `world` processes.

    The first is `micro_batch_size`, or the largest number below it that divides the process's share of the batch.

    Raises:
        FulldepthError: if the processes cannot share the batch evenly.
    """
    share, remainder = divmod(settings.global_batch_size, world)
    if remainder or not share:
        raise FulldepthError(
            f"global_batch_size is {settings.global_batch_size}, which {world} processes cannot share evenly. Expected "
            f"a multiple of {world}."
        )
    largest = min(settings.micro_batch_size or share, share)
    micro = next(size for size in range(largest, 0, -1) if share % size == 0)
    return micro, share // micro


def smaller_batch(settings: TrainSettings, world: int) -> list[str]:
    """Return a warning if forward passes hold fewer items than `micro_batch_size`, so that all hold equally many."""
    micro, accumulation = batch_split(settings, world)
    share = micro * accumulation
    if micro >= min(settings.micro_batch_size or share, share):
        return []
    unit = "sequences" if settings.unit == "tokens" else settings.unit
    return [
        f"micro_batch_size={settings.micro_batch_size} does not divide the {share} {unit} of a process in a step: "
        f"forward passes hold {micro}."
    ]


def worker_count(settings: TrainSettings, processes: int) -> int:
    """Return the number of data loading processes for each training process.

    It is `workers`, or by default up to four, one for each core.

    Args:
        settings: the run's settings.
        processes: training processes on this machine.
    """
    if settings.workers is not None:
        return settings.workers
    if settings.steps * settings.global_batch_size * settings.sequence_length < SMALL_RUN:
        return 0
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(MOST_WORKERS, cores // processes)


def parameter_groups(model: Any, settings: TrainSettings) -> list[dict[str, Any]]:
    """Assign every trainable parameter to exactly one group; no group is empty.

    The model's method `parameter_groups` is used if it has one (`DepthLlamaForCausalLM`). For other models
    `decay: matrices` leaves vectors and embeddings without weight decay.

    Raises:
        FulldepthError: for `decay: routers` and `router_learning_rate` if the model trains no such router, and for
            `backbone_learning_rate` if it has no backbone.
    """
    if hasattr(model, "parameter_groups"):
        groups = model.parameter_groups(
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            router_learning_rate=settings.router_learning_rate,
            decay=settings.decay,
        )
        groups = [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]
    else:
        backbone = set[Any]()
        if settings.backbone_learning_rate is not None:
            anatomy = find_anatomy(model)
            if anatomy.family.backbone is None:
                raise FulldepthError(
                    f"backbone_learning_rate is for detectors; {type(model).__name__} has no backbone."
                )
            backbone = set(anatomy.body.get_submodule(anatomy.family.backbone).parameters())
        embeddings = {module.weight for module in model.modules() if isinstance(module, nn.Embedding)}
        embeddings |= {p for name, p in model.named_parameters() if EMBEDDED.search(name.rpartition(".")[2])}
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        matrices = {p for p in trained if settings.decay == "all" or (p.ndim >= 2 and p not in embeddings)}
        groups = [
            {
                "params": [p for p in trained if (p in matrices, p in backbone) == (decays, of_backbone)],
                "weight_decay": settings.weight_decay if decays else 0.0,
                "lr": settings.backbone_learning_rate if of_backbone else settings.learning_rate,
                "name": ("backbone, " if of_backbone else "") + ("decay" if decays else "no decay"),
            }
            for decays, of_backbone in product((True, False), (False, True))
        ]
    groups = [group for group in groups if group["params"]]
    names = {group["name"] for group in groups}
    if settings.router_learning_rate is not None and not names & {"router_decay", "router_no_decay"}:
        raise FulldepthError(
            "router_learning_rate has no effect: it applies to memory routers, and this model trains none."
        )
    if settings.decay == "routers" and "router_decay" not in names:
        raise FulldepthError(
            "decay=routers has no effect: it applies to dynamic and kv routers, and this model trains none."
        )
    return groups


def multistep(settings: TrainSettings, step: int) -> float:
    """Return the factor of the learning rate at a 0-based step: linear warm-up, then a tenth from each milestone on."""
    if step < settings.warmup_length:
        return step / settings.warmup_length
    return 0.1 ** sum(step >= round(share * settings.steps) for share in settings.milestones)


def window_collator(settings: TrainSettings) -> Callable[[list[Any]], dict[str, Any]]:
    """Return the collator of windows: one row per window, or one row in total if flash attention separates documents.

    Raises:
        FulldepthError: if a penalty needs each window in a row of its own.
    """
    if settings.data.across_documents or settings.attention != "flash_attention_2":
        return default_data_collator
    for name in per_batch_terms(settings.objective.terms):
        raise FulldepthError(
            f"With attention=flash_attention_2 and data.across_documents=false a batch is one long row, but {name} "
            "needs each sequence in a row of its own. Use attention=sdpa, or across_documents=true."
        )
    return flatten_windows


@dataclass(frozen=True)
class RunData:
    """Training data of a run: its items, the collator that makes batches, and facts about them."""

    config: PreTrainedConfig
    """Configuration of the model that fits the data."""
    processing: Any
    """Tokenizer or image processor, saved with every checkpoint."""
    train: Any
    validation: Any
    facts: dict[str, Any]
    """Entries for the record; `hash` covers everything that determines the items."""
    collator: Any
    """Function that makes a batch from items."""
    warnings: list[str] = field(default_factory=list)
    validation_shapes: Sequence[Hashable] = ()
    """Shape of each image of `validation` after processing, for a detector; empty if all have one shape."""

    @property
    def held_out(self) -> dict[str, Any]:
        """Arguments of `evaluate_held_out`, besides the model and the size of batches."""
        return {"data": self.validation, "collate": self.collator, "shapes": self.validation_shapes}


class RunTrainer(DepthTrainer):
    """Trainer with the objective, parameter groups, schedule and order of the items of a run's settings.

    Training is one pass of `steps * global_batch_size` items. Every step is a full batch, also across epoch boundaries.
    Batches do not depend on the numbers of processes, workers and micro-batches, or on resuming.

    Checkpoints of sharded weights have the files of other checkpoints, so any number of processes can resume from them,
    with or without sharding.
    """

    # Trainer declares these as optional; they are set before they are used.
    model: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    train_dataset: Any

    def __init__(self, model: Any, arguments: Any, data: RunData, settings: TrainSettings) -> None:
        self.settings = settings
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
        """Return the parameter groups of the run's settings."""
        return parameter_groups(model, self.settings)

    def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the Trainer's loss with the objective; frozen features run in evaluation mode, without dropout."""
        if self.settings.freezes_features and model.training:
            for part in self.plain_model.children():
                part.eval()
        return super().compute_loss(model, *args, **kwargs)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Make the Trainer's schedule, or a multistep one, which transformers lacks."""
        if self.settings.schedule == "multistep" and self.lr_scheduler is None:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, partial(multistep, self.settings))
        return super().create_scheduler(num_training_steps, optimizer)

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        """Return the sampler whose order depends on the seed alone."""
        settings = self.settings
        data = self.train_dataset
        sampler = EpochSampler if isinstance(data, LabelledRows) else ShuffledSampler
        return sampler(len(data), seed=settings.seed, length=settings.steps * settings.global_batch_size)

    def get_train_dataloader(self) -> Any:
        """Make the Trainer's data loader, with workers that ignore SIGTERM."""
        loader = super().get_train_dataloader()
        inner = getattr(loader, "base_dataloader", loader)  # accelerate's adapter forwards attribute reads, not writes
        inner.worker_init_fn = partial(_start_worker, inner.worker_init_fn)
        return loader

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does, without the warnings of tokenizers in workers, which tokenise nothing."""
        with patch_environment(TOKENIZERS_PARALLELISM=os.environ.get("TOKENIZERS_PARALLELISM", "false")):
            return super().train(*args, **kwargs)

    def _prepare_for_training(self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        """Prepare as the Trainer does; with FSDP2, load weights before they are sharded and check the result."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is None:
            return super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        plugin.cpu_ram_efficient_loading = built_once(self.plain_model, self.settings)
        if resume_from_checkpoint and (self.args.process_index == 0 or not plugin.cpu_ram_efficient_loading):
            self._load_weights(resume_from_checkpoint)  # before they are sharded
        prepared = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        stepped = {parameter for group in self.optimizer.param_groups for parameter in group["params"]}
        for name, parameter in self.model.named_parameters():
            if not isinstance(parameter, DTensor):
                raise FulldepthError(
                    f"fsdp=true, but {name} is not sharded: this version of accelerate copies it. Use fsdp=false."
                )
            if parameter.requires_grad and parameter not in stepped:
                raise FulldepthError(
                    f"fsdp=true, but the optimiser lost {name} when the weights were sharded. Use fsdp=false."
                )
        return prepared

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Save as the Trainer does, with adapters merged.

        A sharded model is saved as a model of its class before sharding, with its code, and a tied weight once.
        """
        model = self.plain_model
        if self.settings.lora.rank and self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            state_dict = save_adapters(model, state_dict or model.state_dict(), folder)
        if not (self.is_fsdp_enabled and self.args.should_save):
            super()._save(output_dir, state_dict=state_dict)
            return
        every = dict(model.named_parameters(remove_duplicate=False))
        first = dict(model.named_parameters())
        once = {name: tensor for name, tensor in state_dict.items() if name in first or name not in every}
        sharded = type(model)
        model.__class__ = next(kind for kind in sharded.__mro__ if not issubclass(kind, FSDPModule))
        try:
            super()._save(output_dir, state_dict=once)
        finally:
            model.__class__ = sharded

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save as the Trainer does; the first process gathers the states of sharded weights."""
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        states = self.optimizer.state_dict()
        whole = dict[int, dict[str, Any]]()
        for index, moments in states["state"].items():
            whole[index] = {}
            for name, value in moments.items():
                gathered = value.full_tensor() if isinstance(value, DTensor) else value
                whole[index][name] = gathered.cpu() if self.args.should_save else None
        if self.args.should_save:
            torch.save({**states, "state": whole}, Path(output_dir) / OPTIMIZER_NAME)
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_weights(self, checkpoint: str) -> None:
        """Copy the trained weights of a checkpoint into a model that is not sharded."""
        (load_adapters if self.settings.lora.rank else load_weights)(self.plain_model, checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Load as the Trainer does, or adapters alone; nothing with FSDP2."""
        if self.is_fsdp_enabled:  # `_prepare_for_training` loaded the weights before they were sharded
            return
        if self.settings.lora.rank:
            self._load_weights(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load as the Trainer does; each process keeps its shards of the states of sharded weights."""
        if checkpoint is None or not self.is_fsdp_enabled:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        read = partial(torch.load, map_location="cpu", weights_only=True)
        states = read(Path(checkpoint) / OPTIMIZER_NAME, mmap=True)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, moments in states["state"].items():
            mesh = parameters[index].device_mesh
            placements = parameters[index].placements
            for name, value in moments.items():
                if value.ndim:
                    value = value.to(parameters[index].device)
                    moments[name] = distribute_tensor(value, mesh, placements, src_data_rank=None)
        self.optimizer.load_state_dict(states)
        self.lr_scheduler.load_state_dict(read(Path(checkpoint) / SCHEDULER_NAME))


def _start_worker(start: Callable[[int], None], number: int) -> None:
    """Ignore SIGTERM: schedulers send it to every process, and a dying worker would end the run before it saves."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    start(number)

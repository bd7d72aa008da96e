"""Converts settings to the objective and the Trainer's arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import TrainingArguments
from transformers.integrations.integration_utils import get_available_reporting_integrations

from fulldepth import launch
from fulldepth.errors import FulldepthError, unknown
from fulldepth.hf import checkpoint_of, pick_device
from fulldepth.losses import METHODS, TERMS, Objective
from fulldepth.processor import check_bfloat16
from fulldepth.settings.train import ObjectiveSettings, TrainSettings

MOST_WORKERS = 4
"""Default maximum for each training process; few suffice, as reading a window is a copy from the page cache."""
SMALL_RUN = 1 << 24
"""Tokens below which a run starts no workers by default: starting them takes longer than reading all tokens."""


def resolved(settings: TrainSettings) -> TrainSettings:
    """The settings with the method's terms filled in (terms under `objective` take precedence), a run folder in
    `model.checkpoint` replaced by its last checkpoint, and `data.validation_sequences` of the task.

    The losses of all layers alternate with the last layer's in training from scratch, and are taken at every step in
    fine-tuning and in detection (aligned training, App. B.3, B.5 and C.2).

    Raises:
        FulldepthError: for an unknown method or term, and for an option or value that a term refuses.
    """
    if settings.method not in METHODS:
        raise unknown("method", settings.method, METHODS)
    given = settings.objective.model_dump(exclude_unset=True)
    for name in given:
        if name not in (known := [*TERMS, "energy_warmup"]):
            raise unknown("setting", f"objective.{name}", [f"objective.{key}" for key in known])
    preset, start = METHODS[settings.method], settings.model.checkpoint
    if start is not None or settings.task == "detection":
        preset = {
            name: {**options, "schedule": "always"} if "schedule" in options else options
            for name, options in preset.items()
        }
    chosen = {**preset, **given}
    on = {name: options for name, options in chosen.items() if options is not None}
    data = settings.data.model_copy(update={"validation_sequences": settings.most_validation})
    changes: dict[str, Any] = {"objective": ObjectiveSettings(**on), "data": data}
    if start is not None:
        changes["model"] = settings.model.model_copy(update={"checkpoint": checkpoint_of(start)})
    made = settings.model_copy(update=changes)
    make_objective(made)
    return made


def make_objective(settings: TrainSettings) -> Objective:
    """The objective that the settings describe.

    Raises:
        FulldepthError: for an unknown option of a term.
    """
    return Objective(energy_warmup=settings.objective.energy_warmup, **settings.objective.terms)


def training_arguments(settings: TrainSettings, folder: Path) -> Any:
    """The Trainer's arguments for a run; under torchrun this also joins the other processes.

    Args:
        settings: the run's settings.
        folder: the run folder.

    Raises:
        FulldepthError: if batch sizes do not divide, these processes cannot shard, settings contradict each other, or
            the device or tracker is absent.
    """
    _check(settings)
    micro, accumulation = batch_split(settings, launch.world())
    on_cpu = pick_device(settings.device).type == "cpu"
    if on_cpu and settings.precision != "float32":
        check_bfloat16()
    schedule = {"cosine": "cosine_with_min_lr", "linear": "linear"}.get(settings.schedule, "constant_with_warmup")
    kind, more = TrainingArguments, dict[str, Any]()
    if settings.stage == "sft":
        kind, more = trl_module().SFTConfig, {"max_length": None, "packing": False}  # `conversation_data` cuts
    # The Trainer's name of gradient checkpointing depends on the version of transformers; multistep: see RunMixin.
    renamed = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    checkpointing = "activation_checkpointing" if renamed else "gradient_checkpointing"
    more |= {checkpointing: settings.gradient_checkpointing, f"{checkpointing}_kwargs": {"use_reentrant": False}}
    if settings.schedule == "cosine":
        more["lr_scheduler_kwargs"] = {"min_lr_rate": settings.min_learning_rate / settings.learning_rate}
    if settings.fsdp:
        options = {"fsdp_version": 2, "reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT"}
        more |= {"fsdp": True, "fsdp_config": {**options, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}
    arguments = kind(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=schedule,
        warmup_steps=settings.warmup_length,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_epsilon=settings.adam_epsilon,
        max_grad_norm=settings.clip,
        bf16=settings.precision == "autocast",
        torch_compile=settings.compile,
        seed=settings.seed,
        data_seed=settings.seed,
        use_cpu=on_cpu,
        save_strategy="no",
        logging_strategy="steps" if settings.report_to else "no",
        logging_steps=settings.log_every,
        logging_nan_inf_filter=False,
        report_to=settings.report_to or "none",
        disable_tqdm=True,
        dataloader_num_workers=worker_count(settings, launch.local_world()),
        dataloader_pin_memory=not on_cpu,
        ddp_find_unused_parameters=False,
        remove_unused_columns=False,
        **more,
    )
    if settings.fsdp:
        _shard(arguments, settings)
    return arguments


def _check(settings: TrainSettings) -> None:
    """Refuse a schedule that contradicts itself, and trackers that are not at hand."""
    if settings.fsdp and settings.task != "causal-lm":
        raise FulldepthError(f"fsdp shards language models; in task: {settings.task} every process has a copy.")
    if settings.warmup_length > settings.steps:
        raise FulldepthError(f"warmup_steps is {settings.warmup_steps}, but the run has {settings.steps} steps.")
    if settings.min_learning_rate > settings.learning_rate:
        raise FulldepthError(
            f"min_learning_rate ({settings.min_learning_rate}) is above learning_rate ({settings.learning_rate})."
        )
    if settings.min_learning_rate and settings.schedule != "cosine":
        raise FulldepthError(f"min_learning_rate belongs to the cosine schedule, not to {settings.schedule}.")
    installed = get_available_reporting_integrations() if settings.report_to else []
    for name in settings.report_to:
        if name not in (*installed, "all", "none"):
            raise unknown("installed tracker", name, installed)


def batch_split(settings: TrainSettings, world: int) -> tuple[int, int]:
    """(sequences per forward pass, accumulated passes) of each of `world` processes. The first is `micro_batch_size`,
    or the largest number below it that divides the process's share of the batch (`batch_note` says so).

    Raises:
        FulldepthError: if the processes cannot share the batch evenly.
    """
    share, remainder = divmod(settings.global_batch_size, world)
    if remainder or not share:
        raise FulldepthError(
            f"global_batch_size is {settings.global_batch_size}, which {world} processes cannot share evenly."
        )
    most = min(settings.micro_batch_size or share, share)
    micro = next(size for size in range(most, 0, -1) if share % size == 0)
    return micro, share // micro


def batch_note(settings: TrainSettings, micro: int) -> list[str]:
    """A sentence if `micro` sequences are in a forward pass, and the settings want another number."""
    asked = settings.micro_batch_size
    if asked in (None, micro):
        return []
    return [f"A forward pass has {micro} instead of {asked} sequences: micro_batch_size divides a process's batch."]


def worker_count(settings: TrainSettings, processes: int) -> int:
    """Data loading processes of each training process: `workers`, or by default up to four, one for each core.

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


def _shard(arguments: TrainingArguments, settings: TrainSettings) -> None:
    """Check that these processes can shard, and set the precision of their communication.

    Gradients are summed in float32. With `precision=autocast` weights are gathered in bfloat16, otherwise in their own
    type; the model's outputs keep their type. accelerate's policy for bf16 would use bfloat16 for all three, the loss
    included.

    Args:
        arguments: the Trainer's, with `fsdp`, after the processes have joined.
        settings: the run's settings.

    Raises:
        FulldepthError: for a process that torchrun has not started, and for processes on CPUs, for which accelerate
            would silently copy the weights.
    """
    kind = arguments.distributed_state.distributed_type
    if kind == DistributedType.MULTI_CPU or (kind == DistributedType.NO and arguments.device.type == "cpu"):
        raise FulldepthError("fsdp needs accelerators: on CPUs the processes copy the weights (fsdp=false).")
    if kind == DistributedType.NO:
        raise FulldepthError("fsdp shards over processes; start them with torchrun, or train with fsdp=false.")
    gathered = torch.bfloat16 if settings.precision == "autocast" else None
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)
    arguments.fsdp_plugin_args["mixed_precision_policy"] = policy


def trl_module() -> Any:
    """The package trl.

    Raises:
        FulldepthError: if it is not installed.
    """
    try:
        import trl  # noqa: PLC0415
    except ImportError as error:
        raise FulldepthError("Fine-tuning on conversations needs trl: pip install 'fulldepth[sft]'.") from error
    return trl

"""Converts settings to the Trainer's arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainingArguments

from fulldepth import launch
from fulldepth.errors import FulldepthError
from fulldepth.hf import pick_device
from fulldepth.processor import check_bfloat16
from fulldepth.training.loading import worker_count
from fulldepth.training.settings import TrainSettings
from fulldepth.training.sharding import require_processes, set_policy, sharding_arguments
from fulldepth.training.trackers import check_trackers


def training_arguments(settings: TrainSettings, folder: Path, kind: type[Any] = TrainingArguments, **more: Any) -> Any:
    """The Trainer's arguments for a run; under torchrun this also joins the other processes.

    Args:
        settings: the run's settings.
        folder: the run folder.
        kind: class of the arguments (TRL has its own).
        more: further arguments of that class.

    Raises:
        FulldepthError: if batch sizes do not divide, these processes cannot shard, or the device or tracker is absent.
    """
    check_trackers(settings.report_to)
    world = launch.world()
    micro, accumulation = batch_split(settings, world)
    on_cpu = pick_device(settings.device).type == "cpu"
    if on_cpu and settings.precision != "float32":
        check_bfloat16()
    schedule, options = _schedule(settings)
    arguments = kind(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=options,
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
        **_checkpointing(settings),
        **sharding_arguments(settings),
        **more,
    )
    if settings.fsdp:
        require_processes(arguments)
        set_policy(arguments, settings)
    return arguments


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


def _schedule(settings: TrainSettings) -> tuple[str, dict[str, Any]]:
    """Name and options of the schedule; `FulldepthError` if its settings contradict each other."""
    if settings.warmup_length > settings.steps:
        raise FulldepthError(f"warmup_steps is {settings.warmup_steps}, but the run has {settings.steps} steps.")
    if settings.min_learning_rate > settings.learning_rate:
        raise FulldepthError(
            f"min_learning_rate ({settings.min_learning_rate}) is above learning_rate ({settings.learning_rate})."
        )
    if settings.schedule == "cosine":
        return "cosine_with_min_lr", {"min_lr_rate": settings.min_learning_rate / settings.learning_rate}
    if settings.min_learning_rate:
        raise FulldepthError(f"min_learning_rate belongs to the cosine schedule, not to {settings.schedule}.")
    return ("linear" if settings.schedule == "linear" else "constant_with_warmup"), {}  # multistep: see GroupsMixin


def _checkpointing(settings: TrainSettings) -> dict[str, Any]:
    """Gradient checkpointing, under its name in this version of transformers."""
    renamed = "activation_checkpointing" in TrainingArguments.__dataclass_fields__
    name = "activation_checkpointing" if renamed else "gradient_checkpointing"
    return {name: settings.gradient_checkpointing, f"{name}_kwargs": {"use_reentrant": False}}

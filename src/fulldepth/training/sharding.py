"""Sharding by FSDP2: what the Trainer is asked for, and whether it happened."""

from __future__ import annotations

from typing import Any

import torch
from accelerate.utils import DistributedType
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

from fulldepth.errors import FulldepthError
from fulldepth.training.settings import TrainSettings


def sharding_arguments(settings: TrainSettings) -> dict[str, Any]:
    """The Trainer's arguments for `fsdp`."""
    if not settings.fsdp:
        return {}
    options = {"fsdp_version": 2, "reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT"}
    return {"fsdp": True, "fsdp_config": {**options, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


def set_policy(arguments: TrainingArguments, settings: TrainSettings) -> None:
    """Set what is sent between processes, and in which precision.

    Gradients are summed in float32. With `precision=autocast` weights are gathered in bfloat16, else as they are; the
    model's outputs keep their type. accelerate's own policy for bf16 has bfloat16 for all three, the loss included.
    """
    gathered = torch.bfloat16 if settings.precision == "autocast" else None
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)
    arguments.fsdp_plugin_args["mixed_precision_policy"] = policy


def require_processes(arguments: TrainingArguments) -> None:
    """Refuse to shard processes for which accelerate has no FSDP2; it would copy the weights and say nothing.

    Args:
        arguments: that ask for `fsdp`, after the processes have joined.

    Raises:
        FulldepthError: for a process that torchrun has not started, and for processes on CPUs.
    """
    kind = arguments.distributed_state.distributed_type
    if kind == DistributedType.MULTI_CPU or (kind == DistributedType.NO and arguments.device.type == "cpu"):
        raise FulldepthError("fsdp needs accelerators: on CPUs the processes copy the weights (fsdp=false).")
    if kind == DistributedType.NO:
        raise FulldepthError("fsdp shards over processes; start them with torchrun, or train with fsdp=false.")


def require_shards(trainer: Any) -> None:
    """Refuse to train if the weights are not sharded although the arguments ask for it, or are not the optimiser's.

    Args:
        trainer: whose model and optimiser are prepared.

    Raises:
        FulldepthError: naming the first weight that is whole on every process, or that no step would change.
    """
    if not trainer.args.fsdp:
        return
    stepped = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise FulldepthError(f"fsdp is on, but {name} is not sharded: this version of accelerate copies it.")
        if parameter.requires_grad and id(parameter) not in stepped:
            raise FulldepthError(f"fsdp is on, but the optimiser has lost {name} when the weights were sharded.")

"""Sharding by FSDP2: the Trainer's arguments, a check that weights are sharded, and sharded checkpoints.

Every process writes its own shards, each weight once; numbers that are not tensors are saved as JSON.
"""

from __future__ import annotations

import errno
import json
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import pydantic
import torch
from accelerate.utils import DistributedType
from pydantic import Field, JsonValue
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer import SCHEDULER_NAME

from fulldepth.distributed import cpu_group, current
from fulldepth.errors import FulldepthError, is_disk_full, one_line
from fulldepth.files import read_document
from fulldepth.hf import (
    OPTIMIZER_SHARDS,
    WEIGHT_SHARDS,
    aliases,
    first_failure,
    is_sharded,
    missing_weights,
    read_shards,
    stored_shapes,
    write_shards,
)
from fulldepth.losses.trainer import AnyTrainer
from fulldepth.training.model import built_once
from fulldepth.training.settings import TrainSettings

NUMBERS = "optimizer.json"
"""File in a sharded checkpoint: the optimiser's step counters and options."""


def sharding_arguments(settings: TrainSettings) -> dict[str, Any]:
    """The Trainer's arguments for `fsdp`."""
    if not settings.fsdp:
        return {}
    options = {"fsdp_version": 2, "reshard_after_forward": True, "state_dict_type": "FULL_STATE_DICT"}
    return {"fsdp": True, "fsdp_config": {**options, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}}


def set_policy(arguments: TrainingArguments, settings: TrainSettings) -> None:
    """Set the precision of communication between processes.

    Gradients are summed in float32. With `precision=autocast` weights are gathered in bfloat16, otherwise in their own
    type; the model's outputs keep their type. accelerate's policy for bf16 would use bfloat16 for all three, the loss
    included.
    """
    gathered = torch.bfloat16 if settings.precision == "autocast" else None
    policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32)
    arguments.fsdp_plugin_args["mixed_precision_policy"] = policy


def require_processes(arguments: TrainingArguments) -> None:
    """Refuse processes for which accelerate has no FSDP2 and would silently copy the weights.

    Args:
        arguments: Trainer's arguments with `fsdp`, after the processes have joined.

    Raises:
        FulldepthError: for a process that torchrun has not started, and for processes on CPUs.
    """
    kind = arguments.distributed_state.distributed_type
    if kind == DistributedType.MULTI_CPU or (kind == DistributedType.NO and arguments.device.type == "cpu"):
        raise FulldepthError("fsdp needs accelerators: on CPUs the processes copy the weights (fsdp=false).")
    if kind == DistributedType.NO:
        raise FulldepthError("fsdp shards over processes; start them with torchrun, or train with fsdp=false.")


def require_shards(trainer: Any) -> None:
    """With `fsdp`, check that every weight is sharded and belongs to the optimiser.

    Args:
        trainer: the trainer, with prepared model and optimiser.

    Raises:
        FulldepthError: naming the first weight that is not sharded or that the optimiser does not have.
    """
    if not trainer.args.fsdp:
        return
    stepped = {id(parameter) for group in trainer.optimizer.param_groups for parameter in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        if not isinstance(parameter, DTensor):
            raise FulldepthError(f"fsdp is on, but {name} is not sharded: this version of accelerate copies it.")
        if parameter.requires_grad and id(parameter) not in stepped:
            raise FulldepthError(f"fsdp is on, but the optimiser has lost {name} when the weights were sharded.")


@contextmanager
def units_of(model: PreTrainedModel, plugin: Any) -> Iterator[None]:
    """While accelerate shards a model: no module that it shards as one unit lies inside another one.

    accelerate shards every module of the classes in `_no_split_modules` and the input embedding. In BERT and ViT the
    embedding lies inside such a module, which is then no unit of its own; a DETR has no input embedding to ask for.

    Args:
        model: the model, not sharded yet.
        plugin: accelerate's settings of FSDP.
    """
    embedding: Any
    try:
        embedding = model.get_input_embeddings()
    except NotImplementedError:
        embedding = None
    around = {type(module).__name__ for module in model.modules() if embedding in module.children()}
    names = [name for name in model._no_split_modules or () if name not in around]
    given, plugin.transformer_cls_names_to_wrap = plugin.transformer_cls_names_to_wrap, names
    model.get_input_embeddings = lambda: embedding  # type: ignore[method-assign]
    try:
        yield
    finally:
        plugin.transformer_cls_names_to_wrap = given
        del model.get_input_embeddings


class OptimizerNumbers(pydantic.BaseModel):
    """Schema of `optimizer.json`."""

    steps: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]
    """Weight -> its number of steps."""
    groups: list[dict[str, JsonValue]]
    """Options of each parameter group; `params` holds the names of its weights."""


@dataclass
class Writing:
    """Background writing of shards."""

    futures: list[Future[Any]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether everything is written; on the first process, by all processes."""
        return all(future.done() for future in self.futures)

    def completes(self, seconds: float) -> bool:
        """Whether everything is written, without an error, within `seconds`."""
        finished, rest = wait(self.futures, timeout=seconds)
        return not rest and all(future.exception() is None for future in finished)

    def wait(self) -> None:
        """Wait until everything is written.

        Raises:
            OSError: if the disk is full.
            FulldepthError: if a process could not write for another reason.
        """
        for future in self.futures:
            error = future.exception()
            if error is None:
                continue
            cause = first_failure(error)
            if is_disk_full(cause):
                raise OSError(errno.ENOSPC, "No space left on device") from error
            raise FulldepthError(f"A checkpoint could not be written: {one_line(cause, 300)}.") from error


def reshard(model: nn.Module) -> None:
    """Restore the shards of weights that FSDP2 keeps gathered after a forward pass."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """All weights and saved buffers by name; a tied weight once."""
    reshard(model)
    saved = model.state_dict().keys()
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return tensors | {name: buffer for name, buffer in model.named_buffers() if name in saved}


def take_weights(model: nn.Module, folder: Path, group: Any = None) -> None:
    """Load a checkpoint into a model; both may be sharded or not.

    Raises:
        FulldepthError: if a weight is missing or has another shape, or a file is damaged.
    """
    source_folder = folder / WEIGHT_SHARDS if is_sharded(folder) else folder
    stored, others = stored_shapes(source_folder), aliases(model)
    if missing := missing_weights(model, stored):
        raise FulldepthError(f"Cannot read {folder}: it lacks the weight {missing[0]}.")
    tensors_by_name = {
        next((other for other in others.get(name, []) if other in stored), name): tensor
        for name, tensor in whole_tensors(model).items()
    }
    read_shards(source_folder, tensors_by_name, group)


def describe(model: PreTrainedModel, folder: Path) -> None:
    """Write a model's configuration, generation settings and code, without weights."""
    kind: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"):
        twin = kind(model.config).to(model.dtype)
    if hasattr(model, "generation_config"):
        twin.generation_config = model.generation_config
    twin.save_pretrained(folder, state_dict={})
    for path in folder.glob("*.safetensors"):  # it holds no weights
        path.unlink()


class ShardsMixin(AnyTrainer):
    """Adds sharded checkpoints to a Trainer, used where its weights are sharded.

    A sharded checkpoint can be resumed by any number of processes, with or without sharding.
    """

    writing: Writing | None = None
    """Writing of the last checkpoint's shards, until it is sealed."""
    _groups: tuple[Any, Any] | None = None

    @property
    def plain_model(self) -> Any:
        """The model without the wrappers of torch.compile and DDP."""
        return self.accelerator.unwrap_model(self.model, keep_torch_compile=False)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None:
            plugin.cpu_ram_efficient_loading = built_once(self.plain_model, self.settings)
        with nullcontext() if plugin is None else units_of(self.plain_model, plugin):
            return super()._prepare_for_training(*args, **kwargs)

    @property
    def sharded(self) -> bool:
        """Whether the weights are sharded."""
        return any(isinstance(parameter, DTensor) for parameter in self.plain_model.parameters())

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; a sharded one without weights, which are saved with the optimiser's states."""
        if not self.sharded:
            super().save_model(output_dir, _internal_call)
        elif self.args.should_save:
            folder = Path(output_dir or self.args.output_dir)
            with self.config_as_given():
                describe(self.plain_model, folder)
            self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.sharded:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        folder, (first, second) = Path(output_dir), self._cpu_groups()
        moments, numbers = self._states()
        background = self.settings.save_in_background
        self.writing = Writing()
        for name, tensors, group in (
            (WEIGHT_SHARDS, whole_tensors(self.plain_model), first),
            (OPTIMIZER_SHARDS, moments, second),
        ):
            self.writing.futures.append(write_shards(folder / name, tensors, group, background=background))
        if self.args.should_save:
            (folder / NUMBERS).write_text(json.dumps(numbers.model_dump(), indent=1), encoding="utf-8")
            torch.save(self.lr_scheduler.state_dict(), folder / SCHEDULER_NAME)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the random states of all processes on the first one's disk, to which others may have no access."""
        if self.args.world_size == 1:
            super()._save_rng_state(output_dir)
            return
        with tempfile.TemporaryDirectory() as scratch:
            super()._save_rng_state(scratch)
            own_files = {path.name: path.read_bytes() for path in Path(scratch).iterdir()}
        everyone = current().gather(own_files)
        if self.args.should_save:
            for files in everyone:
                for name, content in files.items():
                    (Path(output_dir) / name).write_bytes(content)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        folder = Path(resume_from_checkpoint)
        if self.sharded or is_sharded(folder):
            take_weights(self.plain_model, folder, self._cpu_groups()[0])
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not (self.sharded or (Path(checkpoint) / OPTIMIZER_SHARDS).is_dir()):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        folder = Path(checkpoint)
        if not (folder / OPTIMIZER_SHARDS).is_dir():
            raise FulldepthError(
                f"{folder} was written without fsdp: its optimiser is in one piece. Resume with fsdp=false, or start a "
                "new run from its weights (model.checkpoint)."
            )
        self._take_states(folder)
        self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULER_NAME, weights_only=True))

    def _states(self) -> tuple[dict[str, torch.Tensor], OptimizerNumbers]:
        """The optimiser's tensors by name, and its numbers."""
        names = _names(self.plain_model)
        moments: dict[str, torch.Tensor] = {}
        steps: dict[str, float] = {}
        for parameter in (parameter for group in self.optimizer.param_groups for parameter in group["params"]):
            if state := self.optimizer.state.get(parameter):  # empty if it never had a gradient
                name = names[id(parameter)]
                steps[name] = float(state["step"])
                moments |= {f"{name}.{key}": tensor for key, tensor in state.items() if key != "step"}
        groups: list[Any] = [
            {key: list(value) if isinstance(value, tuple) else value for key, value in group.items() if key != "params"}
            | {"params": [names[id(parameter)] for parameter in group["params"]]}
            for group in self.optimizer.param_groups
        ]
        return moments, OptimizerNumbers(steps=steps, groups=groups)

    def _take_states(self, folder: Path) -> None:
        """Load the optimiser's states from a sharded checkpoint.

        Raises:
            FulldepthError, ValueError: if the states do not fit the optimiser's groups and weights.
        """
        numbers = read_document(folder / NUMBERS, OptimizerNumbers)
        names, stored = _names(self.plain_model), stored_shapes(folder / OPTIMIZER_SHARDS)
        if len(numbers.groups) != len(self.optimizer.param_groups):
            raise ValueError("the optimiser has another number of groups")
        tensors_by_name: dict[str, torch.Tensor] = {}
        for group, options in zip(self.optimizer.param_groups, numbers.groups, strict=True):
            if options.pop("params", None) != [names[id(parameter)] for parameter in group["params"]]:
                raise ValueError("the optimiser's groups hold other weights")
            for key, value in options.items():
                group[key] = tuple(value) if isinstance(value, list) else value
            for parameter in group["params"]:
                name = names[id(parameter)]
                if name not in numbers.steps:
                    continue  # it never had a gradient
                state = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                for key, tensor in state.items():
                    if stored.get(f"{name}.{key}") != list(tensor.shape):
                        raise ValueError(f"{key} does not fit its weight")
                    tensors_by_name[f"{name}.{key}"] = tensor
                step = torch.tensor(numbers.steps[name], dtype=torch.float32)
                self.optimizer.state[parameter] = {"step": step.to(_step_device(group, parameter)), **state}
        read_shards(folder / OPTIMIZER_SHARDS, tensors_by_name, self._cpu_groups()[1])

    def _cpu_groups(self) -> tuple[Any, Any]:
        """Two process groups, for two concurrent writes; all processes must call this together."""
        if self._groups is None:
            self._groups = (cpu_group(), cpu_group())
        return self._groups


def _names(model: nn.Module) -> dict[int, str]:
    """`id` of a parameter in the optimiser -> its name."""
    reshard(model)
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _step_device(group: dict[str, Any], parameter: torch.Tensor) -> torch.device:
    """Device of AdamW's step counter of a parameter."""
    on_device = group.get("capturable") or group.get("fused")
    return parameter.device if on_device else torch.device("cpu")

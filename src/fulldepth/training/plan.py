"""The dry run: parameters, FLOPs and memory of a recipe, estimated without allocating a model or reading the data."""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth.core import launch
from fulldepth.core.errors import FulldepthError
from fulldepth.execution import find_anatomy
from fulldepth.execution.flops import TokenFlops, forward_flops
from fulldepth.hf import Anatomy, add_exit_heads, exit_heads_of, image_config, load_tokenizer
from fulldepth.settings.train import TrainSettings
from fulldepth.training.frozen import freeze_features
from fulldepth.training.initial import check_initializer
from fulldepth.training.labelled import class_names
from fulldepth.training.lora import add_adapters
from fulldepth.training.model import HEADS, WEIGHTS, build_config, meta_model
from fulldepth.training.text import named_tokenizer
from fulldepth.training.trainer import batch_split, make_objective, parameter_groups, resolved, smaller_batch

FEW_LAYERS = 3
"""Layers of the copy in which parts of a family outside the table are found."""


@dataclass(frozen=True)
class RunPlan:
    """Size and cost of a run."""

    settings: TrainSettings
    """Settings with the terms of the method filled in; for images `sequence_length` is the tokens of one image."""
    model: str
    """Class of the model."""
    parameters: int
    """Number of parameters; a tied head counts once."""
    parameters_without_embeddings: int
    """Parameters without token and position embeddings and without an untied output head."""
    trainable: int
    processes: int
    micro_batch: int
    accumulation: int
    memory: int
    """Bytes of weights, gradients and AdamW's two moments in one process; with FSDP2, the process's share of them."""
    flops: TokenFlops | None
    """FLOPs of the forward pass per token; None for a detector, where they depend on the size of each image, and for a
    classifier whose head is not found."""

    @property
    def tokens(self) -> int:
        """Tokens in the whole run."""
        return self.settings.steps * self.settings.global_batch_size * self.settings.sequence_length

    @property
    def step_flops(self) -> float:
        """Training FLOPs per token, with recomputation, without penalties; only the forward pass of frozen features.

        With adapters, products with the frozen matrices count twice, because these have no gradient.
        """
        assert self.flops is not None
        if self.settings.freezes_features:
            return self.flops.forward
        adapters = 2 * self.trainable
        frozen = self.flops.linear + self.flops.head - adapters if self.settings.lora.rank else 0.0
        recomputed = self.flops.forward - self.flops.head if self.settings.gradient_checkpointing else 0.0
        return self.flops.training - frozen + recomputed

    @property
    def run_flops(self) -> float | None:
        """Training FLOPs of the whole run, see `step_flops`; None if they are not known."""
        return None if self.flops is None else self.step_flops * self.tokens


def plan(settings: TrainSettings, config: PreTrainedConfig, *, processes: int = 1) -> RunPlan:
    """Estimate the cost of a run. The model is on the meta device, so any size can be planned on any machine.

    Args:
        settings: the run's settings.
        config: the model's configuration; any model of transformers for the task.
        processes: number of processes that share each batch.

    Raises:
        FulldepthError: if batch sizes do not divide, an option of a penalty is unknown, or the initializer or weight
            decay does not apply to the model.
    """
    settings = resolved(settings)
    micro, accumulation = batch_split(settings, processes)
    model = meta_model(config, settings.task)
    if settings.freezes_features:
        freeze_features(_anatomy_of(model, settings.task))
    elif make_objective(settings).needs_exit_heads:
        add_exit_heads(_anatomy_of(model, settings.task))
    add_adapters(model, settings.lora)
    if settings.task == "image-classification":
        settings = settings.model_copy(update={"sequence_length": tokens_of_an_image(model)})
    check_initializer(model, settings.initializer)
    parameter_groups(model, settings)
    detects = settings.task == "detection"
    head = None if detects else model.get_output_embeddings()
    heads = [] if head is None else [head, *exit_heads_of(model).values()]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    left_out = {p for module in [*tables, *heads] for p in module.parameters()}
    shards = processes if settings.fsdp else 1
    parameters = model.num_parameters()
    trainable = model.num_parameters(only_trainable=True)
    return RunPlan(
        settings=settings,
        model=type(model).__name__,
        parameters=parameters,
        parameters_without_embeddings=sum(p.numel() for p in model.parameters() if p not in left_out),
        trainable=trainable,
        processes=processes,
        micro_batch=micro,
        accumulation=accumulation,
        memory=(parameters + 3 * trainable) * WEIGHTS[settings.precision].itemsize // shards,
        flops=None if detects else _flops_of(model, settings),
    )


def _anatomy_of(model: PreTrainedModel, task: str) -> Anatomy:
    """Return the anatomy of a model on the meta device.

    Parts of a family that is not in the table are found by arithmetic, in a copy with random weights and few layers.
    """
    with suppress(FulldepthError):
        return find_anatomy(model)
    config = copy.deepcopy(model.config)
    layers = image_config(config) if task == "image-classification" else config.get_text_config()
    layers.num_hidden_layers = min(layers.num_hidden_layers, FEW_LAYERS)
    with torch.random.fork_rng(devices=[]):  # a run plans itself before its first step
        small = HEADS[task].auto.from_config(config, trust_remote_code=False).eval()
        return replace(find_anatomy(small), model=model)


def _flops_of(model: PreTrainedModel, settings: TrainSettings) -> TokenFlops | None:
    """Return the FLOPs of a token; the head of a classifier that is not in the table of families is found first.

    None for a class that does not run on small inputs, such as one of pictures with text.
    """
    flops = forward_flops(model, settings.sequence_length)
    if flops is None:
        with suppress(FulldepthError, ValueError, RuntimeError):
            return forward_flops(model, settings.sequence_length, _anatomy_of(model, settings.task))
    return flops


def tokens_of_an_image(model: PreTrainedModel) -> int:
    """Return T of an image classifier on the meta device: the number of patches and special tokens.

    Raises:
        FulldepthError: if its states are not sequences of tokens.
    """
    config = image_config(model.config)
    size = getattr(config, "image_size", None) or 0
    edges = size if isinstance(size, list | tuple) else (size, size)
    pixels = torch.zeros(1, getattr(config, "num_channels", 3), *edges, device="meta")
    states = model(pixel_values=pixels, output_hidden_states=True).hidden_states[-1] if size else pixels
    if states.ndim != 3:
        raise FulldepthError(
            f"A {config.model_type} does not read an image as a sequence of tokens: its states have the shape "
            f"{tuple(states.shape)}, expected [B, T, D]."
        )
    return int(states.shape[1])


def dry_run_lines(settings: TrainSettings) -> list[tuple[str, str, str]]:
    """Return the lines of `fulldepth train --dry-run` for these processes: `(name, value, sentence)`.

    Args:
        settings: the settings of the run.

    Returns:
        The lines, in the order in which they are printed.

    Raises:
        FulldepthError: if the settings are inconsistent, or their tokenizer or checkpoint does not exist.
    """
    settings = resolved(settings)
    reads_text = settings.unit != "images"
    vocab_size = None
    if reads_text and "vocab_size" not in (settings.model.model_extra or {}) and settings.model.checkpoint is None:
        name, _, size = named_tokenizer(settings)
        vocab_size = size or len(load_tokenizer(name))
    config = build_config(
        settings.model,
        task=settings.task,
        vocab_size=vocab_size,
        positions=settings.sequence_length if reads_text else None,
        classes=None if settings.task == "causal-lm" else class_names(settings),
    )
    run = plan(settings, config, processes=launch.world())
    settings = run.settings
    flops = run.flops
    unit = "sequences" if settings.unit == "tokens" else settings.unit
    without_tables = f"{run.parameters_without_embeddings:,} without embeddings and output head."
    batch = f"{run.processes} x {run.micro_batch} x {run.accumulation}"
    factors = f"Processes, {unit} in a forward pass, forward passes in a step."
    rows = [
        ("model", run.model, f"{run.trainable:,} parameters are trained."),
        ("parameters", f"{run.parameters:,}", without_tables),
        ("steps", f"{settings.steps:,}", f"{settings.global_batch_size:,} {unit} each."),
        ("batch", batch, " ".join([factors, *smaller_batch(settings, run.processes)])),
        ("memory", f"{run.memory / 2**30:,.2f} GiB", "Weights, gradients and optimiser of one process."),
    ]
    if flops is None:
        return rows
    attention = "all positions" if flops.attention == flops.attention_full else "the causal half"
    passes = (
        f"{'Two' if settings.lora.rank else 'Three'} forward passes"
        + ", and the blocks once more" * settings.gradient_checkpointing
    )
    passes = "One forward pass, of which the heads alone are trained" if settings.freezes_features else passes
    longest = " If all conversations fill sequence_length." * (settings.stage == "sft")
    return [
        *rows,
        ("tokens", f"{run.tokens:,}", f"{run.tokens / run.parameters:,.3g} for each parameter.{longest}"),
        ("forward", f"{flops.forward:.3g} FLOP/token", f"Matrix products, attention over {attention}."),
        ("training", f"{run.step_flops:.3g} FLOP/token", f"{passes}; without penalties."),
        ("total", f"{run.run_flops:.3g} FLOP", "The whole run, without penalties and evaluations."),
    ]

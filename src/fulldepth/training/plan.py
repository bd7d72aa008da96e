"""The dry run: cost of a recipe, estimated without allocating a model or downloading more than a tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth import launch
from fulldepth.errors import FulldepthError
from fulldepth.execution.flops import TokenFlops, forward_flops
from fulldepth.hf import exit_heads_of, load_tokenizer, pick_device
from fulldepth.losses import add_exit_heads
from fulldepth.training.arguments import batch_note, batch_split
from fulldepth.training.classes import class_names
from fulldepth.training.footprint import WEIGHT, CheckpointSize, Memory, checkpoint_size, estimate_memory
from fulldepth.training.initial import check_initializer
from fulldepth.training.methods import make_objective, resolved
from fulldepth.training.model import build_config, built_once, meta_model, tokens_of_an_image
from fulldepth.training.optimiser import parameter_groups
from fulldepth.training.settings import TrainSettings

UTILISATION = 0.5
"""Assumed share of the measured rate of large matrix products that training reaches; norms, sums, small products, the
optimiser and communication take the rest."""
GPU_SIZES = (16, 24, 40, 48, 80, 141, 192)
"""GiB of memory of common accelerators (sold as GB)."""
USABLE = 0.9
"""Share of an accelerator's memory that the estimate may fill; the rest is for the driver and fragmentation."""
FACTOR = {"float32": torch.float32, "autocast": torch.bfloat16, "bfloat16": torch.bfloat16}
"""Precision -> type of the factors of matrix products."""
LEARNED = ("builtin", "wordpiece", "bpe")
"""Kinds of tokenizers that are trained for a run, with at most so many tokens as they name."""
SIDE = {"cpu": 1024}
DEVICE_SIDE = 8192
"""Rows of the square matrices that are multiplied to measure the rate."""

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
DAY = 86400


@dataclass(frozen=True)
class Plan:
    """Size and cost of a run."""

    settings: TrainSettings
    """Settings with the terms of the method filled in; for images `sequence_length` is the tokens of one."""
    model: str
    """Class of the model."""
    parameters: int
    """Number of parameters; a tied head counts once."""
    parameters_without_embeddings: int
    """Parameters without token and position embeddings and without an untied output head."""
    trainable: int
    flops: TokenFlops
    """FLOPs of the forward pass per token."""
    objective_flops: float
    """Training FLOPs per token of penalties."""
    recomputed_flops: float
    """Training FLOPs per token that gradient checkpointing recomputes."""
    memory: Memory
    """Memory of one process."""
    other_memory: Memory | None
    """Memory of one process with `fsdp` negated; None for a single process."""
    checkpoint: CheckpointSize
    host: int
    """Bytes of CPU memory in which all processes together build or load the weights."""
    processes: int
    micro_batch: int
    accumulation: int
    rate: float | None
    """FLOP/s of matrix products on one process's device; None = not measured."""
    utilisation: float

    @property
    def tokens_per_step(self) -> int:
        """Tokens in an optimiser step."""
        return self.settings.global_batch_size * self.settings.sequence_length

    @property
    def tokens(self) -> int:
        """Tokens in the whole run."""
        return self.settings.steps * self.tokens_per_step

    @property
    def step_flops(self) -> float:
        """Training FLOPs per token, recomputation included."""
        return self.flops.training + self.objective_flops + self.recomputed_flops

    @property
    def total_flops(self) -> float:
        """FLOPs of the whole run, without evaluations."""
        return self.step_flops * self.tokens

    @property
    def seconds(self) -> float | None:
        """Expected training time: FLOPs / (rate * utilisation * processes)."""
        return None if self.rate is None else self.total_flops / (self.rate * self.utilisation * self.processes)

    @property
    def save_seconds(self) -> float | None:
        """Expected training time between two checkpoints: `seconds * min(save_every, steps) / steps`."""
        steps = self.settings.steps
        return None if self.seconds is None else self.seconds * min(self.settings.save_every, steps) / steps

    @property
    def checkpoints(self) -> int:
        """Checkpoints on disk at the end of the run."""
        written, limit = math.ceil(self.settings.steps / self.settings.save_every), self.settings.keep_checkpoints
        return written if limit is None else min(written, limit)


def plan(
    settings: TrainSettings,
    config: PreTrainedConfig,
    *,
    processes: int = 1,
    rate: float | None = None,
    utilisation: float = UTILISATION,
) -> Plan:
    """Estimate the cost of a run. The model is on the meta device, so any size can be planned on any machine.

    Args:
        settings: the run's settings.
        config: the model's configuration; any causal language model or classifier of texts or images of transformers.
        processes: number of processes that share each batch.
        rate: measured FLOP/s of a process (`measure_rate`); None = no expected time.
        utilisation: assumed share of that rate that training reaches.

    Raises:
        FulldepthError: if batch sizes do not divide, an option of a penalty is unknown, the configuration has no causal
            language model, or the initializer or weight decay does not apply to the model.
    """
    settings = resolved(settings)
    micro, accumulation = batch_split(settings, processes)
    model, objective = meta_model(config, settings.task), make_objective(settings)
    if objective.needs_exit_heads:
        add_exit_heads(model)
    if settings.task == "image-classification":
        settings = settings.model_copy(update={"sequence_length": tokens_of_an_image(model)})
    check_initializer(model, settings.initializer)
    parameter_groups(model, settings)
    flops = forward_flops(model, settings.sequence_length)
    other = settings.model_copy(update={"fsdp": not settings.fsdp})
    builders = 1 if built_once(model, settings) else processes
    copies = builders * (1 if settings.model.checkpoint is None else 2)  # the model, and the checkpoint that is read
    return Plan(
        settings=settings,
        model=type(model).__name__,
        parameters=model.num_parameters(),
        parameters_without_embeddings=_without_embeddings(model),
        trainable=model.num_parameters(only_trainable=True),
        flops=flops,
        objective_flops=objective.flops(model.config, settings.sequence_length, flops),
        recomputed_flops=flops.checkpointed if settings.gradient_checkpointing else 0.0,
        memory=estimate_memory(model, settings, micro_batch=micro, processes=processes),
        other_memory=estimate_memory(model, other, micro_batch=micro, processes=processes) if processes > 1 else None,
        checkpoint=checkpoint_size(model, settings, processes=processes),
        host=copies * WEIGHT[settings.precision] * model.num_parameters(),
        processes=processes,
        micro_batch=micro,
        accumulation=accumulation,
        rate=rate,
        utilisation=utilisation,
    )


def measure_rate(device: str | torch.device, dtype: torch.dtype, *, seconds: float = 1.0) -> float:
    """Measure the FLOP/s of products of large square matrices (1,024 rows on a CPU, 8,192 elsewhere), after a warm-up.

    Args:
        device: device of the matrices.
        dtype: type of the factors.
        seconds: duration of the measurement; at least one product.
    """
    where = torch.device(device)
    side = SIDE.get(where.type, DEVICE_SIDE)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(side, side, generator=generator).to(where, dtype) for _ in range(2))
    _product(left, right)
    products, start, elapsed = 0, perf_counter(), 0.0
    while not products or elapsed < seconds:
        _product(left, right)
        products += 1
        elapsed = perf_counter() - start
    return products * 2 * side**3 / elapsed


def dry_run_lines(settings: TrainSettings) -> list[tuple[str, str, str]]:
    """Output of `fulldepth train --dry-run`: `(name, value, sentence)` lines for this device and these processes.

    Raises:
        FulldepthError: if the settings are inconsistent, or their tokenizer or checkpoint does not exist.
    """
    processes = launch.world()
    classes = None if settings.task == "causal-lm" else class_names(settings)
    config = build_config(
        settings.model,
        task=settings.task,
        vocab_size=_vocab_size(settings) if settings.unit in ("tokens", "texts") else None,
        positions=settings.sequence_length if settings.unit in ("tokens", "texts") else None,
        classes=classes,
    )
    if settings.task == "detection":
        return detector_lines(settings, config, processes)
    rate = measure_rate(pick_device(settings.device), FACTOR[settings.precision])
    return lines(plan(settings, config, processes=processes, rate=rate))


def detector_lines(settings: TrainSettings, config: PreTrainedConfig, processes: int = 1) -> list[tuple[str, str, str]]:
    """The dry run of a detector: sizes and amounts. Operations and activations depend on the size of each image, and
    are not estimated.
    """
    settings = resolved(settings)
    micro, accumulation = batch_split(settings, processes)
    model, objective = meta_model(config, settings.task), make_objective(settings)
    if objective.needs_exit_heads:
        add_exit_heads(model)
    check_initializer(model, settings.initializer)
    parameter_groups(model, settings)
    parameters, held = model.num_parameters(), WEIGHT[settings.precision]
    states, size = 4 * parameters * held // (processes if settings.fsdp else 1), checkpoint_size(model, settings)
    images = settings.steps * settings.global_batch_size
    return [
        ("model", type(model).__name__, f"{config.num_labels:,} classes, {config.num_queries:,} queries."),
        ("parameters", f"{parameters:,}", "All are trained, the backbone's too."),
        ("steps", f"{settings.steps:,}", f"{settings.global_batch_size:,} images each."),
        ("images", f"{images:,}", "Of the whole run, without evaluations."),
        ("batch", f"{processes} x {micro} x {accumulation}", _batch_sentence(settings, micro)),
        ("states", _bytes(states), "Weights, gradients and optimiser of one process; activations are not estimated."),
        ("checkpoint", _bytes(size.total), f"Weights {_bytes(size.weights)}, optimiser {_bytes(size.optimiser)}."),
    ]


def lines(plan: Plan) -> list[tuple[str, str, str]]:
    """A plan as text: name, value with its unit, and a sentence that explains it."""
    settings, flops, memory = plan.settings, plan.flops, plan.memory
    parts = ("weights", "gradients", "optimiser", "activations", "logits", "loss_gradients")
    split = ", ".join(f"{name.replace('_', ' ')} {_bytes(getattr(memory, name))}" for name in parts)
    full_square = _flop(flops.forward - flops.attention + flops.attention_full)
    batch = f"{plan.processes} x {plan.micro_batch} x {plan.accumulation}"
    samples = "" if settings.unit == "tokens" else f", {settings.global_batch_size:,} {settings.unit} at most so long"
    if settings.unit == "images":
        samples = f", {settings.global_batch_size:,} images of {settings.sequence_length}"
    without = f"{plan.parameters_without_embeddings:,} without embeddings and output head."
    rows = [
        ("model", plan.model, f"{plan.trainable:,} parameters are trained."),
        ("parameters", f"{plan.parameters:,}", without),
        ("steps", f"{settings.steps:,}", f"{plan.tokens_per_step:,} tokens each{samples}."),
        ("tokens", f"{plan.tokens:,}", f"{plan.tokens / plan.parameters:,.3g} for each parameter."),
        ("batch", batch, _batch_sentence(settings, plan.micro_batch)),
        (
            "forward",
            f"{_flop(flops.forward)}/token",
            "Matrix products, attention over all positions."
            if flops.attention == flops.attention_full
            else f"Matrix products, attention over the causal half; over the full square the sum is {full_square}.",
        ),
        (
            "training",
            f"{_flop(plan.step_flops)}/token",
            f"Three forward passes, {_flop(plan.recomputed_flops)} computed again, {_flop(plan.objective_flops)} for "
            "penalties.",
        ),
        ("total", _flop(plan.total_flops), "The whole run, without evaluations."),
        ("memory", _bytes(memory.total), f"Of one process, estimated: {split}."),
        (
            "host",
            _bytes(plan.host),
            "CPU memory of all processes together while they build the model, without data.",
        ),
        ("fits", _fitting(memory), _fitting_sentence(plan)),
        *_checkpoint_rows(plan),
    ]
    if plan.rate is not None and plan.seconds is not None and plan.save_seconds is not None:
        assumed = f"If training reaches {plan.utilisation:.0%} of that rate (an assumption) on each of"
        interval = f"save_every ({settings.save_every:,}) of {settings.steps:,} steps"
        rows += [
            ("rate", f"{_flop(plan.rate)}/s", "Measured just now on products of large matrices."),
            ("time", _duration(plan.seconds), f"{assumed} {plan.processes} such devices."),
            ("save", f"every {_duration(plan.save_seconds)}", f"{interval}; a failure costs this much at most."),
        ]
    return rows


def _batch_sentence(settings: TrainSettings, micro: int) -> str:
    unit = "sequences" if settings.unit == "tokens" else settings.unit
    return " ".join([f"Processes, {unit} in a forward pass, forward passes in a step.", *batch_note(settings, micro)])


def _checkpoint_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Lines on the disk space of checkpoints."""
    size, count, limit = plan.checkpoint, plan.checkpoints, plan.settings.keep_checkpoints
    kept = "all are kept" if limit is None else f"keep_checkpoints={limit}"
    split = f"Weights {_bytes(size.weights)}, optimiser {_bytes(size.optimiser)}, the rest {_bytes(size.rest)}."
    sentence = f"{count:,} of them at the end of the run ({kept}), one more while one is written."
    return [("checkpoint", _bytes(size.total), split), ("checkpoints", _bytes(size.total * count), sentence)]


def _fitting(memory: Memory) -> str:
    """The smallest accelerator for that much memory: `80 GB`."""
    sizes = [size for size in GPU_SIZES if memory.total <= USABLE * size * 2**30]
    return f"{sizes[0]} GB" if sizes else "none"


def _fitting_sentence(plan: Plan) -> str:
    sizes = "/".join(map(str, GPU_SIZES))
    here, otherwise = ("with", "without") if plan.settings.fsdp else ("without", "with")
    if plan.other_memory is None:
        return f"The smallest GPU of {sizes} GB whose {USABLE:.0%} hold this, for one process."
    return (
        f"The smallest GPU of {sizes} GB whose {USABLE:.0%} hold this, {here} fsdp on {plan.processes} processes; "
        f"{otherwise} fsdp: {_fitting(plan.other_memory)}."
    )


def _vocab_size(settings: TrainSettings) -> int | None:
    """Tokens of the tokenizer; None if the model's settings give the number of embeddings."""
    if "vocab_size" in (settings.model.model_extra or {}) or settings.model.checkpoint is not None:
        return None
    if settings.tokenizer is None:
        raise FulldepthError("A model from scratch needs a tokenizer: tokenizer=builtin:2048, a folder or a Hub name.")
    kind, _, size = settings.tokenizer.partition(":")
    return int(size) if kind in LEARNED and size.isdigit() else len(load_tokenizer(settings.tokenizer))


def _without_embeddings(model: PreTrainedModel) -> int:
    """Number of parameters outside embedding tables and the output head, or of a language model's heads of layers."""
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = model.get_output_embeddings()
    heads = [] if head is None else [head, *exit_heads_of(model).values()]
    left_out = {p for module in [*tables, *heads] for p in module.parameters()}
    return sum(p.numel() for p in model.parameters() if p not in left_out)


def _product(left: torch.Tensor, right: torch.Tensor) -> None:
    """Compute one product and wait for it."""
    torch.matmul(left, right)
    if left.device.type != "cpu":
        torch.accelerator.synchronize(left.device)


def _flop(number: float) -> str:
    """`12.3 GFLOP`."""
    return _scaled(number, 1000, "FLOP")


def _bytes(number: float) -> str:
    """`4.50 GiB`."""
    return _scaled(number, 1024, "B")


def _scaled(number: float, base: int, unit: str) -> str:
    power = 0
    while abs(number) >= base and power < len(PREFIXES) - 1:
        number /= base
        power += 1
    prefix = f"{PREFIXES[power].upper()}i" if base == 1024 and power else PREFIXES[power]
    return f"{_digits(number) if power else round(number)} {prefix}{unit}"


def _duration(seconds: float) -> str:
    """`45 s`, `12.5 min`, `7.50 h`, `11.0 days`, `3.10 years`."""
    for size, unit, limit in ((1, "s", 90), (60, "min", 90 * 60), (3600, "h", 2 * DAY), (DAY, "days", 730 * DAY)):
        if seconds < limit:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / (365.25 * DAY))} years"


def _digits(number: float) -> str:
    """Three significant digits, or all integer digits if there are more."""
    places = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:,.{places}f}"

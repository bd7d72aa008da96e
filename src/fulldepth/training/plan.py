"""The dry run: parameters, FLOPs and memory of a recipe, estimated without allocating a model or reading the data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth import launch
from fulldepth.errors import FulldepthError
from fulldepth.execution.flops import TokenFlops, forward_flops, head_channels, key_value_heads, weight_products
from fulldepth.hf import exit_heads_of, load_tokenizer
from fulldepth.losses import add_exit_heads
from fulldepth.settings.train import TrainSettings
from fulldepth.training.arguments import batch_note, batch_split, make_objective, resolved
from fulldepth.training.initial import check_initializer
from fulldepth.training.labelled import class_names
from fulldepth.training.model import build_config, meta_model, tokens_of_an_image
from fulldepth.training.trainer import parameter_groups

LEARNED = ("builtin", "wordpiece", "bpe")
"""Kinds of tokenizers that are trained for a run, with at most so many tokens as they name."""
PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")
WEIGHT = {"float32": 4, "autocast": 4, "bfloat16": 2}
"""Precision -> bytes of a weight, a gradient, and each of AdamW's two states."""
PRODUCT = {"float32": 4, "autocast": 2, "bfloat16": 2}
"""Precision -> bytes of an input or output of linear layers and attention."""
NORM = {"float32": 12, "autocast": 13, "bfloat16": 8}
"""Precision -> bytes per channel that a norm keeps for the backward pass: input, normalised input, and output.
Statistics are float32; autocast copies the output for each matrix product, three in attention, two in the MLP."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at the start of a backward pass, without fragmentation of the allocator."""

    weights: int
    """P weights; under autocast also a bfloat16 copy of the matrices."""
    gradients: int
    optimiser: int
    """AdamW's two moments."""
    activations: int
    """What the forward pass keeps for the backward pass, without the logits."""
    logits: int
    """B T V log-probabilities (B C of a classifier) in float32, which the loss keeps for the backward pass."""
    loss_gradients: int
    """The gradients of these and of the logits, in float32, with which the backward pass begins."""

    @property
    def total(self) -> int:
        """The sum."""
        states = self.weights + self.gradients + self.optimiser
        return states + self.activations + self.logits + self.loss_gradients


def estimate_memory(model: PreTrainedModel, settings: TrainSettings, *, micro_batch: int, processes: int = 1) -> Memory:
    """Estimate the memory of one process.

    Weights, gradients and optimiser are `P` (trainable) parameters times the bytes of the precision; with FSDP2 each
    process has its share (the gathered weights of the current layer are ignored). Activations per token, with D
    channels, MLP width F, heads of d_h channels, and c bytes per product:

    - a layer: two norms (8 to 13 bytes D), attention `c (2 H + 2 H_kv) d_h` for queries, keys, values and output
      (eager: and `H T` weights), MLP `4 c F` (right with a gate; without one, 2 to 8 by activation function);
    - additional activations of the architecture, from its configuration (`extra_activation_bytes`);
    - the head: one norm.

    For Llama and `depth_llama` the estimate is within a quarter of what autograd keeps, for others within a factor of
    two (dropout and some activation functions keep more).

    Gradient checkpointing keeps each layer's input (`num_residual_streams` states if the configuration has them, else
    one) and all activations of one layer at a time. Penalties are ignored: JREG keeps scalars, aligned training chunks
    of logits, CR up to ten states of each of its layers.

    Args:
        model: on the meta device.
        settings: precision, attention, checkpointing, FSDP and sequence length are used.
        micro_batch: sequences in a forward pass.
        processes: number of processes.
    """
    precision = settings.precision
    shards = processes if settings.fsdp else 1
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    held = WEIGHT[precision]
    copies = 2 * _product_weights(model) if precision == "autocast" else 0
    config = model.config.get_text_config()
    if settings.task.endswith("-classification"):
        scores = micro_batch * (config.num_labels or 0)
    else:
        scores = micro_batch * settings.sequence_length * config.vocab_size
    tokens = micro_batch * settings.sequence_length
    return Memory(
        weights=((trainable + frozen) * held + copies) // shards,
        gradients=trainable * held // shards,
        optimiser=2 * trainable * held // shards,
        activations=int(tokens * _activations(config, settings)),
        logits=4 * scores,
        loss_gradients=2 * 4 * scores,
    )


@dataclass(frozen=True)
class RunPlan:
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
    processes: int
    micro_batch: int
    accumulation: int
    flops: TokenFlops | None = None
    """FLOPs of the forward pass per token; None for a detector, where they depend on the size of each image."""
    objective_flops: float = 0.0
    """Training FLOPs per token of penalties."""
    recomputed_flops: float = 0.0
    """Training FLOPs per token that gradient checkpointing recomputes."""
    memory: Memory | None = None
    """Memory of one process; None for a detector."""

    @property
    def tokens(self) -> int:
        """Tokens in the whole run."""
        return self.settings.steps * self.settings.global_batch_size * self.settings.sequence_length

    @property
    def step_flops(self) -> float:
        """Training FLOPs per token, recomputation included."""
        assert self.flops is not None
        return self.flops.training + self.objective_flops + self.recomputed_flops

    @property
    def total_flops(self) -> float:
        """FLOPs of the whole run, without evaluations."""
        return self.step_flops * self.tokens


def plan(settings: TrainSettings, config: PreTrainedConfig, *, processes: int = 1) -> RunPlan:
    """Estimate the cost of a run. The model is on the meta device, so any size can be planned on any machine.

    Args:
        settings: the run's settings.
        config: the model's configuration; any model of transformers for the task.
        processes: number of processes that share each batch.

    Raises:
        FulldepthError: if batch sizes do not divide, an option of a penalty is unknown, the configuration has no model
            for the task, or the initializer or weight decay does not apply to the model.
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
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    detects, head = settings.task == "detection", None
    if not detects:
        head = model.get_output_embeddings()
    heads = [] if head is None else [head, *exit_heads_of(model).values()]
    left_out = {p for module in [*tables, *heads] for p in module.parameters()}
    made = RunPlan(
        settings=settings,
        model=type(model).__name__,
        parameters=model.num_parameters(),
        parameters_without_embeddings=sum(p.numel() for p in model.parameters() if p not in left_out),
        trainable=model.num_parameters(only_trainable=True),
        processes=processes,
        micro_batch=micro,
        accumulation=accumulation,
    )
    if detects:
        return made
    flops = forward_flops(model, settings.sequence_length)
    return replace(
        made,
        flops=flops,
        objective_flops=objective.flops(model.config, settings.sequence_length, flops),
        recomputed_flops=flops.checkpointed if settings.gradient_checkpointing else 0.0,
        memory=estimate_memory(model, settings, micro_batch=micro, processes=processes),
    )


def dry_run_lines(settings: TrainSettings) -> list[tuple[str, str, str]]:
    """Output of `fulldepth train --dry-run`: `(name, value, sentence)` lines for these processes.

    Raises:
        FulldepthError: if the settings are inconsistent, or their tokenizer or checkpoint does not exist.
    """
    of_text = settings.unit in ("tokens", "texts")
    vocab_size = None
    if of_text and "vocab_size" not in (settings.model.model_extra or {}) and settings.model.checkpoint is None:
        if settings.tokenizer is None:
            raise FulldepthError(
                "A model from scratch needs a tokenizer: tokenizer=builtin:2048, a folder or a Hub name."
            )
        kind, _, size = settings.tokenizer.partition(":")
        vocab_size = int(size) if kind in LEARNED and size.isdigit() else len(load_tokenizer(settings.tokenizer))
    config = build_config(
        settings.model,
        task=settings.task,
        vocab_size=vocab_size,
        positions=settings.sequence_length if of_text else None,
        classes=None if settings.task == "causal-lm" else class_names(settings),
    )
    return lines(plan(settings, config, processes=launch.world()))


def lines(plan: RunPlan) -> list[tuple[str, str, str]]:
    """A plan as text: name, value with its unit, and a sentence that explains it."""
    settings, flops, memory = plan.settings, plan.flops, plan.memory
    items, unit = settings.global_batch_size, "sequences" if settings.unit == "tokens" else settings.unit
    split = [
        "Processes,",
        unit,
        "in a forward pass, forward passes in a step.",
        *batch_note(settings, plan.micro_batch),
    ]
    rows = [
        ("model", plan.model, f"{plan.trainable:,} parameters are trained."),
        (
            "parameters",
            f"{plan.parameters:,}",
            f"{plan.parameters_without_embeddings:,} without embeddings and output head.",
        ),
        ("steps", f"{settings.steps:,}", f"{items:,} {unit} each."),
        ("batch", f"{plan.processes} x {plan.micro_batch} x {plan.accumulation}", " ".join(split)),
    ]
    if flops is None or memory is None:
        return rows
    parts = ("weights", "gradients", "optimiser", "activations", "logits", "loss_gradients")
    of_memory = ", ".join(f"{name.replace('_', ' ')} {_bytes(getattr(memory, name))}" for name in parts)
    attention = "all positions" if flops.attention == flops.attention_full else "the causal half"
    added = f"{_flop(plan.recomputed_flops)} computed again, {_flop(plan.objective_flops)} for penalties"
    return [
        *rows,
        ("tokens", f"{plan.tokens:,}", f"{plan.tokens / plan.parameters:,.3g} for each parameter."),
        ("forward", f"{_flop(flops.forward)}/token", f"Matrix products, attention over {attention}."),
        ("training", f"{_flop(plan.step_flops)}/token", f"Three forward passes, {added}."),
        ("total", _flop(plan.total_flops), "The whole run, without evaluations."),
        ("memory", _bytes(memory.total), f"Of one process, estimated: {of_memory}."),
    ]


def _activations(config: PreTrainedConfig, settings: TrainSettings) -> float:
    """Activation bytes per token, without the logits."""
    precision, layers = settings.precision, config.num_hidden_layers
    layer = _layer(config, settings)
    own = getattr(config, "extra_activation_bytes", None)
    sizes = {"product": PRODUCT[precision], "norm": NORM[precision], "state": WEIGHT[precision]}
    extra = own(**sizes) if own is not None else 0.0
    last = NORM[precision] * config.hidden_size
    if settings.gradient_checkpointing:
        state = WEIGHT[precision] * config.hidden_size * getattr(config, "num_residual_streams", 1)
        return layers * state + layer + extra / layers + last
    return layers * layer + extra + last


def _layer(config: PreTrainedConfig, settings: TrainSettings) -> float:
    """Activation bytes per token of one plain layer."""
    product, width, channels = PRODUCT[settings.precision], config.hidden_size, head_channels(config)
    heads = getattr(config, "num_attention_heads", None) or 0
    attention = product * 2 * (heads + key_value_heads(config)) * channels
    if settings.attention == "eager":
        attention += heads * settings.sequence_length * (4 if product == 4 else 4 + product)
    inner = getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * width
    return 2 * NORM[settings.precision] * width + attention + product * 4 * inner


def _product_weights(model: PreTrainedModel) -> int:
    """Parameters that autocast copies: those of linear layers (one multiplication and one addition each)."""
    return int(sum(map(weight_products, model.modules())) / 2)


def _flop(number: float) -> str:
    """`12.3 GFLOP`."""
    return _scaled(number, 1000, "FLOP")


def _bytes(number: float) -> str:
    """`4.50 GiB`."""
    return _scaled(number, 1024, "B")


def _scaled(number: float, base: int, unit: str) -> str:
    """A number with a prefix, and three significant digits or all integer digits."""
    power = 0
    while abs(number) >= base and power < len(PREFIXES) - 1:
        number /= base
        power += 1
    prefix = f"{PREFIXES[power].upper()}i" if base == 1024 and power else PREFIXES[power]
    places = 0 if not power or number >= 100 else 2 if number < 10 else 1
    return f"{number:,.{places}f} {prefix}{unit}"

"""`Term`: interface of a penalty, with its options, the sites that it reads, and its loss.

The functions below it are shared by penalties: checks of hidden states, dtype of statistics, blocks of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import pydantic
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fulldepth.core.distributed import add_up, current
from fulldepth.core.errors import FulldepthError
from fulldepth.execution import Activations
from fulldepth.hf import Anatomy, Classifier
from fulldepth.losses.task import Task

Amount = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
"""A finite number of at least 0, such as a weight."""
CPU_BLOCK = 1 << 18
"""Elements per block on a CPU, small enough to stay in its cache."""
ACCELERATOR_BLOCK = 1 << 23
"""Elements per block on an accelerator: enough to fill it, few compared to a model's activations."""


@dataclass(frozen=True)
class Portion:
    """Fraction of an optimiser step that one call covers, so that accumulated and distributed steps add up exactly.

    A term that is a mean over `n` tokens is scaled by `n / tokens` (a mean over `n` targets by `n / targets`), any
    other term by `share`. Means over tokens are also scaled by `share` if `tokens` is None, as for images, which all
    have the same number of positions. The default is a step that consists of this call alone.
    """

    share: Tensor | float = 1.0
    """This call's sequences, divided by the step's sequences per process (their mean over processes)."""
    tokens: Tensor | None = None
    """Tokens of the step that penalties count, per process (their mean over processes)."""
    targets: Tensor | None = None
    """Positions of the step that have a label, per process (their mean over processes)."""

    @classmethod
    def of_items(cls, task: Task, batch: Mapping[str, Any], number: Tensor | float) -> Portion:
        """Return the portion of a micro-batch in a step with `number` targets over all processes.

        Transformers' Trainer knows only this number, so every term is scaled by the share of the targets.
        """
        count = task.targets(batch)
        targets = torch.as_tensor(number) / current().world
        return cls() if count is None else cls(_share(count, targets), None, targets)

    def of_targets(self, task: Task, batch: Mapping[str, Any]) -> Tensor | float:
        """Return the scale factor of a mean over a batch's targets."""
        count = task.targets(batch)
        return 1.0 if self.targets is None or count is None else _share(count, self.targets)


@dataclass(frozen=True)
class Context:
    """Inputs of a term, from one forward pass."""

    states: Activations
    """Hidden states by site: `states["residual"]` is `[h_0, ..., h_L]`, each `[B, T, D]`."""
    task: Task
    batch: Mapping[str, Any]
    """Inputs of the model."""
    portion: Portion = Portion()
    step: int = 1
    """1-based optimiser step."""
    energy_warmup: int = 0
    """Number of steps with CR's energy penalty."""
    classifier: Classifier | None = None
    """The model's head, for terms with `needs_head` and for classifiers of samples."""
    logits: Tensor | None = None
    """`[B, T, V]` logits in the model's output, for terms with `needs_logits`."""

    @property
    def mask(self) -> Tensor | None:
        """`[B, T]` bool, True = counts; None if every token counts."""
        return self.task.mask(self.batch)

    def token_share(self, device: torch.device) -> Tensor | float:
        """Return the scale factor of a mean over this batch's tokens (see `Portion`)."""
        count = self.task.tokens(self.batch)
        if self.portion.tokens is None or count is None:
            return self.portion.share
        return _share(torch.as_tensor(count, device=device), self.portion.tokens)


class Term(pydantic.BaseModel, ABC):
    """Base class of penalties: its fields are the options, checked by their types. A subclass must define `value`.

    To add a penalty, subclass this in a file of its own, and add the class to `objective.TERMS`.
    """

    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid")

    name: ClassVar[str]
    """Keyword of `Objective`, and key under `objective` in a recipe."""
    sites: ClassVar[tuple[str, ...]]
    """Keys of `execution.SITES` whose states the term reads."""
    unit: ClassVar[str] = "1"
    per_batch: ClassVar[bool] = False
    """True if the value is a function of the whole batch rather than a mean over tokens."""
    needs_head: ClassVar[bool] = False
    """True if the term reads `Context.classifier`."""
    needs_logits: ClassVar[bool] = False
    """True if the term reads `Context.logits`."""
    needs_exit_heads: ClassVar[bool] = False
    """True if the model must have exit heads (`hf.add_exit_heads`)."""

    weight: Amount = 1.0

    def check(self, anatomy: Anatomy) -> None:
        """Raise a `FulldepthError` if the options do not fit a model; called when the objective is attached."""

    @abstractmethod
    def value(self, context: Context) -> Tensor:
        """The penalty of one batch, a differentiable scalar, without its weight."""

    def factor(self, context: Context, device: torch.device) -> Tensor | float:
        """Return the factor of this batch's value, so that the sum over a step is the value of one large batch."""
        return context.portion.share if self.per_batch else context.token_share(device)

    def apply(self, loss: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Add the term to the loss.

        Args:
            loss: sum of the model's loss and the terms before this one.
            context: inputs of the term.

        Returns:
            `loss + weight * factor * value`, and the detached value; None if the term is not active in this step.
        """
        value = self.value(context)
        return loss + self.weight * self.factor(context, value.device) * value.to(loss.device), value.detach()


class LayerTerm(Term):
    """Base class of penalties of the attention sub-layers of some layers: the sum of `of_layer` over the layers."""

    per_batch = True
    weight: Amount = 0.01
    layers: list[int] | tuple[int, ...] | None = None
    """0-based layers; None = the paper's, at the same share of other depths."""

    @abstractmethod
    def default_layers(self, num_layers: int) -> Sequence[int]:
        """The paper's layers, 0-based, scaled to a model's depth."""

    @abstractmethod
    def of_layer(self, context: Context, layer: int) -> Tensor:
        """The penalty of a 0-based layer."""

    def chosen_layers(self, num_layers: int) -> list[int]:
        """Return the 0-based layers that the penalty reads in a model with `num_layers` layers.

        Raises:
            FulldepthError: for no layer, duplicates, or a layer that the model does not have.
        """
        layers = list(self.default_layers(num_layers) if self.layers is None else self.layers)
        wrong = [layer for layer in layers if not 0 <= layer < num_layers]
        if wrong or not layers or len(set(layers)) < len(layers):
            raise FulldepthError(
                f"{self.name}.layers is {layers}; expected different 0-based layers, 0 to {num_layers - 1} of "
                f"{num_layers}."
            )
        return layers

    def check(self, anatomy: Anatomy) -> None:
        """Check that the model has the layers of the penalty."""
        self.chosen_layers(anatomy.num_layers)

    def value(self, context: Context) -> Tensor:
        """Sum over the layers of the penalty, on the device of the last one.

        Raises:
            FulldepthError: for a batch whose sequences are joined to one row, because norms and frequencies would be
                those of the whole row.
        """
        if "cu_seq_lens_q" in context.batch:  # of padding-free collators
            raise joined_sequences(self.name)
        layers = self.chosen_layers(len(context.states["attention_output"]))
        values = [self.of_layer(context, layer) for layer in layers]
        return torch.stack([value.to(values[-1].device) for value in values]).sum()


def joined_sequences(terms: str) -> FulldepthError:
    """Return the refusal of a batch whose sequences are joined to one row, for the named terms."""
    return FulldepthError(
        f"The penalty {terms} needs each sequence in a row of its own, and the collator joins the sequences of a batch "
        "to one row (padding_free, packing, flattening). Turn that off, or leave the penalty out."
    )


def step_counts(
    task: Task, batches: Sequence[Mapping[str, Any]], device: Any, *, gather: bool = True
) -> dict[str, Tensor]:
    """Count `sequences`, `tokens` and `targets` of an optimiser step, as far as they are known.

    Args:
        task: the model's task.
        batches: the step's micro-batches in this process.
        device: device of the result.
        gather: take means over processes, because data parallelism averages gradients.
    """
    totals: dict[str, Tensor] = {}
    for name in ("sequences", "tokens", "targets"):
        counts: list[Any] = [getattr(task, name)(batch) for batch in batches]
        if counts and all(count is not None for count in counts):
            totals[name] = torch.as_tensor(sum(counts), device=device)
    if totals and gather and (world := current().world) > 1:
        stacked = torch.stack(list(totals.values()))
        add_up(stacked)
        return dict(zip(totals, stacked / world, strict=True))
    return totals


def nodes_of(loss: Tensor) -> Iterator[Any]:
    """Yield the nodes of a loss's graph, each once, from the loss backwards."""
    seen = set[Any]()
    waiting: list[Any] = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(before for before, _ in node.next_functions)


def _share(count: Tensor, total: Tensor) -> Tensor:
    """Return `count / total`; 0 if both are 0."""
    return torch.nan_to_num(count / total.to(count.device))


recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
"""Call a function so that its backward pass computes it again and only references to the arguments are stored."""


def statistics_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype for sums and norms of these tensors: float64 if one of them is float64, else float32."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def block_size(size: int, device: torch.device) -> int:
    """Return the number of items of `size` elements each in a block that suits the device."""
    room = CPU_BLOCK if device.type == "cpu" else ACCELERATOR_BLOCK
    return max(1, room // max(1, size))


def check_states(hidden_states: Sequence[Tensor], mask: Tensor | None, least: int = 1, dimensions: int = 0) -> None:
    """Raise an error for too few states, states that are not `[..., D]` of one shape, or a mask of another shape.

    Args:
        hidden_states: states to check.
        mask: mask to check.
        least: minimum number of states.
        dimensions: number of dimensions of each state (0: any number from 2).
    """
    if len(hidden_states) < least:
        raise FulldepthError(f"expected at least {least} hidden states, one per layer, got {len(hidden_states)}")
    shape = hidden_states[-1].shape
    fits = len(shape) == dimensions if dimensions else len(shape) >= 2
    for index, state in enumerate(hidden_states):
        if not fits or not state.is_floating_point() or state.shape != shape:
            raise FulldepthError(
                f"hidden states must be floating-point tensors [B, T, D] of one shape: number {index} is {state.dtype} "
                f"{tuple(state.shape)}, the last one {tuple(shape)}"
            )
    if mask is not None and (mask.is_floating_point() or mask.shape != shape[:-1]):
        raise FulldepthError(
            f"mask must be boolean (or 0 and 1) of shape {tuple(shape[:-1])}, got {mask.dtype} {tuple(mask.shape)}"
        )

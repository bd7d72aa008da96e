"""`Term`: the interface of a penalty. It owns its options, the sites that it reads, its loss and its cost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import pydantic
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from fulldepth.errors import FulldepthError
from fulldepth.execution import Activations
from fulldepth.hf import Classifier
from fulldepth.losses.task import Task

Amount = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]
"""A weight, or another finite number of at least 0."""


@dataclass(frozen=True)
class Portion:
    """How much of an optimiser step one call covers, so that accumulated and distributed steps add up exactly.

    A term that is a mean over `n` tokens enters with `n / tokens` (or, if it is a mean over targets, `n / targets`),
    any other with `share`; so do means over tokens where `tokens` is None, as for images, which have as many positions
    each. The default is a step that consists of this call alone.
    """

    share: Tensor | float = 1.0
    """This call's sequences, divided by those of the step: over all processes, divided by the number of processes."""
    tokens: Tensor | None = None
    """Tokens in the step that penalties count, over all processes, divided by the number of processes."""
    targets: Tensor | None = None
    """Likewise, positions that have a label."""


@dataclass(frozen=True)
class Context:
    """What a term may read of one forward pass."""

    states: Activations
    """Hidden states by site: `states["residual"]` is `[h_0, ..., h_L]`, each `[B, T, D]`."""
    task: Task
    batch: Mapping[str, Any]
    """What the model was called with."""
    portion: Portion = field(default_factory=Portion)
    step: int = 1
    """1-based optimiser step."""
    energy_warmup: int = 0
    """Steps with CR's energy penalty."""
    classifier: Classifier | None = None
    """The model's head, for terms that ask for it (`needs_head`)."""

    @property
    def mask(self) -> Tensor | None:
        """`[B, T]` bool, True = counts; None if every token does."""
        return self.task.mask(self.batch)

    def token_share(self, device: torch.device) -> Tensor | float:
        """Factor of a mean over this batch's tokens."""
        count = self.task.tokens(self.batch)
        if self.portion.tokens is None or count is None:
            return self.portion.share
        return _share(torch.as_tensor(count, device=device), self.portion.tokens)

    def target_share(self) -> Tensor | float:
        """Factor of a mean over this batch's targets."""
        count = self.task.targets(self.batch)
        return 1.0 if self.portion.targets is None or count is None else _share(count, self.portion.targets)


class Term(pydantic.BaseModel, ABC):
    """Base of the penalties: the fields are its options, checked by their types. A subclass with `value` is complete.

    To add a penalty, subclass this in a file of its own, and name the class in `terms.TERMS`.
    """

    model_config = pydantic.ConfigDict(frozen=True, strict=True, extra="forbid")

    name: ClassVar[str]
    """Keyword of `Objective`, and key under `objective` in a recipe."""
    sites: ClassVar[tuple[str, ...]]
    """Names out of `SITES` whose states it reads."""
    unit: ClassVar[str] = "1"
    per_batch: ClassVar[bool] = False
    """Whether the value is a function of the sequences of a whole batch, and not a mean over tokens."""
    needs_head: ClassVar[bool] = False
    """Whether it reads `Context.classifier`."""

    weight: Amount = 1.0

    def check(self, num_layers: int) -> None:
        """Refuse options that do not fit a model of so many layers, by a `FulldepthError`."""

    @abstractmethod
    def value(self, context: Context) -> Tensor:
        """The penalty of one batch, a differentiable scalar, without its weight."""

    def apply(self, loss: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Put the term into the loss.

        Args:
            loss: of the terms before it; the model's own for the first one.
            context: of the forward pass.

        Returns:
            `loss + weight * portion * value`, and the detached value; None where the term is not active in this step.
        """
        value = self.value(context)
        factor = context.portion.share if self.per_batch else context.token_share(value.device)
        return loss + self.weight * factor * value.to(loss.device), value.detach()

    def flops(self, config: PreTrainedConfig, sequence_length: int) -> float:
        """Floating-point operations of one token that the term adds to a training step: its matrix products.

        Args:
            config: of the text model.
            sequence_length: T.
        """
        return 0.0


class LayerTerm(Term):
    """A penalty of the attention sub-layers of some layers: the sum of `of_layer` over them."""

    per_batch = True
    weight: Amount = 0.01
    layers: list[int] | tuple[int, ...] | None = None
    """0-based; None = the paper's, at the same share of other depths."""

    @abstractmethod
    def default_layers(self, num_layers: int) -> Sequence[int]:
        """The paper's layers, 0-based, scaled to a model's depth."""

    @abstractmethod
    def of_layer(self, context: Context, layer: int) -> Tensor:
        """The penalty of a 0-based layer."""

    def chosen_layers(self, num_layers: int) -> list[int]:
        """The 0-based layers that the penalty reads in a model of so many.

        Raises:
            FulldepthError: for none, the same twice, or one that the model does not have.
        """
        chosen = list(self.default_layers(num_layers) if self.layers is None else self.layers)
        wrong = [layer for layer in chosen if not 0 <= layer < num_layers]
        if wrong or not chosen or len(set(chosen)) < len(chosen):
            raise FulldepthError(
                f"{self.name}.layers is {chosen}; expected different 0-based layers, 0 to {num_layers - 1} of "
                f"{num_layers}."
            )
        return chosen

    def check(self, num_layers: int) -> None:
        """Refuse layers that the model does not have."""
        self.chosen_layers(num_layers)

    def value(self, context: Context) -> Tensor:
        """Sum over the chosen layers, on the device of the last one."""
        layers = self.chosen_layers(len(context.states["attention_output"]))
        values = [self.of_layer(context, layer) for layer in layers]
        return torch.stack([value.to(values[-1].device) for value in values]).sum()


def _share(count: Tensor, total: Tensor) -> Tensor:
    """`count / total`; 0 of nothing."""
    return torch.nan_to_num(count / total.to(count.device))

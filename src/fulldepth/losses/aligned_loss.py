"""Losses of all layers: aligned training with one shared head (Representation progression and aligned training, Eq. 5),
and multi-exit training with a head for each layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import pydantic
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fulldepth import hf
from fulldepth.core.distributed import current
from fulldepth.core.errors import FulldepthError, unknown
from fulldepth.core.targets import IGNORE
from fulldepth.execution import find_anatomy
from fulldepth.hf import Anatomy, Classifier, exit_weights, uses_fsdp
from fulldepth.losses.task import Detection
from fulldepth.losses.term import Context, Term, check_states, statistics_dtype

CHUNK = 1024
"""Number of positions whose logits exist at a time."""
Reader = Callable[[Tensor], Tensor]
"""Final norm and output projection, `[N, D] -> [N, V]`."""


class LayerwiseLoss(Term):
    """Base class of terms that replace the last layer's cross-entropy by a weighted sum over all layers."""

    sites = ("residual",)
    unit = "nats"
    needs_head = True
    weights: Literal["linear", "uniform", "sum"] | list[float] | tuple[float, ...] = "linear"
    """Weights of layers: linear (2l / (L (L+1))), uniform (1/L), sum (1, as DETR's auxiliary losses), or L numbers."""
    schedule: Literal["alternate", "always"] = "alternate"
    """Steps on which it replaces the loss: alternate (the even ones, for training from scratch, App. B.3) or always."""

    def check(self, anatomy: Anatomy) -> None:
        """Check that there is one weight per layer."""
        layer_weights(self.weights, anatomy.num_layers)

    def apply(self, loss: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Replace the loss on the steps of the schedule; return it unchanged on the others."""
        if not self.active(context.step):
            return loss, None
        value = self.value(context)
        return self.weight * self.factor(context, value.device) * value, value.detach()

    def factor(self, context: Context, device: torch.device) -> Tensor | float:
        """The batch's share of the step's targets."""
        return context.portion.of_targets(context.task, context.batch)

    def active(self, step: int) -> bool:
        """Return True if the loss of this 1-based optimiser step is replaced."""
        return self.schedule == "always" or step % 2 == 0

    def value(self, context: Context) -> Tensor:
        """Weighted loss of layers 1..L, each read by its exit head if it has one.

        Raises:
            FulldepthError: if the batch has no labels.
        """
        assert context.classifier is not None
        return self.of_layers(context, context.classifier.after_forward())

    def of_layers(self, context: Context, classifier: Classifier, positions: float = 1.0) -> Tensor:
        """Weighted loss of layers 1..L, each read by the head that the classifier has for it.

        Args:
            context: inputs of the term.
            classifier: the head, for use between the forward and the backward pass.
            positions: share of positions as in `aligned_loss`, for a classifier with one head.
        """
        states = context.states["residual"][1:]
        losses = context.task.layer_losses(context.batch, states, classifier)
        if losses is not None:
            pairs = zip(layer_weights(self.weights, len(losses)), losses, strict=True)
            return torch.stack([share * loss for share, loss in pairs]).sum()
        labels = context.task.labels(context.batch)
        if labels is None:
            raise FulldepthError(f"The {self.name} loss needs `labels` in the batch.")
        heads = [classifier.at(layer) for layer in range(1, len(states) + 1)]
        if not classifier.per_token:
            return self._of_samples(context, states, heads, labels)
        readers = [head.tokens for head in heads] if classifier.exits else classifier.tokens
        return aligned_loss(states, readers, labels, weights=self.weights, positions=positions)

    def _of_samples(
        self, context: Context, states: Sequence[Tensor], heads: Sequence[Classifier], labels: Tensor
    ) -> Tensor:
        """Weighted loss of layers 1..L of a classifier of sequences or images, from the states that its head reads."""
        dtype = statistics_dtype(*states)
        device = states[-1].device
        total = torch.zeros((), dtype=dtype, device=device)
        for share, state, head in zip(layer_weights(self.weights, len(states)), states, heads, strict=True):
            if not share:
                continue
            mask = head.sample_mask(context.batch, context.task.counted(context.batch, state))
            logits = head.sequences(state, mask)  # [B, C]
            if labels.is_floating_point() or labels.shape != logits.shape[:1] or logits.shape[1] < 2:
                raise FulldepthError(
                    f"Layers are trained as classifiers of one class out of several: expected integer labels "
                    f"[{len(logits)}] and at least two classes, got {labels.dtype} {tuple(labels.shape)} and "
                    f"{logits.shape[1]} classes."
                )
            targets = labels.to(logits.device)
            loss = F.cross_entropy(logits.to(dtype), targets, reduction="sum", ignore_index=IGNORE)
            total = total + share * (loss / (targets != IGNORE).sum().clamp(min=1)).to(device)
        return total


class Aligned(LayerwiseLoss):
    """Cross-entropy of every layer through the shared head, in place of the last layer's (Eq. 5)."""

    name = "aligned"
    positions: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    """Share of the positions that each layer predicts, drawn for each layer and batch. The gradient is an unbiased
    estimate, and costs less if the vocabulary is large. For models that predict at every position."""

    def value(self, context: Context) -> Tensor:
        """Weighted loss of layers 1..L through the model's head.

        Raises:
            FulldepthError: if the batch has no labels, or `positions` is below 1 and the model does not predict a token
                at every position.
        """
        assert context.classifier is not None
        classifier = context.classifier.after_forward().shared()
        if self.positions < 1 and (not classifier.per_token or isinstance(context.task, Detection)):
            raise FulldepthError(
                f"aligned.positions is {self.positions:g}; below 1 it is for models that predict a token at every "
                "position."
            )
        return self.of_layers(context, classifier, self.positions)


class MultiExit(LayerwiseLoss):
    """Cross-entropy of every layer through its exit head, in place of the last layer's (the baseline of Sec. 3.1).

    The last layer keeps the model's head. `DepthTrainer` adds the exit heads to the model; in your own loop, call
    `add_exit_heads` before the optimiser is made.
    """

    name = "multi_exit"
    needs_exit_heads = True

    def apply(self, loss: Tensor, context: Context) -> tuple[Tensor, Tensor | None]:
        """Replace the loss on the steps of the schedule.

        Under DDP, exit heads that a step does not use get zero gradients, because DDP waits for a gradient of every
        weight; `Objective.drop_idle_gradients` removes them.
        """
        total, value = super().apply(loss, context)
        assert context.classifier is not None
        model = context.classifier.anatomy.model
        if value is None and current().world > 1 and not uses_fsdp(model):
            for weight in exit_weights(model):
                total = total + 0.0 * weight.sum().to(total.device, total.dtype)
        return total, value


def add_exit_heads(model: nn.Module, seed: int = 0) -> None:
    """Give each of layers 1..L-1 a linear head of its own; call it before the optimiser is made.

    An exit head is the model's head with another matrix `[C, D]`, without bias, in its last linear layer; the final
    norm, the pooling and the pooler before it are shared. `(L - 1) C D` parameters are added (Table 1); in a language
    model C is the size of the vocabulary. They are part of the model's `parameters()` and `state_dict()`.
    `save_pretrained` leaves them out, so that the checkpoint is an ordinary one; `DepthTrainer` and
    `fulldepth.hf.save_exit_heads` write them beside it.

    Args:
        model: a language model or a classifier of texts or images of transformers, with or without wrappers.
        seed: seed of the heads' weights.

    Raises:
        FulldepthError: if the model has no head, its head does not end in a linear layer, or it has exit heads.

    Source: "Representation progression and aligned training", Sec. 3.1 and Table 1 (multiple classifiers).
    """
    hf.add_exit_heads(find_anatomy(model), seed)  # type: ignore[arg-type]


def aligned_loss(
    hidden_states: Sequence[Tensor],
    head: Reader | Sequence[Reader],
    labels: Tensor,
    weights: str | Sequence[float] = "linear",
    ignore_index: int = IGNORE,
    chunk: int = CHUNK,
    positions: float = 1.0,
) -> Tensor:
    r"""Weighted cross-entropy of every layer read by one head, in nats.

    .. math:: L_{aligned} = \sum_{l=1}^{L} \lambda_l \, \mathrm{mean}_{n: y_n \ne ignored}
        \mathrm{CE}(W h^{(l)}_n, y_n), \quad \lambda_l = \frac{2 l}{L (L + 1)}

    Logits are computed for about `chunk` positions of one layer at a time and recomputed in the backward pass. With
    `positions` below 1 each layer reads `ceil(positions * n)` of the n labelled positions, drawn without replacement
    from torch's global generator: an unbiased estimate, of the gradients too.

    Args:
        hidden_states: `h_1, ..., h_L`, each `[B, T, D]` (or `[B, D]`: pooled), possibly on several devices. To skip
            positions, ignore their labels: slices of states would be copied.
        head: final norm and output projection, `[N, D] -> [N, V]`, or L of them, one for each layer. Their parameters
            receive gradients.
        labels: `[B, T]` (or `[B]`), aligned with the positions: for causal models the caller shifts them.
        weights: `"linear"` as above, `"uniform"` for `1/L`, `"sum"` for 1, or L numbers.
        ignore_index: label of ignored positions. Their states have no effect, even if they are NaN.
        chunk: positions at a time, at least 1.
        positions: share of the labelled positions that each layer reads, above 0 and at most 1; below 1 for a single
            head.

    Returns:
        Scalar, unit nats, float32 (float64 for float64 states), on the device of the last state. If all positions are
        ignored, 0 with zero gradients.

    Raises:
        FulldepthError: for an empty list of states, mismatched shapes, invalid labels or weights, or a head whose
            output has another shape.

    Source: "Representation progression and aligned training", Eq. 5; uniform weights: App. B.3.
    """
    check_states(hidden_states, None)
    last = hidden_states[-1]
    if labels.shape != last.shape[:-1] or labels.is_floating_point():
        raise FulldepthError(
            f"labels must be integers of shape {tuple(last.shape[:-1])}, one per position of the hidden states "
            f"{tuple(last.shape)}, got {labels.dtype} {tuple(labels.shape)}"
        )
    if chunk < 1:
        raise FulldepthError(f"chunk must be at least 1 position, got {chunk}")
    if not 0 < positions <= 1:
        raise FulldepthError(f"positions must be above 0 and at most 1, got {positions}")
    heads = list(head) if isinstance(head, Sequence) else [head] * len(hidden_states)
    if len(heads) != len(hidden_states) or (positions < 1 and isinstance(head, Sequence)):
        raise FulldepthError(
            f"expected one head, or one for each of {len(hidden_states)} layers with positions=1, got {len(heads)} "
            f"with positions={positions:g}"
        )
    shares = layer_weights(weights, len(hidden_states))
    device = last.device
    dtype = statistics_dtype(*hidden_states)
    labels = labels.to(device).flatten()
    labelled = (labels != ignore_index).nonzero()[:, 0]
    number = math.ceil(positions * len(labelled))
    size = math.ceil(chunk / positions)  # of a chunk of positions, of which `chunk` are read
    all_chunks = _labelled_chunks(labels, ignore_index, size)

    total = torch.zeros((), dtype=dtype, device=device)
    weighted = [layer for layer in zip(shares, hidden_states, heads, strict=True) if layer[0]]
    if not number:
        return sum((state[:0].sum(dtype=dtype).to(device) for _, state, _ in weighted), total)
    for share, state, layer_head in weighted:
        chunks = all_chunks
        if number < len(labelled):
            drawn = labelled[torch.randperm(len(labelled), device=device)[:number]]
            drawn_labels = torch.full_like(labels, ignore_index).index_copy(0, drawn, labels[drawn])
            chunks = _labelled_chunks(drawn_labels, ignore_index, size)
        for rows, (index, targets) in zip(state.flatten(0, -2).split(size), chunks, strict=True):
            if len(targets):
                summed = checkpoint(_cross_entropy, layer_head, rows, index, targets, dtype, use_reentrant=False)
                total = total + share * summed.to(device)
    return total / number


def _labelled_chunks(labels: Tensor, ignore_index: int, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return for each chunk of positions the indices of those with a label, and their labels."""
    indices = ((part, (part != ignore_index).nonzero()[:, 0]) for part in labels.split(size))
    return [(index, part[index]) for part, index in indices]


def layer_weights(weights: str | Sequence[float], num_layers: int) -> list[float]:
    """Return the weights of layers 1..L, by name ("linear": `2l / (L(L+1))`, "uniform": `1/L`, "sum": 1) or as given.

    Raises:
        FulldepthError: for an unknown name, a wrong number of weights, or a negative or infinite weight.

    Source: "Representation progression and aligned training", Eq. 5 and App. B.3.
    """
    if isinstance(weights, str):
        named = {
            "linear": [2 * layer / (num_layers * (num_layers + 1)) for layer in range(1, num_layers + 1)],
            "uniform": [1 / num_layers] * num_layers,
            "sum": [1.0] * num_layers,
        }
        if weights not in named:
            raise unknown("weighting of layers", weights, named)
        return named[weights]
    numbers = isinstance(weights, Sequence) and all(isinstance(weight, int | float) for weight in weights)
    if not numbers or len(weights) != num_layers or not all(0 <= weight < math.inf for weight in weights):
        raise FulldepthError(f"expected {num_layers} finite weights of at least 0, one per layer, got {weights}")
    return [float(weight) for weight in weights]


def _cross_entropy(head: Reader, rows: Tensor, index: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of the cross-entropies at the rows `index` of one chunk `[N, D]`."""
    logits = head(rows.to(targets.device)[index])
    if logits.ndim != 2 or len(logits) != len(targets):
        raise FulldepthError(f"the head must return [N, V] for N = {len(targets)} states, got {tuple(logits.shape)}")
    return F.cross_entropy(logits.to(dtype), targets.to(logits.device), reduction="sum")

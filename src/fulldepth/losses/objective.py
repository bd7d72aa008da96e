"""`Objective`: cross-entropy and any subset of the penalties, on any model whose anatomy is known."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from fulldepth.capture import Tape, capture, find_anatomy
from fulldepth.distributed import sum_over_processes
from fulldepth.errors import FulldepthError
from fulldepth.hf import Anatomy, Classifier
from fulldepth.losses.aligned_loss import aligned_loss
from fulldepth.losses.coherence_penalty import coherence_penalty, refuse_padding
from fulldepth.losses.counts import IGNORE, aligned_labels, token_count, token_mask
from fulldepth.losses.displacement import Displacements
from fulldepth.losses.jump_penalty import jump_penalty
from fulldepth.losses.orthogonality_penalty import orthogonality_penalty
from fulldepth.losses.similarity_penalty import similarity_penalty
from fulldepth.losses.terms import (
    Aligned,
    Coherence,
    Jump,
    Orthogonality,
    Similarity,
    Term,
    coherence_layers,
    make_term,
    orthogonality_layers,
)


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


class Objective:
    """Cross-entropy plus weighted penalties, with activations from `capture`.

        L = L_ce + sum_i weight_i * penalty_i

    `aligned` replaces `L_ce` on the steps on which it is active: `L = weight * L_aligned + ...`. Energy (CR's warm-up)
    is on while the 1-based optimiser step is at most `energy_warmup`.

    In a hand-written loop::

        objective = Objective(jump=1.0).attach(model)
        loss, parts = objective(model(**batch), batch)
        objective.detach()

    In a Trainer: `DepthTrainer(..., objective=objective)`.

    Args:
        jump: weight, or options of `terms.Jump` (`weight`, `alpha`); None = off. So are the others:
        coherence: `weight`, `layers`, `target`, `scope`.
        orthogonality: `weight`, `layers`, `form`.
        aligned: `weight`, `weights`, `schedule`.
        similarity: `weight`, `weights`.
        energy_warmup: optimiser steps with CR's energy penalty.

    Raises:
        FulldepthError: for an unknown term or option.
    """

    def __init__(
        self,
        *,
        jump: float | Mapping[str, Any] | None = None,
        coherence: float | Mapping[str, Any] | None = None,
        orthogonality: float | Mapping[str, Any] | None = None,
        aligned: float | Mapping[str, Any] | None = None,
        similarity: float | Mapping[str, Any] | None = None,
        energy_warmup: int = 800,
    ) -> None:
        given = {
            "jump": jump,
            "coherence": coherence,
            "orthogonality": orthogonality,
            "aligned": aligned,
            "similarity": similarity,
        }
        self.terms: dict[str, Term] = {n: make_term(n, value) for n, value in given.items() if value is not None}
        self.energy_warmup = energy_warmup
        self.step = 1
        """1-based optimiser step that the next call belongs to."""
        self.anatomy: Anatomy | None = None
        self._open = ExitStack()
        self._tape: Tape | None = None
        self._classifier: Classifier | None = None
        self._counting = False

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Self:
        """Start to watch a model; do so before its first compiled pass, and before FSDP2 shards it.

        Args:
            model: of transformers; a list of blocks is found in any family, and of a model for images and text the
                text model is watched. Adapters of PEFT that change the layers, `torch.compile` and DDP are looked
                through.
            optimizer: counts the steps; without one, every call in training is a step (for gradient accumulation
                give the optimiser, or set `step` yourself).

        Raises:
            FulldepthError: if it is attached already, or the model cannot do what a term needs.
        """
        if self._tape is not None:
            raise FulldepthError("This objective is attached already; call detach() first.")
        self.anatomy = find_anatomy(model)  # type: ignore[arg-type]
        self._check()
        sites = sorted({site for term in self.terms.values() for site in term.sites})
        self._tape = self._open.enter_context(capture(self.anatomy, sites, grad=True))
        self._counting = optimizer is None
        if optimizer is not None:
            self._open.enter_context(_Counter(self, optimizer))
        return self

    def detach(self) -> None:
        """Stop watching: every hook is gone."""
        self._open.close()
        self._tape = self._classifier = None

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs beside the model and the optimiser."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where `state_dict` was taken."""
        self.step = int(state["step"])

    def __call__(
        self, outputs: Any, batch: Mapping[str, Any], portion: Portion | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss to call `backward` on, and its parts.

        Args:
            outputs: of the model, called with `labels`; or its loss.
            batch: what the model was called with; `attention_mask` says which tokens count, `labels` are read by
                `aligned`.
            portion: for accumulated or distributed steps; `DepthTrainer` fills it in.

        Returns:
            The loss, and `{"ce": ..., term: ...}`: detached, unweighted, in the order of the terms.

        Raises:
            FulldepthError: without `attach`, without labels, or if a term cannot be computed on this batch.
        """
        if self._tape is None or self.anatomy is None:
            raise FulldepthError("The objective watches no model; call attach(model) before the forward pass.")
        base, portion = _base_loss(outputs), portion or Portion()
        try:
            loss, parts = self._combine(base, batch, portion)
        finally:
            self._tape.clear()
        if self._counting and torch.is_grad_enabled():
            self.step += 1
        return loss, parts

    def _combine(self, loss: Tensor, batch: Mapping[str, Any], portion: Portion) -> tuple[Tensor, dict[str, Tensor]]:
        assert self._tape is not None
        parts: dict[str, Tensor] = {"ce": loss.detach()}
        if isinstance(aligned := self.terms.get("aligned"), Aligned) and self._aligned_now(aligned):
            value, factor = self._aligned(aligned, batch, portion)
            parts["aligned"] = value.detach()
            loss = aligned.weight * factor * value
        for term in self.terms.values():
            if isinstance(term, Jump):
                loss, parts["jump"] = self._with_jump(loss, term, batch, portion)
            elif not isinstance(term, Aligned):
                value, factor = self._penalty(term, batch, portion)
                loss = loss + term.weight * factor * value.to(loss.device)
                parts[term.name] = value.detach()
        return loss, parts

    def _with_jump(self, loss: Tensor, term: Jump, batch: Mapping[str, Any], portion: Portion) -> tuple[Tensor, Tensor]:
        """The loss with the displacement penalty, and the penalty's value."""
        assert self._tape is not None
        states, mask = self._tape["residual"], token_mask(batch)
        factor = term.weight * _of_tokens(batch, portion, states[-1].device)
        if self._tape.holds_the_stream:
            displacements = Displacements(states, term.alpha, mask)
            return displacements.added_to(loss, factor), displacements.value
        value = jump_penalty(states, term.alpha, mask)
        return loss + factor * value.to(loss.device), value.detach()

    def _penalty(self, term: Term, batch: Mapping[str, Any], portion: Portion) -> tuple[Tensor, Tensor | float]:
        """The value of one of the other penalties, and the factor that its portion of the step gives it."""
        assert self._tape is not None
        mask = token_mask(batch)
        if isinstance(term, Similarity):
            states = self._tape["residual"][1:]
            value = similarity_penalty(states, term.weights, mask=mask)
            return value, _of_tokens(batch, portion, value.device)
        if isinstance(term, Coherence):
            return self._coherence(term, mask), portion.share
        assert isinstance(term, Orthogonality)
        states = self._tape["attention_output"]
        chosen = [states[layer] for layer in orthogonality_layers(term, len(states))]
        values = [orthogonality_penalty(state, form=term.form, mask=mask).to(chosen[-1].device) for state in chosen]
        return torch.stack(values).sum(), portion.share

    def _coherence(self, term: Coherence, mask: Tensor | None) -> Tensor:
        assert self._tape is not None
        refuse_padding(mask)
        inputs, outputs = self._tape["attention_input"], self._tape["attention_output"]
        values = [
            coherence_penalty(
                inputs[layer],
                outputs[layer],
                layer,
                len(inputs),
                target=term.target,
                energy=self.step <= self.energy_warmup,
                reduce=sum_over_processes if term.scope == "global" else None,
            )
            for layer in coherence_layers(term, len(inputs))
        ]
        return torch.stack([value.to(values[-1].device) for value in values]).sum()

    def _aligned_now(self, term: Aligned) -> bool:
        return term.schedule == "always" or self.step % 2 == 0

    def _aligned(self, term: Aligned, batch: Mapping[str, Any], portion: Portion) -> tuple[Tensor, Tensor | float]:
        assert self._tape is not None
        assert self._classifier is not None
        assert self.anatomy is not None
        labels = aligned_labels(batch, shifts=self.anatomy.task == "causal-lm")
        if labels is None:
            raise FulldepthError("The aligned loss needs `labels` in the batch.")
        states, classifier = self._tape["residual"][1:], self._classifier.after_forward()
        factor = 1.0 if portion.targets is None else _part((labels != IGNORE).sum(), portion.targets)
        if classifier.per_token:
            return aligned_loss(states, classifier.tokens, labels, weights=term.weights), factor
        mask = batch.get("attention_mask")
        mask = torch.ones(states[-1].shape[:2], device=states[-1].device) if mask is None else mask
        pooled = [classifier.pool(state, mask) for state in states]
        return aligned_loss(pooled, classifier.pooled, labels, weights=term.weights), factor

    def _check(self) -> None:
        """Refuse at once what would fail in the first step."""
        assert self.anatomy is not None
        layers = self.anatomy.num_layers
        for term in self.terms.values():
            if isinstance(term, Coherence):
                coherence_layers(term, layers)
            elif isinstance(term, Orthogonality):
                orthogonality_layers(term, layers)
            elif isinstance(term, Aligned):
                self._classifier = Classifier(self.anatomy)


class _Counter:
    """Counts an optimiser's steps into an objective while it is attached."""

    def __init__(self, objective: Objective, optimizer: torch.optim.Optimizer) -> None:
        self.objective, self.optimizer = objective, optimizer

    def __enter__(self) -> None:
        def count(*_: Any) -> None:
            self.objective.step += 1

        self.handle = self.optimizer.register_step_post_hook(count)

    def __exit__(self, *_: object) -> None:
        self.handle.remove()


def _base_loss(outputs: Any) -> Tensor:
    if isinstance(outputs, Tensor):
        loss: Any = outputs
    else:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if not isinstance(loss, Tensor) or loss.ndim:
        raise FulldepthError("The model gave no loss; call it with `labels`, or pass the loss itself as a scalar.")
    return loss


def _of_tokens(batch: Mapping[str, Any], portion: Portion, device: torch.device) -> Tensor | float:
    """What a mean over a batch's tokens is multiplied by."""
    count = token_count(batch)
    if portion.tokens is None or count is None:
        return portion.share
    return _part(torch.as_tensor(count, device=device), portion.tokens)


def _part(count: Tensor, total: Tensor) -> Tensor:
    """`count / total`; 0 of nothing."""
    return torch.nan_to_num(count / total.to(count.device))

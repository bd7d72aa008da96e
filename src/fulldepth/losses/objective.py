"""`Objective`: cross-entropy plus any subset of the penalties, for any model with a known anatomy; their registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from inspect import signature
from typing import Any, Self

import torch
from accelerate.state import GradientState
from pydantic import ValidationError
from torch import Tensor, nn

from fulldepth.core.errors import FulldepthError, unknown
from fulldepth.execution import Activations, capture, find_anatomy
from fulldepth.hf import (
    Anatomy,
    Classifier,
    device_of,
    exit_weights,
    has_exit_heads,
    logits_of,
    text_config,
)
from fulldepth.losses.aligned_loss import Aligned, LayerwiseLoss, MultiExit
from fulldepth.losses.coherence_penalty import CoherencePenalty
from fulldepth.losses.distillation import Distillation
from fulldepth.losses.jump_penalty import JumpPenalty
from fulldepth.losses.orthogonality_penalty import OrthogonalityPenalty
from fulldepth.losses.similarity_penalty import SimilarityPenalty
from fulldepth.losses.task import Task
from fulldepth.losses.term import Context, Portion, Term, step_counts

TERMS: dict[str, type[Term]] = {
    term.name: term
    for term in (
        Aligned,  # first, because it replaces the cross-entropy
        MultiExit,  # so does this one
        Distillation,  # before the penalties, because it scales the loss so far
        JumpPenalty,
        CoherencePenalty,
        OrthogonalityPenalty,
        SimilarityPenalty,
    )
}
"""Terms by name, in the order in which an objective applies them."""
METHODS: dict[str, dict[str, Any]] = {
    "standard": {},
    "baseline": {},
    "jreg": {"jump": {"weight": 1.0, "alpha": 1.0}},
    "cr": {"coherence": {"weight": 0.01}, "orthogonality": {"weight": 0.01}},
    "aligned": {"aligned": {"weight": 1.0, "weights": "linear", "schedule": "alternate"}},
    "multi-exit": {"multi_exit": {"weight": 1.0, "weights": "linear", "schedule": "alternate"}},
    "frozen-features": {"multi_exit": {"weight": 1.0, "weights": "sum", "schedule": "always"}},
    "cos-regularised": {"similarity": {"weight": 1.0, "weights": "linear"}},
    "similarity": {"similarity": {"weight": 1.0, "weights": "linear"}},
}
"""Method -> terms with the papers' weights (JREG Eq. 5; CR Sec. 3.3; aligned training Eq. 5 and App. B.3). `baseline`
is `standard`, and `cos-regularised` is `similarity`. In fine-tuning from a checkpoint, `schedule` is `always`. For
`frozen-features` (App. B.4) `fulldepth train` also freezes the model; the losses of the heads are then independent."""


def make_term(name: str, setting: float | Mapping[str, Any]) -> Term:
    """Make a term from its weight, or from a mapping of its options.

    Raises:
        FulldepthError: for an unknown term or option, or an invalid value.
    """
    if name not in TERMS:
        raise unknown("term", name, TERMS)
    options = dict(setting) if isinstance(setting, Mapping) else {"weight": setting}
    fields = TERMS[name].model_fields
    for option in options:
        if option not in fields:
            raise unknown(f"option of {name}", option, fields)
    try:
        return TERMS[name](**options)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        given = "" if problem["type"] == "missing" else f" is {problem['input']!r}"
        raise FulldepthError(f"{name}.{problem['loc'][0]}{given}: {problem['msg'].replace('Input', 'it')}.") from error


def per_batch_terms(names: Iterable[str]) -> list[str]:
    """Return the names of terms that are functions of a whole batch (`Term.per_batch`).

    Args:
        names: names of terms, keys of `TERMS`.

    Returns:
        Those of a whole batch, in the same order.
    """
    return [name for name in names if TERMS[name].per_batch]


class Objective:
    """Cross-entropy plus weighted penalties, with activations from `capture`.

        L = L_ce + sum_i weight_i * penalty_i

    `aligned` and `multi_exit` replace `L_ce` on the steps on which they are active: `L = weight * L_aligned + ...`.
    `distillation` mixes it with the divergence from a teacher: `L = (1 - weight) * L_ce + weight * L_kl + ...`.
    Auxiliary losses of the model (balance of experts) are part of every step.
    CR's energy penalty is active while the 1-based optimiser step is at most `energy_warmup`.

    In a hand-written loop::

        objective = Objective(jump=1.0).attach(model)
        loss, parts = objective(model(**batch), batch)
        objective.detach()

    In a Trainer: `DepthTrainer(..., objective=objective)`; in the `compute_loss` of another one, with
    `num_items_in_batch`.

    Args:
        terms: name of a term in `TERMS` (`jump`, `coherence`, `orthogonality`, `aligned`, `multi_exit`, `similarity`,
            `distillation`) = its weight, or a mapping of its options (the fields of its class, such as `weight`); None
            = off.
        energy_warmup: optimiser steps with CR's energy penalty.

    Raises:
        FulldepthError: for an unknown term or option, or an invalid value.
    """

    def __init__(self, *, energy_warmup: int = 800, **terms: float | Mapping[str, Any] | None) -> None:
        built = {name: make_term(name, setting) for name, setting in terms.items() if setting is not None}
        self.terms: dict[str, Term] = {name: built[name] for name in TERMS if name in built}
        if "aligned" in built and "multi_exit" in built:
            raise FulldepthError("aligned and multi_exit both replace the cross-entropy; train with one of them.")
        if type(energy_warmup) is not int or energy_warmup < 0:
            raise FulldepthError(f"energy_warmup is {energy_warmup!r}. Expected a whole number of steps, at least 0.")
        self.energy_warmup = energy_warmup
        self.step = 1
        """1-based optimiser step that the next call belongs to."""
        self.anatomy: Anatomy | None = None
        self.task: Task | None = None
        self._open = ExitStack()
        self._activations: Activations | None = None
        self._classifier: Classifier | None = None
        self._logits: Tensor | None = None
        self._counting = False
        self._items: Tensor | float | None = None
        """`num_items_in_batch` of the model's last call, the step's number of targets."""
        self.factors: dict[str, Tensor | float] = {}
        """Part of the last loss -> its factor: the batch's share of the optimiser step."""

    @property
    def attached(self) -> bool:
        """True if the objective is attached to a model."""
        return self._activations is not None

    def attach(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        tower: str | None = None,
    ) -> Self:
        """Hook a model; call it before the model's first compiled pass, and before FSDP2 shards it.

        `with Objective(jump=1.0).attach(model) as objective:` detaches at the end.

        Args:
            model: a model of transformers, of any family with a list of blocks; for models of images and text, the
                text model is used. PEFT adapters that change the layers, `torch.compile` and DDP are unwrapped.
            optimizer: the optimiser whose steps are counted; without one, every call in training counts as a step,
                except while accelerate or a Trainer accumulates gradients (in other loops that accumulate, pass the
                optimiser or set `step`).
            tower: the part whose layers are penalised in a model with several: `encoder` or `decoder` (T5, BART),
                `text` or `vision` (CLIP).

        Raises:
            FulldepthError: if it is already attached, or the model lacks what a term needs.
        """
        if self.attached:
            raise FulldepthError("This objective is attached already; call detach() first.")
        self.anatomy = find_anatomy(model, tower)  # type: ignore[arg-type]
        if self.terms and any(getattr(module, "layerdrop", 0) for module in self.anatomy.body.modules()):
            raise FulldepthError(
                "The model leaves layers out at random in training (layerdrop), and the objective reads all of them. "
                "Set its layerdrop to 0."
            )
        self.task = Task.of(self.anatomy.model, tower)
        for term in self.terms.values():
            term.check(self.anatomy)
        if self.needs_exit_heads and not has_exit_heads(self.anatomy.model):
            raise FulldepthError(
                "The objective needs a head for every layer; call add_exit_heads(model) before making the optimiser."
            )
        pools = self.task.classifies and self.anatomy.head is not None
        if pools or any(term.needs_head for term in self.terms.values()):
            self._classifier = Classifier(self.anatomy)
        sites = sorted({site for term in self.terms.values() for site in term.sites})
        self._activations = self._open.enter_context(capture(self.anatomy, sites, grad=True))
        hook = self.anatomy.model.register_forward_pre_hook(self._take_items, with_kwargs=True)
        self._open.callback(hook.remove)
        if any(term.needs_logits for term in self.terms.values()):
            self._open.callback(self.anatomy.model.register_forward_hook(self._keep_logits).remove)
        self._counting = optimizer is None
        GradientState().sync_gradients = True  # a Trainer that was interrupted leaves it false
        if optimizer is not None:
            hook = optimizer.register_step_post_hook(lambda *_: setattr(self, "step", self.step + 1))
            self._open.callback(hook.remove)
        return self

    @torch.compiler.disable
    def _keep_logits(self, model: nn.Module, args: Any, output: Any) -> None:
        """Store the logits of a forward pass with gradients."""
        if torch.is_grad_enabled():
            self._logits = logits_of(output)

    @torch.compiler.disable
    def _take_items(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Remove `num_items_in_batch` from the model's arguments, so that its loss is the batch's mean in every class.

        The objective divides by it.
        """
        if not torch.is_grad_enabled():
            return None
        self._items = kwargs.get("num_items_in_batch")
        return args, {name: value for name, value in kwargs.items() if name != "num_items_in_batch"}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def detach(self) -> None:
        """Remove all hooks."""
        self._open.close()
        self._activations = self._classifier = None

    def state_dict(self) -> dict[str, int]:
        """Return the state to save with the model and the optimiser, for resuming."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the result of `state_dict`."""
        self.step = int(state["step"])

    def __call__(
        self,
        outputs: Any,
        batch: Mapping[str, Any],
        portion: Portion | None = None,
        *,
        num_items_in_batch: Tensor | float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss to call `backward` on, and its parts.

        Args:
            outputs: output of the model, called with `labels`; or its loss.
            batch: inputs of the model; `attention_mask` marks the tokens that count, `aligned` reads `labels`.
            portion: this call's part of an accumulated or distributed step (see `portions`); `DepthTrainer` sets it.
            num_items_in_batch: the step's number of targets, as `compute_loss` of transformers' Trainer receives it.
                Loss and penalties are scaled by the batch's share of it, which is exact for penalties if all sequences
                have one length (else use `portions`). It may be passed to the model instead: while an objective is
                attached, the loss in the model's output is the mean over the batch.

        Returns (if gradients are disabled, the model's own loss without penalties):
            The loss, and `{"ce": ..., term: ...}`: detached, unweighted, in the order of the terms; `auxiliary` is the
            part of the model's loss that is not cross-entropy, with the model's own factor.

        Raises:
            FulldepthError: if the objective is not attached, the loss or labels are missing, a term cannot be computed
                on this batch, or the Trainer accumulates gradients and the number of items is not given.
        """
        if self._activations is None or self.task is None or self.anatomy is None:
            raise FulldepthError(
                "The objective is not attached to a model; call attach(model) before the forward pass."
            )
        try:
            total = self.task.loss(outputs)
            auxiliary = self.task.auxiliary(outputs)
        except FulldepthError:
            self._activations.clear()
            raise
        balances = getattr(text_config(self.anatomy.model.config), "output_router_logits", False)
        if isinstance(outputs, Tensor) and self.replaces and balances:
            raise FulldepthError(
                "The model adds a balancing loss of its experts to the cross-entropy, which the objective replaces; "
                "pass the model's output instead of its loss."
            )
        cross_entropy = total if auxiliary is None else total - auxiliary.to(total.device)
        if not torch.is_grad_enabled():
            self._activations.clear()
            return total, {"ce": cross_entropy}
        number = self._items if num_items_in_batch is None else num_items_in_batch
        self._items = None
        if portion is None and number is not None:
            portion = Portion.of_items(self.task, batch, number)
        elif portion is None and leaves_scaling_to_loss(self.anatomy.model):
            self._activations.clear()
            raise FulldepthError(
                "The Trainer accumulates gradients and leaves their scale to the loss, which would count each "
                "micro-batch as a whole step. Pass num_items_in_batch, which compute_loss receives, to the objective, "
                "or use DepthTrainer."
            )
        return self.combine(cross_entropy, auxiliary, batch, portion)

    def portions(self, batches: Sequence[Mapping[str, Any]]) -> list[Portion]:
        """Return the portion of an optimiser step, over all processes, that each of its micro-batches is.

        Raises:
            FulldepthError: if the objective is not attached, or the batches have no labels or sequences to count.
        """
        if self.task is None or self.anatomy is None:
            raise FulldepthError("The objective is not attached to a model; call attach(model) first.")
        counts = step_counts(self.task, batches, device_of(self.anatomy.model))
        if "targets" not in counts or "sequences" not in counts:
            raise FulldepthError("`portions` needs `labels` and `input_ids` in every batch.")
        shares = [(self.task.sequences(batch) or 0) / counts["sequences"] for batch in batches]
        return [Portion(share, counts.get("tokens"), counts["targets"]) for share in shares]

    @property
    def replaces(self) -> list[str]:
        """Names of the terms that replace the cross-entropy."""
        return [name for name, term in self.terms.items() if isinstance(term, LayerwiseLoss)]

    def combine(
        self,
        cross_entropy: Tensor,
        auxiliary: Tensor | None,
        batch: Mapping[str, Any],
        portion: Portion | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the result of `__call__` from the two parts of the model's loss.

        Without terms the objective need not be attached.

        Args:
            cross_entropy: mean over the batch's targets.
            auxiliary: the rest of the model's loss, with its factor.
            batch: inputs of the model.
            portion: this call's part of the step, as in `__call__`.
        """
        assert self.task is not None
        portion = portion or Portion()
        parts = {"ce": cross_entropy.detach()}
        self.factors = {"ce": portion.of_targets(self.task, batch)}
        loss = times(self.factors["ce"], cross_entropy)
        if self._activations is not None:
            try:
                if self.terms and self._activations.repeated:
                    raise FulldepthError(
                        "The model ran several times since the objective was called, so its states are not known to "
                        "belong to this loss. Call the objective after each forward pass; run passes that are not "
                        "trained under torch.no_grad()."
                    )
                inputs = (self._activations, self.task, batch, portion, self.step, self.energy_warmup)
                context = Context(*inputs, self._classifier, self._logits)
                for term in self.terms.values():
                    loss, value = term.apply(loss, context)
                    if value is not None:
                        parts[term.name] = value
                        self.factors[term.name] = term.factor(context, value.device)
            finally:
                self._activations.clear()
                self._logits = None
        if auxiliary is not None:
            parts["auxiliary"] = auxiliary.detach()
            self.factors["auxiliary"] = portion.share
            loss = loss + times(portion.share, auxiliary).to(loss.device)
        if self._counting and torch.is_grad_enabled() and GradientState().sync_gradients:
            self.step += 1
        return loss, parts

    @property
    def needs_exit_heads(self) -> bool:
        """True if the model must have exit heads (`add_exit_heads`)."""
        return any(term.needs_exit_heads for term in self.terms.values())

    def drop_idle_gradients(self, step: int) -> None:
        """Remove the gradients of exit heads in a 1-based step that does not train them; call it before the step.

        The optimiser then does not change the heads, on any number of processes.
        """
        multi_exit = self.terms.get("multi_exit")
        if isinstance(multi_exit, MultiExit) and not multi_exit.active(step) and self.anatomy is not None:
            for weight in exit_weights(self.anatomy.model):
                weight.grad = None


def leaves_scaling_to_loss(model: Any) -> bool:
    """Return True if transformers' Trainer accumulates gradients and does not divide the loss of this model's class.

    Loops of accelerate, which divide, have `num_steps` above 1.
    """
    state = GradientState()
    if state.sync_gradients or state.num_steps > 1:
        return False
    takes_options = any(p.kind == p.VAR_KEYWORD for p in signature(model.forward).parameters.values())
    return bool(getattr(model, "accepts_loss_kwargs", takes_options))


def times(factor: Tensor | float, value: Tensor) -> Tensor:
    """Return the product; 0 if the factor is 0, even for a mean over nothing (NaN)."""
    product = factor * value
    return product.where(torch.as_tensor(factor, device=value.device) != 0, 0.0)

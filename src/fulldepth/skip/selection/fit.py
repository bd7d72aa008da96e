"""`fit_scales`: trains the scalars of a model with skipped parts; weights are frozen."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from fulldepth.data.batches import Example
from fulldepth.errors import FulldepthError
from fulldepth.execution.flops import Costs, Shape, Variant
from fulldepth.execution.language_model import prove
from fulldepth.execution.scoring import BASE, DIVERGENCE, LOSS, Batch, Scorer
from fulldepth.hf import Anatomy, evaluating, frozen
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches
from fulldepth.progress import Watcher
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.scored_batches import make_batches


@dataclass(frozen=True)
class FitOptions:
    """Options of the training of scalars; the defaults are those of the paper's final fit."""

    learning_rate: float = 3e-3
    """Of Adam, constant."""
    epochs: int = 10
    """Largest number of passes over the training examples."""
    batch_size: int = 32
    """Examples in an optimiser step."""
    micro_batch_size: int = 8
    """Examples run at once; affects memory, and results only by rounding."""
    patience: int = 2
    """Epochs without a better held-out loss before training stops."""
    per_channel: bool = False
    """Whether there is a factor for each channel, rather than one per layer."""
    kl: bool = False
    """Whether the targets are the unmodified model's predictions rather than the data's tokens."""
    seed: int = 0
    """Seed of the order of the examples."""
    checkpointing: bool | None = None
    """Gradient checkpointing: keep one state per block, recompute blocks in the backward pass, at 1.5 times the cost.
    None = if more than 4 GiB would be kept, or weights are offloaded."""


@dataclass
class FitResult:
    """Trained scalars, and the record of their training."""

    scalars: Scalars
    """Scalars with the lowest held-out loss (with `kl`, divergence); untrained ones if no epoch was better."""
    losses: list[float]
    """Mean held-out loss in nats before the first epoch and after each."""
    heldout_loss: float
    """Of `scalars`."""
    epoch: int
    """Epoch after which `scalars` were taken; 0 = untrained."""
    train_losses: list[float] = field(default_factory=list)
    """Mean of the minimised loss over each epoch, in nats."""
    divergences: list[float] = field(default_factory=list)
    """With `kl`: mean held-out divergence from the unmodified model, as `losses`."""
    forwards: int = 0
    """Batches run, including training steps."""
    flops: float = 0.0


def fit_options(settings: SearchSettings) -> FitOptions:
    """Options of the final fit."""
    return replace(
        refit_options(settings),
        learning_rate=settings.learning_rate,
        epochs=settings.epochs,
        patience=settings.patience,
        per_channel=settings.per_channel,
        kl=settings.fit_kl,
    )


def refit_options(settings: SearchSettings) -> FitOptions:
    """Options of a candidate's fit under the criterion `scaled`: one epoch, higher rate, as in the public code."""
    return FitOptions(
        learning_rate=1e-2,
        epochs=1,
        batch_size=settings.fit_batch_size,
        micro_batch_size=min(settings.batch_size, settings.fit_batch_size),
        seed=settings.seed,
        checkpointing=settings.gradient_checkpointing,
    )


def fit_scales(
    model: PreTrainedModel | Anatomy,
    blocks: Iterable[int],
    train: Sequence[Example],
    heldout: Sequence[Example],
    *,
    granularity: str = "attention",
    watcher: Watcher | None = None,
    **options: Any,
) -> FitResult:
    r"""Train the scalars of a model with skipped parts: `x' = b_att A + s_att x`, `y = b_mlp M + s_mlp x'`.

    Adam on float32 scalars, regardless of the model's dtype; weights are frozen, dropout is off. The loss of a step
    is the mean over the labelled tokens of its batch. After every epoch the held-out loss is measured; the best scalars
    are kept, including the untrained ones.

    Args:
        model: an unmodified decoder; it is restored on leaving.
        blocks: 1-based layers to skip; empty = the control "scalars only".
        train: examples to train on.
        heldout: examples for early stopping.
        granularity: skipped part of a layer: `attention`, `mlp` or `layer`.
        watcher: receives progress after every step.
        **options: fields of `FitOptions`: `learning_rate`, `epochs`, `batch_size`, `micro_batch_size`, `patience`,
            `per_channel`, `kl`, `seed`, `checkpointing`.

    Raises:
        FulldepthError: for data without labels, layers that do not exist, or a model that cannot skip.
        TypeError: for an unknown option.

    Source: Hopscotch (arXiv 2506.03303), with held-out data and float32 scalars, which its public code lacks.
    """
    fit_options = FitOptions(**options)
    check_fit(fit_options, train)
    evaluation = make_batches(heldout, fit_options.micro_batch_size)
    owner = model.model if isinstance(model, Anatomy) else model
    with evaluating(owner):
        anatomy, classifier = prove(model, evaluation[0].inputs)
        with Switches(anatomy, granularity) as switches:
            scorer = Scorer(anatomy, classifier, switches, granularity, evaluation[0])
            return fit(scorer, Variant(blocks), train, evaluation, fit_options, watcher)


def check_fit(options: FitOptions, train: Sequence[Example]) -> None:
    """Refuse options out of range, and data without labels."""
    if not any(example.predicted for example in train):
        raise FulldepthError("There are no examples to fit scalars on: no token counts.")
    for name in ("epochs", "batch_size", "micro_batch_size", "patience"):
        if getattr(options, name) < 1:
            raise FulldepthError(f"{name} of the fit must be at least 1, got {getattr(options, name)}.")
    if not (math.isfinite(options.learning_rate) and options.learning_rate > 0):
        raise FulldepthError(f"The learning rate of the fit must be above 0, got {options.learning_rate}.")


def fit(
    scorer: Scorer,
    variant: Variant,
    train: Sequence[Example],
    heldout: Sequence[Batch],
    options: FitOptions,
    watcher: Watcher | None = None,
) -> FitResult:
    """`fit_scales` for a prepared model; without held-out batches every epoch runs, and the last scalars are kept."""
    watcher = watcher or Watcher()
    steps = -(-len(train) // options.batch_size)
    watcher.begin(f"Scalars: {'healing' if variant else 'control'}", options.epochs * steps)
    run = _Run(scorer, variant, options, watcher)
    run.measure(heldout)
    result, epoch = run.result, 0
    result.scalars, trained = copy.deepcopy(run.scalars), list(run.scalars.parameters())
    with frozen(scorer.anatomy.model):
        while trained and epoch < options.epochs and epoch - result.epoch < options.patience:
            epoch += 1
            run.train(train, epoch)
            if not all(bool(torch.isfinite(scalar).all()) for scalar in trained):
                break
            run.measure(heldout)
            if not heldout or run.is_best():
                result.scalars, result.epoch = copy.deepcopy(run.scalars), epoch
    scorer.plain()
    watcher.advance((options.epochs - epoch) * steps)
    result.heldout_loss = result.losses[result.epoch] if heldout else math.nan
    return result


class _Run:
    """Scalars in training, with the record so far."""

    def __init__(self, scorer: Scorer, variant: Variant, options: FitOptions, watcher: Watcher) -> None:
        self.scorer, self.variant, self.options, self.watcher = scorer, variant, options, watcher
        anatomy = scorer.anatomy
        width = anatomy.width if options.per_channel else None
        self.scalars = Scalars(anatomy.num_layers, variant, scorer.granularity, width).to(scorer.device)
        self.result = FitResult(self.scalars, [], math.inf, 0)
        trained = list(self.scalars.parameters())
        self.optimiser = torch.optim.Adam(trained, lr=options.learning_rate) if trained else None

    def train(self, examples: Sequence[Example], epoch: int) -> None:
        """Train for one epoch."""
        assert self.optimiser is not None
        generator = torch.Generator().manual_seed(self.options.seed * 1_000_003 + epoch)
        order = torch.randperm(len(examples), generator=generator)
        loss, tokens = 0.0, 0
        for at in order.split(self.options.batch_size):
            step = [examples[int(index)] for index in at]
            counted = sum(example.predicted for example in step)
            self.optimiser.zero_grad()
            for batch in make_batches(step, self.options.micro_batch_size) if counted else ():
                loss += self._backward(batch.to(self.scorer.device), counted)
            if counted:
                self.optimiser.step()
            tokens += counted
            self.watcher.advance(1)
        self.result.train_losses.append(loss / tokens)

    def _backward(self, batch: Batch, counted: int) -> float:
        """Add the gradients of a batch's share of a step's mean loss; returns the batch's summed loss."""
        with torch.no_grad():
            base = self.scorer.states(batch, BASE) if self.options.kl else None
        with torch.enable_grad():
            states = self.scorer.states(batch, self.variant, self.scalars, checkpointing=self.options.checkpointing)
            total = self.scorer.objective(states, batch.targets, base)
            (total / counted).backward()
        self.result.forwards += 1 + self.options.kl
        self.result.flops += _step_flops(self.scorer.costs, self.variant, batch.shape, self.options)
        return float(total.detach())

    def measure(self, heldout: Sequence[Batch]) -> None:
        """Append the held-out losses of the current scalars."""
        if not heldout:
            return
        kl, costs, result = self.options.kl, self.scorer.costs, self.result
        sums = [self.scorer.healed_sums(batch, self.variant, self.scalars, divergence=kl) for batch in heldout]
        tokens = sum(len(batch.targets) for batch in heldout)
        result.losses.append(sum(sum(of[LOSS]) for of in sums) / tokens)
        if kl:
            result.divergences.append(sum(sum(of[DIVERGENCE]) for of in sums) / tokens)
        result.forwards += len(heldout) * (1 + kl)
        variants = (self.variant, BASE) if kl else (self.variant,)
        result.flops += sum(sum(costs.whole(variant, batch.shape) for variant in variants) for batch in heldout)

    def is_best(self) -> bool:
        """Whether the last held-out loss (with `kl`, divergence) is the lowest; NaN counts as worst."""
        *earlier, last = self.result.divergences if self.options.kl else self.result.losses
        return (math.inf if math.isnan(last) else last) < min(earlier)


def epoch_flops(costs: Costs, variant: Variant, train: Sequence[Example], options: FitOptions) -> tuple[int, float]:
    """Batches and FLOPs of one epoch; approximate, because the order of the examples is not known."""
    shapes = [batch.shape for batch in make_batches(train, options.micro_batch_size)]
    forwards = len(shapes) * (1 + options.kl)
    return forwards, sum(_step_flops(costs, variant, shape, options) for shape in shapes)


def _step_flops(costs: Costs, variant: Variant, shape: Shape, options: FitOptions) -> float:
    return costs.training(variant, shape, divergence=options.kl, checkpointing=options.checkpointing)

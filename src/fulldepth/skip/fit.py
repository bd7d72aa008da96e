"""`fit_scales`: trains the scalars of a model with skipped parts; weights are frozen."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.data.batches import Example
from fulldepth.execution.flops import Variant
from fulldepth.execution.scoring import LOSS, ScoredBatch, Scorer, make_batches
from fulldepth.execution.verify import prove
from fulldepth.hf import Anatomy, evaluating, frozen
from fulldepth.hf.scalars import Block, Scalars, blocks_of
from fulldepth.hf.surgery import Switches
from fulldepth.settings import Settings, layer
from fulldepth.settings.loading import Rate, Seed
from fulldepth.settings.search import Epochs, Rows, SearchSettings


class FitOptions(Settings):
    """Options of the training of scalars; the defaults are those of the paper's final fit."""

    learning_rate: Rate = 3e-3
    """Of Adam, constant."""
    epochs: Epochs = 10
    """Largest number of passes over the training examples."""
    batch_size: Rows = 32
    """Examples in an optimiser step."""
    micro_batch_size: Rows = 8
    """Examples run at once; affects memory, and results only by rounding."""
    patience: Epochs = 2
    """Epochs without a better held-out loss before training stops."""
    seed: Seed = 0
    """Seed of the order of the examples."""
    checkpointing: bool | None = None
    """Gradient checkpointing: keep one state per block, recompute blocks in the backward pass, at 1.5 times the cost.
    None = if more than 4 GiB would be kept, or weights are offloaded."""


@dataclass
class FitResult:
    """Trained scalars, and the record of their training."""

    scalars: Scalars
    """Scalars with the lowest held-out loss; untrained ones if no epoch was better."""
    losses: list[float] = field(default_factory=list)
    """Mean held-out loss in nats before the first epoch and after each."""
    heldout_loss: float = math.nan
    """Of `scalars`."""
    epoch: int = 0
    """Epoch after which `scalars` were taken; 0 = untrained."""
    train_losses: list[float] = field(default_factory=list)
    """Mean of the minimised loss over each epoch, in nats."""
    forwards: int = 0
    """Batches run, including training steps."""
    flops: float = 0.0


def fit_options(settings: SearchSettings, *, candidate: bool = False) -> FitOptions:
    """Options of the final fit, or of a candidate's under the criterion `scaled`: one epoch, as in the public code."""
    return FitOptions(
        learning_rate=1e-2 if candidate else settings.learning_rate,
        epochs=1 if candidate else settings.epochs,
        patience=settings.patience,
        batch_size=settings.fit_batch_size,
        micro_batch_size=min(settings.batch_size, settings.fit_batch_size),
        seed=settings.seed,
        checkpointing=settings.gradient_checkpointing,
    )


def fit_scales(
    model: PreTrainedModel | Anatomy,
    blocks: Iterable[int | Block],
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
        granularity: skipped part of a layer: `attention`, `mlp`, `layer`, or `any` (`blocks` are of type `Block`).
        watcher: receives progress after every step.
        **options: fields of `FitOptions`: `learning_rate`, `epochs`, `batch_size`, `micro_batch_size`, `patience`,
            `seed`, `checkpointing`.

    Returns:
        The scalars with the lowest held-out loss, and the record of their training.

    Raises:
        FulldepthError: for an option that is unknown or out of range, data without labels, layers that do not exist,
            or a model that cannot skip.

    Source: Hopscotch (arXiv 2506.03303), with held-out data and float32 scalars, which its public code lacks.
    """
    fit_options = layer(FitOptions, options)
    check_fit(train)
    plain_model: Any = model.model if isinstance(model, Anatomy) else model
    evaluation = make_batches(heldout, fit_options.micro_batch_size, plain_model.config)
    with evaluating(plain_model):
        anatomy, classifier = prove(model, evaluation[0].inputs)
        with Switches(anatomy, granularity) as switches:
            scorer = Scorer(anatomy, classifier, switches, evaluation[0])
            return fit(
                scorer, blocks_of(blocks, granularity, anatomy.num_layers), train, evaluation, fit_options, watcher
            )


def check_fit(train: Sequence[Example]) -> None:
    """Refuse data without labels."""
    if not any(example.predicted for example in train):
        raise FulldepthError("There are no examples to fit scalars on: no token counts.")


def fit(
    scorer: Scorer,
    variant: Variant,
    train: Sequence[Example],
    heldout: Sequence[ScoredBatch],
    options: FitOptions,
    watcher: Watcher | None = None,
) -> FitResult:
    """`fit_scales` for a prepared model; without held-out batches every epoch runs, and the last scalars are kept."""
    watcher = watcher or Watcher()
    scalars = Scalars(scorer.anatomy.num_layers, variant, scorer.granularity).to(scorer.device)
    trained = list(scalars.parameters())
    result = FitResult(copy.deepcopy(scalars))
    epoch = 0
    optimiser = torch.optim.Adam(trained, lr=options.learning_rate) if trained else None
    steps = -(-len(train) // options.batch_size)
    watcher.begin(f"Scalars: {'healing' if variant else 'control'}", options.epochs * steps)

    def measure() -> None:
        if not heldout:
            return
        sums = [sum(scorer.healed_sums(batch, variant, scalars)[LOSS]) for batch in heldout]
        result.losses.append(sum(sums) / sum(len(batch.targets) for batch in heldout))
        result.forwards += len(heldout)
        result.flops += sum(scorer.costs.whole(variant, batch.shape) for batch in heldout)

    measure()
    with frozen(scorer.anatomy.model):
        while optimiser and epoch < options.epochs and epoch - result.epoch < options.patience:
            epoch += 1
            generator = torch.Generator().manual_seed(options.seed * 1_000_003 + epoch)
            order = torch.randperm(len(train), generator=generator)
            epoch_loss = 0.0
            tokens = 0
            for at in order.split(options.batch_size):
                step = [train[int(index)] for index in at]
                counted = sum(example.predicted for example in step)
                optimiser.zero_grad()
                for batch in make_batches(step, options.micro_batch_size, scorer.anatomy.config) if counted else ():
                    batch = batch.to(scorer.device)
                    with torch.enable_grad():
                        states = scorer.states(batch, variant, scalars, checkpointing=options.checkpointing)
                        loss = scorer.objective(states, batch.targets)
                        (loss / counted).backward()
                    epoch_loss += float(loss.detach())
                    result.forwards += 1
                    result.flops += scorer.costs.training(variant, batch.shape, checkpointing=options.checkpointing)
                if counted:
                    optimiser.step()
                tokens += counted
                watcher.advance(1)
            result.train_losses.append(epoch_loss / tokens)
            if not all(bool(torch.isfinite(scalar).all()) for scalar in trained):
                break
            measure()
            if not heldout or result.losses[-1] < min(result.losses[:-1]):  # NaN is never lower
                result.scalars = copy.deepcopy(scalars)
                result.epoch = epoch
    scorer.plain()
    watcher.advance((options.epochs - epoch) * steps)
    if heldout:
        result.heldout_loss = result.losses[result.epoch]
    return result

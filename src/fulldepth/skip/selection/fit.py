"""`fit_scales`: trains the scalars of a model with skipped parts, and nothing else."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError
from fulldepth.execution.flops import Costs, Shape, Variant
from fulldepth.execution.language_model import prove
from fulldepth.execution.scoring import BASE, DIVERGENCE, LOSS, Batch, Scorer
from fulldepth.hf import Anatomy, evaluating, frozen
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches
from fulldepth.progress import Watcher
from fulldepth.skip.batches import make_batches
from fulldepth.skip.inputs.examples import Example


@dataclass(frozen=True)
class FitOptions:
    """How scalars are trained. Defaults: the paper's final fit."""

    learning_rate: float = 3e-3
    """Of Adam, constant."""
    epochs: int = 10
    """Passes over the training examples at most."""
    batch_size: int = 32
    """Examples in an optimiser step."""
    micro_batch_size: int = 8
    """Examples run at once; changes memory, no result beyond rounding."""
    patience: int = 2
    """Epochs without a better held-out loss before the end."""
    per_channel: bool = False
    """A factor for each channel, rather than one a layer."""
    kl: bool = False
    """Train towards the unmodified model's predictions rather than the data's tokens."""
    seed: int = 0
    """Of the order of the examples."""
    checkpointing: bool | None = None
    """Keep one state a block and run blocks again in the backward pass: half as much computing again, no result
    beyond rounding. None: where more than 4 GiB would be kept, and where weights are offloaded."""


@dataclass(frozen=True)
class FitResult:
    """Scalars that were trained, and how it went."""

    scalars: Scalars
    """Those with the lowest held-out loss (with `kl`, divergence); untrained ones if no epoch was better."""
    losses: list[float]
    """Mean held-out loss in nats before the first epoch and after each."""
    heldout_loss: float
    """That of the scalars kept."""
    epoch: int
    """After which epoch they were kept; 0 = untrained."""
    train_losses: list[float] = field(default_factory=list)
    """Mean of what was minimised, over each epoch, in nats."""
    divergences: list[float] = field(default_factory=list)
    """With `kl`: mean held-out divergence from the unmodified model, as `losses`."""
    forwards: int = 0
    """Batches run, training steps too."""
    flops: float = 0.0


def fit_scales(
    model: PreTrainedModel | Anatomy,
    blocks: Iterable[int],
    train: Sequence[Example],
    heldout: Sequence[Example],
    *,
    granularity: str = "attention",
    learning_rate: float = 3e-3,
    epochs: int = 10,
    batch_size: int = 32,
    micro_batch_size: int = 8,
    patience: int = 2,
    per_channel: bool = False,
    kl: bool = False,
    seed: int = 0,
    checkpointing: bool | None = None,
    watcher: Watcher | None = None,
) -> FitResult:
    r"""Train the scalars of a model with skipped parts: `x' = b_att A + s_att x`, `y = b_mlp M + s_mlp x'`.

    Adam on float32 scalars, whatever the model's dtype; every weight stays as it is, dropout is off. The loss of a step
    is the mean over the labelled tokens of its batch. After every epoch the held-out loss is measured; the best scalars
    are kept, the untrained ones among them.

    Args:
        model: a decoder, plain; it is healed on leaving.
        blocks: 1-based layers to skip; none = the control "scalars only".
        train: what to train on.
        heldout: what to stop by.
        granularity: what a skipped layer lacks, `attention`, `mlp` or `layer`.
        learning_rate: of Adam.
        epochs: passes over `train` at most.
        batch_size: examples in a step.
        micro_batch_size: examples run at once.
        patience: epochs without a better held-out loss before the end.
        per_channel: a factor for each channel.
        kl: minimise the divergence from the unmodified model, and stop by it.
        seed: of the order of the examples.
        checkpointing: keep one state a block, and run blocks again in the backward pass; None: where more than 4 GiB
            would be kept, and where weights are offloaded.
        watcher: told after every step.

    Raises:
        FulldepthError: for data without labels, layers that are not there, or a model that cannot skip.

    Source: Hopscotch (arXiv 2506.03303), with held-out data and float32 scalars, which its public code lacks.
    """
    options = FitOptions(
        learning_rate, epochs, batch_size, micro_batch_size, patience, per_channel, kl, seed, checkpointing
    )
    check_fit(options, train)
    evaluation = make_batches(heldout, micro_batch_size)
    owner = model.model if isinstance(model, Anatomy) else model
    with evaluating(owner):
        anatomy, classifier = prove(model, evaluation[0].inputs)
        with Switches(anatomy, granularity) as switches:
            scorer = Scorer(anatomy, classifier, switches, granularity, evaluation[0])
            return fit(scorer, Variant(blocks), train, evaluation, options, watcher)


def check_fit(options: FitOptions, train: Sequence[Example]) -> None:
    """Refuse options and data that nothing can be fitted with."""
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
    """`fit_scales` for a model that is ready; without held-out batches every epoch is run and the last kept."""
    watcher = watcher or Watcher()
    anatomy = scorer.anatomy
    width = anatomy.width if options.per_channel else None
    scalars = Scalars(anatomy.num_layers, variant, scorer.granularity, width).to(scorer.device)
    trained = list(scalars.parameters())
    optimiser = torch.optim.Adam(trained, lr=options.learning_rate) if trained else None
    best = _measured(scorer, variant, scalars, heldout, options, FitResult(scalars, [], math.inf, 0))
    best = replace(best, scalars=copy.deepcopy(scalars))
    now, steps = best, -(-len(train) // options.batch_size)
    watcher.begin("Fitting scalars", options.epochs * steps)
    epoch = 0
    with frozen(anatomy.model):
        while optimiser is not None and epoch < options.epochs and epoch - best.epoch < options.patience:
            epoch += 1
            now = _trained(scorer, variant, scalars, optimiser, train, options, epoch, now, watcher)
            if not all(bool(torch.isfinite(p).all()) for p in scalars.parameters()):
                break
            now = _measured(scorer, variant, scalars, heldout, options, replace(now, epoch=epoch))
            if not heldout or _target(now, options) < min(_targets(now, options)[:-1]):
                best = replace(now, scalars=copy.deepcopy(scalars))
    scorer.plain()
    watcher.advance((options.epochs - epoch) * steps)
    loss = best.losses[-1] if heldout else math.nan
    return replace(now, scalars=best.scalars, epoch=best.epoch, heldout_loss=loss)


def _targets(found: FitResult, options: FitOptions) -> list[float]:
    return found.divergences if options.kl else found.losses


def _target(found: FitResult, options: FitOptions) -> float:
    """What is to become small; NaN counts as worst."""
    value = _targets(found, options)[-1]
    return value if value == value else math.inf


def _trained(
    scorer: Scorer,
    variant: Variant,
    scalars: Scalars,
    optimiser: torch.optim.Optimizer,
    train: Sequence[Example],
    options: FitOptions,
    epoch: int,
    before: FitResult,
    watcher: Watcher,
) -> FitResult:
    """One epoch."""
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(options.seed * 1_000_003 + epoch))
    loss, tokens, forwards, flops = 0.0, 0, 0, 0.0
    for at in order.split(options.batch_size):
        chosen = [train[int(index)] for index in at]
        counted = sum(example.predicted for example in chosen)
        optimiser.zero_grad()
        for batch in make_batches(chosen, options.micro_batch_size) if counted else ():
            batch = batch.to(scorer.device)
            with torch.no_grad():
                base = scorer.states(batch, BASE) if options.kl else None
            with torch.enable_grad():
                states = scorer.states(batch, variant, scalars, checkpointing=options.checkpointing)
                total = scorer.objective(states, batch.targets, base)
                (total / counted).backward()
            loss, forwards = loss + float(total.detach()), forwards + 1 + options.kl
            flops += _step_flops(scorer.costs, variant, batch.shape, options)
        if counted:
            optimiser.step()
        tokens += counted
        watcher.advance(1)
    return replace(
        before,
        train_losses=[*before.train_losses, loss / tokens],
        forwards=before.forwards + forwards,
        flops=before.flops + flops,
    )


def _measured(
    scorer: Scorer,
    variant: Variant,
    scalars: Scalars,
    heldout: Sequence[Batch],
    options: FitOptions,
    before: FitResult,
) -> FitResult:
    """The held-out losses of the scalars as they are, added to what is known."""
    if not heldout:
        return before
    sums = [scorer.healed_sums(batch, variant, scalars, divergence=options.kl) for batch in heldout]
    tokens = sum(len(batch.targets) for batch in heldout)
    loss = sum(sum(of[LOSS]) for of in sums) / tokens
    more = [sum(sum(of[DIVERGENCE]) for of in sums) / tokens] if options.kl else []
    return replace(
        before,
        losses=[*before.losses, loss],
        divergences=[*before.divergences, *more],
        forwards=before.forwards + len(heldout) * (1 + options.kl),
        flops=before.flops + sum(_evaluation(scorer.costs, variant, batch.shape, options.kl) for batch in heldout),
    )


def _evaluation(costs: Costs, variant: Variant, shape: Shape, kl: bool) -> float:
    return costs.whole(variant, shape) + (costs.whole(BASE, shape) if kl else 0.0)


def epoch_flops(costs: Costs, variant: Variant, train: Sequence[Example], options: FitOptions) -> tuple[int, float]:
    """Batches and FLOPs of one epoch, as near as they can be told without the order of the examples."""
    shapes = [batch.shape for batch in make_batches(train, options.micro_batch_size)]
    forwards = len(shapes) * (1 + options.kl)
    return forwards, sum(_step_flops(costs, variant, shape, options) for shape in shapes)


def _step_flops(costs: Costs, variant: Variant, shape: Shape, options: FitOptions) -> float:
    return costs.training(variant, shape, divergence=options.kl, checkpointing=options.checkpointing)

"""Effects of removal inside a model: discrepancy of the states of every layer, and spectral norms of the weights.

The measures, their accumulators and their rows are those of `fulldepth measure` (`spectral_norm`, and `mmd` with the
unmodified model as the reference). The model is modified in place, and always restored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from fulldepth.execution import Activations, body_inputs, capture, feed_projections, projection_names
from fulldepth.execution.flops import Variant
from fulldepth.execution.scoring import Batch
from fulldepth.hf import device_of
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches
from fulldepth.metrics import Mmd, Observation, Setup, SpectralNorm
from fulldepth.metrics.base import Row
from fulldepth.progress import Watcher

RESERVOIR_TOKENS = 2048
"""Most tokens that the discrepancy is computed from; exact if the data have no more."""


def spectral_norms(switches: Switches) -> tuple[list[Row], list[str]]:
    """The rows of `metrics.SpectralNorm` for every projection, and the names of matrices that cannot be read.

    Args:
        switches: entered, of a model with its original weights, whatever is skipped.
    """
    anatomy = switches.anatomy
    names = projection_names(anatomy)
    measure = SpectralNorm(Setup(num_layers=anatomy.num_layers, width=anatomy.width, projections=names))
    _keep_alone(measure)
    unreadable = feed_projections(measure, anatomy)
    return measure.rows(), unreadable


@torch.inference_mode()
def discrepancies(
    switches: Switches,
    batches: Sequence[Batch],
    variant: Variant,
    scalars: Scalars | None,
    *,
    reservoir_tokens: int = RESERVOIR_TOKENS,
    seed: int = 0,
    watcher: Watcher | None = None,
) -> list[Row]:
    """The rows of `metrics.Mmd`: squared MMD of layers 0..L between the modified and the unmodified model.

    Every token of the batches counts except padding, as for a language model in `fulldepth measure`; the tokens are the
    same for both models. Each batch runs through both models, so that only the states of one batch and of the sample
    are in memory.

    Args:
        switches: entered, of a model in evaluation mode; nothing is skipped on return.
        batches: held-out data.
        variant: layers that the modified model skips.
        scalars: its scalars, made for that variant; None = not healed.
        reservoir_tokens: size of the random sample of tokens.
        seed: of that sample.
        watcher: receives progress after every batch.

    Source: Hopscotch (arXiv 2506.03303), analysis of the hidden states.
    """
    watcher, anatomy = watcher or Watcher(), switches.anatomy
    device = device_of(anatomy.model)
    masks = [batch.inputs["attention_mask"].bool() for batch in batches]
    tokens = sum(int(mask.sum()) for mask in masks)
    measure = Mmd(
        Setup(
            num_layers=anatomy.num_layers,
            width=anatomy.width,
            sequence_length=max(mask.shape[1] for mask in masks),
            num_sequences=sum(map(len, masks)),
            num_tokens=tokens,
            reservoir_tokens=min(reservoir_tokens, tokens),
            seed=seed,
            device=device,
        )
    )
    _keep_alone(measure, *(measure.setup.reservoir(site) for site in measure.sites))
    first = 0
    try:
        with capture(anatomy, ["residual"]) as activations:
            for batch, mask in zip(batches, masks, strict=True):
                _set(switches, Variant(), None)
                reference = _states(activations, batch.to(device), measure.setup.device)
                _set(switches, variant, scalars)
                own = _states(activations, batch.to(device), measure.setup.device)
                mask = mask.to(measure.setup.device)
                numbers = torch.arange(first, first + len(mask), device=mask.device)
                measure.update(Observation({"residual": own, "reference": reference}, mask, mask, numbers))
                first += len(mask)
                watcher.advance(1)
    finally:
        _set(switches, Variant(), None)
    return measure.rows()


def _keep_alone(*metrics: Metric) -> None:
    """Disable the merging of sums between processes: under torchrun one process sees all the data."""
    for metric in metrics:
        metric.distributed_available_fn = _no


def _no() -> bool:
    return False


def _set(switches: Switches, variant: Variant, scalars: Scalars | None) -> None:
    """Set skipped layers and scalars; scalars are removed first, because they match one set of layers only."""
    switches.scalars = None
    switches.skip(variant)
    switches.scalars = scalars


def _states(activations: Activations, batch: Batch, device: torch.device) -> Tensor:
    """[L+1, B, T, D] the residual stream of one pass."""
    activations.clear()
    activations.anatomy.body(**body_inputs(activations.anatomy, batch.inputs))
    return activations.stack("residual", device)

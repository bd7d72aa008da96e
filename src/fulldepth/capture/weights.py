"""Reads weights as ordinary numbers, for the measures that look at matrices rather than at activations."""

from __future__ import annotations

from torch import Tensor, nn

from fulldepth.hf import Anatomy
from fulldepth.metrics import SpectralNorm


def plain_weight(module: nn.Module) -> Tensor | None:
    """A module's matrix as ordinary numbers; None if it is offloaded, or packed in a way that torch cannot undo."""
    weight: Tensor = module.get_parameter("weight").detach()
    if type(weight) is not Tensor and hasattr(weight, "dequantize"):
        weight = weight.dequantize()
    return weight if weight.is_floating_point() and weight.device.type != "meta" else None


def feed_projections(measure: SpectralNorm, anatomy: Anatomy, rank: int = 0, world: int = 1) -> list[str]:
    """Show a measure the projections of every block; matrix `i` belongs to process `i % world`.

    Returns:
        The names of those that cannot be read.
    """
    unreadable = []
    for index, (site, layer, module) in enumerate(anatomy.projections()):
        weight = plain_weight(module)
        if weight is None:
            unreadable.append(site)
        elif index % world == rank:
            measure.update(site, layer, weight)
    return unreadable

"""Reads weights as ordinary numbers, for the measures that look at matrices rather than at activations."""

from __future__ import annotations

from itertools import chain

from torch import Tensor, nn

from fulldepth.hf import Anatomy
from fulldepth.metrics import SpectralNorm


def plain_weight(module: nn.Module) -> Tensor | None:
    """A module's matrix as ordinary numbers; None if it is offloaded, or packed in a way that torch cannot undo."""
    return _plain(module.get_parameter("weight"))


def _plain(parameter: nn.Parameter | None) -> Tensor | None:
    if parameter is None:
        return None
    weight: Tensor = parameter.detach()
    if type(weight) is not Tensor and hasattr(weight, "dequantize"):
        weight = weight.dequantize()
    return weight if weight.is_floating_point() and weight.device.type != "meta" else None


def projection_names(anatomy: Anatomy) -> tuple[str, ...]:
    """Names, inside a block, of all that `feed_projections` shows: matrices, and stacks of experts' matrices."""
    named = ((name, parameter) for name, _, parameter in anatomy.expert_projections())
    experts = [name for name, parameter in named if parameter is not None]
    return tuple(dict.fromkeys([*(name for name, _, _ in anatomy.projections()), *experts]))


def feed_projections(measure: SpectralNorm, anatomy: Anatomy, rank: int = 0, world: int = 1) -> list[str]:
    """Show a measure the projections of every block, those of experts as stacks `[E, m, n]`; number `i` belongs to
    process `i % world`.

    Returns:
        The names of those that cannot be read.
    """
    unreadable = []
    alone = ((site, layer, module.get_parameter("weight")) for site, layer, module in anatomy.projections())
    for index, (site, layer, parameter) in enumerate(chain(alone, anatomy.expert_projections())):
        weight = _plain(parameter)
        if weight is None:
            unreadable.append(site)
        elif index % world == rank:
            measure.update(site, layer, weight)
    return unreadable

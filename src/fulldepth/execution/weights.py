"""Reads weights as plain tensors, for measures of weight matrices."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from torch import Tensor, nn

from fulldepth.hf import Anatomy
from fulldepth.metrics import SpectralNorm


def plain_weight(module: nn.Module) -> Tensor | None:
    """A module's weight as a plain tensor; None if it is offloaded, or packed in a form that cannot be dequantised."""
    return _plain(module.get_parameter("weight"))


def _plain(parameter: nn.Parameter | None) -> Tensor | None:
    if parameter is None:
        return None
    weight: Tensor = parameter.detach()
    if type(weight) is not Tensor and hasattr(weight, "dequantize"):
        weight = weight.dequantize()
    return weight if weight.is_floating_point() and weight.device.type != "meta" else None


def projection_names(anatomy: Anatomy) -> tuple[str, ...]:
    """Names, inside a block, of the weights that `feed_projections` reads: matrices and stacks of expert matrices."""
    named = ((name, parameter) for name, _, parameter in anatomy.expert_projections())
    experts = [name for name, parameter in named if parameter is not None]
    return tuple(dict.fromkeys([*(name for name, _, _ in anatomy.projections()), *experts]))


def feed_projections(measure: SpectralNorm, anatomy: Anatomy, rank: int = 0, world: int = 1) -> list[str]:
    """Update a measure with the projections of every block, experts as stacks `[E, m, n]`; matrix `i` goes to process
    `i % world`.

    Returns:
        The names of projections that cannot be read.
    """
    unreadable: list[str] = []

    def readable() -> Iterator[tuple[str, int, Tensor]]:
        alone = ((site, layer, module.get_parameter("weight")) for site, layer, module in anatomy.projections())
        for index, (site, layer, parameter) in enumerate(chain(alone, anatomy.expert_projections())):
            weight = _plain(parameter)
            if weight is None:
                unreadable.append(site)
            elif index % world == rank:
                yield site, layer, weight

    measure.update_all(readable())
    return unreadable

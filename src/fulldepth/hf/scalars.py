"""`Scalars`: the trainable factors of every layer that compensate for skipped branches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, NamedTuple

import torch
from torch import nn

from fulldepth.core.errors import FulldepthError, one_line, unknown

ROLES = ("attention", "mlp")
"""The two branches of a layer, in the order of their computation."""
GRANULARITIES = (*ROLES, "layer", "any")
"""Removed part of a layer: its attention (with norm and cache), its MLP (with norm), all of it, or `any` of these."""
FACTORS = ("b_att", "s_att", "b_mlp", "s_mlp")
"""Factors of a layer: of the attention branch, of the stream that it is added to, and the same for the MLP."""
FACTORS_OF_PART = {"attention": FACTORS[:2], "mlp": FACTORS[2:], "layer": FACTORS}
"""Part of a layer -> its factors: of the branch, then of the stream that it is added to."""


class Block(NamedTuple):
    """A part of a layer that can be removed."""

    layer: int
    """1-based."""
    part: str
    """`attention`, `mlp`, or `layer` for all of it."""


def blocks_of(removed: Iterable[int | Block], granularity: str, num_layers: int) -> frozenset[Block]:
    """Make blocks from 1-based layers or blocks. With granularity `any`, a whole layer is its attention and its MLP.

    Raises:
        FulldepthError: for an unknown granularity, a block of another one, and anything but layers 1 to `num_layers`.
    """
    if granularity not in GRANULARITIES:
        raise unknown("granularity", str(granularity), GRANULARITIES)
    whole = "layer" if granularity == "any" else granularity
    allowed = tuple(FACTORS_OF_PART) if granularity == "any" else (granularity,)
    blocks: set[Block] = set()
    for entry in removed if isinstance(removed, Iterable) else [removed]:
        layer, part = entry if isinstance(entry, tuple) else (entry, whole)
        if isinstance(layer, bool) or not isinstance(layer, Integral) or not 1 <= layer <= num_layers:
            raise FulldepthError(f"There is no layer {layer!r}; this model has the layers 1 to {num_layers}.")
        if part not in allowed:
            raise FulldepthError(
                f"Granularity {granularity} cannot remove the {part} of layer {layer}, only {' or '.join(allowed)}."
            )
        parts = ROLES if (granularity, part) == ("any", "layer") else (part,)
        blocks.update(Block(int(layer), name) for name in parts)
    return frozenset(blocks)


def factor_names(removed: Iterable[Block], layer: int) -> tuple[str, ...]:
    """Return the factors that a 1-based layer has when these blocks are removed."""
    lacking = {name for block in removed if block.layer == layer for name in FACTORS_OF_PART[block.part]}
    return tuple(name for name in FACTORS if name not in lacking)


class Scalars(nn.Module):
    """Factors of the residual stream, `x' = b_att A + s_att x` and `y = b_mlp M + s_mlp x'`, initially all 1.

    `A` and `M` are what attention and MLP add to the stream. A parallel block reads its MLP's input from x, and is
    `y = s_mlp (b_att A + s_att x) + b_mlp M`. A layer without attention has only the two factors of the MLP, a layer
    without MLP only those of attention, a skipped layer none.

    They are float32 regardless of the model's dtype: bfloat16 cannot represent small changes of a number near 1.

    Args:
        num_layers: L.
        skipped: 1-based layers whose part is skipped; blocks for granularity `any`.
        granularity: the part that is skipped: `attention`, `mlp`, `layer` or `any`.

    Raises:
        FulldepthError: for layers out of range, or an unknown granularity.

    Source: Hopscotch (arXiv 2506.03303); skipped layers as in its public code.
    """

    def __init__(self, num_layers: int, skipped: Iterable[int | Block] = (), granularity: str = "attention") -> None:
        super().__init__()
        self.num_layers = num_layers
        self.skipped = blocks_of(skipped, granularity, num_layers)
        self.granularity = granularity
        self.layers = nn.ModuleDict()
        for layer in range(1, num_layers + 1):
            names = factor_names(self.skipped, layer)
            factors = {name: nn.Parameter(torch.ones((), dtype=torch.float32)) for name in names}
            self.layers[str(layer)] = nn.ParameterDict(factors)

    def get(self, layer: int) -> dict[str, nn.Parameter]:
        """Name -> factor (a single number) of a 1-based layer; empty for a skipped layer."""
        factors: Any = self.layers[str(layer)]
        return {name: factors[name] for name in FACTORS if name in factors}

    def as_dict(self) -> dict[str, dict[str, float]]:
        """1-based layer as text -> name -> number."""
        values = {str(layer): self.get(layer) for layer in range(1, self.num_layers + 1)}
        return {
            layer: {name: factor.item() for name, factor in factors.items()}
            for layer, factors in values.items()
            if factors
        }

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], num_layers: int, granularity: str = "attention") -> Scalars:
        """Make scalars from the result of `as_dict`. A layer without factors of a part counts as skipped.

        Raises:
            FulldepthError: unless there is a finite number for each factor of every layer.
        """
        try:
            tensors = {
                (int(layer), name): torch.tensor(value, dtype=torch.float32)
                for layer, values in mapping.items()
                for name, value in values.items()
            }
            layers = range(1, num_layers + 1)
            parts = ROLES if granularity == "any" else (granularity,)
            blocks = [Block(layer, part) for layer in layers for part in parts]
            skipped = [block for block in blocks if (block.layer, FACTORS_OF_PART[block.part][0]) not in tensors]
            scalars = cls(num_layers, skipped, granularity)
            factors = {(layer, name): factor for layer in layers for name, factor in scalars.get(layer).items()}
            finite = all(tensor.ndim == 0 and bool(tensor.isfinite()) for tensor in tensors.values())
            if factors.keys() != tensors.keys() or not finite:
                raise ValueError("expected a finite number for each factor of every layer")
            with torch.no_grad():
                for key, tensor in tensors.items():
                    factors[key].copy_(tensor)
        except (ArithmeticError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise FulldepthError(f"Scalars do not fit {num_layers} layers: {one_line(error)}.") from error
        return scalars

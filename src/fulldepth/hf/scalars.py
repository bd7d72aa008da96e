"""`Scalars`: the trainable factors of every layer that compensate for skipped branches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import nn

from fulldepth.errors import FulldepthError, unknown

GRANULARITIES = ("attention", "mlp", "layer")
"""Skipped part of a layer: its attention (with norm and cache), its MLP (with norm), or all of it."""
FACTORS = ("b_att", "s_att", "b_mlp", "s_mlp")
"""Factors of a layer: of the attention branch, of the stream that it is added to, and the same for the MLP."""
REMAINING = {"attention": FACTORS[2:], "mlp": FACTORS[:2], "layer": ()}
"""Granularity -> factors that a skipped layer keeps."""


def factor_names(granularity: str, skipped: bool) -> tuple[str, ...]:
    """The factors that a layer has.

    Raises:
        FulldepthError: for an unknown granularity.
    """
    if granularity not in GRANULARITIES:
        raise unknown("granularity", str(granularity), GRANULARITIES)
    return REMAINING[granularity] if skipped else FACTORS


def check_layers(layers: Iterable[int], num_layers: int) -> frozenset[int]:
    """1-based layers as a set.

    Raises:
        FulldepthError: for anything but whole numbers from 1 to `num_layers`.
    """
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        raise FulldepthError(f"Layers are {layers!r}; expected whole numbers from 1 to {num_layers}.")
    numbers = list(layers)
    for layer in numbers:
        if isinstance(layer, bool) or not isinstance(layer, Integral) or not 1 <= layer <= num_layers:
            raise FulldepthError(f"There is no layer {layer!r}; this model has the layers 1 to {num_layers}.")
    return frozenset(map(int, numbers))


class Scalars(nn.Module):
    """Factors of the residual stream, `x' = b_att A + s_att x` and `y = b_mlp M + s_mlp x'`, initially all 1.

    `A` and `M` are what attention and MLP add to the stream. A parallel block reads its MLP's input from x, and is
    `y = s_mlp (b_att A + s_att x) + b_mlp M`. A layer without attention has only the two factors of the MLP, a layer
    without MLP only those of attention, a skipped layer none.

    They are float32 regardless of the model's dtype: bfloat16 cannot represent small changes of a number near 1.

    Args:
        num_layers: L.
        skipped: 1-based layers whose part is skipped.
        granularity: which part: `attention`, `mlp` or `layer`.
        width: D for one factor a channel, `[D]`; None for one a layer.

    Raises:
        FulldepthError: for layers out of range, an unknown granularity, or a width below 1.

    Source: Hopscotch (arXiv 2506.03303); skipped layers as in its public code.
    """

    def __init__(
        self,
        num_layers: int,
        skipped: Iterable[int] = (),
        granularity: str = "attention",
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.num_layers = _positive("The number of layers", num_layers)
        self.skipped = check_layers(skipped, num_layers)
        self.granularity = granularity
        self.width = None if width is None else _positive("The width", width)
        shape = () if width is None else (width,)
        self.layers = nn.ModuleDict(
            {
                str(layer): nn.ParameterDict(
                    {
                        name: nn.Parameter(torch.ones(shape, dtype=torch.float32))
                        for name in factor_names(granularity, layer in self.skipped)
                    }
                )
                for layer in range(1, num_layers + 1)
            }
        )

    def get(self, layer: int) -> dict[str, nn.Parameter]:
        """Name -> factor of a 1-based layer, `[]` or `[D]`; empty for a skipped layer.

        Raises:
            FulldepthError: if there is no such layer.
        """
        check_layers((layer,), self.num_layers)
        factors: Any = self.layers[str(layer)]
        return {name: factors[name] for name in FACTORS if name in factors}

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """1-based layer as text -> name -> number (a list of D numbers where there is one a channel)."""
        values = {str(layer): self.get(layer) for layer in range(1, self.num_layers + 1)}
        return {
            layer: {name: factor.detach().tolist() for name, factor in factors.items()}
            for layer, factors in values.items()
            if factors
        }

    @classmethod
    def from_dict(cls, mapping: Mapping[str, Any], num_layers: int, granularity: str = "attention") -> Scalars:
        """The inverse of `as_dict`; the factors that a layer lacks show that it is skipped.

        Raises:
            FulldepthError: for layers out of range or missing, unknown factors, and values that are not finite numbers
                or lists of one length.
        """
        if not isinstance(mapping, Mapping):
            raise FulldepthError(f"Scalars are a {type(mapping).__name__}; expected a mapping from layers.")
        layers = [str(layer) for layer in range(1, _positive("The number of layers", num_layers) + 1)]
        for layer in mapping:
            if str(layer) not in layers:
                raise FulldepthError(f"Scalars of layer {layer!r}; this model has the layers 1 to {num_layers}.")
        by_layer = {str(layer): values for layer, values in mapping.items()}
        skipped = {int(layer) for layer in layers if _is_skipped(layer, by_layer.get(layer, {}), granularity)}
        tensors = {
            (layer, name): _tensor(value, f"{name} of layer {layer}")
            for layer, values in by_layer.items()
            for name, value in values.items()
        }
        shapes = {tuple(tensor.shape) for tensor in tensors.values()}
        if len(shapes) > 1:
            raise FulldepthError("Scalars have different shapes; expected all numbers, or all lists of one length.")
        width = next((shape[0] for shape in shapes if shape), None)
        scalars = cls(num_layers, skipped, granularity, width)
        with torch.no_grad():
            for (layer, name), tensor in tensors.items():
                scalars.get(int(layer))[name].copy_(tensor)
        return scalars

    def extra_repr(self) -> str:
        """The arguments of the constructor."""
        return (
            f"{self.num_layers}, skipped={sorted(self.skipped)}, granularity={self.granularity!r}, width={self.width}"
        )


def _positive(name: str, number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise FulldepthError(f"{name} is {number!r}; expected a whole number of at least 1.")
    return number


def _is_skipped(layer: str, values: Any, granularity: str) -> bool:
    """Whether a layer's factors are those of a skipped layer."""
    names = set(values) if isinstance(values, Mapping) else None
    for skipped in (False, True):
        if names == set(factor_names(granularity, skipped)):
            return skipped
    full, remaining = (", ".join(factor_names(granularity, skipped)) or "none" for skipped in (False, True))
    got = repr(values) if names is None else ", ".join(map(str, values)) or "none"
    raise FulldepthError(
        f"Layer {layer} has the scalars {got}; expected {full}, or {remaining} where its {granularity} is skipped."
    )


def _tensor(value: Any, name: str) -> torch.Tensor:
    """A finite number or a list of them, float32."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        raise FulldepthError(f"The scalar {name} is {value!r}; expected a number, or a list of one per channel.")
    limit = torch.finfo(torch.float32).max
    if not all(abs(n) <= limit for n in numbers):  # also refuses NaN
        raise FulldepthError(f"The scalar {name} is {value!r}; expected a finite number, at most {limit:.1e} in size.")
    return torch.tensor(value, dtype=torch.float32)

"""The four trainable factors of every layer that heal a model whose branches were skipped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import nn

from fulldepth.errors import FulldepthError, unknown

GRANULARITIES = ("attention", "mlp", "layer")
"""What is skipped of a layer: its attention (with norm and cache), its MLP (with norm), or all of it."""
FACTORS = ("b_att", "s_att", "b_mlp", "s_mlp")
"""Factors of a whole layer: of the attention branch, of the stream it is added to, and the same of the MLP."""
LEFT = {"attention": FACTORS[2:], "mlp": FACTORS[:2], "layer": ()}
"""Granularity -> factors that a skipped layer keeps."""


def factor_names(granularity: str, skipped: bool) -> tuple[str, ...]:
    """The factors that a layer has.

    Raises:
        FulldepthError: for an unknown granularity.
    """
    if granularity not in GRANULARITIES:
        raise unknown("granularity", str(granularity), GRANULARITIES)
    return LEFT[granularity] if skipped else FACTORS


def check_layers(layers: Iterable[int], num_layers: int) -> frozenset[int]:
    """1-based layers as a set.

    Raises:
        FulldepthError: for what is no whole number from 1 to `num_layers`.
    """
    if isinstance(layers, str | bytes) or not isinstance(layers, Iterable):
        raise FulldepthError(f"Layers are {layers!r}; expected whole numbers from 1 to {num_layers}.")
    found = list(layers)
    for layer in found:
        if isinstance(layer, bool) or not isinstance(layer, Integral) or not 1 <= layer <= num_layers:
            raise FulldepthError(f"There is no layer {layer!r}; this model has the layers 1 to {num_layers}.")
    return frozenset(map(int, found))


class Scalars(nn.Module):
    """Factors of the residual stream, `x' = b_att A + s_att x` and `y = b_mlp M + s_mlp x'`, all 1 at the start.

    `A` and `M` are what attention and MLP add to the stream. A parallel block reads its MLP's input from x, and is
    `y = s_mlp (b_att A + s_att x) + b_mlp M`. Only factors of what is left are parameters: a layer without attention
    has the two of the MLP, a layer without MLP the two of attention, a skipped layer none.

    They are float32 whatever the model's dtype: a bfloat16 number cannot rise above 1 in steps smaller than 0.004.

    Args:
        num_layers: L.
        skipped: 1-based layers whose part is skipped.
        granularity: which part: `attention`, `mlp` or `layer`.
        width: D for one factor a channel, `[D]`; None for one a layer.

    Raises:
        FulldepthError: for layers out of range, an unknown granularity, or a width below 1.

    Source: Hopscotch (arXiv 2506.03303); a skipped layer as its public code has it.
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
        """The inverse of `as_dict`; which layers are skipped shows in the factors they lack.

        Raises:
            FulldepthError: for layers out of range or missing, factors that no layer has, and what is no finite
                number, or a list of another length than the others.
        """
        if not isinstance(mapping, Mapping):
            raise FulldepthError(f"Scalars are a {type(mapping).__name__}; expected a mapping from layers.")
        known = [str(layer) for layer in range(1, _positive("The number of layers", num_layers) + 1)]
        for layer in mapping:
            if str(layer) not in known:
                raise FulldepthError(f"Scalars of layer {layer!r}; this model has the layers 1 to {num_layers}.")
        given = {str(layer): values for layer, values in mapping.items()}
        skipped = {int(layer) for layer in known if _is_skipped(layer, given.get(layer, {}), granularity)}
        tensors = {
            (layer, name): _tensor(value, f"{name} of layer {layer}")
            for layer, values in given.items()
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
        """What was asked for."""
        return (
            f"{self.num_layers}, skipped={sorted(self.skipped)}, granularity={self.granularity!r}, width={self.width}"
        )


def _positive(what: str, number: Any) -> int:
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise FulldepthError(f"{what} is {number!r}; expected a whole number of at least 1.")
    return number


def _is_skipped(layer: str, values: Any, granularity: str) -> bool:
    """Whether the factors given for a layer are those of a skipped one."""
    names = set(values) if isinstance(values, Mapping) else None
    for skipped in (False, True):
        if names == set(factor_names(granularity, skipped)):
            return skipped
    whole, left = (", ".join(factor_names(granularity, skipped)) or "none" for skipped in (False, True))
    got = repr(values) if names is None else ", ".join(map(str, values)) or "none"
    raise FulldepthError(
        f"Layer {layer} has the scalars {got}; expected {whole}, or {left} where its {granularity} is skipped."
    )


def _tensor(value: Any, what: str) -> torch.Tensor:
    """A finite number or a list of them, float32."""
    numbers = value if isinstance(value, list | tuple) else [value]
    if not numbers or any(isinstance(n, bool) or not isinstance(n, int | float) for n in numbers):
        raise FulldepthError(f"The scalar {what} is {value!r}; expected a number, or a list of one a channel.")
    most = torch.finfo(torch.float32).max
    if not all(abs(n) <= most for n in numbers):  # NaN is at most nothing
        raise FulldepthError(f"The scalar {what} is {value!r}; expected a finite number, at most {most:.1e} in size.")
    return torch.tensor(value, dtype=torch.float32)

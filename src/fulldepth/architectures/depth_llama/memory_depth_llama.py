"""Routers of layer-integrated memory (LIME): weights of the earlier states that a layer's keys and values read.

`routing_depth_llama` computes the mixtures:

- `StaticRouter`, `DynamicRouter` with `routed_key_value`: layer r projects mixtures of the normalised residual
  streams X_0..X_{r-1}, one mixture per key/value head (LIME, Sec. 4 and App. E).
- `KeyValueRouter` with `route_key_value`: layer r mixes the key and value heads of layers 1..r, linearly and across
  heads (the later public version of the method).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization

from .routing_depth_llama import normalise, route_key_value, routed_key_value

STATIC_STD = 0.1
"""Standard deviation of a static router's logits at the start: nearly uniform mixtures (LIME, App. A)."""


class StaticRouter(nn.Module):
    """One learned mixture of the sources per key/value head: `softmax(R)`, the same for every token (LIME, Sec. 4.1).

    Args:
        num_kv_heads: H_kv.
        num_sources: r, the states that layer r (1-based) reads: X_0..X_{r-1}.
    """

    minus_infinity_prunes = ("logits",)
    """Parameters in which -inf is a pruned weight and no fault (read by checks for broken weights)."""

    def __init__(self, num_kv_heads: int, num_sources: int) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.empty(num_kv_heads, num_sources))
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None) -> None:
        """Draw the logits from 0.1 N(0, 1), whatever `std` other weights of the model have."""
        initialization.normal_(self.logits, std=STATIC_STD)

    def forward(self) -> Tensor:
        """`[H_kv, r]` weights, rows sum to 1."""
        return _softmax(self.logits)

    @torch.no_grad()
    def prune(self, p: float) -> float:
        """Keep the smallest set of weights whose sum exceeds `p`, per head, in place (LIME, App. B).

        The others get logits of -inf: they are exactly zero, stay zero in training and in a saved model, and the kept
        ones sum to 1 again.

        Returns:
            Share of this router's weights that are zero now.

        Raises:
            ValueError: `p` outside (0, 1].
        """
        keep = top_p_mask(self.logits.double().softmax(-1), p)
        self.logits.masked_fill_(~keep, -torch.inf)
        return float((self.logits == -torch.inf).float().mean())


class DynamicRouter(nn.Module):
    """A mixture of the sources per token and key/value head: `softmax(x P)`, P without bias (LIME, Sec. 4.2, App. E).

    Args:
        hidden_size: D.
        num_kv_heads: H_kv.
        num_sources: r, the states that layer r (1-based) reads: X_0..X_{r-1}.
        top_p: use, per token and head, only the smallest set of weights whose sum exceeds it, renormalised.

    Raises:
        ValueError: `top_p` outside (0, 1].
    """

    def __init__(self, hidden_size: int, num_kv_heads: int, num_sources: int, top_p: float | None = None) -> None:
        super().__init__()
        self.num_kv_heads = num_kv_heads
        self.top_p = top_p if top_p is None else _checked(top_p)
        self.weight = nn.Parameter(torch.empty(num_kv_heads * num_sources, hidden_size))
        self.reset_parameters()

    def reset_parameters(self, std: float = 0.02) -> None:
        """Draw P from std N(0, 1), as the model's other linear layers."""
        initialization.normal_(self.weight, std=std)

    def forward(self, x: Tensor, gain: Tensor | None = None) -> Tensor:
        """`[B, T, H_kv, r]` weights, sums over r are 1.

        Args:
            x: `[B, T, D]` what the router reads.
            gain: `[D]` factor of `x`. Folded into P, so that the product of both is not kept for backward.
        """
        logits = F.linear(x, self.weight if gain is None else self.weight * gain)
        logits = logits.unflatten(-1, (self.num_kv_heads, -1))
        if self.top_p is not None:
            keep = top_p_mask(_softmax(logits.detach()), self.top_p)
            logits = logits.masked_fill(~keep, -torch.inf)
        return _softmax(logits)

    def prune(self, p: float) -> None:
        """From now on use only the top-`p` weights of each token (LIME, App. B). P itself does not change, and which
        weights are zero depends on the input, so there is no share to return.

        Raises:
            ValueError: `p` outside (0, 1].
        """
        self.top_p = _checked(p)


class KeyValueRouter(nn.Module):
    """A linear map from the key/value heads of layers 1..r to those of layer r (the public version of LIME).

    There is no softmax: weights may be negative and need not sum to 1.

    Args:
        num_kv_heads: H_kv.
        num_sources: r, the layer's own number (1-based).
        init: start of the weights. In both a head reads itself with weight 1 and its own layer's other heads with 0.
            `"identity"`: earlier layers have weight 0, which is plain attention; `"public"`: U(-b, b) with
            b = sqrt(3 / (r H_kv)).

    Raises:
        ValueError: unknown `init`.
    """

    def __init__(self, num_kv_heads: int, num_sources: int, init: Literal["identity", "public"] = "identity") -> None:
        super().__init__()
        if init not in ("identity", "public"):
            raise ValueError(f"kv_init must be 'identity' or 'public', not {init!r}")
        self.init = init
        self.weight = nn.Parameter(torch.empty(num_kv_heads, num_sources, num_kv_heads))
        self.reset_parameters()

    def reset_parameters(self, std: float | None = None) -> None:
        """Set the weights to their start, whatever `std` other weights of the model have."""
        start = torch.zeros_like(self.weight, requires_grad=False)
        heads, sources, _ = start.shape
        if self.init == "public":
            bound = (3 / (sources * heads)) ** 0.5
            start.uniform_(-bound, bound)
        start[:, -1] = torch.eye(heads, dtype=start.dtype, device=start.device)
        initialization.copy_(self.weight, start)

    def forward(self) -> Tensor:
        """`[H_kv, r, H_kv]` weights: own head, source layer, source head."""
        return self.weight

    def prune(self, p: float) -> None:
        """Raise an error: the weights are not shares.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "top-p pruning needs weights that are shares (memory='static' or 'dynamic'); "
            "those of memory='kv' are a linear map: they may be negative and do not sum to 1"
        )


def top_p_mask(weights: Tensor, p: float) -> Tensor:
    """The smallest set of `weights [..., r]` whose sum exceeds `p`, as a mask of the same shape (LIME, App. B).

    Of equal weights the earlier source is kept. If all of them together do not exceed `p`, all are kept.

    Raises:
        ValueError: `p` outside (0, 1].
    """
    ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    before = F.pad(ordered.cumsum(-1)[..., :-1], (1, 0))
    return torch.zeros_like(weights, dtype=torch.bool).scatter(-1, order, before <= _checked(p))


def _softmax(logits: Tensor) -> Tensor:
    return logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))


def _checked(p: float) -> float:
    if not 0 < p <= 1:
        raise ValueError(f"top-p is a share of weight in (0, 1], not {p}")
    return p


__all__ = [
    "DynamicRouter",
    "KeyValueRouter",
    "StaticRouter",
    "normalise",
    "route_key_value",
    "routed_key_value",
    "top_p_mask",
]

"""Hyper-Connections: several residual streams, mixed by learnt weights around every branch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import initialization

DYNAMIC_SCALE = 0.01
"""Initial value of the scales of the dynamic parts."""
EPS = 1e-5
"""Added to the variance in the connections' LayerNorm."""


class HyperConnection(nn.Module):
    r"""The connection of one branch (attention or MLP) to `n` residual streams `h_1..h_n`.

    .. math:: x = \sum_i \alpha_{i0} h_i, \qquad h'_j = \beta_j f(x) + \sum_i \alpha_{ij} h_i

    .. math:: \alpha = A + s_\alpha \tanh(\mathrm{LN}(h) W_\alpha)

    .. math:: \beta = B + s_\beta \tanh(\mathrm{LN}(h) w_\beta)

    At the start `A = [e_k | I]`, `B = 1`, `W_alpha = 0`, `w_beta = 0`: the branch reads stream `k` and is added to
    every stream, so that `n` equal streams stay equal, each the residual stream of a pre-norm network. `LN` has no
    gain and no bias. Outside of autocast, the weights are computed in float32 at least, and the sums in the type of the
    streams, as a residual sum would be.

    For backward a connection stores, per token, its streams (n D numbers, for the gradient of alpha), the branch's
    output (D, for the gradient of beta) and its weights (order n^2); the branch stores its input. The normalised
    streams, the mixed streams and the products with beta are recomputed or not needed. To store less, one connection's
    streams would have to be computed from another's.

    Args:
        width: channels D.
        num_streams: n.
        start: k, taken modulo n; connections that follow one another should differ.
        dynamic: include the tanh terms.

    Source: "Hyper-Connections", arXiv 2409.19606, Sec. 2; initial values as in its Algorithm 2.
    """

    def __init__(self, width: int, num_streams: int, start: int, dynamic: bool = True) -> None:
        super().__init__()
        self.start = start % num_streams
        self.static_alpha = nn.Parameter(torch.empty(num_streams, num_streams + 1))
        self.static_beta = nn.Parameter(torch.empty(num_streams))
        if dynamic:
            self.dynamic_alpha = nn.Parameter(torch.empty(width, num_streams + 1))
            self.dynamic_beta = nn.Parameter(torch.empty(width))
            self.dynamic_alpha_scale = nn.Parameter(torch.empty(1))
            self.dynamic_beta_scale = nn.Parameter(torch.empty(1))
        self.dynamic = dynamic
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the initial values, n copies of a pre-norm network, except for weights that a checkpoint has filled."""
        streams = len(self.static_beta)
        reads = torch.eye(streams)[:, [self.start]]
        initialization.copy_(self.static_alpha, torch.cat([reads, torch.eye(streams)], dim=1))
        initialization.ones_(self.static_beta)
        if self.dynamic:
            initialization.zeros_(self.dynamic_alpha)
            initialization.zeros_(self.dynamic_beta)
            initialization.constant_(self.dynamic_alpha_scale, DYNAMIC_SCALE)
            initialization.constant_(self.dynamic_beta_scale, DYNAMIC_SCALE)

    def weights(self, streams: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mixing weights of streams `[B, T, n, D]`.

        Returns:
            alpha `[B, T, n, n + 1]` (from stream i, to the branch (column 0) or stream j) and beta `[B, T, n]`;
            without the leading `B, T` for a static connection.
        """
        precision = torch.promote_types(streams.dtype, torch.float32)
        alpha = self.static_alpha.to(precision)
        beta = self.static_beta.to(precision)
        if self.dynamic:
            weight = torch.cat([self.dynamic_alpha, self.dynamic_beta.unsqueeze(-1)], dim=-1)
            # LN(h) is computed again in backward, not stored.
            product = checkpoint(_normed_product, streams, weight, use_reentrant=False, preserve_rng_state=False)
            dynamic = product.to(precision).tanh()  # [B, T, n, n + 2]
            alpha = alpha + dynamic[..., :-1] * self.dynamic_alpha_scale.to(precision)
            beta = beta + dynamic[..., -1] * self.dynamic_beta_scale.to(precision)
        return alpha, beta

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mix the streams before the branch.

        Args:
            streams: `[B, T, n, D]`.

        Returns:
            The branch's input `[B, T, D]`; the streams without the branch `[B, T, n, D]`; beta, for `add`.
        """
        device = "cpu" if streams.is_meta else streams.device.type  # the meta device has no autocast
        with torch.autocast(device, enabled=False):
            alpha, beta = self.weights(streams)
            mixed = alpha.to(streams.dtype).transpose(-1, -2) @ streams  # [B, T, n + 1, D]
        hidden_states, carried = mixed.split([1, mixed.shape[-2] - 1], dim=-2)
        hidden_states = hidden_states.squeeze(-2)
        if torch.is_grad_enabled():  # the branch stores its input for backward; a view would keep all streams in memory
            hidden_states = hidden_states.clone()
        return hidden_states, carried, beta

    @staticmethod
    def add(carried: Tensor, branch: Tensor, beta: Tensor) -> Tensor:
        """Return the streams after the branch: `carried [B, T, n, D] + beta [B, T, n] x branch [B, T, D]`."""
        return carried + beta.to(carried.dtype).unsqueeze(-1) * branch.to(carried.dtype).unsqueeze(-2)


def _normed_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return `LN(x) W`."""
    return functional.layer_norm(x, x.shape[-1:], eps=EPS).to(weight.dtype) @ weight


def expand(hidden_states: Tensor, num_streams: int) -> Tensor:
    """Copy `[B, T, D]` to n equal streams `[B, T, n, D]`."""
    return hidden_states.unsqueeze(-2).repeat_interleave(num_streams, dim=-2)


def collapse(streams: Tensor) -> Tensor:
    """Sum the streams `[B, T, n, D]` to `[B, T, D]`, which the final norm reads."""
    return streams.sum(-2, dtype=streams.dtype)


__all__ = ["HyperConnection", "collapse", "expand"]

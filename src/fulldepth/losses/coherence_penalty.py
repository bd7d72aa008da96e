"""Coherence-based redundancy loss: penalises layers that copy or scramble (CR-Guided Transformers, Sec. 3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from fulldepth.distributed import sum_over_processes
from fulldepth.errors import FulldepthError
from fulldepth.losses.term import Amount, Context, LayerTerm, blocks, check_states, statistics_dtype

POWER_RATIO = 2.0
"""The energy term is 0 if the power of the output's spectrum is within this factor of the input's."""


class CoherencePenalty(LayerTerm):
    """CR's penalty on attention sub-layers, Sec. 3.3. Its energy term is active in the first `energy_warmup` steps."""

    name = "coherence"
    sites = ("attention_input", "attention_output")
    target: Amount = 0.35
    scope: Literal["global", "process"] = "global"
    """global: the batch mean runs over all processes; process: over each process's own sequences."""

    def default_layers(self, num_layers: int) -> Sequence[int]:
        """2, 4, 6, 8 of 12 layers; for other depths the even ones up to the same fraction of the depth."""
        return range(2, round(8 * num_layers / 12) + 1, 2)

    def value(self, context: Context) -> Tensor:
        """Sum over the chosen layers; raises an error for padded batches."""
        refuse_padding(context.mask)
        return super().value(context)

    def of_layer(self, context: Context, layer: int) -> Tensor:
        """`coherence_penalty` of the attention sub-layer."""
        inputs, outputs = context.states["attention_input"], context.states["attention_output"]
        return coherence_penalty(
            inputs[layer],
            outputs[layer],
            layer,
            len(inputs),
            target=self.target,
            energy=context.step <= context.energy_warmup,
            reduce=sum_over_processes if self.scope == "global" else None,
        )


def coherence_penalty(
    h_in: Tensor,
    h_out: Tensor,
    layer: int,
    num_layers: int,
    *,
    target: float = 0.35,
    energy: bool = False,
    reduce: Callable[[Tensor], Tensor] | None = None,
    eps: float = 1e-8,
) -> Tensor:
    r"""Squared distance of a layer's coherence from `target`, weighted by depth.

    .. math:: L_{CR} = \mathrm{mean}_{D, K} \, (c - \mathrm{target})^2 \cdot 0.1 (N - l), \quad
        c = \frac{|S_{xy}|^2}{(S_{xx} + \epsilon)(S_{yy} + \epsilon) + \epsilon}

    with spectra averaged over the batch, :math:`S_{xy} = \mathrm{mean}_B(\varphi_x \overline{\varphi_y})`, from the
    characteristic functions of :math:`p = \mathrm{softmax}_T(z \sqrt{N - l} / f)`, where z is the channel
    standardised along the sequence and :math:`f = \max(\max_T |z| / (2 + l/2), 1)` bounds it. With `energy`,
    :math:`\mathrm{mean}_{B, D}\,\mathrm{relu}(\log^2 (P_y / (P_x + \epsilon)) - \log^2 2)` is added,
    :math:`P = \sum_k (\sqrt{|\varphi|^2 + \epsilon} + \epsilon)`.

    Unweighted: the objective applies the weight (0.01 in the paper). Gradients flow through both sides, in closed form:
    the backward pass recomputes the spectra, some channels at a time, and keeps only references to the states.

    Args:
        h_in: input of the attention sub-layer, `[B, T, D]`.
        h_out: its output, residual included, same shape. There is no mask: frequencies need whole sequences of one
            length, so the caller must reject (`refuse_padding`) or pack padded batches.
        layer: the layer's 0-based number, as in the paper.
        num_layers: N, 12 in the paper.
        target: target coherence, in [0, 1].
        energy: add the energy term (the paper: during the first 800 iterations).
        reduce: differentiable sum of a tensor over all processes, for a batch that is distributed over them (each with
            the same T and D, and any number of sequences); None: this process has the whole batch.
        eps: the listing's epsilon, used wherever it occurs there.

    Returns:
        Scalar, unit 1, float32 or float64, the same in every process. The gradient of a channel that is constant along
        a sequence (up to rounding) is 0.

    Raises:
        FulldepthError: for a single sequence over all processes (its coherence is 1 by construction), fewer than two
            positions, mismatched shapes, or a layer outside 0..N-1.

    Source: "CR-Guided Transformers", Sec. 3.3 and Listing 2.
    """
    check_states([h_in, h_out], None, least=2, dimensions=3)
    if not 0 <= layer < num_layers:
        raise FulldepthError(f"layer must be 0-based, in 0..{num_layers - 1} for {num_layers} layers, got {layer}")
    if h_out.shape[1] < 2:
        raise FulldepthError(f"the coherence penalty needs at least two positions, got {h_out.shape[1]}")
    if reduce is None:
        _check_sequences(len(h_out))
    shape = _Shape(2 + layer / 2, math.sqrt(num_layers - layer), eps, energy)
    spectra, excess = _Spectra.apply(h_in.to(h_out.device), h_out, shape)
    sequences: Tensor | int = len(h_out)
    if reduce is not None:
        spectra = reduce(spectra)
        excess, total = reduce(torch.stack([excess, excess.new_tensor(float(len(h_out)))])).unbind()
        if len(h_out) < 2:  # otherwise the total is sufficient, and reading it would synchronise with the device
            _check_sequences(int(total))
        sequences = total.detach()
    distance = checkpoint(
        _squared_distance, spectra, sequences, target, eps, use_reentrant=False, preserve_rng_state=False
    )
    penalty = distance * (0.1 * (num_layers - layer))
    return penalty + excess / (sequences * h_out.shape[-1]) if energy else penalty


def refuse_padding(mask: Tensor | None) -> None:
    """Raise an error for a padded batch, because padding would dominate the frequencies of its sequence.

    Args:
        mask: `[B, T]`, True (or 1) = counts; None: all positions count.

    Raises:
        FulldepthError: if the batch has padding.
    """
    if mask is not None and not bool((mask != 0).all()):
        raise FulldepthError(
            f"the coherence penalty needs sequences of one length, got padding in {int((mask == 0).any(-1).sum())} of "
            f"{len(mask)}: pack the data, or leave this penalty out"
        )


class _Shape(NamedTuple):
    """Parameters of the distributions over positions, and whether the energy term is needed."""

    bound: float
    sharpness: float
    eps: float
    energy: bool


class _Side(NamedTuple):
    """Some channels of one side, `[B, d, T]`, and their statistics for the backward pass, `[B, d, 1]`."""

    probability: Tensor
    logit: Tensor
    """`scale` times the centred states."""
    scale: Tensor
    deviation: Tensor
    clipped: Tensor
    constant: Tensor


class _Spectra(torch.autograd.Function):
    """Sums over the batch: spectra `[4, D, K]` (cross real, cross imaginary, in, out), and the energy term's excess."""

    @staticmethod
    def forward(ctx: Any, h_in: Tensor, h_out: Tensor, shape: _Shape) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(h_in, h_out)
        ctx.shape = shape
        batch, length, width = h_out.shape
        dtype = statistics_dtype(h_in, h_out)
        spectra = h_out.new_empty(4, width, length // 2 + 1, dtype=dtype)
        excess = h_out.new_zeros((), dtype=dtype)
        for channels in blocks(width, batch * length, h_out.device):
            x, y = (torch.fft.rfft(_side(h[..., channels], dtype, shape).probability) for h in (h_in, h_out))
            spectra[2, channels], spectra[3, channels] = _power(x).sum(0), _power(y).sum(0)
            if shape.energy:
                excess += _excess(x, y, shape.eps)[0].sum()
            cross = x.mul_(y.conj()).sum(0)
            spectra[0, channels], spectra[1, channels] = cross.real, cross.imag
        return spectra, excess

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_spectra: Tensor, of_excess: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        states, shape = ctx.saved_tensors, ctx.shape
        needed = ctx.needs_input_grad[:2]
        gradients = [torch.empty_like(h) if need else None for h, need in zip(states, needed, strict=True)]
        batch, length, width = states[1].shape
        for channels in blocks(width, batch * length, states[1].device):
            sides = [_side(h[..., channels], of_spectra.dtype, shape) for h in states]
            x, y = (torch.fft.rfft(side.probability) for side in sides)
            cross = torch.complex(of_spectra[0, channels], of_spectra[1, channels])
            of_x = (x * (2 * of_spectra[2, channels])).add_(y * cross)
            of_y = (y * (2 * of_spectra[3, channels])).add_(x * cross.conj())
            if shape.energy:
                for of_phi, phi, slope in zip((of_x, of_y), (x, y), _excess(x, y, shape.eps)[1], strict=True):
                    of_phi += phi * (slope * of_excess / (_power(phi) + shape.eps).sqrt_())
            del x, y
            for gradient, side, of_phi in zip(gradients, sides, (of_x, of_y), strict=True):
                if gradient is not None:
                    gradient[..., channels] = _of_states(side, of_phi, shape).mT
        return gradients[0], gradients[1], None


def _side(h: Tensor, dtype: torch.dtype, shape: _Shape) -> _Side:
    """Distributions over positions of the channels `h: [B, T, d]`, with the sequence axis contiguous."""
    batch, length, width = h.shape
    states = h.new_empty(batch, width, length, dtype=dtype).copy_(h.mT)
    mean = states.mean(-1, keepdim=True)
    states -= mean
    deviation = torch.linalg.vector_norm(states, dim=-1, keepdim=True) / math.sqrt(length - 1)
    constant = deviation <= 4 * torch.finfo(dtype).eps * mean.abs()
    peak = torch.maximum(states.amax(-1, keepdim=True), -states.amin(-1, keepdim=True)) / (deviation + shape.eps)
    excess = peak / shape.bound
    scale = shape.sharpness / (deviation + shape.eps) / excess.clamp(min=1.0)
    logit = states.mul_(scale)
    return _Side(torch.softmax(logit, -1), logit, scale, deviation, excess > 1, constant)


def _of_states(side: _Side, of_phi: Tensor, shape: _Shape) -> Tensor:
    """Gradient with respect to the states, `[B, d, T]`, from the gradient with respect to the spectrum, `[B, d, K]`."""
    length = side.logit.shape[-1]
    of_phi[..., 1 : (length + 1) // 2] *= 0.5  # irfft adds the negative frequencies, which the sums do not include
    gradient = torch.fft.irfft(of_phi, n=length, norm="forward")
    gradient.sub_((gradient * side.probability).sum(-1, keepdim=True)).mul_(side.probability)
    # The scale depends on the peak if it is clipped, else on the standard deviation
    pull = (gradient * side.logit).sum(-1, keepdim=True)
    gradient.mul_(side.scale)
    spread = side.scale * (side.deviation + shape.eps) * side.deviation * (length - 1)
    gradient.sub_(side.logit * (pull / spread).masked_fill_(side.clipped | side.constant, 0.0))
    where = side.logit.abs().argmax(-1, keepdim=True)
    at_peak = (pull * side.scale / side.logit.gather(-1, where)).masked_fill_(~side.clipped, 0.0)
    gradient.scatter_add_(-1, where, at_peak.neg_())
    return gradient.sub_(gradient.mean(-1, keepdim=True)).masked_fill_(side.constant, 0.0)


def _power(phi: Tensor) -> Tensor:
    """`|phi|^2`; on a CPU ten times faster than a sum over a last dimension of size 2."""
    return phi.real.square().add_(phi.imag.square())


def _excess(x: Tensor, y: Tensor, eps: float) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Energy term `[B, d]` of two spectra `[B, d, K]`, and its derivatives `[B, d, 1]` by the power of each."""
    power_x, power_y = ((_power(phi).add_(eps).sqrt_() + eps).sum(-1) for phi in (x, y))
    log_ratio = torch.log(power_y / (power_x + eps))
    excess = (log_ratio.square() - math.log(POWER_RATIO) ** 2).relu_()
    slope = (2 * log_ratio).masked_fill_(excess == 0, 0.0)
    return excess, ((-slope / (power_x + eps))[..., None], (slope / power_y)[..., None])


def _squared_distance(spectra: Tensor, sequences: Tensor | int, target: float, eps: float) -> Tensor:
    """Mean over channels and frequencies of `(coherence - target)^2`, from sums over sequences."""
    real, imaginary, power_in, power_out = (spectra / sequences).unbind()
    ratio = (real.square() + imaginary.square()) / ((power_in + eps) * (power_out + eps) + eps)
    return (ratio - target).square().mean()


def _check_sequences(sequences: int) -> None:
    if sequences < 2:
        raise FulldepthError(
            "the coherence penalty needs at least two sequences in a batch, for over one the coherence is 1 by "
            f"construction; got {sequences}"
        )

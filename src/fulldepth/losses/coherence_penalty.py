"""Coherence-based redundancy loss: penalises layers that copy or scramble (CR-Guided Transformers, Sec. 3.3)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from fulldepth.core.distributed import sum_over_processes
from fulldepth.core.errors import FulldepthError
from fulldepth.losses.term import Amount, Context, LayerTerm, block_size, check_states, recomputed, statistics_dtype

POWER_RATIO = 2.0
"""The energy term is 0 if the power of the output's spectrum is within this factor of the input's."""


class CoherencePenalty(LayerTerm):
    """CR's penalty on attention sub-layers, Sec. 3.3. Its energy term is active in the first `energy_warmup` steps."""

    name = "coherence"
    sites = ("attention_input", "attention_output")
    target: Amount = 0.35
    scope: Literal["global", "process"] = "global"
    """global: the batch mean runs over all processes; process: over each process's own sequences."""
    sharpening: bool = True
    """Multiply the bounded states by sqrt(N - l) before the softmax; False is the ablation of Fig. 3a."""
    depth_scale: bool = True
    """Multiply the penalty by 0.1 (N - l), less in deeper layers; False is the ablation of Fig. 3c."""

    def default_layers(self, num_layers: int) -> Sequence[int]:
        """Layers 2, 4, 6, 8 of 12; for other depths the even layers up to the same fraction of the depth."""
        return range(2, round(8 * num_layers / 12) + 1, 2)

    def value(self, context: Context) -> Tensor:
        """Sum over the layers of the penalty.

        Raises:
            FulldepthError: for padded batches, because padding would dominate the frequencies.
        """
        mask = context.mask
        if mask is not None and not mask.all():
            raise FulldepthError(
                f"the coherence penalty needs sequences of one length, got padding in {int((~mask).any(-1).sum())} of "
                f"{len(mask)}: pack the data, or leave this penalty out"
            )
        return super().value(context)

    def of_layer(self, context: Context, layer: int) -> Tensor:
        """`coherence_penalty` of the attention sub-layer."""
        inputs = context.states["attention_input"]
        outputs = context.states["attention_output"]
        return coherence_penalty(
            inputs[layer],
            outputs[layer],
            layer,
            len(inputs),
            target=self.target,
            sharpening=self.sharpening,
            depth_scale=self.depth_scale,
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
    sharpening: bool = True,
    depth_scale: bool = True,
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

    Unweighted: the objective applies the weight (0.01 in the paper). Gradients flow through both sides. The backward
    pass recomputes the spectra, some channels at a time, and keeps only references to the states.

    Args:
        h_in: input of the attention sub-layer, `[B, T, D]`.
        h_out: its output, residual included, same shape. There is no mask: frequencies need whole sequences of one
            length, so the caller must reject or pack padded batches.
        layer: the layer's 0-based number, as in the paper.
        num_layers: N, 12 in the paper.
        target: target coherence, in [0, 1].
        sharpening: apply the factor :math:`\sqrt{N - l}`; False: 1 (the bound stays).
        depth_scale: apply the factor :math:`0.1 (N - l)`; False: 1.
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

    Source: "CR-Guided Transformers", Sec. 3.3 and Listing 2; ablations: Fig. 3 (a, c).
    """
    check_states([h_in, h_out], None, least=2, dimensions=3)
    if not 0 <= layer < num_layers:
        raise FulldepthError(f"layer must be 0-based, in 0..{num_layers - 1} for {num_layers} layers, got {layer}")
    if h_out.shape[1] < 2:
        raise FulldepthError(f"the coherence penalty needs at least two positions, got {h_out.shape[1]}")
    shape = (2 + layer / 2, math.sqrt(num_layers - layer) if sharpening else 1.0, eps)
    dtype = statistics_dtype(h_in, h_out)
    width = h_out.shape[-1]
    size = block_size(h_out[..., 0].numel(), h_out.device)
    parts = (
        recomputed(_spectra, x, y, *shape, dtype, energy)
        for x, y in zip(h_in.to(h_out.device).split(size, -1), h_out.split(size, -1), strict=True)
    )
    sums, excesses = zip(*parts, strict=True)
    spectra = torch.cat(sums, 1)
    excess = torch.stack(excesses).sum()
    sequences = excess.new_tensor(float(len(h_out)))
    if reduce is not None:
        spectra = reduce(spectra)
        excess, sequences = reduce(torch.stack([excess, sequences])).unbind()
    # With two sequences the total is sufficient, and reading it would synchronise with the device
    if len(h_out) < 2 and int(sequences) < 2:
        raise FulldepthError(
            "the coherence penalty needs at least two sequences in a batch, because over one the coherence is 1 by "
            f"construction; got {int(sequences)}"
        )
    sequences = sequences.detach()
    distance = recomputed(_squared_distance, spectra, sequences, target, eps)
    penalty = distance * (0.1 * (num_layers - layer) if depth_scale else 1.0)
    return penalty + excess / (sequences * width) if energy else penalty


def _spectra(
    h_in: Tensor, h_out: Tensor, bound: float, sharpness: float, eps: float, dtype: torch.dtype, energy: bool
) -> tuple[Tensor, Tensor]:
    """Return sums over the batch for channels `[B, T, d]`: the spectra `[4, d, K]` (cross real, cross imaginary, in,
    out), and the energy term's excess.
    """
    x, y = (torch.fft.rfft(_probability(h.to(dtype), bound, sharpness, eps)) for h in (h_in, h_out))  # [B, d, K]
    power_x, power_y = (phi.real.square() + phi.imag.square() for phi in (x, y))
    cross = (x * y.conj()).sum(0)
    spectra = torch.stack([cross.real, cross.imag, power_x.sum(0), power_y.sum(0)])
    if not energy:
        return spectra, spectra.new_zeros(())
    energy_x, energy_y = (((power + eps).sqrt() + eps).sum(-1) for power in (power_x, power_y))
    log_ratio = torch.log(energy_y / (energy_x + eps))
    return spectra, torch.relu(log_ratio.square() - math.log(POWER_RATIO) ** 2).sum()


def _probability(h: Tensor, bound: float, sharpness: float, eps: float) -> Tensor:
    """Distributions over positions `[B, d, T]` of the channels `h: [B, T, d]`, with the sequence axis contiguous."""
    states = h.mT.contiguous()
    mean = states.mean(-1, keepdim=True)
    centred = states - mean
    spread = torch.linalg.vector_norm(centred, dim=-1, keepdim=True) / math.sqrt(h.shape[1] - 1)
    constant = spread <= 4 * torch.finfo(h.dtype).eps * mean.abs()
    deviation = spread + eps
    peak = centred.abs().amax(-1, keepdim=True) / deviation
    logit = centred * (sharpness / deviation / (peak / bound).clamp(min=1.0))
    return torch.softmax(torch.where(constant, logit.detach(), logit), -1)


def _squared_distance(spectra: Tensor, sequences: Tensor, target: float, eps: float) -> Tensor:
    """Mean over channels and frequencies of `(coherence - target)^2`, from sums over sequences."""
    real, imaginary, power_in, power_out = (spectra / sequences).unbind()
    ratio = (real.square() + imaginary.square()) / ((power_in + eps) * (power_out + eps) + eps)
    return (ratio - target).square().mean()

"""Coherence of a layer's input and output over frequencies along the sequence (CR-Guided Transformers, Sec. 3.1)."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from fulldepth.core.threads import map_threads
from fulldepth.metrics.base import Estimated, Observation, Setup
from fulldepth.metrics.standard_errors import Estimate, influence_of_channel_mean, leave_one_out

STD_EPS = 1e-8
"""The paper's epsilon, added to the standard deviation."""
NO_POWER = 1e-28
"""A frequency counts as absent if its mean |phi|^2 is at most this (float64 rounding leaves about 1e-33)."""
TINY = 1e-4
"""Powers below this share of a channel's mean power are computed in float64."""
CHUNKS = 2
"""Groups of channels for each thread."""
BINS = 10
BAND = (0.3, 0.7)
"""Coherence of an "effective" layer; a layer above copies its input, a layer below scrambles it."""
GROUPED_CHANNELS = 64
"""Maximum number of channels whose sums are kept per group, for the standard errors."""
SPECTRAL_GROUPS = 16
"""Maximum number of groups: spectra are large."""
ERROR = "standard_error_of_mean_corrected"
OVER_LAYERS = "mean_corrected_of_layers"


def coherence(h_in: Tensor, h_out: Tensor, *, include_dc: bool = True, corrected: bool = False) -> Tensor:
    r"""Magnitude-squared coherence of every channel and frequency, in [0, 1].

    Each channel is standardised along the sequence and turned into a distribution over positions by a softmax, whose
    characteristic function is evaluated at :math:`\omega_k = 2 \pi k / T, k = 0..K-1, K = \lfloor T/2 \rfloor + 1`:

    .. math:: c = \frac{|S_{xy}|^2}{S_{xx} S_{yy}}, \quad S_{xy} = \mathrm{mean}_B(\varphi_x \overline{\varphi_y}),
        \quad \varphi(k) = \sum_t p(t) e^{-i \omega_k t}, \quad p = \mathrm{softmax}_T \frac{h - \bar h}{s + 10^{-8}}

    The mean over sequences is given in the paper's appendix, not in its main text; without it the ratio is always 1.
    Over `n` sequences the ratio is biased upwards: for unrelated, complex normal spectra it follows Beta(1, n - 1),
    whose mean is `1/n`. See `corrected`.

    Args:
        h_in: input states of the layer, `[B, T, D]`, without padding.
        h_out: output states of the layer, same shape.
        include_dc: keep `k = 0`, which is 1 by construction (as the paper does); False sets it to NaN.
        corrected: return `max(0, (B c - 1)/(B - 1))`. Without the clipping its mean would be 0 where the true coherence
            is 0; with it, that mean is `(1 - 1/B)^B / (B - 1)`: 0.25 for 2 sequences, 0.049 for 8, 0.012 for 32.
            This bias remains in means over cells that are partly noise.

    Returns:
        `[D, K]`, unit 1. NaN where a channel has no power at a frequency (0/0), as for a channel that is constant along
        the sequence (at every `k > 0`).

    Raises:
        ValueError: for a single sequence, a single position, or differing shapes.

    Source: "CR-Guided Transformers", Sec. 3.1 and Appendix A.3.
    """
    if h_in.ndim != 3 or h_in.shape != h_out.shape:
        raise ValueError(f"h_in and h_out must both be [B, T, D], got {tuple(h_in.shape)} and {tuple(h_out.shape)}")
    sequences = len(h_in)
    _check_sequences(sequences)
    phi_in = characteristic_function(h_in)
    phi_out = characteristic_function(h_out)
    cross = _sum_products(phi_in.conj(), phi_out)
    result = _ratio(cross, _modulus(phi_in).sum(0), _modulus(phi_out).sum(0), sequences)
    if not include_dc:
        result[:, 0] = torch.nan
    return _corrected(result, sequences) if corrected else result


def characteristic_function(h: Tensor) -> Tensor:
    """`[B, D, K]` complex128: the characteristic function of every channel of `h: [B, T, D]` along the sequence.

    A channel that varies by no more than rounding counts as constant. Everything is float64, so that even almost
    constant channels give the same numbers in any batch.
    """
    return torch.fft.rfft(torch.softmax(_standardised(h, torch.float64)[0], -1))


def spectra(h: Tensor) -> tuple[Tensor, Tensor]:
    """`characteristic_function`, and its squared modulus, in float32 unless `h` is float64.

    Rounding of a Fourier transform is relative to its largest values. A channel of a sequence with a power below
    `TINY` times its mean is therefore transformed in float64, and stored in float32: its relative error is as small.
    """
    if h.dtype == torch.float64:
        phi = characteristic_function(h)
        return phi, _modulus(phi)
    z, constant = _standardised(h, torch.float32)
    p = torch.softmax(z, -1, out=z) if not z.is_cuda else torch.softmax(z, -1)
    phi = torch.fft.rfft(p)
    power = _modulus(phi)  # [B, D, K]
    smallest = power.amin(-1)
    mean = power.mean(-1)
    tiny = ~(smallest >= TINY * mean) | constant[..., 0]  # also where float32 overflows
    rows, channels = tiny.nonzero(as_tuple=True)
    if len(rows):
        again = characteristic_function(h[rows, :, channels][..., None])[:, 0]  # [n, K]
        phi[rows, channels] = again.to(phi.dtype)
        power[rows, channels] = _modulus(again).to(power.dtype)
    return phi, power


def _standardised(h: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`[B, D, T]` channels of `h: [B, T, D]`, standardised along the sequence, and `[B, D, 1]` bool: constant ones."""
    batch, length, width = h.shape
    if length < 2:
        raise ValueError("coherence needs at least two positions per sequence, got one")
    x = h.new_empty(batch, width, length, dtype=dtype).copy_(h.transpose(1, 2))
    mean = x.mean(-1, keepdim=True)
    x -= mean
    if dtype == torch.float32:
        x -= x.mean(-1, keepdim=True)  # removes the rounding error of the first mean
    std = torch.linalg.vector_norm(x, dim=-1, keepdim=True) / math.sqrt(length - 1)
    rounding = torch.finfo(h.dtype if h.dtype == torch.float64 else torch.float32).eps
    constant = std <= 4 * rounding * (mean.abs() + STD_EPS)
    x *= (1 / (std + STD_EPS)).masked_fill(constant, 0.0)
    return x, constant


class Coherence(Estimated):
    """Coherence of input and output of every layer, and of its attention sub-layer, over the whole data set.

    The spectra are summed over all sequences and divided once. Every token of a sequence is used, regardless of the
    token policy, because frequencies need the whole sequence. `count` is the number of cells (channel, frequency)
    averaged over; cells that are 0/0 are excluded.

    With three sequences or more, the corrected mean of the residual stream has a standard error over sequences, for
    each layer and for the mean over layers. For it, the spectra of at most 64 evenly spaced channels are also summed
    per group of clusters (see `fulldepth.core.uncertainty`).
    """

    name = "coherence"
    units = dict.fromkeys(
        (
            *("mean", "mean_corrected", "share_0.3_0.7", *(f"bin_{index}" for index in range(BINS))),
            *(ERROR, OVER_LAYERS, f"standard_error_of_{OVER_LAYERS}"),
        ),
        "1",
    )
    sites = ("residual", "attention_input", "attention_output")
    needs = frozenset({"equal_lengths", "several_sequences"})
    cross_residual: Tensor
    cross_attention: Tensor
    power_residual: Tensor
    power_input: Tensor
    power_attention: Tensor
    group_cross: Tensor
    group_power: Tensor
    sequences: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        layers = setup.num_layers
        cells = (setup.width, setup.sequence_length // 2 + 1)
        self.add_sum("cross_residual", layers, *cells, dtype=torch.complex128)
        self.add_sum("cross_attention", layers, *cells, dtype=torch.complex128)
        self.add_sum("power_residual", layers + 1, *cells)
        self.add_sum("power_input", 0 if setup.chained else layers, *cells)
        self.add_sum("power_attention", layers, *cells)
        count = min(setup.width, GROUPED_CHANNELS)
        evenly_spaced = torch.linspace(0, setup.width - 1, count, dtype=torch.float64)
        self.channels = evenly_spaced.round().long().to(setup.device)
        grouped = (len(self.channels), cells[1])
        self.group_of = setup.group_of.to(setup.device) % SPECTRAL_GROUPS
        groups = min(setup.groups, SPECTRAL_GROUPS)
        self.add_sum("group_cross", groups, layers, *grouped, dtype=torch.complex128)
        self.add_sum("group_power", groups, layers + 1, *grouped)
        self.add_sum("sequences", groups)

    def update(self, observation: Observation) -> None:
        """Add one batch; groups of channels are spread over threads."""
        residual = observation.states["residual"]
        attention = observation.states.get("attention_output")
        inputs = None if self.setup.chained else observation.states.get("attention_input")
        length = residual.shape[2]
        padded = not bool(observation.attention_mask.all())
        if length != self.setup.sequence_length or padded:  # frequencies would be mixed
            raise ValueError(
                f"coherence needs sequences of one length, {self.setup.sequence_length} positions without padding, got "
                f"{length} positions {'with' if padded else 'without'} padding"
            )
        group = self.group_of[observation.sequence.to(self.group_of.device)]
        width = residual.shape[-1]
        pieces = min(width, CHUNKS * torch.get_num_threads()) if residual.device.type == "cpu" else 1
        edges = [width * index // pieces for index in range(pieces + 1)]
        channels = [slice(*pair) for pair in pairwise(edges)]
        map_threads(lambda part: self._add(part, group, residual, attention, inputs), channels, residual)
        self.sequences += group.bincount(minlength=len(self.sequences))

    def _add(
        self, part: slice, group: Tensor, residual: Tensor, attention: Tensor | None, inputs: Tensor | None
    ) -> None:
        """Add some channels of a batch; every state is transformed once and freed after the next layer."""
        device = self.power_residual.device
        before, power = spectra(residual[0, ..., part])
        self.power_residual[0, part] += power.sum(0).to(device)
        self._add_by_group(part, group, 0, power, None)
        for layer, state in enumerate(residual[1:]):
            before = before.conj_physical_()
            if attention is not None:
                inside, power = spectra(attention[layer, ..., part])
                self.power_attention[layer, part] += power.sum(0).to(device)
                read = before
                if inputs is not None:
                    read, power = spectra(inputs[layer, ..., part])
                    self.power_input[layer, part] += power.sum(0).to(device)
                    read = read.conj_physical_()
                self.cross_attention[layer, part] += _sum_products(read, inside).to(device)
            after, power = spectra(state[..., part])
            cross = before.mul_(after)
            self.power_residual[layer + 1, part] += power.sum(0).to(device)
            self.cross_residual[layer, part] += cross.sum(0).to(device)
            self._add_by_group(part, group, layer + 1, power, cross)
            before = after

    def _add_by_group(self, part: slice, group: Tensor, layer: int, power: Tensor, cross: Tensor | None) -> None:
        """Add the power `[B, C, K]` of a layer's output (layers 0..L), and its products with the layer's input, to the
        sums of each group, for the channels of `part` whose sums are kept per group.
        """
        in_part = (self.channels >= part.start) & (self.channels < part.stop)
        slots = in_part.nonzero().flatten()
        if not len(slots):
            return
        channels = self.channels[slots] - part.start
        device = self.group_power.device
        slots = slice(int(slots[0]), int(slots[-1]) + 1)
        power = power[:, channels.to(power.device)].to(self.group_power)
        self.group_power[:, layer, slots].index_add_(0, group, power)
        if cross is not None:
            cross = cross[:, channels.to(cross.device)].to(device, torch.complex128)
            total = torch.view_as_real(self.group_cross[:, layer - 1, slots])
            total.index_add_(0, group, torch.view_as_real(cross))

    def compute(self) -> list[Estimate]:
        """Numbers of every layer that has cells, at both sites, and of the mean over layers of the residual stream."""
        sequences = int(self.sequences.sum())
        _check_sequences(sequences)
        power_in = self.power_residual[:-1]
        power_read = power_in if self.setup.chained else self.power_input
        residual = zip(self.cross_residual, power_in, self.power_residual[1:], strict=True)
        attention = zip(self.cross_attention, power_read, self.power_attention, strict=True)
        influences, errors = self._influence()
        numbers = []
        counts = []
        corrected = []
        for layer, sums in enumerate(residual, start=1):
            values, count = _statistics(_ratio(*sums, sequences), sequences)
            of_groups = {"mean_corrected": influences[:, layer - 1].tolist()}
            numbers += [
                Estimate(name, value, count, layer, influences=of_groups.get(name)) for name, value in values.items()
            ]
            counts.append(count)
            corrected.append(values["mean_corrected"])
        for layer, sums in enumerate(attention, start=1):
            values, count = _statistics(_ratio(*sums, sequences), sequences)
            numbers += [Estimate(name, value, count, layer, site="attention") for name, value in values.items()]
        *of_layers, overall = errors.tolist()
        numbers += [
            Estimate(ERROR, error, counts[index], index + 1)
            for index, error in enumerate(of_layers)
            if not math.isnan(error)
        ]
        mean = float(torch.tensor(corrected, dtype=torch.float64).nanmean())
        if not math.isnan(mean):
            of_mean = influences[:, -1].tolist()
            numbers.append(Estimate(OVER_LAYERS, mean, sum(counts), error=overall, influences=of_mean))
        return [number for number in numbers if number.count]

    def _influence(self) -> tuple[Tensor, Tensor]:
        """`[G, L+1]` influences on `mean_corrected` of the residual stream and `[L+1]` its standard errors, for layers
        1..L and for the mean over layers; NaN where fewer than two sequences remain without a group.
        """
        rest = leave_one_out(self.sequences)
        layers = self.setup.num_layers
        if not bool((rest > 1).all()):
            return rest.new_full((len(rest), layers + 1), torch.nan), rest.new_full((layers + 1,), torch.nan)
        without = []  # for each group: [L, C] contributions of the channels to the corrected mean over cells
        for cross, power, count in zip(
            leave_one_out(self.group_cross), leave_one_out(self.group_power), rest, strict=True
        ):
            sequences = int(count)
            cells = _corrected(_ratio(cross, power[:-1], power[1:], sequences), sequences)  # [L, C, K]
            without.append(cells.nansum(-1) / cells.isfinite().sum((1, 2)).div(cells.shape[1])[:, None])
        whole = torch.stack(without)
        pairs = [influence_of_channel_mean(part, self.setup.width) for part in (*whole.unbind(1), whole.nanmean(1))]
        return torch.stack([values for values, _ in pairs], 1), torch.stack([error for _, error in pairs])


def _check_sequences(sequences: int) -> None:
    """Refuse fewer than two sequences."""
    if sequences < 2:
        raise ValueError(
            f"coherence needs at least two sequences, because over one it is 1 by construction; got {sequences}"
        )


def _sum_products(x: Tensor, y: Tensor) -> Tensor:
    """`sum_b x_b y_b` over the first dimension, without a temporary of the batch's size."""
    total = x[0] * y[0]
    for a, b in zip(x[1:], y[1:], strict=True):
        total.addcmul_(a, b)
    return total


def _modulus(phi: Tensor) -> Tensor:
    """`|phi|^2`, real."""
    return phi.real.square().addcmul_(phi.imag, phi.imag)


def _ratio(cross: Tensor, power_in: Tensor, power_out: Tensor, sequences: int) -> Tensor:
    """`[..., D, K]` coherence from sums over `sequences`; NaN where either side has no power.

    Everything is NaN if no frequency above 0 has power, because `k = 0` is 1 by construction.
    """
    ratio = (cross.real.square() + cross.imag.square()) / (power_in * power_out)
    present = torch.minimum(power_in, power_out) > NO_POWER * sequences
    has_signal = present[..., 1:].any(-1).any(-1)[..., None, None]
    return ratio.clamp(max=1.0).where(present & has_signal, torch.nan)


def _corrected(ratio: Tensor, sequences: int) -> Tensor:
    """Coherence corrected for the bias of a finite number of sequences, clipped at 0 per cell."""
    return ((sequences * ratio - 1) / (sequences - 1)).clamp(min=0.0)


def _statistics(ratio: Tensor, sequences: int) -> tuple[dict[str, float], int]:
    """Statistics of one layer's cells `[D, K]`, and their number."""
    cells = ratio[ratio.isfinite()]
    statistics = {
        "mean": cells.mean(),
        "mean_corrected": _corrected(cells, sequences).mean(),
        "share_0.3_0.7": ((cells >= BAND[0]) & (cells <= BAND[1])).double().mean(),
    }
    bins = (cells * BINS).long().clamp(max=BINS - 1).bincount(minlength=BINS).double() / cells.numel()
    statistics |= {f"bin_{index}": share for index, share in enumerate(bins)}
    return {name: float(value) for name, value in statistics.items()}, cells.numel()

"""Base of the measures: their input per batch (`Observation`), their configuration (`Setup`) and their output (`Row`).

Each measure is one file with a pure function and a `Measure`. The `Measure` is a `torchmetrics.Metric` that holds
float64 sums and counts and divides once, so its result does not depend on how the data are split into batches or
processes.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from fulldepth.core.targets import IGNORE
from fulldepth.core.uncertainty import deal
from fulldepth.metrics.reservoir import CPU, Accumulator, Reservoir
from fulldepth.metrics.standard_errors import Estimate, EstimateArray, influence_of_ratio

NO_FIRST = ":no-first"
"""Suffix of statistics that exclude the first token of each sequence."""
POSITION_BITS = 24
"""A token's key is `sequence << POSITION_BITS | position`: unique over the data set, independent of the batching."""


def cosine(product: Tensor, norm_x: Tensor, norm_y: Tensor) -> Tensor:
    r"""Cosine of the angle between two vectors, from their inner product and their norms.

    .. math:: \cos(x, y) = \frac{x \cdot y}{\|x\| \, \|y\|}

    Returns:
        In [-1, 1], of the broadcast shape; NaN where a norm is 0 (a zero vector has no direction).
    """
    return (product / (norm_x * norm_y)).clamp_(-1.0, 1.0)


def angular(cosine: Tensor) -> Tensor:
    """Displacement of a cosine, `1 - (1 + cos) / 2`, in [0, 1] (JREG, Eq. 2)."""
    return (1 - cosine) / 2


def later_than_first(keys: Tensor) -> Tensor:
    """Bool, of the shape of `keys`: False for tokens that are the first of their sequence."""
    return keys & ((1 << POSITION_BITS) - 1) != 0


class Row(NamedTuple):
    """One row of `results.parquet`. Layers run 1..L, 0 = embeddings; None where a column does not apply."""

    measure: str
    site: str | None
    layer: int | None
    other: int | None
    statistic: str
    value: float
    count: int  # type: ignore[assignment]  # the column's name, not tuple.count
    unit: str


class Influence(NamedTuple):
    """Contribution of each group of clusters to the deviation of a number; has the keys of the number's table row.

    The number's standard error is `uncertainty.error_of(values)`. For two results with the same text and groups, the
    differences of the values give the error of the paired difference.
    """

    measure: str
    site: str | None
    layer: int | None
    other: int | None
    statistic: str
    values: list[float]
    """[G], in the number's unit; NaN for a group without data."""


class Place(NamedTuple):
    """Position of a mean in the sums and in the table."""

    at: tuple[int, ...]
    """Index into the sums."""
    layer: int
    suffix: str = ""
    """End of the statistics' names."""
    site: str = "residual"
    statistic: str = "mean"
    """Name of the mean."""


@dataclass(frozen=True)
class Setup:
    """Properties of the model and the data, known before the first batch; they size the accumulators."""

    num_layers: int
    """L: number of blocks."""
    width: int
    """D: channels of the residual stream."""
    value_width: int = 0
    """Channels of the value states (number of key/value heads times head size); 0 without value states."""
    chained: bool = True
    """True if every layer's input is exactly the previous layer's output (False for a tree of residual paths)."""
    num_classes: int = 0
    """K: classes of the head or of the data, whichever are more; 0 unless the head predicts one class a sequence."""
    parallel: bool = False
    """True if attention and MLP both read the layer's input and add to it."""
    routed_heads: int = 0
    """Key/value heads whose keys and values a memory router mixes; 0 without a memory."""
    head_shares: tuple[tuple[float, ...], ...] = ()
    """For each layer 1..L, every query head's share of the output projection (see `expected_retrieval.head_shares`);
    empty if unknown."""
    sequence_length: int = 0
    """T: tokens of the longest sequence, special tokens included."""
    num_sequences: int = 0
    """Sequences in the whole data set, over all processes."""
    clusters: tuple[int, ...] = ()
    """Identity of each sequence's unit of independence (`fulldepth.core.uncertainty`); empty = each sequence is one."""
    num_tokens: int = 0
    """Counted tokens (padding and token policy applied), over all processes."""
    first_tokens: bool = True
    """True if the token policy keeps first tokens; if so, statistics are also reported without them."""
    reservoir_tokens: int = 2048
    """Maximum number of tokens, chosen by a seeded hash, that are stored for statistics that are not sums."""
    entropy_sequences: int = 64
    """Maximum number of sequences used for the matrix entropies."""
    words: tuple[str, ...] = ()
    """Look-alike words whose linear separability is measured."""
    projections: tuple[str, ...] = ()
    """Names of the weight matrices inside a block whose spectral norms are measured."""
    stream_scale: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """`residual`, `reference` -> c_0..c_L by which MMD multiplies the states of the model or of the reference: folding
    divided them by it. Empty = 1."""
    effect_parts: tuple[str, ...] = ("layer",)
    """Parts of layers that are removed in turn: `layer`, `attention`, `mlp`."""
    effect_tokens: int = 0
    """Most positions that `layer_effect` keeps for its quantiles, times `effect_positions` in the scope `future`;
    0 = `reservoir_tokens`."""
    effect_population: int = 0
    """Tokens in the data that `effect_tokens` are drawn from."""
    effect_positions: int = 4
    """Number of positions t drawn in each sequence, before which a part is removed (see `layer_effect`)."""
    double: bool = False
    """True if the model computes in float64, so that samples of its numbers are kept in it."""
    seed: int = 0
    device: torch.device = CPU
    """Device of the accumulators."""
    reservoirs: dict[str, Reservoir] = field(default_factory=dict, compare=False)
    """One reservoir per site and size, shared by the measures that need it."""

    @cached_property
    def group_of(self) -> Tensor:
        """`[num_sequences]` int64: the group of each sequence, dealt by hash of its cluster (`uncertainty.deal`)."""
        return torch.from_numpy(deal(self.clusters or range(self.num_sequences)))

    @property
    def groups(self) -> int:
        """G: number of groups of clusters, each with sums of its own; at least 1."""
        return int(self.group_of.max()) + 1 if len(self.group_of) else 1

    @property
    def views(self) -> tuple[str, ...]:
        """Suffixes of statistic names, one per view: all counted tokens, and those without first tokens."""
        return ("", NO_FIRST) if self.first_tokens else ("",)

    def reservoir(self, site: str, tokens: int | None = None) -> Reservoir:
        """Return the shared reservoir of `site` (`residual` or `reference`) for so many tokens, made on first use."""
        tokens = tokens or self.reservoir_tokens
        name = site if tokens == self.reservoir_tokens else f"{site} ({tokens} tokens)"
        if name not in self.reservoirs:
            shape = (self.num_layers + 1, self.width)
            self.reservoirs[name] = Reservoir(tokens, shape, self.seed, self.device)
        return self.reservoirs[name]


@dataclass(frozen=True)
class Readout:
    """Predictions of the last layer's classifier on every layer, at the `M` positions of a batch that have a target."""

    agrees: Tensor
    """[L+1, M] bool: the layer's top prediction equals the last layer's."""
    correct: Tensor
    """[L+1, M] bool: the layer's top prediction equals the target."""
    loss: Tensor
    """[L+1, M] float: cross-entropy in nats."""
    row: Tensor
    """[M] int64: row in the batch of each position's sequence."""
    predicted: Tensor | None = None
    """[L+1, M] int64: the layer's top prediction; None for heads that predict tokens."""
    target: Tensor | None = None
    """[M] int64: the classes that are predicted; None for heads that predict tokens."""


@dataclass(frozen=True)
class Detections:
    """Predictions of layers 1..L of a detector for a batch of images with Q queries each."""

    logits: Tensor
    """[L, B, Q, C+1]: classes, the last one "no object"."""
    boxes: Tensor
    """[L, B, Q, 4]: centre x, centre y, width and height as shares of the image, in [0, 1]."""
    targets: Sequence[Mapping[str, Tensor]] | None = None
    """True objects of each image: `class_labels` [n], `boxes` [n, 4] and perhaps `crowd` [n] bool; None for data
    without boxes."""


@dataclass(eq=False)
class Observation:
    """Activations of one batch: `B` sequences padded to `T`. Derived tensors are computed once and shared."""

    states: Mapping[str, Tensor]
    """site -> [S, B, T, D]: `residual` has S = L+1 (layers 0..L), sites inside layers (`attention_output`, `value`,
    ...) S = L (layers 1..L), `final_normed` S = 1 (layer L), `reference` as `residual`, from the reference model."""
    attention_mask: Tensor
    """[B, T] bool, False = padding."""
    counted: Tensor
    """[B, T] bool: positions that the token policy counts; never padding."""
    sequence: Tensor
    """[B] int64: index of each sequence in the whole data set."""
    labels: Tensor | None = None
    """[B] int64 class of each sequence, -100 where unknown."""
    detections: Detections | None = None
    """Predictions of every layer of a detector; None for other models."""
    words: Tensor | None = None
    """[B, T] int64: index into `Setup.words` of the word that ends at this position, -1 elsewhere."""
    readout: Callable[[], Readout] | None = None
    """Applies the head to every layer; called on first use of `lens`."""
    linear_readout: Callable[[], Readout] | None = None
    """Applies the head to the states of every layer after their fitted maps; called on first use of `linear_lens`."""
    coefficients: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)
    """site -> layer -> mixing weights of the model: `routing` (see `retrieval_weight`)."""

    pooled: bool = False
    """True if a sequence counts as one vector, the mean of its counted states (then N = B everywhere below)."""

    @cached_property
    def lens(self) -> Readout:
        """The head applied to every layer, computed at most once."""
        if self.readout is None:
            raise ValueError("this observation has no classifier head and targets; lens measures need both")
        return self.readout()

    @cached_property
    def linear_lens(self) -> Readout:
        """The head applied to the mapped states of every layer, at the positions of `lens`, computed at most once."""
        if self.linear_readout is None:
            raise ValueError("this observation has no fitted maps; the linear lens needs them")
        return self.linear_readout()

    def select(self, site: str, where: Tensor) -> Tensor:
        """[S, N, D] float32 features of `site` at the `N` positions where `where: [B, T]` holds."""
        states = self.states[site]
        features = states.flatten(1, 2)  # [S, B T, D]
        if not bool(where.all()):
            features = features[:, where.flatten()]
        return features if features.dtype == torch.float64 else features.float()

    @cached_property
    def tokens(self) -> Tensor:
        """[L+1, N, D] residual stream at the `N` counted positions, float32 (float64 for float64 states)."""
        return self.features("residual")

    def features(self, site: str) -> Tensor:
        """[S, N, D] states of a site at the counted positions; if `pooled`, their mean in each sequence."""
        if not self.pooled:
            return self.select(site, self.counted)
        states = self.states[site]
        precision = torch.float64 if states.dtype == torch.float64 else torch.float32
        weights = self.counted.to(states.device, precision)[..., None]  # [B, T, 1]
        return (states.to(precision) * weights).sum(2) / weights.sum(1)

    def keys_at(self, where: Tensor) -> Tensor:
        """[N] int64: the key (see `POSITION_BITS`) of each token where `where: [B, T]` holds."""
        position = self.attention_mask.long().cumsum(1) - 1
        key = (self.sequence[:, None].to(position.device) << POSITION_BITS) | position.clamp(min=0)
        return key[where]

    @cached_property
    def keys(self) -> Tensor:
        """[N] int64: the key of each counted token; of a pooled sequence, that of its first token."""
        return self.sequence << POSITION_BITS if self.pooled else self.keys_at(self.counted)

    @cached_property
    def first(self) -> Tensor:
        """[N] bool: True for counted tokens that are the first of their sequence."""
        return ~later_than_first(self.keys)

    @cached_property
    def view_weights(self) -> Tensor:
        """[N, 2] float64: 1 where a counted token belongs to the view (all tokens; without first tokens)."""
        everything = torch.ones_like(self.first, dtype=torch.float64)
        return torch.stack([everything, (~self.first).double()], dim=1)

    def weights_by_group(self, setup: Setup) -> Tensor:
        """[N, G, 2] float64: `view_weights` in the column of each counted token's group, 0 elsewhere."""
        group = setup.group_of.to(self.keys.device)[self.keys >> POSITION_BITS]
        return one_hot(group, setup.groups).double()[:, :, None] * self.view_weights[:, None, :]

    @cached_property
    def token_labels(self) -> Tensor:
        """[N] int64: the label of each counted token's sequence, -100 without labels."""
        labels = self.labels if self.labels is not None else torch.full_like(self.sequence, IGNORE)
        labels = labels.to(self.counted.device)
        return labels if self.pooled else labels[:, None].expand_as(self.counted)[self.counted]

    @cached_property
    def gram(self) -> Tensor:
        """[N, L+1, L+1] inner products of each token's states over all pairs of layers."""
        per_token = self.tokens.transpose(0, 1)
        return per_token @ per_token.transpose(1, 2)

    @cached_property
    def cosines(self) -> Tensor:
        """[N, L+1, L+1] raw cosine similarities, clamped to [-1, 1]; NaN where a state is exactly zero."""
        norms = self.gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        return cosine(self.gram, norms[:, :, None], norms[:, None, :])


def ignore(done: int) -> None:
    """Ignore progress."""


class Measure(Accumulator):
    """Base class of the accumulators of measures. A subclass declares its inputs, adds states and turns them into rows.

    `name` is the measure's key in the registry; `units` maps each statistic (without suffix) to a unit.
    """

    name: ClassVar[str]
    units: ClassVar[Mapping[str, str]]
    sites: ClassVar[tuple[str, ...]] = ("residual",)
    """Activations that the measure reads."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Requirements, out of `targets, labels, classes, words, equal_lengths, several_sequences, reference, weights,
    routing, head_shares, boxes, objects, interventions, fitted_maps`. Measures that need `weights` or `interventions`
    are not updated with observations of forward passes."""
    optional: ClassVar[bool] = False
    """True if the measure is computed only when it is named, because it takes forward passes of its own."""
    steps: ClassVar[int] = 1
    """Number of parts of `rows`, for progress; a measure with several calls `advance`."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup
        self.advance: Callable[[int], None] = ignore
        """Function that receives the number of `steps` that `rows` has done since the last call."""

    def forecast(self) -> float:
        """Estimate the seconds that `rows` will take once all data are added; 0 if they are too few to estimate."""
        return 0.0

    def add_sum(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> None:
        """Add a zero-initialised state that is summed over batches and processes."""
        self.add(name, shape, dtype=dtype, device=self.setup.device)

    def add_grouped(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> None:
        """Add a sum per group of clusters, `[G, *shape]`, from which standard errors are computed."""
        self.add_sum(name, self.setup.groups, *shape, dtype=dtype)

    @abstractmethod
    def rows(self) -> list[Row]:
        """Return the statistics as rows of `results.parquet`."""

    def influences(self) -> list[Influence]:
        """Return one entry for every number whose error is known from sums per group; none for other measures.

        Sums are over all processes, as in `compute`, so every process must call it.
        """
        return []

    def row(
        self,
        statistic: str,
        value: float | Tensor,
        count: float | Tensor,
        layer: int | None = None,
        other: int | None = None,
        site: str = "residual",
    ) -> Row:
        """Make one row of this measure, in the statistic's unit."""
        unit = self.units[statistic.removesuffix(NO_FIRST)]
        return Row(self.name, site, layer, other, statistic, float(value), int(count), unit)

    def rows_of(
        self,
        statistics: Mapping[str, float],
        count: float,
        layer: int | None = None,
        other: int | None = None,
        site: str = "residual",
    ) -> list[Row]:
        """Make one row per statistic, except for standard errors that are NaN."""
        return [
            self.row(statistic, value, count, layer, other, site)
            for statistic, value in statistics.items()
            if not (statistic.startswith("standard_error") and math.isnan(value))
        ]

    def reset(self) -> None:
        """Remove all data, also from reservoirs that are shared with other measures."""
        super().reset()
        for reservoir in self._reservoirs():
            reservoir.reset()

    @property
    def nbytes(self) -> int:
        """Size of the states in bytes, including reservoirs that are not shared with other measures."""
        unshared = self._reservoirs() - {*self.setup.reservoirs.values()}
        return super().nbytes + sum(reservoir.nbytes for reservoir in unshared)

    def _reservoirs(self) -> set[Reservoir]:
        """The reservoirs that this measure holds."""
        return {part for part in self.modules() if isinstance(part, Reservoir)}


class OfLayers(Measure):
    """Base class of measures with one number for each layer 0..L over the shared samples of tokens of their `sites`."""

    units: ClassVar[Mapping[str, str]] = {"value": "1"}

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.samples = nn.ModuleList(setup.reservoir(site) for site in self.sites)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        for site in self.sites:
            self.setup.reservoir(site).observe(observation, site)

    @abstractmethod
    def compute(self) -> tuple[list[float], int]:
        """Return the numbers of layers 0..L (empty if the sample does not allow them), and the number of tokens."""

    def rows(self) -> list[Row]:
        """One row for each layer 0..L."""
        values, count = self.compute()
        return [self.row("value", value, count, layer) for layer, value in enumerate(values)]


class Estimated(Measure):
    """Base class of measures that compute each number with its standard error and influences."""

    @abstractmethod
    def compute(self) -> list[Estimate]:
        """Return the numbers over all processes, in the order of their rows."""

    def influences(self) -> list[Influence]:
        """Return the influences on every number that has them."""
        return [
            Influence(self.name, number.site, number.layer, number.other, number.statistic, number.influences)
            for number in self.compute()
            if number.influences is not None and any(map(math.isfinite, number.influences))
        ]

    def rows(self) -> list[Row]:
        """A row for every number, and one for its standard error if that is known."""
        rows = []
        for number in self.compute():
            statistics = {number.statistic: number.value, error_name(number.statistic): number.error}
            rows += self.rows_of(statistics, number.count, number.layer, number.other, number.site)
        return rows


def error_name(statistic: str) -> str:
    """Statistic of the standard error: `standard_error` of a `mean` or `value`, `standard_error_of_NAME` of others.

    A suffix, from a colon on, stays at the end.
    """
    name, colon, suffix = statistic.partition(":")
    return f"standard_error{'' if name in ('mean', 'value') else f'_of_{name}'}{colon}{suffix}"


class Means(Estimated):
    """Base class of means with standard errors, from sums and counts per group of clusters.

    The states are `sums [G, *shape]` and `counts`, which broadcasts to it. A subclass names their `places`; by default
    they are those of layers 1..L in every view, `[G, L, 2]`.

    Args:
        setup: sizes.
        shape: shape of the sums; empty = `[L, 2]`.
        counts: shape of the counts; None = that of the sums.
    """

    sums: Tensor
    counts: Tensor

    def __init__(self, setup: Setup, *shape: int, counts: tuple[int, ...] | None = None) -> None:
        super().__init__(setup)
        shape = shape or (setup.num_layers, 2)
        self.add_grouped("sums", *shape)
        self.add_grouped("counts", *(counts or shape))

    def places(self, counts: Tensor) -> Iterable[Place]:
        """Yield the places of the means, given the `counts [*shape]` of all processes."""
        for view, suffix in enumerate(self.setup.views):
            yield from (Place((layer, view), layer + 1, suffix) for layer in range(self.setup.num_layers))

    def add_tokens(self, values: Tensor, observation: Observation) -> None:
        """Add the finite `values [K, N]` of the counted tokens to the sums and counts `[G, K, 2]` of both views."""
        weights = observation.weights_by_group(self.setup).flatten(1).to(values.device)  # [N, G * 2]
        valid = values.isfinite()
        for state, terms in ((self.sums, values.where(valid, 0.0)), (self.counts, valid.double())):
            state += (terms @ weights).view(len(values), -1, 2).movedim(1, 0)

    def compute(self) -> list[Estimate]:
        """The mean at every place, each followed by the place's `further` statistics."""
        counts = self.counts.sum(0)
        means = EstimateArray.of(self.sums.sum(0) / counts, counts, influence_of_ratio(self.sums, self.counts))
        further = self.further(means)
        numbers = []
        for place in self.places(means.counts):
            mean = means.at(place.at, place.statistic + place.suffix, place.layer, place.site)
            numbers.append(mean)
            for name, values in further.items():
                value = float(values[place.at])
                numbers.append(Estimate(name + place.suffix, value, mean.count, place.layer, site=place.site))
        return numbers

    def further(self, means: EstimateArray) -> dict[str, Tensor]:
        """Statistic -> `[*shape]`: statistics besides the means, none by default."""
        return {}

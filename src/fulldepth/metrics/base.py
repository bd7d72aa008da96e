"""What every measure shares: what it sees (`Observation`), what it knows beforehand (`Setup`), what it gives (`Row`).

A measure is a pure function and a `Measure` beside it, in one file. The `Measure` is a `torchmetrics.Metric` that
holds float64 sums and counts and divides once, so any split of the data into batches or processes gives the same
numbers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fulldepth.metrics.accumulator import CPU, Accumulator
from fulldepth.metrics.angle import cosine
from fulldepth.metrics.jackknife import group_sizes
from fulldepth.metrics.reservoir import Reservoir
from fulldepth.targets import IGNORE

NO_FIRST = ":no-first"
"""Suffix of the statistics that leave out the first token of each sequence."""
POSITION_BITS = 24
"""A token's key is `sequence << POSITION_BITS | position`: unique over the data set, whatever the batching."""


class Row(NamedTuple):
    """One row of `results.parquet`. Layers run 1..L, 0 = embeddings; None where a column has no meaning."""

    measure: str
    site: str | None
    layer: int | None
    other: int | None
    statistic: str
    value: float
    count: int  # type: ignore[assignment]  # the column's name, not tuple.count
    unit: str


@dataclass(frozen=True)
class Setup:
    """What is known about the model and the data before the first batch; sizes the accumulators."""

    num_layers: int
    """L: number of blocks."""
    width: int
    """D: channels of the residual stream."""
    value_width: int = 0
    """Channels of the value states (number of key/value heads times head size); 0 where there are none."""
    chained: bool = True
    """Whether every layer reads just what the layer before gave (not so with a tree of residual paths)."""
    routed_heads: int = 0
    """Key/value heads whose keys and values a memory router mixes; 0 without a memory."""
    head_shares: tuple[tuple[float, ...], ...] = ()
    """Of each layer 1..L, the norm of every query head's slice of the output projection over the sum of them; empty
    where it is not known."""
    num_streams: int = 1
    """Residual streams between layers."""
    sequence_length: int = 0
    """T: tokens of the longest sequence, special tokens included."""
    num_sequences: int = 0
    """Sequences in the whole data set, over all processes."""
    num_tokens: int = 0
    """Tokens that count (padding and token policy applied), over all processes."""
    first_tokens: bool = True
    """Whether the token policy keeps first tokens, so that results without them stand beside the others."""
    reservoir_tokens: int = 2048
    """At most this many tokens are kept, chosen by a seeded hash, for what cannot be a sum."""
    entropy_sequences: int = 64
    """At most this many sequences enter the matrix entropies."""
    words: tuple[str, ...] = ()
    """Look-alike words whose linear separability is asked for."""
    projections: tuple[str, ...] = ()
    """Names of the weight matrices inside a block, for the spectral norms."""
    seed: int = 0
    device: torch.device = CPU
    """Where the accumulators live."""
    reservoirs: dict[str, Reservoir] = field(default_factory=dict, compare=False)
    """One reservoir per site, shared by the measures that need it."""

    @property
    def group_sizes(self) -> Tensor:
        """`[G]` float64: sequences in each group of the jackknife (see `fulldepth.metrics.jackknife`)."""
        return group_sizes(self.num_sequences)

    @property
    def groups(self) -> int:
        """G: groups of sequences whose sums are kept apart, for standard errors."""
        return len(self.group_sizes)

    @property
    def views(self) -> tuple[str, ...]:
        """Suffixes of statistic names: all counted tokens, and the same without each sequence's first token."""
        return ("", NO_FIRST) if self.first_tokens else ("",)

    def reservoir(self, site: str) -> Reservoir:
        """The shared reservoir of `site` (`residual` or `reference`), made on first request."""
        if site not in self.reservoirs:
            shape = (self.num_layers + 1, self.width)
            self.reservoirs[site] = Reservoir(self.reservoir_tokens, shape, self.seed, self.device)
        return self.reservoirs[site]


@dataclass(frozen=True)
class Readout:
    """The last layer's classifier applied to every layer, at the `M` positions of a batch that have a target."""

    agrees: Tensor
    """[L+1, M] bool: the layer's top prediction equals the last layer's."""
    correct: Tensor
    """[L+1, M] bool: the layer's top prediction equals the target."""
    loss: Tensor
    """[L+1, M] float: cross-entropy in nats."""
    row: Tensor
    """[M] int64: the sequence of each position, as its row in the batch."""


@dataclass(eq=False)
class Observation:
    """One batch, as the measures see it. `B` sequences padded to `T`; derived tensors are computed once and shared."""

    states: Mapping[str, Tensor]
    """site -> [S, B, T, D]: `residual` has S = L+1 (layers 0..L), `attention_input`, `attention_output` and `value`
    S = L (layers 1..L), `final_normed` S = 1 (layer L), `reference` as `residual`, from the reference model."""
    attention_mask: Tensor
    """[B, T] bool, False = padding."""
    counted: Tensor
    """[B, T] bool: positions that the token policy counts; never padding."""
    sequence: Tensor
    """[B] int64: index of each sequence in the whole data set."""
    labels: Tensor | None = None
    """[B] int64 class of each sequence, -100 where unknown."""
    words: Tensor | None = None
    """[B, T] int64: index into `Setup.words` of the word that ends at this position, -1 elsewhere."""
    readout: Callable[[], Readout] | None = None
    """Applies the head to every layer, when a measure asks for it."""
    coefficients: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)
    """site -> layer -> the model's own weights there: `routing` (see `retrieval_weight`), `attention_mixing` and
    `mlp_mixing` (see `stream_mixing`)."""

    @cached_property
    def lens(self) -> Readout:
        """The head's reading of every layer, computed at most once."""
        if self.readout is None:
            raise ValueError("this observation has no classifier head and targets; lens measures need both")
        return self.readout()

    def select(self, site: str, where: Tensor) -> Tensor:
        """[S, N, D] float32 features of `site` at the `N` positions where `where: [B, T]` holds."""
        states = self.states[site]
        flat = states.flatten(1, 2)
        chosen = flat if bool(where.all()) else flat[:, where.flatten()]
        return chosen if chosen.dtype == torch.float64 else chosen.float()

    @cached_property
    def tokens(self) -> Tensor:
        """[L+1, N, D] residual stream at the `N` counted positions, float32 (float64 stays)."""
        return self.select("residual", self.counted)

    def keys_at(self, where: Tensor) -> Tensor:
        """[N] int64: the key of each token where `where: [B, T]` holds, unique over the data set."""
        position = self.attention_mask.long().cumsum(1) - 1
        key = (self.sequence[:, None].to(position.device) << POSITION_BITS) | position.clamp(min=0)
        return key[where]

    @cached_property
    def keys(self) -> Tensor:
        """[N] int64: the key of each counted token."""
        return self.keys_at(self.counted)

    @cached_property
    def first(self) -> Tensor:
        """[N] bool: the counted token is the first of its sequence."""
        return self.keys & ((1 << POSITION_BITS) - 1) == 0

    @cached_property
    def view_weights(self) -> Tensor:
        """[N, 2] float64: 1 where a counted token belongs to the view (all; without the first token)."""
        everything = torch.ones_like(self.first, dtype=torch.float64)
        return torch.stack([everything, (~self.first).double()], dim=1)

    def weights_by_group(self, groups: int) -> Tensor:
        """[N, G, 2] float64: `view_weights` in the column of each counted token's group of sequences, 0 elsewhere."""
        group = (self.keys >> POSITION_BITS) % groups
        return one_hot(group, groups).double()[:, :, None] * self.view_weights[:, None, :]

    def lens_groups(self, groups: int) -> Tensor:
        """[M] int64: the group of sequences of each position that the lens reads."""
        return self.sequence.to(self.lens.row.device)[self.lens.row] % groups

    @cached_property
    def token_labels(self) -> Tensor:
        """[N] int64: the label of each counted token's sequence, -100 where there is none."""
        labels = self.labels if self.labels is not None else torch.full_like(self.sequence, IGNORE)
        return labels.to(self.counted.device)[:, None].expand_as(self.counted)[self.counted]

    @cached_property
    def gram(self) -> Tensor:
        """[N, L+1, L+1] inner products of one token's states over all pairs of layers."""
        per_token = self.tokens.transpose(0, 1)
        return per_token @ per_token.transpose(1, 2)

    @cached_property
    def cosines(self) -> Tensor:
        """[N, L+1, L+1] raw cosine similarities, clamped to [-1, 1]; NaN where a state is exactly zero."""
        norms = self.gram.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        return cosine(self.gram, norms[:, :, None], norms[:, None, :])


class Measure(Accumulator):
    """Base of the accumulators of measures. A subclass says what it needs, adds its states, and turns them into rows.

    Class attributes are the measure's entry in the registry; `units` maps each statistic (without suffix) to a unit.
    """

    name: ClassVar[str]
    units: ClassVar[Mapping[str, str]]
    sites: ClassVar[tuple[str, ...]] = ("residual",)
    """Activations that the measure reads."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Of `targets, labels, words, equal_lengths, several_sequences, reference, weights, routing, head_shares,
    streams`."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup = setup

    def add_sum(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> None:
        """Add a state of zeros that is summed over batches and processes."""
        self.add(name, shape, dtype=dtype, device=self.setup.device)

    def add_grouped(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> None:
        """Add a sum that is kept apart by group of sequences, `[G, *shape]`: what a standard error needs."""
        self.add_sum(name, self.setup.groups, *shape, dtype=dtype)

    @abstractmethod
    def rows(self) -> list[Row]:
        """The statistics as rows of `results.parquet`."""

    def row(
        self,
        statistic: str,
        value: float | Tensor,
        count: float | Tensor,
        layer: int | None = None,
        other: int | None = None,
        site: str = "residual",
    ) -> Row:
        """One row of this measure, in the statistic's unit."""
        unit = self.units[statistic.removesuffix(NO_FIRST)]
        return Row(self.name, site, layer, other, statistic, float(value), int(count), unit)

    def rows_of(
        self, statistics: Mapping[str, float], count: float, layer: int | None = None, site: str = "residual"
    ) -> list[Row]:
        """A row of each statistic; a standard error that is not a number has none."""
        return [
            self.row(statistic, value, count, layer, site=site)
            for statistic, value in statistics.items()
            if not (statistic.startswith("standard_error") and math.isnan(value))
        ]

    @property
    def nbytes(self) -> int:
        """Bytes that the states hold, those of reservoirs of its own included; those of the setup count apart."""
        shared = set(map(id, self.setup.reservoirs.values()))
        reservoirs = [module for module in self.modules() if isinstance(module, Reservoir) and id(module) not in shared]
        return super().nbytes + sum(reservoir.nbytes for reservoir in reservoirs)

"""A whole data set of invented activations: as plain float64 numbers for the oracles, in batches for the measures."""

import re
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.testing import assert_allclose

from fulldepth.metrics import Observation, Readout, Setup

WORDS = ("is", "are", "was")
EVERYTHING = (12,)
HEADS = 2
"""Key/value heads of the memory, residual streams."""
SHARES = ((0.1, 0.2, 0.3, 0.4), (0.4, 0.1, 0.1, 0.4), (0.05, 0.15, 0.5, 0.3), (0.25,) * 4) * 4
"""Of each layer, how much each of four query heads counts."""
SPLITS = (EVERYTHING, (1,) * 12, (5, 1, 4, 2))


@dataclass(frozen=True)
class World:
    """`N` sequences padded to `T`, as if a model of `L` layers had read them. Layers run along the first axis."""

    states: dict
    """site -> [S, N, T, D] tensors."""
    mask: torch.Tensor
    counted: torch.Tensor
    targets: torch.Tensor
    """[N, T] int64, -100 where there is none."""
    logits: torch.Tensor
    """[L+1, N, T, V]."""
    labels: torch.Tensor
    words: torch.Tensor
    first_tokens: bool = True
    coefficients: dict = field(default_factory=dict)
    """site -> layer -> the model's own weights: `[N, T, ...]` where they depend on the token, else a constant."""
    options: dict = field(default_factory=dict)
    """Further settings for `Setup`."""

    @property
    def layers(self):
        return len(self.states["residual"]) - 1

    def replace(self, **changes):
        return replace(self, **changes)

    def with_states(self, **sites):
        return replace(self, states={**self.states, **sites})

    def setup(self, **options):
        settings = {
            "num_layers": self.layers,
            "width": self.states["residual"].shape[-1],
            "value_width": self.states["value"].shape[-1] if "value" in self.states else 0,
            "sequence_length": int(self.mask.sum(1).max()),
            "num_sequences": len(self.mask),
            "num_tokens": int(self.counted.sum()),
            "first_tokens": self.first_tokens,
            "words": WORDS,
            "num_classes": self.logits.shape[-1],
            "projections": ("self_attn.q_proj", "mlp.down_proj"),
            "routed_heads": HEADS,
            "head_shares": SHARES[: self.layers],
        }
        return Setup(**{**settings, **self.options, **options})

    def observations(self, split=EVERYTHING, *, left=0, right=0, garbage=float("nan"), order=None):
        """The batches; `left` and `right` add padding positions that hold `garbage`."""
        order = torch.arange(len(self.mask)) if order is None else torch.as_tensor(order)
        for chosen in order.split(list(split)):
            pad = (left, right)
            states = {}
            for site, values in self.states.items():
                batch = values[:, chosen].clone()
                batch[:, ~self.mask[chosen]] = garbage
                states[site] = F.pad(batch, (0, 0, *pad), value=garbage)
            coefficients = {
                site: {layer: self._batch(weights, chosen, pad, garbage) for layer, weights in found.items()}
                for site, found in self.coefficients.items()
            }
            yield Observation(
                states=states,
                attention_mask=F.pad(self.mask[chosen], pad, value=False),
                counted=F.pad(self.counted[chosen], pad, value=False),
                sequence=chosen,
                labels=self.labels[chosen],
                words=F.pad(self.words[chosen], pad, value=-1),
                readout=lambda chosen=chosen: self.readout(chosen, self.logits),
                linear_readout=lambda chosen=chosen: self.readout(chosen, self.linear_logits),
                coefficients=coefficients,
            )

    def _batch(self, weights, chosen, pad, garbage):
        """The weights of some sequences, with garbage where there is padding."""
        if weights.ndim < 4:
            return weights
        batch = weights[chosen].clone()
        batch[~self.mask[chosen]] = garbage
        return F.pad(batch, (0, 0, 0, 0, *pad), value=garbage)

    @property
    def linear_logits(self):
        """[L+1, N, T, V] of the mapped states, the last layer's as they are."""
        return (self.logits + self.logits[-1:]) / 2

    def readout(self, chosen, logits):
        targets = self.targets[chosen]
        where = targets != -100
        logits, targets = logits[:, chosen][:, where], targets[where]
        top = logits.argmax(-1)
        loss = logits.logsumexp(-1) - logits.gather(-1, targets.expand(top.shape)[..., None])[..., 0]
        return Readout(
            agrees=top == top[-1], correct=top == targets, loss=loss, row=where.nonzero()[:, 0],
            predicted=top, target=targets,
        )  # fmt: skip

    def rows(self, measure, split=EVERYTHING, *, options=None, **padding):
        """What `measure` says of the whole data: {(site, layer, other, statistic): row}."""
        metric = measure(self.setup(**(options or {})))
        for observation in self.observations(split, **padding):
            metric.update(observation)
        return table(metric.rows())

    def positions(self, view=""):
        """(sequence, position) of each token that counts, in the order of the data, by plain loops."""
        for n in range(len(self.mask)):
            first = int(self.mask[n].int().argmax())
            for t in range(self.mask.shape[1]):
                if self.counted[n, t] and not (view == ":no-first" and t == first):
                    yield n, t

    def tokens(self, site="residual", view=""):
        """[S, N, D] float64: every token that counts."""
        states = self.states[site].double().numpy()
        return np.stack([states[:, n, t] for n, t in self.positions(view)], axis=1)


def table(rows):
    keyed = {(row.site, row.layer, row.other, row.statistic): row for row in rows}
    assert len(keyed) == len(rows), "two rows say the same thing"
    return keyed


def invent_coefficients(layers, count, longest):
    """Routers of all three kinds by turns, and connections that depend on the token or not."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    kinds = (
        lambda layer: normal(count, longest, HEADS, layer).softmax(-1),
        lambda layer: normal(HEADS, layer, HEADS),
        lambda layer: normal(HEADS, layer).softmax(-1),
    )
    return {"routing": {layer: kinds[layer % 3 - 2](layer) for layer in range(2, layers + 1)}}


def invent(generator, lengths=(9, 4, 7, 9, 1, 6, 9, 3, 8, 5, 9, 2), layers=3, width=6, value_width=4, vocabulary=5):
    """A residual stream that walks, with a common mean and a loud first token, over ragged sequences."""
    count, longest = len(lengths), max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    steps = normal(layers + 1, count, longest, width)
    residual = steps.cumsum(0) + 2 * normal(width)
    residual[1:, :, 0] += 30 * normal(width)
    logits = normal(layers + 1, count, longest, vocabulary).cumsum(0)
    targets = torch.randint(vocabulary, (count, longest), generator=generator)
    targets[~mask | (torch.rand(count, longest, generator=generator) < 0.2)] = -100
    targets[4:5] = -100  # a sequence without a target
    words = torch.randint(-1, len(WORDS), (count, longest), generator=generator)
    return World(
        states={
            "residual": residual,
            "attention_output": residual[:-1] + 0.5 * normal(layers, count, longest, width),
            "value": normal(layers, count, longest, value_width),
            "final_normed": F.layer_norm(residual[-1:], (width,)),
            "reference": residual + 0.7 * normal(layers + 1, count, longest, width),
        },
        mask=mask,
        counted=mask,
        targets=targets,
        logits=logits,
        labels=torch.where(torch.arange(count) == 7, -100, torch.tensor([0, 1, 2, 0, 1])[torch.arange(count) % 5]),
        words=words.masked_fill(~mask, -1),
        coefficients=invent_coefficients(layers, count, longest),
    )


@pytest.fixture
def invented(generator):
    """Builder of worlds: `invented(lengths=..., layers=..., width=...)`."""
    return lambda **shape: invent(generator, **shape)


@pytest.fixture
def world(generator):
    """Twelve ragged sequences, three layers."""
    return invent(generator)


@pytest.fixture
def even_world(generator):
    """Twelve sequences of nine tokens each."""
    return invent(generator, lengths=(9,) * 12)


@pytest.fixture
def no_first(world):
    """The same data under the token policy that leaves first tokens out."""
    counted = world.counted.clone()
    counted[:, 0] = False
    return world.replace(counted=counted, first_tokens=False)


@pytest.fixture
def same_rows():
    """Asserts that two tables say the same, to `rtol`."""

    def check(got, expected, rtol=1e-6, atol=1e-7):
        assert got.keys() == expected.keys()
        for key, row in expected.items():
            assert got[key].count == row.count, key
            assert got[key].unit == row.unit, key
            assert_allclose(got[key].value, row.value, rtol=rtol, atol=atol, err_msg=str(key))

    return check


@pytest.fixture
def any_split(same_rows):
    """Asserts that neither batching, nor padding on either side, nor what it holds, changes what a measure says."""

    def check(measure, world, **tolerance):
        expected = world.rows(measure)
        assert expected
        for split in SPLITS[1:]:
            same_rows(world.rows(measure, split), expected, **tolerance)
        same_rows(world.rows(measure, SPLITS[2], right=3, garbage=1e30), expected, **tolerance)
        same_rows(world.rows(measure, SPLITS[2], left=2, right=1), expected, **tolerance)
        return expected

    return check


@pytest.fixture
def expect():
    """Asserts that `rows` holds exactly `expected`: {(site, layer, other, statistic): (value, count or None)}.

    Standard errors and intervals have tests of their own (test_errors.py).
    """

    def check(rows, expected, rtol=1e-5, atol=1e-6):
        rows = {key: row for key, row in rows.items() if not re.search("standard_error|(low|high)_of_", key[3])}
        assert rows.keys() == expected.keys(), rows.keys() ^ expected.keys()
        for key, (value, count) in expected.items():
            assert_allclose(rows[key].value, value, rtol=rtol, atol=atol, err_msg=str(key))
            assert count is None or rows[key].count == count, (key, rows[key].count, count)

    return check

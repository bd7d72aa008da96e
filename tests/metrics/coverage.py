"""How often the stated 95 % intervals hold the truth, by simulation; prints the table of docs/errors.md.

    PYTHONPATH=tests python -m metrics.coverage [draws]

A draw is a data set of 12 to 60 documents or rows with effects of their own. Real measures read its invented states in
batches; the truth is computed in plain numpy from a large population of the same kind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import NamedTuple

import numpy as np
import torch

from fulldepth.core.uncertainty import GROUPS, quantile
from fulldepth.metrics import (
    Coherence,
    Displacement,
    EffectiveDepth,
    JumpRate,
    LensAccuracy,
    LensLoss,
    Measure,
    NormRatio,
    Observation,
    Readout,
    RenyiEntropy,
    Saturation,
    Setup,
)
from fulldepth.metrics.standard_errors import Mean
from metrics.oracle import psi, ratio, renyi

ORDERS = ("sorted", "alternating", "shuffled", "windows")
"""Rows of two classes in the order of their class, alternating, or in random order; windows of documents."""
LENGTH, WIDTH, LAYERS, POSITIONS = 8, 6, 200, 12
"""Tokens of a sequence, channels, layers of the lens, lens positions of a sequence."""
POPULATION = 4_000
READ = 100
"""Layer of the lens whose accuracy and loss are read."""
FEWER = 50
"""Layers of which the effective depth is taken."""
FEWEST, MOST = 12, 60
"""Documents or rows of a draw."""
MISSED = 0.01
"""Share of right predictions that a layer before the last misses by chance."""
LIMITS = 0.90, 0.98


class Sample(NamedTuple):
    """Sequences, in the order in which they are read."""

    cluster: np.ndarray
    """[N] document or row of each sequence."""
    effect: np.ndarray
    """[N] what the sequences of a document have in common."""


def sample(rng, order, clusters):
    """A sample of documents (of 1 to 12 windows each, more where the effect is larger) or rows."""
    classes = rng.random(clusters) < 0.4
    effect = np.where(classes, 1.0, -0.7) + 0.3 * rng.normal(size=clusters)
    if order == "windows":
        windows = np.clip(1 + rng.poisson(2 * np.exp(0.5 * effect)), 1, 12)
        return Sample(np.repeat(np.arange(clusters), windows), np.repeat(effect, windows))
    if order == "sorted":
        effect = np.sort(effect)
    elif order == "alternating":
        low, high = np.array_split(np.sort(effect), 2)
        effect = np.stack([low, np.resize(high, len(low))]).T.reshape(-1)[:clusters]
    return Sample(np.arange(clusters), effect)


def states(rng, effect):
    """[5, N, T, D] a residual stream; the effect scales a direction that all tokens share, and the updates.

    The last two updates turn the stream about as far: the jump rate of the last layer is near its clamp at 0.
    """
    shape = (len(effect), LENGTH, WIDTH)
    scale = np.exp(0.4 * effect)[:, None, None]
    stream = [rng.normal(size=shape) + scale * np.eye(WIDTH)[0]]
    for size in (0.8 * scale, 0.6 * scale, 0.9 * scale**0.5, 1.03 / scale**0.3):
        stream.append(stream[-1] + size * rng.normal(size=shape))
    return np.stack(stream)


def lens(rng, effect):
    """[LAYERS+1, N, P] agreement with the last layer, right predictions, and losses.

    There are many layers, so that an interval has several, and the true median and depth are no multiples of a step.
    """
    shape = (len(effect), POSITIONS)
    layers = np.arange(LAYERS + 1)[:, None, None]
    settles = np.clip(np.ceil(100 + 20 * effect[:, None] + 30 * rng.normal(size=shape)), 1, LAYERS)
    agrees = settles <= layers
    known = rng.random(shape) < 1 / (1 + np.exp(-0.5 - 0.8 * effect[:, None]))
    missed = (rng.random((LAYERS + 1, *shape), dtype=np.float32) < MISSED) & (layers < LAYERS)
    loss = (np.exp(0.5 * effect)[:, None] * rng.exponential(size=shape)).astype(np.float32) * (2 - agrees)
    return agrees, agrees & known & ~missed, loss


def observations(rng, drawn):
    """Two batches of the sample."""
    stream = torch.tensor(states(rng, drawn.effect), dtype=torch.float32)
    agrees, correct, loss = (torch.tensor(part) for part in lens(rng, drawn.effect))
    found = []
    for rows in torch.arange(len(drawn.effect)).tensor_split(2):
        mask = torch.ones(len(rows), LENGTH, dtype=torch.bool)
        read = Readout(
            *(part[:, rows].flatten(1) for part in (agrees, correct, loss)),
            row=torch.arange(len(rows)).repeat_interleave(POSITIONS),
        )
        found.append(Observation({"residual": stream[:, rows]}, mask, mask, rows, readout=lambda read=read: read))
    return found


def part_of(batch, layers):
    """What a model of fewer layers would give; see `Case.layers`."""
    read, step = batch.lens, LAYERS // layers
    lens = Readout(read.agrees[::step], read.correct[::step], read.loss[::step], read.row)
    states = {"residual": batch.states["residual"][: layers + 1]}
    return Observation(states, batch.attention_mask, batch.counted, batch.sequence, readout=lambda: lens)


class Interval(NamedTuple):
    """The stated interval."""

    low: float
    high: float


def interval(metric, layer, value, error):
    """Estimate plus and minus its error, by Student's t over the groups; of a step the stated interval."""
    rows = {row.statistic: row.value for row in metric.rows() if row.layer == layer and row.site == "residual"}
    if not error:
        return Interval(rows[f"low_of_{value}"], rows[f"high_of_{value}"])
    groups = next(len(each.values) for each in metric.influences() if (each.layer, each.statistic) == (layer, value))
    far = quantile(groups) * rows[error]
    return Interval(rows[value] - far, rows[value] + far)


class Case(NamedTuple):
    """A number of a measure, and the same number of the population in numpy."""

    measure: type[Measure]
    layer: int | None
    value: str
    error: str
    truth: Callable[[Population], float]
    layers: int
    """Layers that the measure reads: the first ones of the stream, or so many of the lens, evenly spaced."""


class Population:
    """A large sample, with the numbers of every token in plain numpy."""

    def __init__(self, order):
        rng = np.random.default_rng(99)
        effect = sample(rng, order, POPULATION).effect
        self.states = states(rng, effect)
        self.agrees, correct, self.loss = lens(rng, effect)
        self.settled = self.agrees[1:].mean((1, 2))
        final = correct[-1]
        self.accuracy = np.array([(agrees & final).mean() for agrees in self.agrees])
        self.accuracy[:-1] *= 1 - MISSED  # its mean: by the noise of chance misses, a layer could cross too early

    def psi(self, layer):
        """Mean displacement."""
        return float(psi(*self.states[layer - 1 : layer + 1]).mean())

    def jump(self, layer):
        """Jump rate of a last layer, in per cent."""
        return 100 * max(0.0, self.psi(layer) - self.psi(layer - 1))

    def ratio(self):
        """Mean norm ratio of layer 1."""
        return float(ratio(*self.states[:2]).mean())

    def coherence(self):
        """Mean coherence of layer 1."""
        spectra = []
        for x in self.states[:2]:
            z = (x - x.mean(1, keepdims=True)) / x.std(1, ddof=1, keepdims=True)
            p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
            spectra.append(np.fft.rfft(p, axis=1))
        x, y = spectra
        cross = np.abs((x * y.conj()).sum(0)) ** 2
        return float((cross / (np.abs(x) ** 2).sum(0) / (np.abs(y) ** 2).sum(0)).mean())

    def entropy(self):
        """Mean entropy of layer 1."""
        return float(np.mean([renyi(z, 1) for z in self.states[1]]))

    def depth(self):
        """First layer with 95 % of the last layer's accuracy."""
        accuracy = self.accuracy[:: LAYERS // FEWER]
        return float(np.argmax(accuracy[1:] >= 0.95 * accuracy[-1]) + 1)


CLAMPED = "jump rate near 0"
"""Its interval begins at or below 0 and can miss on one side only: it may hold the truth in more than 98 % of draws."""
MEAN = ("mean", "standard_error")
CASES = {
    "displacement": Case(Displacement, 1, *MEAN, lambda p: p.psi(1), 4),
    "jump rate": Case(JumpRate, 3, "value", "standard_error", lambda p: p.jump(3), 3),
    CLAMPED: Case(JumpRate, 4, "value", "standard_error", lambda p: p.jump(4), 4),
    "norm ratio": Case(NormRatio, 1, *MEAN, Population.ratio, 4),
    "coherence": Case(Coherence, 1, "mean_corrected", "standard_error_of_mean_corrected", Population.coherence, 4),
    "entropy": Case(RenyiEntropy, 1, "mean:plain:1", "standard_error:plain:1", Population.entropy, 4),
    "lens loss": Case(LensLoss, READ, *MEAN, lambda p: float(p.loss[READ].mean()), LAYERS),
    "lens accuracy": Case(LensAccuracy, READ, *MEAN, lambda p: float(p.accuracy[READ]), LAYERS),
    "median saturation": Case(Saturation, None, "median", "", lambda p: float(np.argmax(p.settled >= 0.5) + 1), LAYERS),
    "effective depth": Case(EffectiveDepth, None, "relative_eps=0.05", "", Population.depth, FEWER),
}
EXIT = "accuracy of an exit"
"""`Mean` of early exit, at layer `READ`."""
NAMES = (*CASES, EXIT)


def intervals(rng, order, few, names):
    """The intervals that measures state of one draw of `few` to `MOST` documents or rows."""
    drawn = sample(rng, order, int(rng.integers(few, MOST + 1)))
    clusters = tuple(int(cluster) for cluster in drawn.cluster)
    count, batches = len(clusters), observations(rng, drawn)
    stated = {}
    for name in names:
        if name == EXIT:
            right = torch.cat([batch.lens.correct[READ].double() for batch in batches])
            mean = Mean.of(right, torch.tensor(clusters).repeat_interleave(POSITIONS))
            far = quantile(min(len(set(clusters)), GROUPS)) * (mean.error or 0.0)
            stated[name] = Interval(mean.value - far, mean.value + far)
            continue
        case = CASES[name]
        setup = Setup(
            num_layers=case.layers,
            width=WIDTH,
            sequence_length=LENGTH,
            num_sequences=count,
            num_tokens=count * LENGTH,
            clusters=clusters,
            entropy_sequences=count,
        )
        metric = case.measure(setup)
        for batch in batches:
            metric.update(part_of(batch, case.layers))
        stated[name] = interval(metric, case.layer, case.value, case.error)
    return stated


@cache
def truths(windows):
    """The numbers of the population of windows or rows."""
    population = Population("windows" if windows else "shuffled")
    found = {name: case.truth(population) for name, case in CASES.items()}
    return {**found, EXIT: found["lens accuracy"]}


def simulated(order, draws, names=NAMES, few=FEWEST):
    """Number -> share of the draws whose interval holds the population's; mean error over the scatter of estimates."""
    true = truths(order == "windows")
    found = [intervals(np.random.default_rng((ORDERS.index(order), draw)), order, few, names) for draw in range(draws)]
    result = {}
    for name in names:
        ends = np.array([each[name] for each in found])  # [draws, 2]
        held = (ends[:, 0] <= true[name]) & (true[name] <= ends[:, 1])
        half = (ends[:, 1] - ends[:, 0]).mean() / 2 / quantile((few + MOST) // 2)
        result[name] = float(held.mean()), float(half / ends.mean(1).std(ddof=1))
    return result


def main(draws):
    """Print the table."""
    columns = [simulated(order, draws) for order in ORDERS]
    print(f"{draws:,} draws, {datetime.now(UTC):%Y-%m-%d}\n")
    print(f"| number | {' | '.join(ORDERS)} |\n|---|{'---|' * len(ORDERS)}")
    for name in NAMES:
        print(f"| {name} | {' | '.join(f'{column[name][0]:.3f}' for column in columns)} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 400)

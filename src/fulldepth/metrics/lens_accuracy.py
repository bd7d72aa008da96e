"""Layer-wise accuracy: accuracy of the last layer's classifier on every layer (aligned training, Eq. 2)."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from fulldepth.metrics.base import Influence, Measure, Observation, Readout, Row, Setup
from fulldepth.metrics.jackknife import error_of, ratio_influence
from fulldepth.targets import IGNORE


def lens_accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    r"""Share of positions whose top prediction is the target, in [0, 1].

    .. math:: \mathrm{Acc}^{(l)} = \frac{1}{N} \sum_i [\arg\max g(h_i^{(l)}) = y_i]

    Args:
        logits: a layer's states after final norm and head, `[..., V]`.
        targets: class or token, `[...]`; -100 is ignored.

    Returns:
        0-d float64, unit 1; NaN if no position has a target.

    Raises:
        ValueError: if the shapes do not match.

    Source: "Representation progression and aligned training", Eq. 2.
    """
    if logits.shape[:-1] != targets.shape:
        expected = tuple(logits.shape[:-1])
        raise ValueError(f"logits {tuple(logits.shape)} need targets {expected}, got {tuple(targets.shape)}")
    known = targets != IGNORE
    return ((logits.argmax(-1) == targets) & known).sum().double() / known.sum()


class LensMean(Measure):
    """Mean over positions of one lens statistic, with its standard error, for layers 0..L.

    Site `attention_output`, if the lens reads it, is the stream between the attention and the MLP of layers 1..L. A
    subclass picks the statistic in `reading`.
    """

    needs = frozenset({"targets"})
    sums: Tensor
    count: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        inner = setup.num_layers if "attention_output" in setup.lens_sites else 0
        self.places = [("residual", layer) for layer in range(setup.num_layers + 1)]
        self.places += [("attention_output", layer) for layer in range(1, inner + 1)]
        self.add_grouped("sums", len(self.places))
        self.add_grouped("count", dtype=torch.int64)

    @abstractmethod
    def reading(self, lens: Readout) -> Tensor:
        """[L+1, M] (after attention [L, M]) values to average."""

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        lens = observation.lens
        values = self.reading(lens)
        if len(self.places) > len(values):
            if lens.inner is None:
                raise ValueError("this observation has no readout after attention, which the setup names")
            values = torch.cat([values, self.reading(lens.inner)])
        values = values.to(self.sums.device)
        group = observation.lens_groups(self.setup).to(values.device)
        self.sums.index_add_(0, group, values.double().T)
        self.count += group.bincount(minlength=len(self.count))

    def compute(self) -> tuple[Tensor, Tensor, int]:
        """Means and standard errors at each of `places`, and the number of positions."""
        return self.sums.sum(0) / self.count.sum(), error_of(self._influence()), int(self.count.sum())

    def _influence(self) -> Tensor:
        """[G, places] influences on the means."""
        return ratio_influence(self.sums, self.count[:, None])

    def influences(self) -> list[Influence]:
        """On the mean of each layer of each site."""
        found = zip(self.places, self._influence().T, strict=True)
        return [self.influence("mean", values, layer, site=site) for (site, layer), values in found]

    def rows(self) -> list[Row]:
        """Two rows for each layer of each site; no standard error for fewer than three clusters."""
        means, errors, count = self.compute()
        return [
            row
            for (site, layer), mean, error in zip(self.places, means.tolist(), errors.tolist(), strict=True)
            for row in self.rows_of({"mean": mean, "standard_error": error}, count, layer, site)
        ]


class LensAccuracy(LensMean):
    """Accuracy of the last layer's classifier on layers 0..L, over the positions that have a target."""

    name = "lens_accuracy"
    units = dict.fromkeys(("mean", "standard_error"), "1")

    def reading(self, lens: Readout) -> Tensor:
        """Whether the top prediction is the target."""
        return lens.correct

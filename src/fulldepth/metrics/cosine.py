"""Sample-wise cosine similarity of layers, of one model and across the modalities of two towers (aligned training)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fulldepth.metrics.base import Measure, Observation, Row, Setup, cosine, later_than_first
from fulldepth.metrics.reservoir import Reservoir, Sample

PERCENTILES = {"p05": 0.05, "p25": 0.25, "p50": 0.50, "p75": 0.75, "p95": 0.95}
BLOCK = 1 << 18
"""Numbers converted to float64 at a time."""


def cosine_matrix(features: Tensor, center: bool = True) -> Tensor:
    r"""Mean over samples of the cosine similarity between two layers' states of one sample, in [-1, 1].

    .. math:: C_{l l'} = \frac{1}{N} \sum_n
        \cos\left(z^{(l)}_n - \bar z^{(l)}, z^{(l')}_n - \bar z^{(l')}\right), \quad \bar z = \frac{1}{N} \sum_n z_n

    Without centring, a direction shared by all samples (as in anisotropic language models) makes all layers similar.

    Args:
        features: states of every layer, `[L+1, N, D]`.
        center: subtract each layer's global mean over all samples, as the paper does.

    Returns:
        `[L+1, L+1]` float64, unit 1, symmetric. Samples whose state at either layer is zero (after centring: equal to
        the mean up to rounding) have no direction and are excluded; NaN if none remains.

    Raises:
        ValueError: if `features` is not three-dimensional.

    Source: "Representation progression and aligned training", Sec. 2.1 and footnote 2.
    """
    sums, counts, _ = _cosines(features, center)
    return sums / counts


def centred(features: Tensor, mean: Tensor) -> Tensor:
    """`features - mean` in float64; vectors `[..., D]` that are zero up to rounding become exactly zero."""
    values = features.double()
    result = values - mean
    rounding = torch.finfo(features.dtype if features.dtype == torch.float64 else torch.float32).eps
    noise = _norm(result) <= 4 * rounding * _norm(values)
    return result.masked_fill_(noise, 0.0)


class Cosine(Measure):
    """Cosine similarity of every pair of layers: raw over all counted tokens, centred over the shared sample of tokens.

    `count` is the number of tokens averaged over. The percentiles are those of the centred similarity to layer L.
    """

    name = "cosine"
    units = dict.fromkeys(("mean", "mean_raw", *PERCENTILES), "1")
    sums: Tensor
    counts: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.reservoir = setup.reservoir("residual")
        layers = setup.num_layers + 1
        self.add_sum("sums", 2, layers, layers)
        self.add_sum("counts", 2, layers, layers)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        self.reservoir.observe(observation, "residual")
        cosines = observation.cosines.flatten(1).double()  # [N, (L+1)^2]
        weights = observation.view_weights.to(cosines.device).T
        valid = cosines.isfinite()
        self.sums += (weights @ cosines.where(valid, 0.0)).view(self.sums.shape).to(self.sums.device)
        self.counts += (weights @ valid.double()).view(self.counts.shape).to(self.counts.device)

    def compute(self) -> dict[str, Tensor]:
        """Statistic -> `[views, L+1, L+1]`, percentiles `[views, L+1]`; token counts: `count`, `count_raw`."""
        sample = self.reservoir.compute()
        features = sample.features.transpose(0, 1)
        everything = torch.arange(features.shape[1], device=features.device)
        views = [everything, everything[later_than_first(sample.keys)]] if self.setup.first_tokens else [everything]
        parts = [_cosines(features, center=True, index=index) for index in views]
        result = {
            "mean": torch.stack([sums / counts for sums, counts, _ in parts]),
            "mean_raw": self.sums / self.counts,
            "count": torch.stack([counts for _, counts, _ in parts]),
            "count_raw": self.counts.clone(),
        }
        shares = torch.tensor([*PERCENTILES.values()], dtype=torch.float64, device=features.device)
        spread = [  # layer by layer: torch sorts at most 2^24 numbers at once
            torch.stack([row.nanquantile(shares) if len(row) else shares * torch.nan for row in to_last])
            for *_, to_last in parts
        ]
        return result | dict(zip(PERCENTILES, torch.stack(spread).unbind(-1), strict=True))

    def rows(self) -> list[Row]:
        """Rows for every pair of layers 0..L."""
        values = {name: value.cpu() for name, value in self.compute().items()}
        layers = range(self.setup.num_layers + 1)
        last = self.setup.num_layers
        rows = []
        for view, suffix in enumerate(self.setup.views):
            for layer in layers:
                for other in layers:
                    for statistic, kind in (("mean", "count"), ("mean_raw", "count_raw")):
                        value, count = (values[name][view, layer, other] for name in (statistic, kind))
                        rows.append(self.row(statistic + suffix, value, count, layer, other))
                count = values["count"][view, layer, last]
                rows += [
                    self.row(statistic + suffix, values[statistic][view, layer], count, layer, last)
                    for statistic in PERCENTILES
                ]
        return rows


def _cosines(features: Tensor, center: bool, index: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Sums `[L+1, L+1]` of the samples' cosines, their counts, and the cosines to the last layer `[L+1, N]`.

    Only a part of the samples, all or those in `index`, is copied or converted to float64 at a time.
    """
    if features.ndim != 3:
        raise ValueError(f"features must be [L+1, N, D], got {tuple(features.shape)}")
    layers, samples, width = features.shape
    by_sample = features.transpose(0, 1)  # the reservoir's own layout
    size = max(1, BLOCK // (layers * width))

    def parts() -> Iterator[Tensor]:
        return iter(by_sample.split(size)) if index is None else (by_sample[part] for part in index.split(size))

    count = samples if index is None else len(index)
    mean = None
    if center and count:
        mean = features.new_zeros(layers, width, dtype=torch.float64)
        for part in parts():
            mean += part.double().sum(0)
        mean /= count
    sums = features.new_zeros(layers, layers, dtype=torch.float64)
    counts = torch.zeros_like(sums)
    to_last = []
    for part in parts():
        x = part.double() if mean is None else centred(part, mean)
        gram = x @ x.mT  # [n, L+1, L+1]
        norm = gram.diagonal(dim1=1, dim2=2).sqrt()
        cosines = cosine(gram, norm[:, :, None], norm[:, None, :])
        valid = cosines.isfinite()
        sums += cosines.where(valid, 0.0).sum(0)
        counts += valid.sum(0)
        to_last.append(cosines[:, :, -1])
    return sums, counts, torch.cat(to_last).T


def _norm(x: Tensor) -> Tensor:
    """Return the norm of vectors `[..., D]` as `[..., 1]`."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


SITE = "projected"
CROSS = "cross"
TIE = 1e-6
"""Cosines that differ by at most this are a tie. A tie counts by the share of its candidates that are right."""


class Cross(NamedTuple):
    """Numbers for all pairs of layers, `[L+1, M+1]` float64 each: rows are image layers, columns text layers."""

    matched: Tensor
    """Mean cosine of an image and its own text."""
    mismatched: Tensor
    """Mean cosine of an image and another image's text; NaN if all texts are the same."""
    image_to_text: Tensor
    """Share of images whose most similar text is their own (R@1)."""
    text_to_image: Tensor
    """Share of texts whose most similar image is their own."""
    pairs: int
    """N: matched pairs."""
    others: int
    """Number of mismatched pairs."""


def cross_similarity(image: Tensor, text: Tensor, same: Tensor | None = None) -> Cross:
    r"""Cosine and retrieval across modalities for every pair of layers.

    .. math:: C_{l m} = \frac{1}{N} \sum_n \cos(v_n^{(l)}, t_n^{(m)}), \quad
        v^{(l)} = W_v \mathrm{LN}(\hat v^{(l)}), \; t^{(m)} = W_t \mathrm{LN}(\hat t^{(m)})

    As in CLIP, the final norm comes before the projection (Eq. 23 writes it after), and features are not centred.
    Equal texts count as one text, which matches all of its images.

    Args:
        image: projected image features of layers 0..L, `[L+1, N, P]`.
        text: projected text features of layers 0..M, `[M+1, N, P]`; row n belongs to image n.
        same: index of each row's text, `[N]`, equal for equal texts; None = all are different.

    Returns:
        The means of matching and of other pairs, and the retrieval in both directions, `[L+1, M+1]` each in float64,
        with the numbers of pairs.

    Raises:
        ValueError: if the shapes do not match.

    Source: "Representation progression and aligned training", App. D, Eq. 23.
    """
    if image.ndim != 3 or text.ndim != 3 or image.shape[1:] != text.shape[1:]:
        raise ValueError(f"features must be [L+1, N, P], got {tuple(image.shape)} and {tuple(text.shape)}")
    pairs = image.shape[1]
    groups = torch.arange(pairs) if same is None else same
    groups = groups.to(image.device)
    equal = groups[:, None] == groups[None, :]  # [N, N]
    mismatched = int((~equal).sum())
    columns = normalize(text.double(), dim=-1)
    result = torch.empty(4, len(image), len(text), dtype=torch.float64)
    for layer, features in enumerate(image):
        rows = normalize(features.double(), dim=-1)
        for other, column in enumerate(columns):
            similarity = rows @ column.T  # [N, N]: image n, text m
            result[0, layer, other] = similarity.diagonal().mean()
            result[1, layer, other] = similarity[~equal].mean() if mismatched else torch.nan
            result[2, layer, other] = _retrieval(similarity, equal)
            result[3, layer, other] = _retrieval(similarity.T, equal)
    return Cross(result[0], result[1], result[2], result[3], pairs, mismatched)


def _retrieval(similarity: Tensor, right: Tensor) -> Tensor:
    """Mean over rows of `similarity [N, N]` of the share of `right [N, N]` among the best columns, ties included."""
    best = similarity >= similarity.amax(1, keepdim=True) - TIE
    return ((best & right).sum(1) / best.sum(1)).double().mean()


def cross_rows(numbers: Cross) -> Iterator[Row]:
    """Yield rows of the measures `cosine` and `retrieval` at the site `cross`; `layer` is a layer of the image tower,
    `other` one of the text tower.
    """
    for layer in range(len(numbers.matched)):
        for other in range(numbers.matched.shape[1]):
            for measure, statistic, count in (
                ("cosine", "matched", numbers.pairs),
                ("cosine", "mismatched", numbers.others),
                ("retrieval", "image_to_text", numbers.pairs),
                ("retrieval", "text_to_image", numbers.pairs),
            ):
                value = float(getattr(numbers, statistic)[layer, other])
                yield Row(measure, CROSS, layer, other, statistic, value, count, "1")


class Projected(Measure):
    """Stores projected features of a sample of sequences, one vector for each, and reports their cosine within a tower.

    Args:
        setup: sizes.
        project: function from states `[S, N, D]` to features `[S, N, P]`.
        width: P.
    """

    name = "cosine"
    units = dict.fromkeys(("mean", "mean_raw"), "1")

    def __init__(self, setup: Setup, project: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__(setup)
        self.project = project
        capacity = min(setup.reservoir_tokens, setup.num_sequences)
        self.reservoir = Reservoir(capacity, (setup.num_layers + 1, width), setup.seed, setup.device)

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        features = self.project(observation.tokens)  # [L+1, B, P]
        if features.shape[1] != len(observation.sequence):
            raise ValueError(
                "the token policy must count one token, or one vector, of each sequence, got "
                f"{features.shape[1]} of {len(observation.sequence)} sequences"
            )
        self.reservoir.update(features.transpose(0, 1), observation.sequence.to(features.device))

    def compute(self) -> Sample:
        """The stored features `[N, L+1, P]`, in the order of the data; `keys` are indices of sequences."""
        return self.reservoir.compute()

    def rows(self) -> list[Row]:
        """Centred and raw cosine of every pair of layers, after the projection."""
        features = self.compute().features.transpose(0, 1)
        matrices = {"mean": cosine_matrix(features), "mean_raw": cosine_matrix(features, center=False)}
        return [
            self.row(statistic, matrix[layer, other], features.shape[1], layer, other, site=SITE)
            for statistic, matrix in matrices.items()
            for layer in range(len(features))
            for other in range(len(features))
        ]

"""Similarity across modalities, layer by layer, in the space that two towers share (aligned training, App. D)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fulldepth.metrics.base import Measure, Observation, Row, Setup
from fulldepth.metrics.cosine import cosine_matrix
from fulldepth.metrics.reservoir import Reservoir, Sample

SITE = "projected"
CROSS = "cross"
TIE = 1e-6
"""Cosines that are this near are equal up to rounding; a tie counts by the share of right candidates in it."""


class Cross(NamedTuple):
    """Numbers of all pairs of layers, `[L+1, M+1]` float64 each: rows are image layers, columns text layers."""

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

    As in CLIP, the final norm comes before the projection (Eq. 23 writes it after), and features are not centred,
    because CLIP compares them so. Equal texts are one text: they match all of their images.

    Args:
        image: projected image features of layers 0..L, `[L+1, N, P]`.
        text: projected text features of layers 0..M, `[M+1, N, P]`; row n belongs to image n.
        same: index of each row's text, `[N]`, equal for equal texts; None = all are different.

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
    others = int((~equal).sum())
    columns = normalize(text.double(), dim=-1)
    result = torch.empty(4, len(image), len(text), dtype=torch.float64)
    for layer, features in enumerate(image):
        rows = normalize(features.double(), dim=-1)
        for other, column in enumerate(columns):
            similarity = rows @ column.T  # [N, N]: image n, text m
            result[0, layer, other] = similarity.diagonal().mean()
            result[1, layer, other] = similarity[~equal].mean() if others else torch.nan
            result[2, layer, other] = _found(similarity, equal)
            result[3, layer, other] = _found(similarity.T, equal)
    return Cross(result[0], result[1], result[2], result[3], pairs, others)


def _found(similarity: Tensor, right: Tensor) -> Tensor:
    """Mean over rows of `similarity [N, N]` of the share of `right [N, N]` among the best columns, ties included."""
    best = similarity >= similarity.amax(1, keepdim=True) - TIE
    return ((best & right).sum(1) / best.sum(1)).double().mean()


def cross_rows(numbers: Cross) -> Iterator[Row]:
    """Rows of the measures `cosine` and `retrieval` at the site `cross`: `layer` of the image tower, `other` of the
    text tower.
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
    """Keeps projected features of a sample of sequences, one vector for each; reports their cosine within the tower.

    Args:
        setup: sizes.
        project: from states `[S, N, D]` to features `[S, N, P]`.
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
            raise ValueError("the token policy must count one token, or one vector, of each sequence")
        self.reservoir.update(features.transpose(0, 1), observation.sequence.to(features.device))

    def compute(self) -> Sample:
        """The kept features `[N, L+1, P]`, in the order of the data; `keys` are indices of sequences."""
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

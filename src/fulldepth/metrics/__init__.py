"""Layer-wise measures of a network: pure functions of activations, and their accumulators over a data set."""

from __future__ import annotations

from fulldepth.metrics.average_precision import AveragePrecision, average_precision
from fulldepth.metrics.base import Detections, Influence, Measure, Observation, Readout, Row, Setup
from fulldepth.metrics.cka import Cka, cka_matrix, linear_cka
from fulldepth.metrics.coherence import Coherence, coherence
from fulldepth.metrics.cosine import Cosine, Cross, cosine_matrix, cross_similarity
from fulldepth.metrics.displacement import Displacement, NormRatio, displacement, norm_ratio
from fulldepth.metrics.jump_rate import JumpRate, jump_rate
from fulldepth.metrics.lens import (
    EffectiveDepth,
    LensAccuracy,
    LensLoss,
    Saturation,
    effective_depth,
    lens_accuracy,
    lens_loss,
    saturation_layer,
)
from fulldepth.metrics.mmd import Mmd, mmd
from fulldepth.metrics.nc1 import Nc1, nc1
from fulldepth.metrics.renyi_entropy import RenyiEntropy, renyi_entropy
from fulldepth.metrics.reservoir import Reservoir
from fulldepth.metrics.routing import (
    ExpectedRetrieval,
    RetrievalWeight,
    StreamMixing,
    expected_retrieval,
    head_shares,
    retrieval_share,
    retrieval_weight,
    stream_mixing,
)
from fulldepth.metrics.separability import Separability, separability
from fulldepth.metrics.spectral_norm import SpectralNorm, spectral_norm

METRICS: dict[str, type[Measure]] = {
    "displacement": Displacement,
    "jump_rate": JumpRate,
    "coherence": Coherence,
    "cosine": Cosine,
    "cka": Cka,
    "norm_ratio": NormRatio,
    "lens_accuracy": LensAccuracy,
    "lens_loss": LensLoss,
    "saturation": Saturation,
    "effective_depth": EffectiveDepth,
    "nc1": Nc1,
    "renyi_entropy": RenyiEntropy,
    "separability": Separability,
    "spectral_norm": SpectralNorm,
    "mmd": Mmd,
    "retrieval_weight": RetrievalWeight,
    "expected_retrieval": ExpectedRetrieval,
    "stream_mixing": StreamMixing,
    "average_precision": AveragePrecision,
}
"""Measures by public name. Adding a measure takes one file, one line here and one test."""

__all__ = [
    "METRICS",
    "AveragePrecision",
    "Cka",
    "Coherence",
    "Cosine",
    "Cross",
    "Detections",
    "Displacement",
    "EffectiveDepth",
    "ExpectedRetrieval",
    "Influence",
    "JumpRate",
    "LensAccuracy",
    "LensLoss",
    "Measure",
    "Mmd",
    "Nc1",
    "NormRatio",
    "Observation",
    "Readout",
    "RenyiEntropy",
    "Reservoir",
    "RetrievalWeight",
    "Row",
    "Saturation",
    "Separability",
    "Setup",
    "SpectralNorm",
    "StreamMixing",
    "average_precision",
    "cka_matrix",
    "coherence",
    "cosine_matrix",
    "cross_similarity",
    "displacement",
    "effective_depth",
    "expected_retrieval",
    "head_shares",
    "jump_rate",
    "lens_accuracy",
    "lens_loss",
    "linear_cka",
    "mmd",
    "nc1",
    "norm_ratio",
    "renyi_entropy",
    "retrieval_share",
    "retrieval_weight",
    "saturation_layer",
    "separability",
    "spectral_norm",
    "stream_mixing",
]

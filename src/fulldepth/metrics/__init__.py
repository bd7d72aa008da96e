"""Layer-wise measures of a network: pure functions of activations, and their accumulators over a data set."""

from __future__ import annotations

from fulldepth.metrics.average_precision import AveragePrecision, average_precision
from fulldepth.metrics.base import Detections, Influence, Measure, Observation, Readout, Row, Setup
from fulldepth.metrics.cka import Cka, cka_matrix, linear_cka
from fulldepth.metrics.coherence import Coherence, coherence
from fulldepth.metrics.cosine import Cosine, cosine_matrix
from fulldepth.metrics.cross import Cross, cross_similarity
from fulldepth.metrics.displacement import Displacement, displacement
from fulldepth.metrics.effective_depth import EffectiveDepth, effective_depth
from fulldepth.metrics.expected_retrieval import ExpectedRetrieval, expected_retrieval, head_shares
from fulldepth.metrics.jump_rate import JumpRate, jump_rate
from fulldepth.metrics.lens_accuracy import LensAccuracy, lens_accuracy
from fulldepth.metrics.lens_loss import LensLoss, lens_loss
from fulldepth.metrics.mmd import Mmd, mmd
from fulldepth.metrics.nc1 import Nc1, nc1
from fulldepth.metrics.norm_ratio import NormRatio, norm_ratio
from fulldepth.metrics.renyi_entropy import RenyiEntropy, renyi_entropy
from fulldepth.metrics.reservoir import Reservoir
from fulldepth.metrics.retrieval_weight import RetrievalWeight, retrieval_share, retrieval_weight
from fulldepth.metrics.saturation import Saturation, saturation_layer
from fulldepth.metrics.separability import Separability, separability
from fulldepth.metrics.spectral_norm import SpectralNorm, spectral_norm
from fulldepth.metrics.stream_mixing import StreamMixing, stream_mixing

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

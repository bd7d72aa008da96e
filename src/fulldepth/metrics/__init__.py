"""Layer-wise measures of a network: pure functions of activations, and their accumulators over a data set."""

from __future__ import annotations

from fulldepth.metrics.average_precision import AveragePrecision, average_precision
from fulldepth.metrics.base import Detections, Influence, Measure, Observation, Readout, Row, Setup
from fulldepth.metrics.cka import Cka, cka_matrix, linear_cka
from fulldepth.metrics.coherence import Coherence, coherence
from fulldepth.metrics.contribution import Contribution, contribution
from fulldepth.metrics.cosine import Cosine, Cross, cosine_matrix, cross_similarity
from fulldepth.metrics.displacement import Displacement, NormRatio, displacement, norm_ratio
from fulldepth.metrics.jump_rate import JumpRate, jump_rate
from fulldepth.metrics.layer_effect import LayerEffect, Removals, relative_change
from fulldepth.metrics.lens import (
    EffectiveDepth,
    LensAccuracy,
    LensF1,
    LensLoss,
    Saturation,
    effective_depth,
    macro_f1,
    saturation_layer,
)
from fulldepth.metrics.linear_lens import LinearLensAccuracy, LinearLensLoss, LinearMaps, MapSums, linear_map
from fulldepth.metrics.mmd import Mmd, mmd
from fulldepth.metrics.nc1 import Nc1, nc1
from fulldepth.metrics.renyi_entropy import RenyiEntropy, renyi_entropy
from fulldepth.metrics.reservoir import Reservoir
from fulldepth.metrics.routing import (
    ExpectedRetrieval,
    RetrievalWeight,
    expected_retrieval,
    head_shares,
    retrieval_share,
    retrieval_weight,
)
from fulldepth.metrics.separability import Separability, separability
from fulldepth.metrics.spectral_norm import SpectralNorm, spectral_norm
from fulldepth.metrics.standard_errors import Estimate

MEASURES: tuple[type[Measure], ...] = (
    Displacement,
    JumpRate,
    Coherence,
    Cosine,
    Cka,
    NormRatio,
    Contribution,
    LensAccuracy,
    LensLoss,
    LensF1,
    Saturation,
    EffectiveDepth,
    LinearLensAccuracy,
    LinearLensLoss,
    Nc1,
    RenyiEntropy,
    Separability,
    SpectralNorm,
    Mmd,
    RetrievalWeight,
    ExpectedRetrieval,
    AveragePrecision,
    LayerEffect,
)
METRICS = {measure.name: measure for measure in MEASURES}
"""Measures by public name. Adding a measure takes one file, one line here and one test."""

__all__ = [
    "METRICS",
    "AveragePrecision",
    "Cka",
    "Coherence",
    "Contribution",
    "Cosine",
    "Cross",
    "Detections",
    "Displacement",
    "EffectiveDepth",
    "Estimate",
    "ExpectedRetrieval",
    "Influence",
    "JumpRate",
    "LayerEffect",
    "LensAccuracy",
    "LensF1",
    "LensLoss",
    "LinearLensAccuracy",
    "LinearLensLoss",
    "LinearMaps",
    "MapSums",
    "Measure",
    "Mmd",
    "Nc1",
    "NormRatio",
    "Observation",
    "Readout",
    "Removals",
    "RenyiEntropy",
    "Reservoir",
    "RetrievalWeight",
    "Row",
    "Saturation",
    "Separability",
    "Setup",
    "SpectralNorm",
    "average_precision",
    "cka_matrix",
    "coherence",
    "contribution",
    "cosine_matrix",
    "cross_similarity",
    "displacement",
    "effective_depth",
    "expected_retrieval",
    "head_shares",
    "jump_rate",
    "linear_cka",
    "linear_map",
    "macro_f1",
    "mmd",
    "nc1",
    "norm_ratio",
    "relative_change",
    "renyi_entropy",
    "retrieval_share",
    "retrieval_weight",
    "saturation_layer",
    "separability",
    "spectral_norm",
]

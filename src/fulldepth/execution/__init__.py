"""Runs models and captures activations by site name; also reads weights. No other package hooks models."""

from fulldepth.execution.hooks import COEFFICIENTS, SITES, Activations, capture
from fulldepth.execution.lens import TopTokens, read_layers, top_tokens
from fulldepth.execution.verify import Verified, find_anatomy, verify
from fulldepth.hf import body_inputs

__all__ = [
    "COEFFICIENTS",
    "SITES",
    "Activations",
    "TopTokens",
    "Verified",
    "body_inputs",
    "capture",
    "find_anatomy",
    "read_layers",
    "top_tokens",
    "verify",
]

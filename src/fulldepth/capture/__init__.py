"""Runs a model and hands out activations by site name: the only reader of activations. Reads weights, too."""

from fulldepth.capture.hooks import COEFFICIENTS, SITES, Tape, capture
from fulldepth.capture.lens import TopTokens, read_layers, top_tokens
from fulldepth.capture.trace import body_inputs
from fulldepth.capture.verify import Verified, find_anatomy, verify
from fulldepth.capture.weights import feed_projections, plain_weight

__all__ = [
    "COEFFICIENTS",
    "SITES",
    "Tape",
    "TopTokens",
    "Verified",
    "body_inputs",
    "capture",
    "feed_projections",
    "find_anatomy",
    "plain_weight",
    "read_layers",
    "top_tokens",
    "verify",
]

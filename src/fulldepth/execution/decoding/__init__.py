"""Decoding on top of the layer runner: plain, with early exit, and with drafts of the model's own first layers."""

from fulldepth.execution.decoding.decoder import Decoder, Generation
from fulldepth.execution.decoding.options import RULES, ExitRule, Options, certainty
from fulldepth.execution.decoding.session import Stats

__all__ = [
    "RULES",
    "Decoder",
    "ExitRule",
    "Generation",
    "Options",
    "Stats",
    "certainty",
]

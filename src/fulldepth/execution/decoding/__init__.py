"""Decoding on top of the layer runner: plain, with early exit, and with drafts of the model's own first layers."""

from fulldepth.execution.decoding.decoder import Decoder, Generation, decoder_of, generate
from fulldepth.execution.decoding.options import BOUNDED_RULES, POLICIES, DraftPlan, Options
from fulldepth.execution.decoding.rules import RULES, ExitRule, certainty, sample_certainty, theoretical_speedup
from fulldepth.execution.decoding.stats import Stats

__all__ = [
    "BOUNDED_RULES",
    "POLICIES",
    "RULES",
    "Decoder",
    "DraftPlan",
    "ExitRule",
    "Generation",
    "Options",
    "Stats",
    "certainty",
    "decoder_of",
    "generate",
    "sample_certainty",
    "theoretical_speedup",
]

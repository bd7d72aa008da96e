"""`fulldepth demo`: train a small model, measure its checkpoints. A composition of the other verbs' public functions."""

from fulldepth.demo.run import RESULTS, demo

__all__ = ["RESULTS", "demo"]

"""`fulldepth demo`: train a small model, measure its checkpoints. Composes the verbs' public functions."""

from fulldepth.demo.run import RESULTS, demo

__all__ = ["RESULTS", "demo"]

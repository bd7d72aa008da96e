"""`fulldepth demo`: trains, measures and compares two small models with the verbs' public functions."""

from fulldepth.demo.run import COMPARISON, demo

__all__ = ["COMPARISON", "demo"]

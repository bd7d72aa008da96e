"""`fulldepth demo`: train two small models, measure them, compare them. Composes the verbs' public functions."""

from fulldepth.demo.run import COMPARISON, demo

__all__ = ["COMPARISON", "demo"]

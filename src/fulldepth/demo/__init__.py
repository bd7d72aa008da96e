"""`fulldepth demo`: the whole tool on a real model, or on three that it trains."""

from fulldepth.demo.model import demo
from fulldepth.demo.training import COMPARISON, train_demo

__all__ = ["COMPARISON", "demo", "train_demo"]

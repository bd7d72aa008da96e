"""`fulldepth demo`: all commands on a trained model, or on three models that it trains."""

from fulldepth.demonstration.model import demo
from fulldepth.demonstration.training import COMPARISON, train_demo

__all__ = ["COMPARISON", "demo", "train_demo"]

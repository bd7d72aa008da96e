"""Turns a result table and its document into figures and one self-contained HTML page. Imports no torch."""

from fulldepth.reporting.figures import build
from fulldepth.reporting.page import index, render

__all__ = ["build", "index", "render"]

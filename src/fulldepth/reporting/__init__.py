"""A table and its document in, figures and one self-contained HTML page out; imports no torch and nothing above it."""

from fulldepth.reporting.figures import build
from fulldepth.reporting.page import index, render

__all__ = ["build", "index", "render"]

"""Figures of `fulldepth skip`: what went, what it cost, what healing did, and quality against time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from fulldepth.figures import healing, pareto, removal
from fulldepth.figures.skipped import layers_of, parts
from fulldepth.figures.style import Figures


def figures(table: pd.DataFrame, meta: Mapping[str, Any]) -> Figures:
    """Every figure of one folder (kinds `skip`, `curve`, `bench`, `quantise`) or of several together (`skips`)."""
    found = parts(table, meta)
    return removal.figures(found) | healing.figures(found, layers_of(found)) | pareto.figures(found)

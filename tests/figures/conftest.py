"""Synthetic results as fixtures."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """Builders of results: `language_model`, `series`, `classifier`, `comparison`, `minimal`."""
    spec = importlib.util.spec_from_file_location("fulldepth_synthetic", Path(__file__).with_name("synthetic.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

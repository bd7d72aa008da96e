"""Shared by the tests of removing blocks."""

from __future__ import annotations

import pytest


@pytest.fixture
def unproven(monkeypatch):
    """Exports without the fresh process that loads them, for tests of what is written."""
    monkeypatch.setattr("fulldepth.skip.exports.export.prove_export", lambda *_: 0.0)

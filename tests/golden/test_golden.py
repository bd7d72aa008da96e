"""Numbers that a restructuring must not change: see `tables`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from golden import tables

TOLERANCE = {"train": 1e-3, "search": 1e-5, "measure": 1e-6}
"""Relative, for machines that round otherwise: models run in float32; all else is float64."""


def close(found: Any, expected: Any, tolerance: float) -> bool:
    """Whether numbers are near, in lists too, and all else is equal."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected, [tolerance] * len(expected)))
    return found == (pytest.approx(expected, rel=tolerance, abs=tolerance) if type(expected) is float else expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", tables.MAKERS)
def test_numbers_are_those_of_before(name: str) -> None:
    stored = json.loads(tables.path(name).read_text(encoding="utf-8"))
    rows = tables.MAKERS[name]()
    assert rows.keys() == stored["rows"].keys()
    same = stored["machine"] == tables.machine()
    tolerance = 0.0 if same else TOLERANCE.get(name.split("-")[0], 1e-9)
    for row, values in rows.items():
        assert close(json.loads(json.dumps(values)), stored["rows"][row], tolerance), row

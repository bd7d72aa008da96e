"""Numbers that a restructuring must not change: see `tables`."""

from __future__ import annotations

import json

import pytest

from golden import tables

TOLERANCE = {"train": 1e-3}
"""Relative, for machines that round otherwise: runs are float32 and amplify it; all else is float64."""


@pytest.mark.slow
@pytest.mark.parametrize("name", tables.MAKERS)
def test_numbers_are_those_of_before(name: str) -> None:
    stored = json.loads(tables.path(name).read_text(encoding="utf-8"))
    rows = tables.MAKERS[name]()
    assert rows.keys() == stored["rows"].keys()
    same = stored["machine"] == tables.machine()
    close = TOLERANCE.get(name.split("-")[0], 1e-9)
    for row, values in rows.items():
        expected = stored["rows"][row] if same else pytest.approx(stored["rows"][row], rel=close, abs=close)
        assert values == expected, row

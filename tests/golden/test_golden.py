"""Numbers that a restructuring must not change: see `tables`."""

from __future__ import annotations

import json

import pytest

from golden import tables
from json_files import read_json

TOLERANCE = {"measure": 1e-7, "train": 1e-3, "search": 1e-5}
"""Relative, for machines and versions of torch that round otherwise: some attention has a softmax in float32, and
training amplifies it."""
NEARLY_SINGULAR = {"nc1": 1e-6}
"""Measure whose tolerance is wider, because it inverts a matrix: torch 2.14 changes it by 4e-7."""
REORDERED = {"cka": 2e-7}
"""Measure whose products, in float32, round otherwise on machines that agree in all that `tables.machine` asks."""


def close(found, expected, tolerance):
    """Whether numbers are near, in lists too, and all else is equal."""
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(close, found, expected, [tolerance] * len(expected)))
    return found == (pytest.approx(expected, rel=tolerance, abs=tolerance) if type(expected) is float else expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", tables.MAKERS)
def test_numbers_are_those_of_before(name):
    stored = read_json(tables.path(name))
    rows = tables.MAKERS[name]()
    assert rows.keys() == stored["rows"].keys()
    same = stored["machine"] == tables.machine()
    for row, values in rows.items():
        measure = row.split()[0]
        rounded = NEARLY_SINGULAR.get(measure, TOLERANCE[name.split("-")[0]])
        tolerance = REORDERED.get(measure, 0.0) if same else rounded
        assert close(json.loads(json.dumps(values)), stored["rows"][row], tolerance), row

"""The stated 95 % intervals hold the truth, whatever the order of the rows; see `metrics.coverage`."""

import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from fulldepth.metrics import base
from metrics import coverage

DRAWS = 40
PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
LOWEST = scipy.stats.binom(DRAWS, 0.95).ppf(1e-4) / DRAWS


def within(name, share):
    """Whether a coverage is in its limits."""
    low, high = coverage.LIMITS
    return low <= share <= (1.0 if name == coverage.CLAMPED else high)


def wrong(names):
    """Numbers whose coverage or size of the error is wrong in a few draws of many documents, with both."""
    found = coverage.simulated("windows", DRAWS, names, few=48)
    steps = ("effective depth", coverage.CLAMPED)
    right = {name for name, (held, size) in found.items() if held >= LOWEST and (name in steps or 0.75 < size < 1.35)}
    return {name: found[name] for name in names if name not in right}


def test_the_interval_of_every_number_holds_the_truth():
    assert wrong(coverage.NAMES) == {}


def test_groups_by_position_would_not(monkeypatch):
    monkeypatch.setattr(base, "deal", lambda clusters: np.arange(len(clusters)) % 16)
    assert wrong(("norm ratio",))


@pytest.mark.thorough
@pytest.mark.parametrize("order", coverage.ORDERS)
def test_coverage_is_between_its_limits(order):
    found = {name: held for name, (held, _) in coverage.simulated(order, 400).items()}
    assert {name: held for name, held in found.items() if not within(name, held)} == {}


def test_the_page_shows_the_coverage_of_every_number_within_its_limits():
    rows = re.findall(r"^\| ([a-z0 ]+) \|((?: [01]\.\d{3} \|){4})$", PAGE.read_text(), re.MULTILINE)
    shares = {name: [float(cell) for cell in cells.split("|")[:-1]] for name, cells in rows}
    assert shares.keys() >= set(coverage.NAMES)
    assert all(within(name, share) for name in coverage.NAMES for share in shares[name]), shares

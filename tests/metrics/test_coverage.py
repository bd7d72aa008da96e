"""The stated 95 % intervals hold the truth, whatever the order of the rows; see `metrics.coverage`."""

import re
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.metrics import f1_score

from fulldepth.core.uncertainty import GROUPS, quantile
from fulldepth.metrics import LensF1, Observation, Readout, Setup, base
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


def interval_of_f1(rng, shares, rows):
    """Macro F1 of layer 1 over rows of three classes, with the ends of its interval; None without an error."""
    true, predicted = labels(rng, shares, rows)
    metric = LensF1(Setup(1, 4, num_classes=3, num_sequences=rows, sequence_length=1, num_tokens=rows))
    mask = torch.ones(rows, 1, dtype=torch.bool)
    right = torch.tensor(true == predicted).expand(2, -1)
    read = Readout(
        right,
        right,
        torch.zeros(2, rows),
        torch.arange(rows),
        torch.tensor(predicted).expand(2, -1),
        torch.tensor(true),
    )
    metric.update(
        Observation({"residual": torch.zeros(2, rows, 1, 4)}, mask, mask, torch.arange(rows), readout=lambda: read)
    )
    stated = {row.statistic: row.value for row in metric.rows() if row.layer == 1}
    if "standard_error_of_macro" not in stated:
        return None
    far = quantile(min(rows, GROUPS)) * stated["standard_error_of_macro"]
    return stated["macro"] - far, stated["macro"] + far


def labels(rng, shares, rows):
    """True and predicted classes of rows; the three classes are right in 0.9, 0.7 and 0.5."""
    true = rng.choice(3, rows, p=shares)
    right = rng.random(rows) < np.array([0.9, 0.7, 0.5])[true]
    return true, np.where(right, true, rng.choice(3, rows, p=shares))


def test_macro_f1_has_an_error_only_where_every_class_has_rows_enough():
    """With a class of 10 %, intervals of 12 to 60 rows would hold the truth in 0.83."""
    shares = (0.6, 0.3, 0.1)
    truth = f1_score(*labels(np.random.default_rng(9), shares, 400_000), average="macro")
    held = []
    for draw in range(300):
        rng = np.random.default_rng(draw)
        stated = interval_of_f1(rng, shares, int(rng.integers(12, 200)))
        if stated is not None:
            held.append(stated[0] <= truth <= stated[1])
    assert 100 < len(held) < 200, "about half of the draws hold ten rows of the rarest class"
    assert np.mean(held) >= scipy.stats.binom(len(held), 0.95).ppf(1e-3) / len(held)
    assert all(interval_of_f1(np.random.default_rng(draw), shares, 30) is None for draw in range(50))


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

"""Speed at equal quality and quality at equal speed, against mixtures of thresholds tried one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest

from fulldepth.comparison import speedups


def model(label, points, full=0.9, baseline=False, quality="accuracy", rule="confidence"):
    """A model with points (threshold, quality, speed-up)."""
    entries = [
        {
            "rule": rule,
            "threshold": threshold,
            "split": "report",
            quality: value,
            "drop": full - value,
            "drop_stderr": 0.001,
            "measured_speedup": speed,
        }
        for threshold, value, speed in points
    ]
    return {"label": label, "baseline": baseline, "full": {quality: full}, "exits": entries}


PLAIN = model("plain", [(0.5, 0.7, 2.0), (0.9, 0.88, 1.2), (0.99, 0.8995, 1.05), (1.0, 0.9, 0.98)], baseline=True)
ALIGNED = model("aligned", [(0.5, 0.86, 2.5), (0.9, 0.915, 1.4), (1.0, 0.92, 0.97)], full=0.92)
WORSE = model("worse", [(0.5, 0.6, 3.0), (1.0, 0.85, 1.0)], full=0.85)


def mixed(points, full, speedup):
    """The best of 10,000 mixtures of neighbours whose time is at most that of the speed-up."""
    line = [(1 / speed, value) for threshold, value, speed in points if threshold < 1] + [(1.0, full)]
    values = []
    for (time, value), (other, after) in pairwise(line):
        if not min(time, other) <= 1 / speedup <= max(time, other):
            continue
        tried = [(abs(p * time + (1 - p) * other - 1 / speedup), p * value + (1 - p) * after) for p in shares()]
        values.append(min(tried)[1])
    return max(values)


def shares():
    return [number / 10_000 for number in range(10_001)]


def test_quality_at_a_speed_up_is_that_of_a_mixture_of_neighbouring_thresholds():
    rows = speedups.compared([PLAIN, ALIGNED, WORSE])
    points = [(0.5, 0.86, 2.5), (0.9, 0.915, 1.4)]
    for speedup in speedups.AT:
        assert rows["aligned"]["at"][f"{speedup:g}"] == pytest.approx(mixed(points, 0.92, speedup), abs=1e-4)
    assert speedups.quality_at(speedups.curve_of(PLAIN), 2.0) == pytest.approx(0.7)
    assert speedups.quality_at(speedups.curve_of(PLAIN), 2.1) is None


def test_speed_without_loss():
    rows = speedups.compared([PLAIN, ALIGNED, WORSE])
    assert rows["plain"]["speedup"] == 1.05  # a loss of half its standard error
    assert rows["plain"]["speedup_at_baseline"] == 1.0
    assert rows["aligned"]["speedup"] == 1.0
    assert rows["aligned"]["speedup_at_baseline"] == 1.4
    assert rows["worse"]["speedup_at_baseline"] is None
    findings = speedups.findings([PLAIN, ALIGNED, WORSE], rows)
    assert findings["speedup_at_baseline:worse"].value is None
    sentences = {name: finding.sentence for name, finding in findings.items()}
    assert "1.40 times as fast at the 90.0% accuracy of plain" in sentences["speedup_at_baseline:aligned"]
    assert "does not reach" in sentences["speedup_at_baseline:worse"]


def test_models_that_cannot_be_compared_are_left_out():
    detector = model("detector", [(0.5, 0.3, 1.1), (1.0, 0.4, 1.0)], 0.4, quality="average_precision")
    untimed = model("untimed", [(0.5, 0.3, None)])
    rows = speedups.compared([PLAIN, detector, untimed])
    assert rows.keys() == {"plain", "detector"}
    assert rows["detector"]["speedup_at_baseline"] is None
    assert speedups.findings([PLAIN, detector, untimed], rows).keys() == {"speedup_at_baseline:plain"}

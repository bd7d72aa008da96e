"""Speed at equal accuracy and accuracy at equal speed, against mixtures of thresholds tried one by one."""

from __future__ import annotations

import numpy as np

from fulldepth.results import speedups


def model(label, points, full=0.9, baseline=False, calibration=True, timing="differs"):
    """A model with points (threshold, accuracy, speed-up), the same on both parts."""
    entries = [
        {
            "rule": "confidence",
            "threshold": threshold,
            "split": split,
            "exits": [early := 0 if threshold == 1 else round(1000 * (1.1 - threshold)), 1000 - early],
            "accuracy": value,
            "drop": full - value,
            "drop_stderr": 0.001,
            "measured_speedup": speed if split == "report" else None,
            "measured_speedup_interval": [speed - 0.02, speed + 0.02] if speed else None,
            "timing": timing,
        }
        for split in ("report", "calibration")[: 1 + calibration]
        for threshold, value, speed in points
    ]
    return {"label": label, "baseline": baseline, "full": {"accuracy": full}, "exits": entries}


PLAIN = model("plain", [(0.5, 0.7, 2.0), (0.9, 0.88, 1.2), (0.99, 0.8995, 1.05), (1.0, 0.9, 0.98)], baseline=True)
POINTS = [(0.5, 0.86, 2.5), (0.9, 0.915, 1.4), (1.0, 0.92, 0.97)]
ALIGNED = model("aligned", POINTS, full=0.92)
WORSE = model("worse", [(0.5, 0.6, 3.0), (1.0, 0.85, 1.0)], full=0.85)


def test_speed_at_equal_quality_is_of_the_threshold_that_the_calibration_part_chose():
    rows = speedups.speedups([PLAIN, ALIGNED, WORSE])
    found = {label: (row["speedup"], row["speedup_at_baseline"]) for label, row in rows.items()}
    assert found == {
        "plain": (1.0, 1.0),
        "aligned": (1.0, 1.4),
        "worse": (1.0, None),
    }  # every threshold loses something
    findings = speedups.findings([PLAIN, ALIGNED, WORSE], rows)
    assert findings["speedup_at_baseline:worse"].value is None
    said = findings["speedup_at_baseline:aligned"]
    assert said.value == 1.4
    assert all(part in said.sentence for part in ("1.40", "1.38 to 1.42", "confidence 0.9", "90.0% accuracy of plain"))


def test_nothing_is_chosen_for_a_model_with_one_part():
    one = model("one", POINTS, full=0.92, calibration=False)
    rows = speedups.speedups([PLAIN, one])
    assert rows["one"]["speedup"] is rows["one"]["speedup_at_baseline"] is None
    assert speedups.findings([PLAIN, one], rows)["speedup_at_baseline:one"].value is None


def test_times_whose_interval_holds_one_are_no_speed_up():
    slow = model("slow", [(0.9, 0.93, 1.01), (1.0, 0.92, 1.0)], full=0.92, timing="no-difference")
    finding = speedups.findings([PLAIN, slow], speedups.speedups([PLAIN, slow]))["speedup_at_baseline:slow"]
    assert finding.value is None
    assert finding.sentence.startswith("No measurable difference")


def simulated(rng, samples=400, noise=0.05):
    """Thresholds that neither lose quality nor save time: noise of samples on both parts, and of times."""
    points = [(threshold, 0.9, 1.0) for threshold in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)]
    made = model("noise", points, timing="no-difference")
    for entry in made["exits"]:
        entry["drop_stderr"] = (0.1 / samples) ** 0.5
        entry["drop"] = float(rng.normal(0, entry["drop_stderr"]))
        entry["accuracy"] = 0.9 - entry["drop"]
        if entry["split"] == "report":
            entry["measured_speedup"] = float(np.exp(rng.normal(0, noise)))
    return made


def test_no_speed_up_is_found_in_noise():
    """The fastest of those without a loss on the reported part (the rule that was used) is 4 % faster on average."""
    rng, found, before = np.random.default_rng(0), [], []
    for _ in range(400):
        one = simulated(rng)
        found.append(speedups.speedups([one])["noise"]["speedup"])
        fine = [e["measured_speedup"] for e in speedups.curve_of(one).timed if e["drop"] - e["drop_stderr"] <= 0]
        before.append(max([1.0, *fine]))
    error = np.std(found) / len(found) ** 0.5
    assert abs(np.mean(found) - 1) < 3 * error
    assert np.mean(before) - 1 > 10 * error


def test_models_that_were_not_timed_are_left_out():
    untimed = model("untimed", [(0.5, 0.3, None)])
    rows = speedups.speedups([PLAIN, untimed])
    assert rows.keys() == {"plain"}
    assert speedups.findings([PLAIN, untimed], rows).keys() == {"speedup_at_baseline:plain"}

"""Training runs at equal steps: differences by pandas, ratios by hand, and what is refused or warned of."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from fulldepth.results import Results, compare, tabulate
from fulldepth.results.runs import seconds_per_step
from refusals import refused
from reporting.synthetic import of_model, row, versus


def run(
    losses,
    profile,
    seconds=1.0,
    memory=100.0,
    load=0.02,
    parameters=1000,
    hash="sha256:aa",
    targets=64,
    **settings,
):
    """A run with a loss for each step, one displacement profile that grows with the step, and steady costs."""
    tables = []
    for step, loss in losses.items():
        means = [value * (1 + step / 100) for value in profile]
        last = 100 * max(0.0, means[-1] - means[-2])
        costs = [("elapsed", seconds * step, "s"), ("peak_memory", memory, "MiB")]
        costs += [("other_load", load, "1")] if load is not None else []
        rows = [of_model("validation_loss", loss, "nats", "mean", targets), *(of_model(*cost) for cost in costs)]
        if step:
            rows.append(of_model("train_loss", loss - 0.1, "nats", "mean", 999))
            rows.append(of_model("throughput", 64 / seconds, "tokens/s", "mean"))
        rows += [row("displacement", layer, mean) for layer, mean in enumerate(means, start=1)]
        rows.append(row("jump_rate", len(means), last, "value", unit="%"))
        tables.append(tabulate(rows, step=step))
    meta = {
        "kind": "training",
        "recipe": "toy",
        "settings": {"steps": 30, "global_batch_size": 4, "sequence_length": 16, "tokenizer": "t", **settings},
        "model": {"name": "toy", "num_layers": len(profile), "parameters": parameters},
        "data": {"name": "text", "hash": hash},
        "warnings": [],
    }
    return Results(pd.concat(tables, ignore_index=True), meta)


def plain(**changes):
    return run({0: 7.0, 10: 5.0, 20: 4.0, 30: 3.5}, [0.3, 0.1, 0.4], **changes)


def jreg(**changes):
    made = {"seconds": 1.25, "memory": 110.0, "parameters": 1500, **changes}
    return run({0: 7.1, 10: 5.2, 20: 4.1, 30: 3.25}, [0.3, 0.2, 0.21], **made)


def test_differences_are_taken_at_equal_steps_and_layers():
    a, b = plain(), jreg()
    found = versus(a, b)
    keys = ["measure", "site", "layer", "statistic", "step"]
    merged = b.table.merge(a.table, on=keys, suffixes=("", "_base"))
    expected = (merged["value"] - merged["value_base"]).to_numpy()
    own = found.table[found.table.model == "b"]
    assert_allclose(own["difference"].to_numpy(float), expected, atol=1e-12)
    assert found.table[found.table.model == "a"]["difference"].isna().all()
    assert found.is_comparison
    assert found.meta["of"] == "training"
    assert found.meta["step"] == 30


def test_the_headline_by_hand():
    found = versus(plain(), jreg())
    # At step 30 every displacement is 1.3 times its profile: plain 0.39, 0.13, 0.52; jreg 0.39, 0.26, 0.273.
    expected = {
        "validation_loss:b": -0.25,
        "peak_memory:b": 1.1,
        "parameters:b": 1.5,
        "redundancy_change:b": 0.0,  # the median of 0, 13 and -24.7
        "zeta_L:b": 1.3 - 39.0,
        "last_layer_displacement:b": 0.273 - 0.52,
    }
    values = {name: entry["value"] for name, entry in found.headline.items()}
    assert values.pop("time_per_step:b") is None  # three intervals
    assert values == pytest.approx(expected)


@pytest.mark.parametrize(("factor", "differs"), [(1.0, False), (1.1, True)])
def test_times_are_compared_interval_by_interval(factor, differs):
    noise = np.random.default_rng(0).uniform(0.97, 1.03, (2, 12))
    made = []
    for seconds in (noise[0], factor * noise[1]):
        one = run(dict.fromkeys(range(0, 130, 10), 3.0), [0.3, 0.1, 0.4])
        clock = one.table["measure"] == "elapsed"
        one.table.loc[clock, "value"] = np.r_[0.0, 10 * seconds.cumsum()]
        made.append(one)
    found = versus(*made).headline["time_per_step:b"]
    ratios = np.sort(factor * noise[1] / noise[0])
    if differs:  # the third smallest and the third largest of 12 ratios hold their median with 0.961
        assert found["value"] == pytest.approx(np.median(ratios))
        assert found["interval"] == pytest.approx([ratios[2], ratios[9]])
    else:
        assert found["value"] is None
        assert "no measurable difference (95 % interval 0.9" in found["sentence"]


def test_the_last_common_step_decides():
    short = run({0: 7.0, 10: 5.5, 20: 4.2}, [0.3, 0.1, 0.2], seconds=0.5)
    found = compare([plain(), jreg(), short], names=["plain", "jreg", "short"])
    assert found.meta["step"] == 20
    assert found.headline["validation_loss:short"]["value"] == pytest.approx(0.2)
    assert found.headline["validation_loss:jreg"]["value"] == pytest.approx(0.1)
    assert found.meta["warnings"] == ["plain, jreg were trained past step 20, the last that all runs have."]


def test_means_since_the_last_evaluation_meet_only_over_the_same_steps():
    other = run({0: 7.0, 20: 5.0, 30: 3.0}, [0.3, 0.1, 0.2])
    found = versus(plain(), other).table
    own = found[found.model == "b"].set_index(["measure", "step"])["difference"]
    assert own["validation_loss"].to_dict() == pytest.approx({0: 0.0, 20: 1.0, 30: -0.5})
    assert np.isnan(own["train_loss"][20])  # over steps 1 to 20, where the baseline's is over 11 to 20
    assert own["train_loss"][30] == pytest.approx(-0.5)


def test_depths_that_differ_meet_at_relative_depth():
    deep = run({0: 7.0, 10: 5.0}, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    found = versus(plain(), deep)
    own = found.table.query("model == 'b' and step == 10")
    profile = own[own.measure == "displacement"]
    base = 1.1 * np.array([0.3, 0.1, 0.4])
    expected = profile["value"] - np.interp(np.arange(1, 7) / 6, np.arange(1, 4) / 3, base)
    assert_allclose(profile["difference"], expected, atol=1e-12)
    rate = own[own.measure == "jump_rate"]["difference"].item()
    assert rate == pytest.approx(100 * 1.1 * (0.1 - 0.3))
    assert found.meta["warnings"][-1].startswith("b and a have 6 and 3 layers")


def test_the_time_of_a_step_by_interval():
    clocks = {0: 0.0, 10: 10.0, 20: 20.0, 30: 90.0}
    table = pd.concat(tabulate([of_model("elapsed", clock, "s")], step=n) for n, clock in clocks.items())
    assert seconds_per_step(table, 30) == pytest.approx({(0, 10): 1.0, (10, 20): 1.0, (20, 30): 7.0})
    assert seconds_per_step(table[table.step > 0], 20) == pytest.approx({(0, 10): 1.0, (10, 20): 1.0})  # from zero on
    assert seconds_per_step(table, 0) == {}


@pytest.mark.parametrize(("load", "reason"), [(0.35, "used 35% of its CPU during b"), (None, "not recorded")])
def test_costs_of_a_busy_machine_are_not_compared(load, reason):
    found = versus(plain(), jreg(load=load))
    assert not [name for name in found.headline if "time_per_step" in name or "peak_memory" in name]
    assert "parameters:b" in found.headline
    assert any(reason in line for line in found.meta["warnings"])
    assert found.meta["models"][1]["headline"]["peak_memory"]["value"] == 110.0  # its own number stays


def test_what_makes_runs_unequal_is_said():
    changed = jreg(hash="sha256:bb", targets=128, tokenizer="u", global_batch_size=8)
    found = versus(plain(), changed)
    (steps_differ,) = found.meta["warnings"]
    name, finding = next(iter(found.headline.items()))
    assert name == "comparable:b"
    assert all(word in finding["sentence"] for word in ("data", "tokenizers", "targets"))
    assert not [name for name in found.headline if name.startswith(("validation_loss", "zeta", "redundancy"))]
    assert "parameters:b" in found.headline
    assert "batch sizes differ (b: 8, a: 4)" in steps_differ
    only_start = versus(plain(), run({0: 7.0}, [0.3, 0.1, 0.2]))
    assert only_start.meta["step"] == 0
    assert any("before training" in line for line in only_start.meta["warnings"])


def test_runs_that_have_nothing_in_common_are_refused():
    measured = Results(plain().table.drop(columns="step"), {"kind": "measure", "model": {"num_layers": 3}})
    odd = run({5: 7.0, 15: 5.0}, [0.3, 0.1, 0.2])
    lost = plain()
    lost.table["value"] = lost.table["value"].where(lost.table.measure != "validation_loss")
    for other in (measured, odd, lost):
        with refused("other"):
            compare([plain(), other], names=["plain", "other"])

"""Comparisons of times: simulated clocks whose true ratio is known, and one number in headline, table and figure."""

from __future__ import annotations

import re
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from fulldepth.skip.assessment.bench_table import Cell, Measured, headline, table_of

from fulldepth import figures
from fulldepth.execution.latency import PHASES, OtherLoad, Runner, Trial, time_in_rounds
from fulldepth.reporting.payload import payload
from fulldepth.skip.assessment.bench import bench
from skip.word_tokenizer import tokenizer
from tiny_models import build

CELL = Cell(1, 8)


class Clock:
    """Seconds of runs on one machine, whose speed changes while it runs."""

    def __init__(self, kind: str, rounds: int, seed: int) -> None:
        self.kind, self.rng, self.done = kind, np.random.default_rng(seed), 0
        self.runs = 2 * rounds
        self.slow = self.rng.integers(self.runs)

    def seconds(self) -> float:
        """Of the next run of a model that takes 1 s on a quiet machine."""
        factor = {
            "noise": 1.0,
            "drift": 1 + 0.5 * self.done / self.runs,
            "slow run": 4.0 if self.done == self.slow else 1.0,
            "load in the middle": 1.6 if self.done >= self.runs // 2 else 1.0,
        }[self.kind]
        self.done += 1
        return factor * float(self.rng.lognormal(0, 0.03))


class FakeRunner:
    """A model that takes `ratio` seconds of a clock."""

    def __init__(self, clock: Clock, ratio: float) -> None:
        self.clock, self.ratio = clock, ratio

    def run(self, ids, context) -> Trial:
        seconds = self.ratio * self.clock.seconds()
        return Trial(seconds, seconds, None, torch.zeros(1))


def simulated(kind: str, ratio: float, rounds: int, seed: int) -> Measured:
    clock = Clock(kind, rounds, seed)
    runs = {name: (FakeRunner(clock, value), nullcontext) for name, value in (("original", 1.0), ("other", ratio))}
    timed = time_in_rounds(runs, None, 8, repeats=rounds, warmup=0, seed=seed, advance=lambda done: None)
    return Measured(
        ["original", "other"],
        1,
        {"original": 1, "other": 1},
        {(name, CELL, phase): seconds for (name, phase), seconds in timed.seconds.items()},
        {CELL: timed.other_load},
        {(name, CELL): 1 for name in runs},
        {(name, CELL): 1.0 for name in runs},
    )


@pytest.fixture
def quiet(monkeypatch) -> None:
    monkeypatch.setattr(OtherLoad, "__init__", lambda self: None)
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.0)


@pytest.mark.parametrize("draws", [200, pytest.param(3000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("rounds", [9, 15])
@pytest.mark.parametrize("kind", ["noise", "drift", "slow run", "load in the middle"])
def test_equal_models_do_not_differ_and_ten_per_cent_are_found(kind, rounds, draws, quiet) -> None:
    same, slower = 0, 0
    for seed in range(draws):
        same += "no measurable difference" not in said(simulated(kind, 1.0, rounds, seed))
        slower += "no measurable difference" not in said(simulated(kind, 1.1, rounds, seed))
    assert same / draws <= 0.05 + 2 * (0.05 * 0.95 / draws) ** 0.5
    assert slower / draws >= 0.9


def said(measured: Measured) -> str:
    return headline(measured, {})["prefill_time_ratio other"].sentence


def test_a_ratio_by_hand(quiet) -> None:
    measured = simulated("noise", 1.0, 9, 0)
    measured.times["original", CELL, "decode"] = [10.0] * 9
    measured.times["other", CELL, "decode"] = [8.0, 8.2, 8.4, 8.6, 8.8, 9.0, 9.2, 9.4, 20.0]
    rows = table_of(measured)
    rows = rows[(rows.measure == "time_ratio") & (rows.site == "decode") & rows.batch.isna()]
    # the second smallest and the second largest of nine: 1 - 2 (1 + 9) / 512 = 0.961
    assert rows.set_index("statistic").value.to_dict() == pytest.approx({"median": 0.88, "low": 0.82, "high": 0.94})
    sentence = headline(measured, {})["decode_time_ratio other"].sentence
    assert sentence == "other, decode time: 0.880 times the original's (95 % interval 0.820 to 0.940)."


def test_over_a_grid_a_round_is_the_geometric_mean_of_its_cells(quiet) -> None:
    measured, other = simulated("noise", 1.0, 9, 0), Cell(4, 8)
    measured.other_load[other] = 0.0
    for name, seconds in (("original", 1.0), ("other", 0.9)):
        measured.times[name, CELL, "prefill"] = [seconds] * 9
        measured.times[name, other, "prefill"] = [5 * seconds**3] * 9
    assert measured.ratio("other", "prefill", CELL, other) == pytest.approx([0.9**2] * 3)


def test_fewer_rounds_have_no_interval_and_no_verdict(quiet) -> None:
    measured = simulated("noise", 1.0, 8, 0)
    assert re.fullmatch(
        r"other, prefill time: [\d.]+ times the original's \(an interval takes 9 rounds, this is 8\)\.", said(measured)
    )
    rows = table_of(measured)
    assert set(rows[rows.measure == "time_ratio"].statistic) == {"median"}


def test_times_of_a_busy_machine_are_not_compared(monkeypatch) -> None:
    monkeypatch.setattr(OtherLoad, "share", lambda self: 0.35)
    measured = simulated("noise", 1.1, 9, 0)
    assert "time_ratio" not in set(table_of(measured).measure)
    (finding,) = headline(measured, {}).values()
    assert finding.value is None
    expected = "The machine was busy: other programs used 35% of its processor. Times are not compared."
    assert finding.sentence == expected


@pytest.mark.parametrize("grid", [{"contexts": [8]}, {"contexts": [8, 16]}])
def test_headline_table_and_figure_show_one_number(monkeypatch, quiet, grid) -> None:
    original, other = build("llama"), build("llama", seed=1)
    rng, run = np.random.default_rng(5), Runner.run

    def noisy(self, ids, context) -> Trial:
        trial = run(self, ids, context)
        seconds = rng.lognormal(0, 0.3, 2) * (1 if self.model is original else 0.4)
        return trial._replace(prefill=seconds[0], decode=seconds[1])

    monkeypatch.setattr(Runner, "run", noisy)
    heldout = [{"text": " ".join(["one two three"] * 4)}] * 4
    results = bench(original, [other], heldout=heldout, tokenizer=tokenizer(), batches=[1], new_tokens=2, **grid)
    assert results.meta["settings"]["repeats"] == 9
    label = results.meta["models"][1]["label"]
    made = payload(results)
    columns = dict(zip(made["models"]["columns"], made["models"]["rows"][1][1:], strict=True))
    for phase in PHASES:
        finding = results.headline[f"{phase}_time_ratio {label}"]
        shown = [f"{finding['value']:.3f}", *re.findall(r"interval ([\d.]+) to ([\d.]+)\)", finding["sentence"])[0]]
        assert f"{phase} time" in finding["sentence"]
        assert f": {shown[0]} times the original's" in finding["sentence"]
        assert columns[f"{phase.capitalize()} time"] == "{}× ({} to {})".format(*shown)
        figure = figures.build(results.table, results.meta)[f"pareto_{phase}"]
        (point,) = [one for one in figure.data if one.mode == "markers" and one.name == label]
        assert [f"{number:.3f}" for number in (point.x[0], *point.customdata[0])] == shown
        if len(grid["contexts"]) == 1:  # the place and the whole grid are one
            keep = (results.table.measure == "time_ratio") & (results.table.site == phase)
            middle = results.table[keep & (results.table.statistic == "median")].value
            assert set(middle) == {finding["value"]}

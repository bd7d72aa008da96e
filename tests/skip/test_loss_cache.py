"""A search that was killed comes to the same plan; several processes come to the plan of one."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.execution.scoring import Scorer
from fulldepth.skip import loss_cache
from fulldepth.skip.plan import FILE, Plan
from fulldepth.skip.search import search
from hostile import damaged_json
from json_files import read_json, write_json
from marks import thorough
from refusals import refused
from skip import plain
from skip.searching import LAYERS, OPTIONS, SIZES, STEPS, UNFITTED, WEIGHTS, WIDTH

PROGRAM = Path(__file__).with_name("searching.py")
PROGRESS = "progress.json"


@pytest.fixture(scope="module")
def model():
    return plain.trained(LAYERS, WIDTH, STEPS)


@pytest.fixture(scope="module")
def examples():
    return plain.examples(train=12, heldout=48)


class Killed(BaseException):
    """Nothing that anybody catches."""


def timeless(plan):
    """A plan without how long it took."""
    document = json.loads(json.dumps(plan.document()))
    document["cost"].pop("seconds")
    document["cost"].get("fit", {}).pop("seconds", None)
    return document


@pytest.fixture(autouse=True)
def without_results(monkeypatch):
    """The results and the page beside a plan take longer than these searches; `test_run` has them."""
    saved = SimpleNamespace(save=lambda folder, watcher: None)
    monkeypatch.setattr(sys.modules["fulldepth.skip.search"], "search_results", lambda *_, **__: saved)


def stopping(after):
    """A watcher that ends everything at some step."""
    told = []

    def advance(count):
        told.append(count)
        if len(told) == after:
            raise Killed

    return Watcher(advance=advance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "criterion"),
    [
        ("greedy", "loss"),
        ("exact", "kl"),
        ("taylor", "loss"),
        thorough("greedy", "scaled"),
    ],
)
def test_a_search_broken_off_anywhere_goes_on_to_the_same_plan(model, examples, tmp_path, name, criterion):
    options = {**OPTIONS, "search": name, "criterion": criterion, "epochs": 1}
    heard = []
    whole = search(model, examples, watcher=Watcher(advance=heard.append), **options)
    steps = len(heard)
    for after in (steps // 3, steps - 1):
        folder = tmp_path / str(after)
        with pytest.raises(Killed):
            search(model, examples, output=folder, watcher=stopping(after), **options)
        assert not (folder / FILE).exists()
        heard.clear()
        plan = search(model, examples, output=folder, resume=True, watcher=Watcher(advance=heard.append), **options)
        assert timeless(plan) == timeless(whole) == timeless(Plan.load(folder))
        assert not (folder / PROGRESS).exists()
    assert len(heard) < steps, "what was done was not done again"


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "greedy-scaled",
        "greedy-loss-speedup",
        *(thorough(f"{k}-loss") for k in ("exact", "taylor")),
    ],
)
def test_two_processes_find_the_plan_of_one(model, tmp_path, kind):
    name, criterion, *target = kind.split("-")
    torch.save(model.state_dict(), tmp_path / WEIGHTS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = {"capture_output": True, "text": True, "env": environment, "timeout": 300}
    done = subprocess.run([*command, tmp_path / kind], check=False, **ran)
    assert done.returncode == 0, done.stderr
    if target:  # one process has timed the parts
        reached = Plan.load(tmp_path / kind).cost["target"]
        assert reached["reached"] >= reached["needed"] == pytest.approx(1 - 1 / 1.1)
        return
    one = timeless(search(model, plain.examples(**SIZES), search=name, criterion=criterion, **OPTIONS))
    two = timeless(Plan.load(tmp_path / kind))
    for key in ("blocks", "losses", "cost", "scalars", "healed_loss", "control_loss"):
        assert flat(two[key]) == pytest.approx(flat(one[key]), rel=1e-5, abs=1e-7), key


def flat(value):
    """Every number of plain values, in their order."""
    if isinstance(value, dict):
        return [number for key in sorted(value) for number in flat(value[key])]
    if isinstance(value, list):
        return [number for part in value for number in flat(part)]
    return [value] if isinstance(value, int | float) else []


def test_a_round_ends_with_its_time_and_does_so_again_after_a_restart(model, examples, tmp_path, monkeypatch):
    """Every step takes a second by this clock: the first of three rounds has 8.3 seconds, the others what is left."""
    ticks = itertools.count()
    monkeypatch.setattr(loss_cache, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    options, said = {**UNFITTED, "budget": "10s"}, []
    plan = search(model, examples, watcher=Watcher(say=said.append), **options)
    rounds = plan.cost["rounds"]
    assert [found["scored"] for found in rounds] == [18, 2, 2]  # nine chunks of two sequences, one, one
    stopped = [number for number, found in enumerate(rounds, 1) if found["decided_by"] == "budget"]
    assert stopped
    assert set(stopped) <= set(plan.cost["unsure_rounds"])
    for number, words in zip(stopped, plan.cost["stopped_by_budget"], strict=True):
        assert words == f"round {number}: stopped by budget after {rounds[number - 1]['scored']} of 48 sequences"
        assert any(words.split(": ")[1] in line for line in said)
    with pytest.raises(Killed):
        search(model, examples, output=tmp_path, watcher=stopping(20), **options)
    assert search(model, examples, output=tmp_path, resume=True, **options).cost["rounds"] == rounds


def test_progress_of_another_search_is_refused(model, examples, tmp_path):
    folder, other = tmp_path / "out", copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    with pytest.raises(Killed):
        search(model, examples, output=folder, watcher=stopping(9), **OPTIONS)
    before = (folder / PROGRESS).read_bytes()
    for words, one, data, options in (
        ("unfinished", model, examples, {"resume": False}),
        ("holds another search: seed was 0, is 1. Choose another output folder", model, examples, {"seed": 1}),
        ("criterion was", model, examples, {"criterion": "kl"}),
        ("data was", model, plain.examples(train=12, heldout=48, seed=1), {}),
        ("model was", other, examples, {}),
    ):
        with refused(words):
            search(one, data, output=folder, **(OPTIONS | {"resume": True} | options))
        assert (folder / PROGRESS).read_bytes() == before


def test_progress_of_another_version_says_so(model, examples, tmp_path):
    options = {**UNFITTED, "search": "greedy", "output": tmp_path / "out", "resume": True}
    with pytest.raises(Killed):
        search(model, examples, watcher=stopping(8), **options)
    path = tmp_path / "out" / PROGRESS
    write_json(path, read_json(path) | {"schema_version": 3})
    with refused(r"cannot be used: it has schema_version 3, .* Remove the file to start the search again"):
        search(model, examples, **options)


@pytest.mark.parametrize("name", ["greedy", "taylor"])
def test_damaged_progress_is_refused_or_does_not_matter(model, examples, tmp_path, name):
    options = {**UNFITTED, "search": name, "output": tmp_path / "out", "resume": True}
    options |= {"losses": True} if name == "taylor" else {}  # a ranking alone stores no losses
    with pytest.raises(Killed):
        search(model, examples, watcher=stopping(8), **options)
    path, rng, messages = tmp_path / "out" / PROGRESS, random.Random(0), []
    document = read_json(path)
    whole = timeless(search(model, examples, **UNFITTED, **({"losses": True} if name == "taylor" else {}), search=name))
    for _ in range(30):
        path.write_text(damaged_json(document, rng), encoding="utf-8", errors="replace")
        try:
            plan = search(model, examples, **options)
        except FulldepthError as error:
            messages.append(str(error))
        else:
            assert timeless(plan) == whole
            for file in path.parent.iterdir():
                file.unlink()
    assert len(messages) > 8
    assert all(len(text) < 1000 and ("Remove the file" in text or "another search" in text) for text in messages)


def test_a_finished_plan_is_neither_written_over_nor_found_again(model, examples, tmp_path, monkeypatch):
    options, told = {**UNFITTED, "output": tmp_path / "out"}, []
    plan = search(model, examples, **options)
    with refused(r"already holds a plan\.json"):
        search(model, examples, **options)
    again = search(model, examples, resume=True, watcher=Watcher(say=told.append), **options)
    assert again.document() == plan.document()
    assert not told
    with refused("plan of another search"):
        search(model, examples, resume=True, **options | {"seed": 1})
    monkeypatch.setattr(model.config, "rope_parameters", {**model.config.rope_parameters, "rope_theta": 500.0})
    with refused("plan of another search"):
        search(model, examples, resume=True, **options)


def test_a_loss_that_is_not_finite_is_never_ranked(model, examples, monkeypatch):
    usual = Scorer.sums

    def overflowing(self, batch, variants, **options):
        found = usual(self, batch, variants, **options)
        worse = {
            v: {name: [math.nan] * len(sums) for name, sums in found[v].items()} for v in found if (2, "attention") in v
        }
        return found | worse

    monkeypatch.setattr(Scorer, "sums", overflowing)
    with refused(r"Without .*attention 2.* the loss is not finite in torch.float32"):
        search(model, examples, **OPTIONS)

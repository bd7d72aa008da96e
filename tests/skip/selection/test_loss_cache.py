"""A search that was killed comes to the same plan; several processes come to the plan of one."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fulldepth.errors import FulldepthError
from fulldepth.execution.scoring import Scorer
from fulldepth.progress import Watcher
from fulldepth.skip.plan import FILE, Plan
from fulldepth.skip.selection.search import search
from skip import plain
from skip.searching import LAYERS, OPTIONS, STEPS, WEIGHTS, WIDTH

PROGRAM = Path(__file__).parents[1] / "searching.py"
PROGRESS = "progress.json"
SLOW = pytest.param("greedy", "scaled", marks=pytest.mark.slow)


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


def stopping(after):
    """A watcher that ends everything at some step."""
    told = []

    def advance(count):
        told.append(count)
        if len(told) == after:
            raise Killed

    return Watcher(advance=advance)


@pytest.mark.parametrize(
    ("name", "criterion"),
    [("greedy", "loss"), ("exact", "loss"), ("exact", "kl"), ("taylor", "loss"), SLOW],
)
def test_a_search_broken_off_anywhere_goes_on_to_the_same_plan(model, examples, tmp_path, name, criterion):
    options = {**OPTIONS, "search": name, "criterion": criterion, "epochs": 1}
    heard = []
    whole = search(model, examples, watcher=Watcher(advance=heard.append), **options)
    steps = len(heard)
    for after in sorted({1, steps // 4, steps // 2, 3 * steps // 4, steps - 1}):
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
def test_a_process_that_is_killed_without_notice_loses_nothing(model, examples, tmp_path):
    """An exact search; `tests/kills` breaks off greedy ones at every operation on a file."""
    kind, name, criterion = "exact-kl", "exact", "kl"
    torch.save(model.state_dict(), tmp_path / WEIGHTS)
    whole = search(model, examples, search=name, criterion=criterion, **OPTIONS)
    for moment in ("1", "2.5", "6", "9.5"):
        folder = tmp_path / f"{kind}-{moment}"
        killed = subprocess.run([sys.executable, PROGRAM, folder, moment], check=False, capture_output=True, text=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert len(json.loads((folder / PROGRESS).read_text())["log"]) == int(float(moment))
        subprocess.run([sys.executable, PROGRAM, folder], check=True)
        assert timeless(Plan.load(folder)) == timeless(whole)
        assert [path.name for path in folder.iterdir()] == [FILE]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["greedy-loss", "exact-loss", "taylor-loss", "exact-scaled"])
def test_two_processes_find_the_plan_of_one(model, examples, tmp_path, kind):
    name, criterion = kind.split("-")
    torch.save(model.state_dict(), tmp_path / WEIGHTS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", PROGRAM]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, tmp_path / kind], check=False, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    one = timeless(search(model, examples, search=name, criterion=criterion, **OPTIONS))
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


def test_progress_of_another_search_is_refused(model, examples, tmp_path):
    folder = tmp_path / "out"
    with pytest.raises(Killed):
        search(model, examples, output=folder, watcher=stopping(9), **OPTIONS)
    before = (folder / PROGRESS).read_bytes()

    def refused(words, data=examples, resume=True, **options):
        with pytest.raises(FulldepthError, match=words):
            search(model, data, output=folder, resume=resume, **(OPTIONS | options))
        assert (folder / PROGRESS).read_bytes() == before

    refused("holds an unfinished search", resume=False)
    refused("another search: seed was 0, is 1", seed=1)
    refused("another search: criterion was 'loss', is 'kl'", criterion="kl")
    refused("another search: data was", data=plain.examples(train=12, heldout=48, seed=1))
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    with pytest.raises(FulldepthError, match="another search: model was"):
        search(other, examples, output=folder, resume=True, **OPTIONS)
    for text, words in (
        ("{", "is damaged: it is not valid JSON: Expecting .* Remove the file"),
        ('{"schema_version": 9, "of": {}}', "schema version 9"),
    ):
        (folder / PROGRESS).write_text(text)
        with pytest.raises(FulldepthError, match=words):
            search(model, examples, output=folder, resume=True, **OPTIONS)


def test_a_finished_plan_is_neither_written_over_nor_found_again(model, examples, tmp_path):
    folder = tmp_path / "out"
    plan = search(model, examples, output=folder, fit=False, **OPTIONS)
    with pytest.raises(FulldepthError, match=r"already holds a plan\.json"):
        search(model, examples, output=folder, fit=False, **OPTIONS)
    told = []
    again = search(model, examples, output=folder, fit=False, resume=True, watcher=Watcher(say=told.append), **OPTIONS)
    assert again.document() == plan.document()
    assert not told
    with pytest.raises(FulldepthError, match="plan of another search"):
        search(model, examples, output=folder, fit=False, resume=True, **(OPTIONS | {"seed": 1}))


def test_a_disk_that_is_full_is_said_in_one_line(model, examples, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(FulldepthError, match=r"Cannot write into .*file/out: Not a directory") as error:
        search(model, examples, output=blocked / "out", fit=False, **OPTIONS)
    assert "\n" not in str(error.value)


def test_a_loss_that_is_not_finite_is_never_ranked(model, examples, monkeypatch):
    usual = Scorer.sums

    def overflowing(self, batch, variants, **options):
        found = usual(self, batch, variants, **options)
        for variant in found:
            if 2 in variant:
                found[variant] = {name: [math.nan for _ in sums] for name, sums in found[variant].items()}
        return found

    monkeypatch.setattr(Scorer, "sums", overflowing)
    with pytest.raises(FulldepthError, match=r"blocks \[(1, )?2.*\] skipped the loss is not finite in torch.float32"):
        search(model, examples, **OPTIONS)

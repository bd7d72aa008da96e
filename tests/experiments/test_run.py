"""The smoke pool of experiments/run.py: one line a run, nothing twice, other settings refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fulldepth.core.errors import FulldepthError, StoppedError
from places import ROOT

sys.path.insert(0, str(ROOT / "experiments"))

import probes
import run as experiments

PROGRAM = ROOT / "experiments" / "run.py"


@pytest.mark.slow
def test_a_finished_run_is_one_line_and_is_not_repeated(tmp_path):
    def run(*more):
        command = [sys.executable, str(PROGRAM), "smoke", "--arms", "jreg-last", "--output", str(tmp_path), *more]
        path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    first = run()
    assert first.returncode == 0, first.stderr[-2000:]
    assert "1 finished, 0 left, 0 failed" in first.stdout
    stored = (tmp_path / "smoke.jsonl").read_text()
    assert '"refused": {}' in stored
    assert run().returncode == 0
    assert (tmp_path / "smoke.jsonl").read_text() == stored
    assert "with other settings" in run("--set", "steps=9").stderr


def test_a_killed_run_repeats_no_finished_probe(tmp_path, monkeypatch):
    called = []
    stopped = [True]

    def first(subject):
        called.append("first")
        subject.chosen["layer", "greedy"] = [3, 5]
        return {"one": 1.0}

    def second(subject):
        called.append("second")
        raise FulldepthError("not for this model")

    def third(subject):
        called.append("third")
        if stopped[0]:
            raise StoppedError("a signal")
        return {"three": subject.chosen["layer", "greedy"]}

    monkeypatch.setattr(experiments, "PROBES", {"first": first, "second": second, "third": third})
    monkeypatch.setattr(experiments, "subject_of", lambda order, checkpoint: SimpleNamespace(chosen={}))

    def probed(**settings):
        order = experiments.Order("pool", "arm", 0, settings, {}, tmp_path, "cpu", ["first", "second", "third"])
        order.folder.mkdir(parents=True, exist_ok=True)
        return experiments.probed(order, order.folder)

    with pytest.raises(StoppedError):
        probed(steps=1)
    stopped[0] = False
    whole = {"one": 1.0, "three": [3, 5]}, {"second": "not for this model"}
    assert probed(steps=1) == whole
    assert called == ["first", "second", "third", "third"]
    assert probed(steps=1) == whole
    assert probed(steps=2) == whole, "other settings are read anew"
    assert called[4:] == ["first", "second", "third"]


@pytest.mark.parametrize(("load", "is_busy"), [(0.0, False), (0.5, True)])
def test_self_speculation_is_timed_in_changing_order_and_not_beside_other_programs(load, is_busy, monkeypatch):
    clock = [0.0]
    first = []

    def generate(ids, max_new_tokens, speculate_from=None):
        first.append(speculate_from is None)
        clock[0] += 2.0 if speculate_from is None else 1.0

    monkeypatch.setattr(probes, "Decoder", lambda model: SimpleNamespace(generate=generate))
    monkeypatch.setattr(probes, "OtherLoad", lambda: SimpleNamespace(share=lambda: load))
    monkeypatch.setattr(probes.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(probes, "drafting_layers", lambda subject: 2)
    subject = SimpleNamespace(model=None, prompts=[None], common={"sequence_length": 64})
    if is_busy:
        with pytest.raises(RuntimeError, match="other programs"):
            probes.timed_speculation(subject)
    else:
        assert probes.timed_speculation(subject) == {"speculation_speedup": 2.0}
    assert {*first[::2]} == {True, False}


def test_a_call_for_one_arm_checks_the_settings_of_the_stored_ones(tmp_path, monkeypatch):
    llama = {"arm": "llama", "seed": 0, "settings": experiments.hash_of(experiments.settings_of("small", "llama", {}))}
    (tmp_path / "small.jsonl").write_text(json.dumps(experiments.sealed(llama)) + "\n")
    monkeypatch.setattr(experiments, "prepare", lambda *_: {"choosing": ""})
    monkeypatch.setattr(experiments, "run_all", lambda left, *_: orders.extend(order.job for order in left) or (0, 0))
    orders = []
    command = ["run.py", "small", "--arms", "llama,tree", "--seeds", "0,1", "--output", str(tmp_path)]
    for changes, message in (([], "0"), (["--set", "steps=100"], "holds llama, seed 0, with other settings")):
        monkeypatch.setattr(sys, "argv", [*command, *changes])
        with pytest.raises(SystemExit, match=message):
            experiments.main()
    assert orders == [("tree", 0), ("llama", 1), ("tree", 1)], "a stored run is not repeated"

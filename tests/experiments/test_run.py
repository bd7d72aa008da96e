"""The smoke pool of experiments/run.py: one line a run, nothing twice, other settings refused."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from places import ROOT

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

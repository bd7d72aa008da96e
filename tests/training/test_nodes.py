"""Machines that share no disk: a resumed run goes on from what the first one's disk holds."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from fulldepth.results import Results

sys.path.insert(0, str(Path(__file__).parent))
from node_local_train import launch

TIMED = ("throughput", "elapsed", "peak_memory", "other_load")


@pytest.mark.slow
def test_a_run_on_machines_without_a_shared_disk_resumes_bit_equal(recipe: Any, tmp_path: Path) -> None:
    path = recipe(model={"attention_dropout": 0.1}, steps=6, save_every=4)
    whole = launch("train", path, "--output", tmp_path / "whole" / "NODE")
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert not list((tmp_path / "whole" / "node1").glob("checkpoint-*"))
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "node0" / "checkpoint-6")
    again = launch("train", path, "--output", tmp_path / "cut" / "NODE", "--resume")
    assert again.returncode == 0, again.stderr[-3000:]
    mine, theirs = (load_file(tmp_path / name / "node0/checkpoint-6/model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(theirs[name], value) for name, value in mine.items())
    tables = [Results.load(tmp_path / name / "node0").table for name in ("whole", "cut")]
    pd.testing.assert_frame_equal(*(table[~table.measure.isin(TIMED)].reset_index(drop=True) for table in tables))
    assert {p.name for p in (tmp_path / "cut" / "node1").iterdir()} <= {"tokens"}  # no copy is left behind

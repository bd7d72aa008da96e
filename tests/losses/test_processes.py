"""Two processes give the gradients of one: data parallel and sharded, CR's batch mean over both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from sharded_step import TERMS, batch, model

from fulldepth.losses import Objective


def launch(*arguments: str, script: str = "sharded_step.py") -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    program = str(Path(__file__).with_name(script))
    done = subprocess.run([*command, program, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "resharded"])
def test_two_processes_equal_one(mode: str, tmp_path: Path) -> None:
    plain, inputs = model(), batch()
    objective = Objective(**TERMS).attach(plain)
    # Orthogonality is a mean over sequences and all else over tokens or the global batch, so equal shares add up.
    loss, _ = objective(plain(**inputs), inputs)
    loss.backward()
    launch(mode, str(tmp_path / "step.pt"))
    found = torch.load(tmp_path / "step.pt", weights_only=True)
    assert float(found["loss"]) == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found["gradients"][name], parameter.grad, rtol=1e-4, atol=1e-6)

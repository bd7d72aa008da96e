"""`torchrun` with two processes gives the losses of one at the same global batch; so does a resumed pair."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fulldepth.results import Results
from fulldepth.settings import layer, read
from fulldepth.training import TrainSettings, train

KINDS: dict[str, dict[str, Any]] = {
    "jreg": {"objective": {"jump": 1.0, "similarity": 0.2}, "micro_batch_size": 1},
    "cr": {
        "model": {"type": "depth_llama", "residual": "tree", "tree": {1: [-1, 0], 2: [0, 1]}},
        "objective": {"coherence": {"weight": 0.5, "layers": [1, 2]}, "orthogonality": {"weight": 0.5, "layers": [3]}},
    },
    "lime": {"model": {"type": "depth_llama", "memory": "dynamic"}, "objective": {"aligned": 1.0}},
}


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*program, "-m", "fulldepth", "train", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=600)


def losses(results: Results) -> list[float]:
    wanted = ("validation_loss", "train_loss", "penalty", "displacement")
    return results.table[results.table.measure.isin(wanted)].value.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_like_one(kind: str, recipe: Any, tmp_path: Path) -> None:
    path = recipe(**KINDS[kind])
    chosen = layer(TrainSettings, read(path, "train"))
    one = train(chosen.model_copy(update={"micro_batch_size": None}), tmp_path / "one")
    done = torchrun(path, "--output", tmp_path / "two")
    assert done.returncode == 0, done.stderr[-3000:]
    two = Results.load(tmp_path / "two")
    assert losses(two) == pytest.approx(losses(one), rel=1e-4, abs=1e-5)
    assert two.table[two.table.measure == "train_loss"]["count"].sum() == 8 * (4 if kind == "jreg" else 2)


@pytest.mark.slow
def test_fewer_documents_than_processes_is_refused(recipe: Any, tmp_path: Path) -> None:
    text = tmp_path / "two.jsonl"
    text.write_text('{"text": "' + "one word after another " * 300 + '"}\n' * 1, encoding="utf-8")
    path = recipe(data={"name": str(text)})
    done = torchrun(path, "--output", tmp_path / "run")
    assert done.returncode != 0
    assert "document" in done.stderr
    assert "Traceback" not in done.stderr.split("Error:")[0]

"""Every example runs and learns."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    return history


@pytest.mark.slow
def test_hand_written_loop() -> None:
    history = run("hand_written_loop")
    assert len(history) == 20
    assert history[-1]["ce"] < history[0]["ce"] - 0.3
    assert history[-1]["jump"] < 0.5 * history[0]["jump"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "sft"])
def test_trainers(name: str) -> None:
    if name == "sft":
        pytest.importorskip("trl")
    steps = [entry for entry in run(name) if "loss_jump" in entry]
    assert float(steps[-1]["loss_ce"]) < float(steps[0]["loss_ce"])
    assert float(steps[-1]["loss_jump"]) < float(steps[0]["loss_jump"])
    first = {key: float(value) for key, value in steps[0].items()}
    parts = first["loss_ce"] + first["loss_jump"] + 0.1 * first.get("loss_similarity", 0.0)
    assert first["loss"] == pytest.approx(parts, rel=1e-3)


def test_every_example_is_run_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"hand_written_loop", "trainer", "sft"}

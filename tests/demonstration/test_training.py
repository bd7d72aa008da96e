"""`demo --train` with smaller models and fewer steps: trains, measures, compares, goes on after an interruption."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from fulldepth import cli
from fulldepth.demonstration import training as demo
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher
from fulldepth.results import Results
from fulldepth.settings import read

STEPS, MOMENTS = 20, [5, 10, 15, 20]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The same recipes with three layers of 32 channels and short sequences."""
    sizes = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48}
    for name, recipe in list(demo.RECIPES.items()):
        settings = read(recipe, "train")
        settings["model"] |= sizes
        settings |= {"sequence_length": 32, "global_batch_size": 4, "tokenizer": "builtin:300"}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(settings), "utf-8")
        monkeypatch.setitem(demo.RECIPES, name, str(path))


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return load_file(folder / name / "run" / "checkpoint-20" / "model.safetensors")


def interrupted(folder: Path) -> None:
    """A demo that stops within its first training, after step 13."""
    titles: list[str] = []
    passed: list[int] = []

    def begin(title: str, total: int) -> None:
        titles.append(title)
        passed.clear()

    def advance(done: int) -> None:
        passed.append(done)
        if titles[-1] == "Training" and sum(passed) >= 13:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        demo.train_demo(folder, steps=STEPS, watcher=Watcher(begin=begin, advance=advance))
    assert (folder / "baseline" / "run" / "checkpoint-10").is_dir()
    assert not (folder / "baseline" / "run" / "checkpoint-15").exists()


@pytest.mark.slow
def test_the_demo_trains_measures_and_compares(small, tmp_path, monkeypatch, capsys):
    """A whole demo by the command line; the same again; another one in its folder; one that was interrupted."""
    out = tmp_path / "demo"
    monkeypatch.setattr(sys, "argv", ["fulldepth", "demo", "--train", "--output", str(out), "--steps", str(STEPS)])
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    printed = capsys.readouterr()
    assert not leaving.value.code, printed.err
    assert f"Page: {out / 'comparison' / 'report.html'}" in printed.out.replace("\n", "")
    for page in ("comparison", "training", "baseline/results", "jreg/results", "baseline/run", "jreg/run"):
        assert (out / page / "report.html").stat().st_size > 100_000, page
    for name in ("baseline", "jreg"):
        series = Results.load(out / name / "results")
        assert sorted(set(series.table["step"])) == MOMENTS
    together = Results.load(out / "comparison")
    assert [model["label"] for model in together.meta["models"]] == ["baseline", "tree", "jreg"]
    psi = together.table[(together.table.measure == "displacement") & (together.table.statistic == "mean")]
    psi = psi[(psi.site == "residual") & (psi.layer == 3)].set_index("model").value
    assert psi["jreg"] < psi["baseline"], "the penalty turns the last layer less"

    before = times(out / "baseline" / "run") | times(out / "jreg" / "results" / "steps")
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert not leaving.value.code
    assert "nothing to do" in capsys.readouterr().err
    changed = {
        p
        for p, t in (times(out / "baseline" / "run") | times(out / "jreg" / "results" / "steps")).items()
        if before.get(p) != t and "checkpoint" in str(p)
    }
    assert not changed

    before = times(out)
    with pytest.raises(FulldepthError, match="steps was 20, is 40"):
        demo.train_demo(out, steps=40)
    assert times(out) == before

    interrupted(tmp_path / "broken")
    demo.train_demo(tmp_path / "broken", steps=STEPS)
    for name in ("baseline", "jreg"):
        resumed, whole = weights(tmp_path / "broken", name), weights(out, name)
        assert all(torch.equal(resumed[key], whole[key]) for key in whole)


def test_too_few_steps_for_the_checkpoints(tmp_path):
    with pytest.raises(FulldepthError, match=r"at least 20 steps, .*got 19"):
        demo.train_demo(tmp_path / "run", steps=19)
    assert not (tmp_path / "run").exists()


def test_the_recipes_differ_in_one_thing_each():
    plain, tree, jreg = (read(recipe, "train") for recipe in demo.RECIPES.values())
    for other, own in ((tree, {"model"}), (jreg, {"objective", "method"})):
        different = {key for key in plain.keys() | other.keys() if plain.get(key) != other.get(key)}
        assert different <= {"about", "source"} | own

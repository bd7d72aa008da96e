"""The demo with a smaller model and fewer steps: trains, measures, and goes on after an interruption."""

from __future__ import annotations

import inspect
import sys
from itertools import pairwise

import pytest
import torch
import transformers as tf

from fulldepth import cli
from fulldepth.demo import run as demo
from fulldepth.errors import FulldepthError
from fulldepth.measure import Watcher
from fulldepth.results import Results

STEPS = 25
MOMENTS = [1, 3, 8, 15, 25]
"""4, 12, 30, 60 and 100 % of 25 steps."""


@pytest.fixture
def small(monkeypatch):
    """Three layers of 32 channels."""
    sizes = {"LAYERS": 3, "WIDTH": 32, "HEADS": 4, "HIDDEN": 48, "VOCABULARY": 300, "LENGTH": 32, "BATCH": 4}
    for name, size in sizes.items():
        monkeypatch.setattr(demo, name, size)
    texts = {part: [text[:60000] for text in demo.builtin_texts(part)[:1]] for part in ("train", "heldout")}
    monkeypatch.setattr(demo, "builtin_texts", texts.get)


def steps_of(folder):
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*"))


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_the_demo_trains_measures_and_shows(small, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    command = ["fulldepth", "demo", "--output", str(out), "--steps", str(STEPS)]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    printed = capsys.readouterr()
    assert not leaving.value.code, printed.err
    assert "zeta_L" in printed.out
    assert f"Page: {out / 'results' / 'report.html'}" in printed.out.replace("\n", "")
    assert (out / "results" / "report.html").stat().st_size > 100_000

    assert steps_of(out / "model") == MOMENTS
    results = Results.load(out / "results")
    assert sorted(set(results.table["step"])) == MOMENTS
    assert results.meta["model"]["num_layers"] == 3
    assert {"displacement", "cka", "coherence", "saturation", "renyi_entropy"} <= set(results.table.measure)
    loss = results.table[(results.table.measure == "lens_loss") & (results.table.layer == 3)].set_index("step").value
    assert loss[25] < loss[1], "it learns"
    last = tf.LlamaForCausalLM.from_pretrained(out / "model" / "checkpoint-25")
    assert last.config.num_hidden_layers == 3

    before = times(out / "model") | times(out / "results" / "steps")
    with pytest.raises(SystemExit) as leaving:
        cli.main()
    assert not leaving.value.code
    assert "nothing to do" in capsys.readouterr().err
    assert times(out / "model") | times(out / "results" / "steps") == before


@pytest.mark.slow
def test_an_interrupted_demo_goes_on_to_the_same_weights(small, tmp_path):
    def stop_after(count):
        passed = []

        def advance(done):
            passed.append(done)
            if sum(passed) >= count:
                raise KeyboardInterrupt

        return Watcher(advance=advance)

    with pytest.raises(KeyboardInterrupt):
        demo.demo(tmp_path / "broken", steps=STEPS, watcher=stop_after(18))
    assert steps_of(tmp_path / "broken" / "model") == [1, 3, 8, 15]
    before = times(tmp_path / "broken" / "model" / "checkpoint-8")
    results = demo.demo(tmp_path / "broken", steps=STEPS)
    assert times(tmp_path / "broken" / "model" / "checkpoint-8") == before
    assert steps_of(tmp_path / "broken" / "model") == MOMENTS
    assert sorted(set(results.table["step"])) == MOMENTS

    demo.demo(tmp_path / "whole", steps=STEPS)
    resumed, whole = (
        tf.LlamaForCausalLM.from_pretrained(tmp_path / name / "model" / "checkpoint-25").state_dict()
        for name in ("broken", "whole")
    )
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_checkpoint_that_was_cut_off_is_made_again(small, tmp_path):
    """A power cut while the last checkpoint is written leaves some of its files."""
    demo.train(tmp_path / "run" / "model", STEPS, 0, Watcher())
    last = tmp_path / "run" / "model" / "checkpoint-25"
    (last / "trainer_state.json").unlink()  # the Trainer writes it last
    (last / "model.safetensors").write_bytes((last / "model.safetensors").read_bytes()[:1000])
    results = demo.demo(tmp_path / "run", steps=STEPS)
    assert sorted(set(results.table["step"])) == MOMENTS


@pytest.mark.slow
def test_another_run_in_the_folder_is_refused(small, tmp_path):
    demo.demo(tmp_path / "run", steps=STEPS)
    before = times(tmp_path / "run")
    with pytest.raises(FulldepthError, match="another run"):
        demo.demo(tmp_path / "run", steps=40)
    assert times(tmp_path / "run") == before


def test_too_few_steps_for_the_checkpoints(tmp_path):
    with pytest.raises(FulldepthError, match=r"at least 25 steps, got 24"):
        demo.demo(tmp_path / "run", steps=24)
    assert not (tmp_path / "run").exists()


def test_checkpoints_are_dense_where_most_changes():
    steps = inspect.signature(demo.demo).parameters["steps"].default
    moments = [max(1, round(share * steps)) for share in demo.MOMENTS]
    assert len(set(moments)) == 5
    assert moments[-1] == steps
    gaps = [after - before for before, after in pairwise(moments)]
    assert gaps == sorted(gaps)

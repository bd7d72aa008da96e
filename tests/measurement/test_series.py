"""A folder of checkpoints: one series, which goes on where it stopped and never overwrites another run."""

from __future__ import annotations

import json
import math
import shutil

import pandas as pd
import pytest
import torch
import transformers as tf

from fulldepth.errors import FulldepthError
from fulldepth.hf import checkpoint_of, trained_steps
from fulldepth.measurement import MeasureSettings, measure, measure_into
from fulldepth.progress import Watcher
from fulldepth.results import Results

STEPS = (5, 20, 100)
SETTINGS = MeasureSettings(max_sequences=4, sequence_length=12)
FEW = ["--max-sequences", "4", "--sequence-length", "12"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, checkpoint):
    """What the Trainer leaves: checkpoint-N, each with its tokenizer, and files of its own beside them."""
    root = tmp_path_factory.mktemp("training")
    torch.manual_seed(1)
    for step in STEPS:
        model = tf.LlamaForCausalLM.from_pretrained(checkpoint("llama"))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * step**0.5 * torch.randn_like(parameter))
        home = root / f"checkpoint-{step}"
        model.save_pretrained(home)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(checkpoint("llama") / name, home)
        (home / "trainer_state.json").write_text("{}")
    (root / "runs").mkdir()
    (root / "checkpoint-best").mkdir()
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory, run_folder, text_file):
    """The series, measured once; tests work on copies."""
    output = tmp_path_factory.mktemp("series") / "out"
    measure_into(run_folder, str(text_file), output, SETTINGS)
    return output


@pytest.fixture
def output(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"


def times(folder):
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def lines(run_folder, text_file, output, settings=SETTINGS, **options):
    said = []
    watcher = Watcher(say=said.append)
    results = measure_into(run_folder, str(text_file), output, settings, watcher=watcher, **options)
    return results, said


def test_series_holds_every_checkpoint(finished, run_folder, text_file):
    results = Results.load(finished)
    assert results.is_series
    assert list(dict.fromkeys(results.table["step"])) == list(STEPS)
    assert pd.api.types.is_integer_dtype(results.table["step"])
    assert [entry["step"] for entry in results.meta["steps"]] == list(STEPS)
    for step, entry in zip(STEPS, results.meta["steps"], strict=True):
        alone = measure(run_folder / f"checkpoint-{step}", text_file, max_sequences=4, sequence_length=12)
        rows = results.table[results.table.step == step].drop(columns="step").reset_index(drop=True)
        pd.testing.assert_frame_equal(rows, alone.table, check_dtype=False)
        assert entry["headline"] == alone.headline
        assert entry["lens_grid"] == json.loads(json.dumps(alone.meta["lens_grid"]))
        assert entry["model"]["name"].endswith(f"checkpoint-{step}")
    assert results.headline == results.meta["steps"][-1]["headline"]
    assert results.meta["steps"][0]["headline"] != results.headline


def test_same_again_has_nothing_to_do(output, run_folder, text_file):
    before = times(output)
    _, said = lines(run_folder, text_file, output)
    assert any("nothing to do" in line for line in said)
    assert times(output) == before
    _, said = lines(run_folder, text_file, output, SETTINGS.model_copy(update={"batch_size": 1}))
    assert any("nothing to do" in line for line in said), "the batch size changes no number"


def test_goes_on_after_an_interruption(output, run_folder, text_file):
    whole = Results.load(output)
    for name in ("results.json", "results.parquet", "report.html"):
        (output / name).unlink()
    shutil.rmtree(output / "steps" / "checkpoint-20")
    before = times(output)
    results, said = lines(run_folder, text_file, output)
    after = times(output)
    assert {name for name in after if after[name] == before.get(name)} == set(before)
    assert sum("measured already" in line for line in said) == 2
    pd.testing.assert_frame_equal(results.table, whole.table, check_dtype=False)
    assert results.influences is whole.influences is None  # one document
    pd.testing.assert_frame_equal(Results.load(output).table, whole.table)


def test_overwrite_measures_every_checkpoint_anew(output, run_folder, text_file):
    before = times(output)
    _, said = lines(run_folder, text_file, output, overwrite=True)
    assert not any("measured already" in line for line in said)
    after = times(output)
    assert before.keys() == after.keys()
    assert not {name for name in before if before[name] == after[name]}


@pytest.mark.parametrize("change", ["changed", "gone", "settings"])
def test_a_series_whose_past_is_another_is_not_extended(output, run_folder, checkpoint, text_file, tmp_path, change):
    run, settings = tmp_path / "run", SETTINGS
    shutil.copytree(run_folder, run)
    measure_into(run, str(text_file), tmp_path / "again", SETTINGS)
    shutil.copytree(run / "checkpoint-100", run / "checkpoint-200")
    if change == "changed":
        shutil.copy(checkpoint("llama", 1) / "model.safetensors", run / "checkpoint-20")
    elif change == "gone":
        shutil.rmtree(run / "checkpoint-20")
    else:
        settings = SETTINGS.model_copy(update={"seed": 3})
    before = times(tmp_path / "again")
    with pytest.raises(FulldepthError, match="another run"):
        lines(run, text_file, tmp_path / "again", settings)
    assert times(tmp_path / "again") == before


@pytest.mark.parametrize("damage", ["lost", "half", "no table"])
def test_a_damaged_part_is_measured_anew(output, run_folder, text_file, damage):
    whole = Results.load(output)
    (output / "results.json").unlink()
    home = output / "steps" / "checkpoint-20"
    document = (home / "results.json").read_text()
    if damage == "no table":
        (home / "results.parquet").unlink()
    else:
        lost = json.dumps(json.loads(document) | {"timings": "lost"})
        (home / "results.json").write_text(lost if damage == "lost" else document[: len(document) // 2])
    _, said = lines(run_folder, text_file, output)
    assert sum("measured already" in line for line in said) == 2
    pd.testing.assert_frame_equal(Results.load(output).table, whole.table)
    assert Results.load(home).meta["complete"] is True


@pytest.mark.parametrize("state", ["{", "[]", '{"global_step": true}', '{"global_step": -1}', '{"global_step": 1.5}'])
def test_a_trainer_state_without_a_step_names_none(tmp_path, state):
    (tmp_path / "trainer_state.json").write_text(state)
    assert trained_steps(tmp_path) is None


def final_model(run, source, step=None):
    """What `Trainer.save_model` and `save_state` leave at the root of a run."""
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, run)
    if step is not None:
        (run / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": [{"loss": math.nan}]}))


def test_a_final_model_is_the_last_point_of_the_series(run_folder, checkpoint, text_file, tmp_path, main):
    run, last = tmp_path / "run", checkpoint("llama", 1)
    shutil.copytree(run_folder, run)
    final_model(run, last, step=150)
    results, said = lines(run, text_file, tmp_path / "out")
    assert [entry["step"] for entry in results.meta["steps"]] == [5, 20, 100, 150]
    alone = measure(last, text_file, max_sequences=4, sequence_length=12)
    rows = results.table[results.table.step == 150].drop(columns="step").reset_index(drop=True)
    pd.testing.assert_frame_equal(rows, alone.table, check_dtype=False)
    assert results.headline == alone.headline
    assert checkpoint_of(run) == str(run)

    outcome = main("measure", run, "--data", text_file, "--output", tmp_path / "single", *FEW, "--no-series")
    assert outcome.code == 0, outcome.err
    pd.testing.assert_frame_equal(Results.load(tmp_path / "single").table, alone.table, check_dtype=False)

    shutil.move(run / "checkpoint-100", run / "checkpoint-200")  # training went on: another last model
    shutil.copytree(run_folder / "checkpoint-100", run / "checkpoint-100")
    final_model(run, run / "checkpoint-200", step=200)
    results, said = lines(run, text_file, tmp_path / "out")
    assert [entry["step"] for entry in results.meta["steps"]] == [5, 20, 100, 200]
    assert sum("measured already" in line for line in said) == 3


@pytest.mark.parametrize(
    ("source", "step", "says"),
    [
        ("checkpoint-100", None, None),
        ("checkpoint-20", 100, None),
        (None, None, "no trainer_state"),
        (None, 100, "100"),
    ],
    ids=["the last checkpoint", "the best checkpoint", "step unknown", "another model of the last step"],
)
def test_a_final_model_that_is_no_point_of_its_own(run_folder, checkpoint, text_file, tmp_path, source, step, says):
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    final_model(run, run / source if source else checkpoint("llama", 1), step)
    settings = SETTINGS.model_copy(update={"measures": ["displacement"]})
    results, said = lines(run, text_file, tmp_path / "out", settings)
    assert [entry["step"] for entry in results.meta["steps"]] == list(STEPS)
    about_it = [line for line in said if "at the root" in line]
    assert len(about_it) == (says is not None)
    assert all(says in line and "--no-series" in line for line in about_it)
    assert [line for line in results.meta["warnings"] if "at the root" in line] == about_it


def test_results_inside_the_model_folder_are_not_part_of_the_model(checkpoint, run_folder, text_file, tmp_path):
    """`--output MODEL/depth` is a natural place; the results there must not make the next run another run."""
    for source in (checkpoint("llama"), run_folder):
        model = tmp_path / source.name
        shutil.copytree(source, model)
        first, _ = lines(model, text_file, model / "depth")
        again, said = lines(model, text_file, model / "depth")
        assert any("nothing to do" in line for line in said)
        pd.testing.assert_frame_equal(first.table, again.table, check_dtype=False)

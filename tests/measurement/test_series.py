"""A folder of checkpoints: one series, which goes on where it stopped and never overwrites another run."""

from __future__ import annotations

import json
import math
import shutil

import pytest
from pandas.testing import assert_frame_equal

from fulldepth.hf import checkpoint_of, trained_steps
from fulldepth.measurement import MeasureSettings, measure, measure_into
from fulldepth.results import Results
from json_files import write_json
from refusals import refused

STEPS = [5, 20, 100]
SETTINGS = MeasureSettings(max_sequences=4, sequence_length=12)


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory, checkpoint):
    """What the Trainer leaves: checkpoint-N, each with its tokenizer, and files of its own beside them."""
    root = tmp_path_factory.mktemp("training") / "run"
    for step in STEPS:
        shutil.copytree(checkpoint("llama", step), root / f"checkpoint-{step}")
        (root / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (root / "checkpoint-best").mkdir()
    return root


@pytest.fixture(scope="module")
def finished(tmp_path_factory, trained_run, text_file):
    """The series, measured once."""
    output = tmp_path_factory.mktemp("series") / "out"
    measure_into(trained_run, str(text_file), output, SETTINGS)
    return output


@pytest.fixture
def run(trained_run, tmp_path):
    """A copy of the run, to change."""
    shutil.copytree(trained_run, tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture
def output(finished, tmp_path):
    """A copy of the finished results."""
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture
def measured(into):
    """`measured(model, output, settings)`: the results, and the lines that were said."""
    return lambda model, output, settings=SETTINGS, **options: into(model, output, settings, **options)


def same_as_alone(results, step, model, text_file):
    """Asserts that the rows of a step are those of its model alone, whose results are returned."""
    alone = measure(model, text_file, max_sequences=4, sequence_length=12)
    rows = results.table.query("step == @step").drop(columns="step").reset_index(drop=True)
    assert_frame_equal(rows, alone.table, check_dtype=False)
    return alone


def times(folder):
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def of(said, words):
    return [line for line in said if words in line]


def test_series_holds_every_checkpoint(finished, trained_run, text_file):
    results = Results.load(finished)
    assert results.is_series
    assert list(dict.fromkeys(results.table["step"])) == steps_of(results) == STEPS
    for step, entry in zip(STEPS, results.meta["steps"], strict=True):
        alone = same_as_alone(results, step, trained_run / f"checkpoint-{step}", text_file)
        assert entry["headline"] == alone.headline
        assert entry["lens_grid"] == json.loads(json.dumps(alone.meta["lens_grid"]))
        assert entry["model"]["name"].endswith(f"checkpoint-{step}")
    assert results.headline == results.meta["steps"][-1]["headline"] != results.meta["steps"][0]["headline"]


def test_same_again_has_nothing_to_do_and_overwrite_does_everything(measured, output, trained_run):
    before = times(output)
    _, said = measured(trained_run, output, SETTINGS.model_copy(update={"batch_size": 1}))  # which changes no number
    assert of(said, "nothing to do")
    assert times(output) == before
    _, said = measured(trained_run, output, overwrite=True)
    assert not of(said, "measured already")
    after = times(output)
    assert before.keys() == after.keys()
    assert not {name for name in before if before[name] == after[name]}


def test_goes_on_after_an_interruption(measured, output, trained_run):
    """Half a document is left of one step, no table of another; a step that is absent is measured below."""
    whole, half, bare = Results.load(output), *(output / "steps" / f"checkpoint-{step}" for step in (5, 20))
    for name in ("results.json", "results.parquet", "report.html"):
        (output / name).unlink()
    (bare / "results.parquet").unlink()
    (half / "results.json").write_text((half / "results.json").read_text()[:-100])
    before = {name: time for name, time in times(output).items() if "checkpoint-100" in name}
    results, said = measured(trained_run, output)
    assert before.items() <= times(output).items()
    assert len(of(said, "measured already")) == 1
    assert_frame_equal(results.table, whole.table, check_dtype=False)
    assert_frame_equal(Results.load(output).table, whole.table)
    assert all(Results.load(home).meta["complete"] is True for home in (half, bare))


def test_a_series_whose_past_is_another_is_not_extended(measured, run, checkpoint, tmp_path):
    settings, middle = SETTINGS.model_copy(update={"measures": ["displacement"]}), run / "checkpoint-20"
    measured(run, tmp_path / "again", settings)
    shutil.copytree(run / "checkpoint-100", run / "checkpoint-200")
    before = times(tmp_path / "again")
    for change in (
        lambda: settings.model_copy(update={"seed": 3}),
        lambda: shutil.copy(checkpoint("llama", 1) / "model.safetensors", middle) and settings,
        lambda: shutil.rmtree(middle) or settings,
    ):
        with refused("another run"):
            measured(run, tmp_path / "again", change())
        assert times(tmp_path / "again") == before


def test_checkpoints_that_are_left_out_are_named(measured, run, tmp_path):
    settings = SETTINGS.model_copy(update={"measures": ["displacement"]})
    for step in (200, 300):
        (run / f"checkpoint-{step}").mkdir()
    results, said = measured(run, tmp_path / "out", settings)
    (line,) = of(said, "left out: still being written")
    assert line.startswith(f"'checkpoint-200', 'checkpoint-300' in {run} are left out")
    assert line in results.meta["warnings"]
    assert steps_of(results) == STEPS


def test_a_trainer_state_without_a_step_names_none(tmp_path):
    for state in ("{", "[]", *(f'{{"global_step": {step}}}' for step in ("-1", "true", "1.5"))):
        (tmp_path / "trainer_state.json").write_text(state)
        assert trained_steps(tmp_path) is None, state


def steps_of(results):
    return [entry["step"] for entry in results.meta["steps"]]


def final_model(run, source, step=None):
    """What `Trainer.save_model` and `save_state` leave at the root of a run."""
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, run)
    if step is not None:
        write_json(run / "trainer_state.json", {"global_step": step, "log_history": [{"loss": math.nan}]})


def test_a_final_model_is_the_last_point_of_the_series(measured, run, checkpoint, text_file, tmp_path):
    last = checkpoint("llama", 1)
    final_model(run, last, step=150)
    results, _ = measured(run, tmp_path / "out")
    assert steps_of(results) == [*STEPS, 150]
    alone = same_as_alone(results, 150, last, text_file)
    assert results.headline == alone.headline
    assert checkpoint_of(run) == str(run)
    single, _ = measured(run, tmp_path / "single", series=False)
    assert_frame_equal(single.table, alone.table, check_dtype=False)

    shutil.copytree(run / "checkpoint-100", run / "checkpoint-200")  # training went on: another last model
    final_model(run, checkpoint("llama"), step=250)
    results, said = measured(run, tmp_path / "out")
    assert steps_of(results) == [*STEPS, 200, 250]
    assert len(of(said, "measured already")) == 3


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
def test_a_final_model_that_is_no_point_of_its_own(measured, run, checkpoint, tmp_path, source, step, says):
    final_model(run, run / source if source else checkpoint("llama", 1), step)
    results, said = measured(run, tmp_path / "out", SETTINGS.model_copy(update={"measures": ["displacement"]}))
    assert steps_of(results) == STEPS
    about_it = of(said, "at the root")
    assert len(about_it) == (says is not None)
    assert all(says in line and "--no-series" in line for line in about_it)
    assert of(results.meta["warnings"], "at the root") == about_it


def test_results_inside_the_model_folder_are_not_part_of_the_model(measured, checkpoint, run, tmp_path):
    """`--output MODEL/depth` is a natural place; the results there must not make the next run another run."""
    shutil.copytree(checkpoint("llama"), tmp_path / "model")
    for model in (tmp_path / "model", run):
        first, _ = measured(model, model / "depth")
        again, said = measured(model, model / "depth")
        assert of(said, "nothing to do")
        assert_frame_equal(first.table, again.table, check_dtype=False)

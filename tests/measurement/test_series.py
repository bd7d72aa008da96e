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


@pytest.mark.parametrize("broken", ["half json", "half parquet", "no parquet", "empty folder"])
def test_what_was_half_written_is_measured_anew(output, run_folder, text_file, broken):
    whole = Results.load(output)
    (output / "results.json").unlink()
    home = output / "steps" / "checkpoint-5"
    if broken == "empty folder":
        shutil.rmtree(home)
        home.mkdir()
    elif broken == "no parquet":
        (home / "results.parquet").unlink()
    else:
        path = home / ("results.json" if "json" in broken else "results.parquet")
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    _, said = lines(run_folder, text_file, output)
    assert sum("measured already" in line for line in said) == 2
    pd.testing.assert_frame_equal(Results.load(output).table, whole.table)
    assert Results.load(home).meta["complete"] is True


def test_an_interruption_in_the_middle_keeps_what_is_done(tmp_path, run_folder, text_file):
    def stop_at_the_third(line):
        if "3 of 3" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_into(run_folder, str(text_file), tmp_path, SETTINGS, watcher=Watcher(say=stop_at_the_third))
    assert not (tmp_path / "results.json").exists()
    assert sorted(p.name for p in (tmp_path / "steps").iterdir()) == ["checkpoint-20", "checkpoint-5"]
    _, said = lines(run_folder, text_file, tmp_path)
    assert sum("measured already" in line for line in said) == 2


def test_a_new_checkpoint_joins_the_series(output, run_folder, text_file, tmp_path):
    grown = tmp_path / "grown"
    shutil.copytree(run_folder, grown)  # keeps the times of the files, as training that goes on does
    first = tmp_path / "first"
    earlier = measure_into(grown, str(text_file), first, SETTINGS)
    shutil.copytree(grown / "checkpoint-100", grown / "checkpoint-200")
    before = times(first / "steps")
    results, said = lines(grown, text_file, first)
    assert sum("measured already" in line for line in said) == 3
    assert {n: t for n, t in times(first / "steps").items() if n in before} == before
    pd.testing.assert_frame_equal(results.table[results.table.step <= 100], earlier.table, check_dtype=False)
    assert [entry["step"] for entry in Results.load(first).meta["steps"]] == [5, 20, 100, 200]
    assert any("nothing to do" in line for line in lines(grown, text_file, first)[1])


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


def test_an_interrupted_series_of_other_settings_is_not_overwritten(output, run_folder, text_file):
    (output / "results.json").unlink()
    before = times(output)
    with pytest.raises(FulldepthError, match="checkpoint-5 holds results of another run"):
        lines(run_folder, text_file, output, SETTINGS.model_copy(update={"seed": 3}))
    assert times(output) == before


@pytest.mark.parametrize("entry", ["timings", "data", "headline", "left_out", "warnings", "model"])
def test_a_damaged_document_is_measured_anew(output, run_folder, text_file, entry):
    whole = Results.load(output)
    (output / "results.json").unlink()
    path = output / "steps" / "checkpoint-20" / "results.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {entry: "lost"}))
    _, said = lines(run_folder, text_file, output)
    assert sum("measured already" in line for line in said) == 2
    pd.testing.assert_frame_equal(Results.load(output).table, whole.table)


@pytest.mark.parametrize("state", ["{", "[]", "{}", *(f'{{"global_step": {x}}}' for x in ("true", "-1", '"7"', "1.5"))])
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


@pytest.mark.parametrize(
    "change", [["--seed", "3"], ["--max-sequences", "3"], ["--tokens", "no-first"], ["--measures", "cka"]]
)
def test_other_settings_are_refused_and_touch_nothing(refused, output, run_folder, text_file, change):
    before = times(output)
    refused(
        "measure", run_folder, "--data", text_file, "--output", output, *FEW, *change, says=["another", "--overwrite"]
    )
    assert times(output) == before


def test_changed_weights_and_data_are_another_run(checkpoint, text_file, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), model)
    data = tmp_path / "text.txt"
    shutil.copy(text_file, data)
    measure_into(model, str(data), tmp_path / "out", SETTINGS)
    data.write_text(data.read_text() + " And more.")
    with pytest.raises(FulldepthError, match="another run"):
        measure_into(model, str(data), tmp_path / "out", SETTINGS)
    shutil.copy(text_file, data)
    tf.LlamaForCausalLM.from_pretrained(checkpoint("llama", 1)).save_pretrained(model)
    with pytest.raises(FulldepthError, match="another run"):
        measure_into(model, str(data), tmp_path / "out", SETTINGS)


def test_overwrite_replaces(main, output, run_folder, text_file):
    command = ["measure", run_folder, "--data", text_file, "--output", output, *FEW, "--measures", "displacement"]
    outcome = main(*command, "--overwrite")
    assert outcome.code == 0, outcome.err
    results = Results.load(output)
    assert set(results.table.measure) == {"displacement"}
    assert set(results.table.step) == set(STEPS)
    assert {json.loads(p.read_text())["settings"]["measures"][0] for p in output.rglob("results.json")} == {
        "displacement"
    }


def test_a_failed_overwrite_leaves_the_earlier_results(refused, output, run_folder, tmp_path):
    before = times(output)
    empty = tmp_path / "empty.txt"
    empty.touch()
    refused("measure", run_folder, "--data", empty, "--output", output, *FEW, "--overwrite", says=["empty.txt"])
    assert times(output) == before
    assert Results.load(output).is_series


def test_command_line_writes_the_page_and_says_where(main, run_folder, text_file, tmp_path):
    outcome = main("measure", run_folder, "--data", text_file, "--output", tmp_path / "out", *FEW)
    assert outcome.code == 0, outcome.err
    assert f"Page: {tmp_path / 'out' / 'report.html'}" in outcome.out
    assert (tmp_path / "out" / "report.html").stat().st_size > 100_000
    assert "zeta_L" in outcome.out


def test_checkpoints_are_taken_by_number_not_by_name(run_folder):
    from fulldepth.measurement.folder import find_checkpoints

    assert [step for step, _ in find_checkpoints(run_folder)] == [5, 20, 100]
    assert find_checkpoints(run_folder / "checkpoint-5") == []
    assert find_checkpoints(run_folder / "absent") == []


def test_tokenizer_beside_the_checkpoints_is_found(run_folder, text_file, tmp_path):
    """Some trainers save the tokenizer once, in the run's folder."""
    shutil.copytree(run_folder / "checkpoint-5", tmp_path / "run" / "checkpoint-5")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(tmp_path / "run" / "checkpoint-5" / name, tmp_path / "run" / name)
    results, _ = lines(tmp_path / "run", text_file, tmp_path / "out")
    assert set(results.table.step) == {5}


def test_results_inside_the_model_folder_are_not_part_of_the_model(checkpoint, run_folder, text_file, tmp_path):
    """`--output MODEL/depth` is a natural place; the results there must not make the next run another run."""
    for source in (checkpoint("llama"), run_folder):
        model = tmp_path / source.name
        shutil.copytree(source, model)
        first, _ = lines(model, text_file, model / "depth")
        again, said = lines(model, text_file, model / "depth")
        assert any("nothing to do" in line for line in said)
        pd.testing.assert_frame_equal(first.table, again.table, check_dtype=False)


def test_the_same_folder_written_otherwise_is_the_same_run(main, checkpoint, text_file, tmp_path, monkeypatch):
    shutil.copytree(checkpoint("llama"), tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for name in ("model", "model/", "./model", tmp_path / "model"):  # a slash is what a shell's completion adds
        outcome = main("measure", name, "--data", text_file, "--output", tmp_path / "out", *FEW)
        assert outcome.code == 0, outcome.err
    assert "nothing to do" in outcome.err


def test_another_reference_under_the_same_name_is_another_run(checkpoint, text_file, tmp_path):
    reference = tmp_path / "reference"
    shutil.copytree(checkpoint("llama", 1), reference)
    settings = SETTINGS.model_copy(update={"measures": ["mmd"], "reference": str(reference)})
    measure_into(checkpoint("llama"), str(text_file), tmp_path / "out", settings)
    tf.LlamaForCausalLM.from_pretrained(checkpoint("llama")).save_pretrained(reference)
    with pytest.raises(FulldepthError, match="another run"):
        measure_into(checkpoint("llama"), str(text_file), tmp_path / "out", settings)

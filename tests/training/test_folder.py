"""A run folder: nothing of anybody else is written over or deleted, and damaged resume files end in one message."""

from __future__ import annotations

import random
import re
import shutil
from pathlib import Path
from pickle import UnpicklingError

import pytest
import torch
from pandas.testing import assert_frame_equal

from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.hf import is_sealed, notes_of, seal
from fulldepth.results import Results
from fulldepth.training.folder import dump, export_run, open_run
from hostile import damaged_bytes, damaged_json
from json_files import change_json
from refusals import refused
from training.conftest import settings, train_by, without_times

SHORT = {"steps": 4, "eval_every": 2, "save_every": 2}


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_of_something_else_stays_as_it_is(recipe, tmp_path):
    names = ("results.json", "plan.json", "config.json", "tokenizer/tokenizer.json", "checkpoint-2/x", "settings.yaml")
    for number, name in enumerate(names):
        run = tmp_path / str(number)
        (run / name).parent.mkdir(parents=True)
        (run / name).write_text("steps: 5  # mine\n" if name == "settings.yaml" else '{"kind": "measurement"}')
        before = contents(run)
        for resume in (False, True):
            with refused(re.escape(name.partition("/")[0] if number < 5 else str(run))):
                train_by(recipe(**SHORT), run, resume=resume)
            assert contents(run) == before


def test_results_of_another_command_in_a_run_folder_are_not_written_over(recipe, tmp_path):
    run, path = tmp_path / "run", recipe(**SHORT)
    train_by(path, run)
    change_json(run / "results.json", kind="measurement")
    before = contents(run)
    with refused("results of the kind 'measurement', expected 'training'"):
        train_by(path, run, resume=True)
    assert contents(run) == before


def test_foreign_checkpoints_are_renamed_and_half_written_ones_of_ours_go(recipe, tmp_path):
    run, path = tmp_path / "run", recipe(**SHORT)
    train_by(path, run)
    whole = Results.load(run).table
    for step in (1, 3, 9):
        (run / f"checkpoint-{step}").mkdir()
        (run / f"checkpoint-{step}" / "weights").write_text(f"foreign {step}")
    (run / "checkpoint-7").mkdir()
    (run / "checkpoint-7" / "unfinished").touch()
    (run / "checkpoint-7" / "model.safetensors").write_text("half")
    (run / "checkpoint-4" / "model.safetensors").write_bytes(b"changed by somebody")
    (run / "unsealed-checkpoint-1").mkdir()
    said = []
    train_by(path, run, resume=True, watcher=Watcher(say=said.append))
    assert sorted(p.name for p in run.glob("*checkpoint*")) == [
        *("checkpoint-2", "checkpoint-4", "unsealed-checkpoint-1", "unsealed-checkpoint-1-2"),
        *("unsealed-checkpoint-3", "unsealed-checkpoint-4", "unsealed-checkpoint-9"),
    ]
    assert (run / "unsealed-checkpoint-9" / "weights").read_text() == "foreign 9"
    assert (run / "unsealed-checkpoint-4" / "model.safetensors").read_bytes() == b"changed by somebody"
    assert any("unsealed-checkpoint-9" in line for line in said)
    assert is_sealed(run / "checkpoint-4")
    assert_frame_equal(without_times(whole), without_times(Results.load(run).table))


def test_damaged_settings_of_a_run_are_refused_in_words(recipe, tmp_path):
    given, rng, path = settings(recipe(**SHORT)), random.Random(3), tmp_path / "settings.yaml"
    path.write_text(dump(given))
    open_run(tmp_path, given, resume=True)
    document, messages = given.model_dump(mode="json"), []
    for number in range(90):
        if number % 3:
            path.write_text(damaged_json(document, rng), encoding="utf-8", errors="replace")
        else:
            path.write_bytes(damaged_bytes(dump(given).encode(), rng))
        try:
            open_run(tmp_path, given, resume=True)
        except FulldepthError as error:
            messages.append(str(error))
    assert len(messages) > 45
    for message in messages:
        assert len(message) < 1000
        assert str(tmp_path) in message


@pytest.fixture
def stopped(recipe, tmp_path):
    """A run with one checkpoint, of 2 of 4 steps, and its recipe."""
    path = recipe(**SHORT)
    train_by(path, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    return tmp_path / "run", path


def test_a_refused_setting_leaves_no_folder_that_blocks_the_corrected_command(recipe, tmp_path):
    run = tmp_path / "run"
    for change in ({"tokenizer": str(tmp_path)}, {"data": {"validation": str(tmp_path / "absent.jsonl")}}):
        with refused() as caught:
            train_by(recipe(**SHORT | change), run)
        assert "other settings" not in str(caught.value)
        assert not run.exists(), "an export into this folder would be refused"
    run.mkdir()
    (run / "user.txt").write_text("stays")
    with refused("absent.jsonl"):
        train_by(recipe(**SHORT | {"data": {"validation": str(tmp_path / "absent.jsonl")}}), run)
    assert [path.name for path in run.iterdir()] == ["user.txt"]
    (run / "settings.yaml").write_text(dump(settings(recipe(**SHORT | {"steps": 3}))))  # killed before a step
    (run / "tokenizer").mkdir()  # of a run of another size, which was refused after it had trained one
    assert train_by(recipe(**SHORT), run).meta["complete"]
    assert not (run / "tokenizer").exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "model.safetensors", "complete.json"])
def test_a_changed_file_is_refused(stopped, name):
    """With the same size, so that the seal still counts."""
    run, path = stopped
    file = run / "checkpoint-2" / name
    content = file.read_bytes()
    changed = content.replace(b'"elapsed": ', b'"elapsed":-') if name == "complete.json" else content[:-9] + b"x" * 9
    file.write_bytes(changed)
    assert is_sealed(run / "checkpoint-2")
    with refused(r"Cannot read .*Remove .*checkpoint-2 to go on"):
        train_by(path, run, resume=True)
    if name != "complete.json":  # an export does not need the notes
        with refused(f"{name}: it has changed since .*Restore the file, or export another checkpoint"):
            export_run(run, run / "export")
        assert not (run / "export").exists()


def test_a_seal_whose_hashes_are_of_other_files_does_not_count(stopped):
    """No file outside of the checkpoint is read, which may be a device without an end."""
    run, _ = stopped
    for hashes in ({"/dev/zero": "0" * 64}, {"model.safetensors": "0" * 64}):
        change_json(run / "checkpoint-2" / "complete.json", hashes=hashes)
        assert not is_sealed(run / "checkpoint-2")
        with refused("Cannot read .*complete.json: .*hashes and files name different files"):
            notes_of(run / "checkpoint-2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "optimizer.pt").unlink(), "lacks optimizer.pt"),
        (lambda folder: (folder / "scheduler.pt").unlink(), "lacks scheduler.pt"),
        (
            lambda folder: (folder / "trainer_state.json").write_text("{"),
            "trainer_state.json does not state the step 2",
        ),
        (lambda folder: change_json(folder / "trainer_state.json", global_step=1), "does not state the step 2"),
    ],
)
def test_a_run_goes_on_only_from_a_whole_state(stopped, change, message):
    """Also where the seal says nothing of the file, as in a seal that was edited."""
    run, path = stopped
    notes = notes_of(run / "checkpoint-2")
    change(run / "checkpoint-2")
    seal(run / "checkpoint-2", notes)
    with refused(f"{message}. Remove .*checkpoint-2 to go on"):
        train_by(path, run, resume=True)


def test_no_file_of_a_checkpoint_is_unpickled(stopped, tmp_path):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    run, path = stopped
    notes = notes_of(run / "checkpoint-2")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        before = (run / "checkpoint-2" / name).read_bytes()
        torch.save({"state": Evil()}, run / "checkpoint-2" / name)
        seal(run / "checkpoint-2", notes)
        if name == "training_args.bin":  # never read
            train_by(path, run, resume=True)
            shutil.rmtree(run / "checkpoint-4")
        else:
            with pytest.raises(UnpicklingError):
                train_by(path, run, resume=True)
        (run / "checkpoint-2" / name).write_bytes(before)
        assert not (tmp_path / "ran").exists()

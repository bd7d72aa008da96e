"""Killed at any moment and resumed, a run ends with the very weights of the run that was left alone."""

from __future__ import annotations

import errno
import shlex
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from pandas.testing import assert_frame_equal
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

import tiny_models
from fulldepth.architectures import SKIPPED
from fulldepth.core.progress import Watcher
from fulldepth.hf import find_checkpoints, is_sealed
from fulldepth.results import Results
from fulldepth.training import train
from fulldepth.training.callback import RunCallback
from fulldepth.training.folder import resume_notes
from fulldepth.training.text import rows_hash
from fulldepth.training.trainer import RunTrainer
from json_files import read_json, write_json
from refusals import refused
from tiny_models import same_weights
from training.conftest import SHORT, interrupted, settings, train_by, without_times

EVERYTHING = {
    "jump": 0.5,
    "aligned": {"schedule": "alternate"},
    "coherence": {"weight": 0.1, "layers": [1]},
    "energy_warmup": 5,
}
"""Terms with a schedule: odd and even steps, and a warm-up that ends between two checkpoints."""


def weights(run, step=8):
    return load_file(run / f"checkpoint-{step}" / "model.safetensors")


def same(one, two, step=8):
    return same_weights(weights(one, step), weights(two, step))


@pytest.fixture
def whole(recipe, tmp_path):
    """A recipe with dropout, micro-batches and terms with a schedule, and the folder of its run."""
    path = recipe(model={"attention_dropout": 0.1}, objective=EVERYTHING, global_batch_size=4, micro_batch_size=2)
    train_by(path, tmp_path / "whole")
    return path, tmp_path / "whole"


class Killed(BaseException):
    """The end of a process."""


def killed_run(path, folder, after, monkeypatch):
    """A run that ends in the step after `after` steps."""
    step = RunTrainer.training_step

    def dying(self, *arguments):
        if self.state.global_step == after:
            raise Killed
        return step(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(RunTrainer, "training_step", dying)
        with pytest.raises(Killed):
            train_by(path, folder)


def test_kill_and_resume_is_bit_equal(whole, tmp_path, monkeypatch):
    """Killed in the fifth step, two after a checkpoint and an evaluation."""
    path, folder = whole
    killed_run(path, tmp_path / "cut", 4, monkeypatch)
    resumed = train_by(path, tmp_path / "cut", resume=True)
    assert same(folder, tmp_path / "cut")
    assert_frame_equal(without_times(resumed.table), without_times(Results.load(folder).table))


def test_throughput_counts_the_time_since_the_last_evaluation_also_after_a_resumption(recipe, tmp_path, monkeypatch):
    """Stopped between two evaluations, of which the later one counts steps and seconds since the first."""
    path = recipe(save_every=2, eval_every=4)
    killed_run(path, tmp_path / "cut", 6, monkeypatch)
    table = train_by(path, tmp_path / "cut", resume=True).table
    elapsed, speed = (table[table.measure == name].set_index("step")["value"] for name in ("elapsed", "throughput"))
    units_of_a_step = [speed[at] * (elapsed[at] - elapsed[before]) / 4 for before, at in ((0, 4), (4, 8))]
    assert units_of_a_step[0] == pytest.approx(units_of_a_step[1], rel=1e-9)


@pytest.mark.parametrize("damage", ["cut short", "no seal", "file gone"])
def test_a_half_written_checkpoint_is_skipped(damage, whole, tmp_path):
    path, folder = whole
    run = interrupted(folder, 8, tmp_path / "run")
    broken = run / "checkpoint-6"
    if damage == "cut short":
        (broken / "optimizer.pt").write_bytes((broken / "optimizer.pt").read_bytes()[:-100])
    else:
        (broken / ("complete.json" if damage == "no seal" else "model.safetensors")).unlink()
    assert [step for step, _ in find_checkpoints(run)] == [3]
    lines = []
    train_by(path, run, resume=True, watcher=Watcher(say=lines.append))
    assert any("checkpoint-3" in line for line in lines)
    assert same(folder, run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_and_an_interruption_save_and_say_where(recipe, tmp_path, monkeypatch, main, number):
    evaluate = RunCallback._evaluate

    def signalled(self, step):
        evaluate(self, step)
        if step == 3:
            handler = signal.getsignal(number)
            handler(number, None)

    monkeypatch.setattr(RunCallback, "_evaluate", signalled)
    before = signal.getsignal(number)
    code, _, error = main("train", recipe(save_every=8), "-o", tmp_path / "run")
    assert signal.getsignal(number) == before
    assert code == 128 + number
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    assert is_sealed(checkpoint)
    assert checkpoint.name == "checkpoint-3"
    assert str(checkpoint) in error.replace("\n", "")
    monkeypatch.undo()
    assert error.strip().endswith("--resume")
    code, _, error = main(*shlex.split(error.strip().splitlines()[-1].partition("Run again: ")[2])[1:])
    assert code == 0
    assert "going on after checkpoint-3" in error


def test_a_resumption_without_a_checkpoint_says_that_it_starts_at_the_beginning(recipe, tmp_path):
    lines = []
    train_by(recipe(**SHORT), tmp_path / "run", resume=True, watcher=Watcher(say=lines.append))
    assert any("starting at step 0" in line for line in lines)


def test_resume_with_nothing_there_starts_and_a_finished_run_stays(recipe, tmp_path):
    path = recipe(**SHORT)
    first = train_by(path, tmp_path / "run", resume=True)
    stamp = (tmp_path / "run" / "checkpoint-2" / "model.safetensors").stat().st_mtime_ns
    again = train_by(path, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "checkpoint-2" / "model.safetensors").stat().st_mtime_ns == stamp
    assert_frame_equal(first.table, again.table)


def test_a_folder_in_use_is_refused(recipe, tmp_path):
    path = recipe(**SHORT)
    run = tmp_path / "run"
    train_by(path, run)
    before = [(p, p.stat().st_mtime_ns) for p in run.rglob("*")]
    with refused("--resume"):
        train_by(path, run)
    with refused("learning_rate"):
        train_by(recipe(**SHORT, learning_rate=1e-3), run, resume=True)
    assert [(p, p.stat().st_mtime_ns) for p in run.rglob("*")] == before


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 640 vs 598"),
        None,
    ],
)
def test_a_full_disk_names_the_last_whole_checkpoint(recipe, tmp_path, monkeypatch, error):
    """The system's errors, and those of torch for a real full disk: at the end of a file, and at once (`/dev/full`)."""
    if error is None and not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    save, path = torch.save, recipe()

    def full(what, file, *more, **options):
        if "checkpoint-6" in str(file) and "optimizer" in str(file):
            Path(file).write_bytes(b"half of it")
            if error is not None:
                raise error
            file = "/dev/full"
        save(what, file, *more, **options)

    monkeypatch.setattr(torch, "save", full)
    with refused(r"disk is full.*checkpoint-3; the same command"):
        train_by(path, tmp_path / "run")
    assert not is_sealed(tmp_path / "run" / "checkpoint-6")
    monkeypatch.undo()
    train_by(path, tmp_path / "run", resume=True)
    train_by(path, tmp_path / "whole")
    assert same(tmp_path / "run", tmp_path / "whole")


def test_weights_that_are_saved_under_other_names_are_resumed_too(recipe, tmp_path):
    chosen = settings(recipe(model={"type": "mixtral"}, steps=4, eval_every=4, save_every=2))
    train(chosen, tmp_path / "whole")
    again = interrupted(tmp_path / "whole", 4, tmp_path / "again")
    train(chosen, again, resume=True)
    assert same(again, tmp_path / "whole", 4)


def test_a_run_of_a_model_without_skipped_parts_is_resumed_to_the_same_bytes(recipe, sources, tmp_path):
    """Its configuration marks layers without attention or MLP, and stock configurations refuse such marks."""
    kind = SKIPPED["llama"]
    torch.manual_seed(0)
    shape = {**tiny_models.DECODER, "vocab_size": 400, "skipped_attention": [2], "skipped_mlp": [1]}
    kind(kind.config_class(**shape)).save_pretrained(tmp_path / "fast")
    path = recipe(model={"checkpoint": str(tmp_path / "fast")}, steps=4, eval_every=4, save_every=2)
    train_by(path, tmp_path / "whole")
    again = interrupted(tmp_path / "whole", 4, tmp_path / "again")
    train_by(path, again, resume=True)
    assert same(again, tmp_path / "whole", 4)


@pytest.mark.parametrize("changed", ["text", "validation", "tokenizer", "model", "batch"])
def test_a_run_does_not_go_on_with_other_data_or_another_model(changed, recipe, sources, tmp_path):
    paths = {"text": tmp_path / "text.jsonl", "validation": tmp_path / "validation.jsonl"}
    for path in paths.values():
        shutil.copy(sources[0], path)
    paths["tokenizer"] = shutil.copytree(sources[1], tmp_path / "tokenizer")
    data = {"name": str(paths["text"]), "validation": str(paths["validation"])}
    path = recipe(
        **{**SHORT, "save_every": 1, "micro_batch_size": 2 if changed == "batch" else None},
        **{"data": data, "tokenizer": str(paths["tokenizer"]), "objective": {"orthogonality": 0.1}},
    )
    chosen, run = settings(path), tmp_path / "run"
    train(chosen, run)
    shutil.rmtree(run / "checkpoint-2")
    if changed == "tokenizer":  # the same name, the same number of tokens, other ids
        file = paths["tokenizer"] / "tokenizer.json"
        content = read_json(file)
        ids = content["model"]["vocab"]
        one, two = (token for token in ids if token in ("e", "t"))
        ids[one], ids[two] = ids[two], ids[one]
        write_json(file, content)
    elif changed == "model":
        seal = run / "checkpoint-1" / "complete.json"
        document = read_json(seal)
        document["notes"]["origin"]["model configuration"] = "sha256:other"
        write_json(seal, document)
    elif changed == "batch":
        chosen = chosen.model_copy(update={"micro_batch_size": 4})
    else:
        rows = paths[changed].read_text().splitlines()
        paths[changed].write_text("\n".join(rows[::-1]) + "\n")
    before = resume_notes(run / "checkpoint-1").origin
    name = {"model": "model configuration", "batch": "batch of orthogonality"}.get(changed, "training data")
    with refused(f"The {name} differs: {before[name][:19]}"):
        train(chosen, run, resume=True)
    assert not (run / "checkpoint-2").exists()


def small_llama(seed):
    """Of the recipe's vocabulary."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{**tiny_models.DECODER, "vocab_size": 400}))


@pytest.mark.parametrize("replaced", [None, "text", "validation", "start", "teacher"])
def test_a_run_goes_on_where_its_data_and_models_have_moved(replaced, recipe, sources, tmp_path):
    """Named by other paths, with the same contents; other contents under the new names are refused."""
    before, after = tmp_path / "before", tmp_path / "after"
    for name in ("text", "validation"):
        before.mkdir(exist_ok=True)
        shutil.copy(sources[0], before / f"{name}.jsonl")
    for seed, name in enumerate(("start", "teacher")):
        small_llama(seed).save_pretrained(before / name)

    def chosen(folder):
        data = {"name": str(folder / "text.jsonl"), "validation": str(folder / "validation.jsonl")}
        objective = {"distillation": {"teacher": str(folder / "teacher"), "weight": 0.5}}
        return settings(
            recipe(
                **{**SHORT, "steps": 4, "data": data, "objective": objective},
                model={"checkpoint": str(folder / "start")},
            )
        )

    train(chosen(before), tmp_path / "whole")
    again = interrupted(tmp_path / "whole", 4, tmp_path / "again")
    before.rename(after)
    if replaced in ("text", "validation"):
        rows = (after / f"{replaced}.jsonl").read_text().splitlines()
        (after / f"{replaced}.jsonl").write_text("\n".join(rows[::-1]) + "\n")
    elif replaced is not None:
        small_llama(seed=2).save_pretrained(after / replaced)
    if replaced is None:
        train(chosen(after), again, resume=True)
        assert same(again, tmp_path / "whole", 4)
        with refused(r"data.name was .*text.jsonl', is .*absent.jsonl'"):
            train(settings(recipe(**SHORT, data={"name": str(after / "absent.jsonl")})), again, resume=True)
    else:
        name = {"start": "model to start from", "teacher": "teacher"}.get(replaced, "training data")
        with refused(f"The {name} differs"):
            train(chosen(after), again, resume=True)


def test_the_hash_of_conversations_is_of_what_is_read():
    rows = [{"input_ids": [1, 2, n], "labels": [-100, 2, n], "text": "a"} for n in range(5)]
    first, again = Dataset.from_list(rows), Dataset.from_list([{**row, "text": "b"} for row in rows])
    assert rows_hash(first) == rows_hash(again)
    other = Dataset.from_list([{**rows[0], "labels": [1, 2, 0]}, *rows[1:]])
    assert len({rows_hash(first), rows_hash(other), rows_hash(first.select([1, 0, 2, 3, 4]))}) == 3
    assert rows_hash(first, first.select([0])) != rows_hash(first.select([0]), first)


@pytest.mark.parametrize(("keep", "count"), [(None, 4), (1, 2), (9, 4)])
def test_checkpoints_that_do_not_fit_are_refused_before_the_first_step(keep, count, recipe, tmp_path, monkeypatch):
    """Against the files of a whole run; one checkpoint is written while the one that it replaces is still there."""
    chosen, usage = settings(recipe(steps=8, eval_every=8, save_every=2, keep_checkpoints=keep)), SimpleNamespace()
    train(chosen, tmp_path / "whole")
    files = (tmp_path / "whole" / "checkpoint-8" / name for name in ("model.safetensors", "optimizer.pt"))
    one = sum(file.stat().st_size for file in files)
    monkeypatch.setattr("fulldepth.hf.checkpoint_folder.shutil.disk_usage", lambda _: usage)
    usage.free = 0.8 * count * one
    with monkeypatch.context() as idle, refused(f"optimiser: {count} x .*keep_checkpoints=1"):
        idle.setattr(RunTrainer, "train", lambda *_, **__: pytest.fail("a step was taken"))
        train(chosen, tmp_path / "first")
    usage.free = count * one
    train(chosen, tmp_path / "first")
    if keep is None:
        again = interrupted(tmp_path / "whole", 8, tmp_path / "again")
        usage.free = 0.8 * one
        with refused("optimiser: 1 x"):
            train(chosen, again, resume=True)
        usage.free = one
        train(chosen, again, resume=True)


def test_a_run_with_a_setting_without_effect_resumes(recipe, tmp_path):
    """Earlier versions took such settings, and wrote them into the run folder."""
    path = recipe(**SHORT)
    whole = tmp_path / "whole"
    train_by(path, whole)
    cut = interrupted(whole, 2, tmp_path / "cut")
    written = cut / "settings.yaml"
    written.write_text(
        written.read_text().replace("log_every: 10", "log_every: 3").replace("alpha: null", "alpha: 4.0")
    )
    with refused("log_every has no effect without report_to"):
        settings(written)
    heard = []
    train(written, cut, resume=True, watcher=Watcher(say=heard.append))
    assert same(whole, cut, step=2)
    notes = (
        "log_every has no effect without report_to. It is left out.",
        "lora.alpha has no effect without lora.rank.",
    )
    assert all(any(line.startswith(note) for line in heard) for note in notes)
    contradiction = written.read_text().replace("warmup: 0.0", "warmup: 0.5")
    written.write_text(contradiction)
    with refused("both state the warm-up's length"):
        train(written, cut, resume=True)

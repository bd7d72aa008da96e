"""What counts as the same measurement: the contents of model and data, not their places, sizes or times."""

from __future__ import annotations

import json
import os
import shutil
from functools import partial

import pytest

from fulldepth.core.errors import FulldepthError
from fulldepth.measurement import MeasureSettings
from fulldepth.measurement.series import fingerprints, hash_contents
from fulldepth.subject.open import read_source
from json_files import write_json

SETTINGS = MeasureSettings(max_sequences=4, sequence_length=12, measures=["displacement"])


@pytest.fixture
def is_known(into, tmp_path):
    """Whether the folder's results are taken for those of this model and data; a refusal means that they are not."""

    def known(model, data, settings=SETTINGS, **options):
        try:
            _, said = into(model, tmp_path / "out", settings, data, **options)
        except FulldepthError as error:
            if "another run" not in str(error):
                raise
            return False
        return any("nothing to do" in line for line in said)

    return known


def replaced(path, content):
    """Other content of the same size, with the same times."""
    times = path.stat()
    assert len(content) == times.st_size
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("beside", [".", "tokenizer"])
def test_text_weights_and_tokenizer_replaced_at_equal_size_and_time(is_known, checkpoint, text_file, tmp_path, beside):
    """The tokenizer lies beside the model, in either place where loading finds it."""
    model, text = tmp_path / "run" / "model", tmp_path / "text.txt"
    shutil.copytree(checkpoint("llama"), model)
    shutil.copy(text_file, text)
    (tmp_path / "run" / beside).mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(model / name, tmp_path / "run" / beside / name)
    assert not is_known(model, str(text))  # and measures it
    weights, tokenizer = model / "model.safetensors", tmp_path / "run" / beside / "tokenizer.json"
    kept = {path: path.read_bytes() for path in (text, weights, tokenizer)}
    words = json.loads(kept[tokenizer])
    vocabulary = words["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]

    replaced(text, kept[text].swapcase())
    assert not is_known(model, str(text))
    text.unlink()
    text.write_bytes(kept[text])
    os.utime(text, (1, 1))
    assert is_known(model, str(text)), "equal content in a new file"
    replaced(weights, kept[weights][:-1] + bytes([kept[weights][-1] ^ 1]))
    assert not is_known(model, str(text))
    weights.write_bytes(kept[weights])
    (model / "optimizer.pt").write_bytes(b"never read")
    (model / "train.log").write_text("step 1")
    assert is_known(model, str(text))
    write_json(tokenizer, words)
    assert not is_known(model, str(text))


@pytest.mark.parametrize("role", ["model", "reference"])
def test_a_run_that_got_a_further_checkpoint_is_another_model(is_known, checkpoint, text_file, tmp_path, role):
    """A run's folder stands for its last checkpoint, which is read."""
    run = tmp_path / "run"
    shutil.copytree(checkpoint("llama", 1), run / "checkpoint-10")
    settings = SETTINGS
    model = run
    if role == "reference":
        settings = SETTINGS.model_copy(update={"measures": ["mmd"], "reference": str(run)})
        model = checkpoint("llama")
    known = partial(is_known, model, str(text_file), settings, series=False)
    assert not known()  # and measures it
    assert known()
    shutil.copytree(checkpoint("llama", 2), run / "checkpoint-20")
    assert not known()


def test_of_the_text_that_a_lens_is_fitted_on_the_files_of_data_count(checkpoint, text_file, tmp_path):
    folder = tmp_path / "fit"
    (folder / ".cache").mkdir(parents=True)
    text = folder / "text.txt"
    shutil.copy(text_file, text)
    settings = MeasureSettings(measures=["linear_lens_loss"], fit=str(folder))
    model = hash_contents(checkpoint("llama"))

    def print_of():
        return fingerprints([model], read_source(str(text_file), settings), settings)

    before = print_of()
    for name in ("notes.md", ".cache/text.txt"):
        (folder / name).write_text("not data")
    assert print_of() == before
    text.write_text("other text")
    assert print_of() != before


def test_a_moved_run_extends_its_series(into, checkpoint, text_file, tmp_path, monkeypatch):
    """A moved run and its text, named from another folder, are the same; only a new checkpoint is measured."""
    run = tmp_path / "run"
    text = tmp_path / "text.txt"
    shutil.copy(text_file, text)
    for step in (1, 2):
        shutil.copytree(checkpoint("llama", step), run / f"checkpoint-{step}")
    settings = SETTINGS.model_copy(update={"tokenizer": str(run / "checkpoint-1")})
    into(run, tmp_path / "out", settings, str(text))
    fitted = MeasureSettings(measures=["linear_lens_loss"], fit=str(text))
    lens = fingerprints([hash_contents(run)], read_source(str(text), fitted), fitted)
    results = [tmp_path / "out" / "steps" / f"checkpoint-{step}" / "results.json" for step in (1, 2)]
    written = [path.stat().st_mtime_ns for path in results]

    moved = tmp_path / "moved #1"
    (moved / "inside").mkdir(parents=True)
    run.rename(moved / "run")
    text.rename(moved / "text.txt")
    monkeypatch.chdir(moved / "inside")
    fitted = fitted.model_copy(update={"fit": "../text.txt"})
    assert fingerprints([hash_contents("../run")], read_source("../text.txt", fitted), fitted) == lens
    settings = settings.model_copy(update={"tokenizer": "../run/checkpoint-1"})
    shutil.copytree(checkpoint("llama", 3), moved / "run" / "checkpoint-3")
    extended, _ = into("../run", tmp_path / "out", settings, "../text.txt")
    assert [path.stat().st_mtime_ns for path in results] == written
    assert sorted(extended.table.step.unique()) == [1, 2, 3]

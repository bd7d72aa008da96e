"""What counts as the same measurement: the contents of model and data, not their names, sizes or times."""

from __future__ import annotations

import json
import os
import shutil

import datasets

from fulldepth.errors import FulldepthError
from fulldepth.measurement import MeasureSettings, measure_into
from fulldepth.progress import Watcher

SETTINGS = MeasureSettings(max_sequences=4, sequence_length=12, measures=["displacement"])


def replaced(path, content):
    """Other content of the same size, with the same times."""
    assert len(content) == path.stat().st_size
    assert content != path.read_bytes()
    times = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def is_known(model, data, output, settings=SETTINGS):
    """Whether the folder's results are taken for those of this model and data; a refusal means that they are not."""
    said = []
    try:
        measure_into(model, data, output, settings, watcher=Watcher(say=said.append))
    except FulldepthError as error:
        if "another run" not in str(error):
            raise
        return False
    return any("nothing to do" in line for line in said)


def test_text_and_weights_replaced_at_equal_size_and_time(checkpoint, text_file, tmp_path):
    model, text, output = tmp_path / "model", tmp_path / "text.txt", tmp_path / "out"
    shutil.copytree(checkpoint("llama"), model)
    shutil.copy(text_file, text)
    measure_into(model, str(text), output, SETTINGS)
    content, weights = text.read_bytes(), (model / "model.safetensors").read_bytes()

    replaced(text, content.swapcase())
    assert not is_known(model, str(text), output)
    text.unlink()
    text.write_bytes(content)
    os.utime(text, (1, 1))
    assert is_known(model, str(text), output), "equal content in a new file"

    replaced(model / "model.safetensors", weights[:-1] + bytes([weights[-1] ^ 1]))
    assert not is_known(model, str(text), output)
    (model / "model.safetensors").write_bytes(weights)
    (model / "optimizer.pt").write_bytes(b"never read")
    (model / "train.log").write_text("step 1")
    assert is_known(model, str(text), output)


def test_a_tokenizer_beside_the_model_counts(checkpoint, text_file, tmp_path):
    model = tmp_path / "run" / "model"
    shutil.copytree(checkpoint("llama"), model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.move(model / name, tmp_path / "run" / name)
    measure_into(model, str(text_file), tmp_path / "out", SETTINGS)
    assert is_known(model, str(text_file), tmp_path / "out")
    path = tmp_path / "run" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[-2:]
    words[first], words[second] = words[second], words[first]
    path.write_text(json.dumps(tokenizer))
    assert not is_known(model, str(text_file), tmp_path / "out")


def words_of(text):
    """A data set of three texts, with a column that is not read."""
    return datasets.Dataset.from_dict({"text": text, "id": [1, 2, 3]})


def test_python_objects_of_one_look_are_told_apart(checkpoint, corpus, tmp_path):
    texts = [corpus[n * 300 : n * 300 + 300] for n in range(6)]
    model, output = checkpoint("llama"), tmp_path / "out"
    first, other = words_of(texts[:3]), words_of(texts[3:])
    assert str(first) == str(other)
    measure_into(model, first, output, SETTINGS)
    assert not is_known(model, other, output)
    same = words_of(texts[:3]).map(lambda row: {"id": row["id"] + 7})
    assert same._fingerprint != first._fingerprint
    assert is_known(model, same, output), "a column that is not read does not count"
    measure_into(model, texts[:3], output / "list", SETTINGS)
    assert is_known(model, list(texts[:3]), output / "list")
    assert not is_known(model, texts[3:], output / "list")

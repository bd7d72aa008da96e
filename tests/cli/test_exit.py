"""`fulldepth exit` on the command line: results, checkpoints, and one message for every mistake."""

from __future__ import annotations

import pytest

from fulldepth.settings.exit import file_size
from json_files import read_json
from skip.word_tokenizer import checkpoint as saved
from skip.word_tokenizer import words


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = saved(tmp_path_factory.mktemp("model"))
    (folder / "text.txt").write_text("\n\n".join(words(*range(n, n + 20)) for n in range(12)))
    return folder


def test_a_checkpoint(main, checkpoint, tmp_path, monkeypatch):
    """A sweep: `cli.test_tiny_recipes`."""
    monkeypatch.setattr("fulldepth.exit.elastic._prove", lambda *_: 0.0)  # see `exit.test_elastic`
    code, out, _ = main("exit", "export", checkpoint, "--layers", 2, "--output", tmp_path / "short")
    assert code == 0
    assert "2 of 3" in out
    assert read_json(tmp_path / "short" / "config.json")["num_hidden_layers"] == 2
    assert (tmp_path / "short" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ("exit MODEL --data TEXT --threshold 0,0.5", "threshold"),
        ("exit MODEL --data TEXT --set min_layer=9", "min_layer is 9"),
        ("exit MODEL --data TEXT --target-accuracy-drop -0.1", "target_accuracy_drop"),
        ("exit MODEL --data TEXT --set calibration_share=0.3", "calibration_share has no effect without --target-accu"),
        ("exit MODEL", "--data"),
        ("exit export MODEL --layers 9", "first 9"),
        ("exit export MODEL --layers 2 --effective-depth 0.1", "--layers or --effective-depth, got both"),
        ("exit export MODEL --layers 1 --max-sequences 4", "--max-sequences has no effect without --effective-depth."),
        ("exit export MODEL --layers 1 --data TEXT", "--data has no effect without --effective-depth."),
        ("exit export MODEL", "--layers or --effective-depth, got neither"),
    ],
)
def test_a_mistake_ends_with_one_message(main, checkpoint, tmp_path, arguments, name):
    places = {"MODEL": checkpoint, "TEXT": checkpoint / "text.txt"}
    code, _, err = main(*(places.get(word, word) for word in arguments.split()), "--output", tmp_path / "out")
    assert code == 2
    assert name in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_sizes_and_defaults():
    assert file_size("500MB") == 500 * 10**6
    assert file_size("1.5 GiB") == 3 * 2**29

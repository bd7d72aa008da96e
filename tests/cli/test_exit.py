"""`fulldepth exit` on the command line: results, checkpoints, and one message for every mistake."""

from __future__ import annotations

import json

import pytest

import tiny_models
from fulldepth.settings import layer
from fulldepth.settings.exit import ExitSettings, file_size
from skip.word_tokenizer import tokenizer, words


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_models.build("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (folder / "text.txt").write_text("\n\n".join(words(*range(n, n + 20)) for n in range(12)), encoding="utf-8")
    return folder


def test_a_sweep_and_a_checkpoint(main, checkpoint, tmp_path):
    data = ["--data", checkpoint / "text.txt", "--sequence-length", 16, "--new-tokens", 2]
    arguments = ["exit", checkpoint, *data, "--output", tmp_path / "out", "--thresholds", "0.5,1"]
    code, out, _ = main(*arguments, "--rule", "confidence,patience", "--target-accuracy-drop", "0.1", "--json")
    assert code == 0
    assert json.loads(out)["accuracy"]["sentence"].endswith("nothing is advised.")  # random weights
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {row["threshold"] for row in stored["exits"] if not row["calibrated"]} == {0.5, 1.0}
    assert {row["split"] for row in stored["exits"] if row["calibrated"]} == {"calibration", "report"}
    assert (tmp_path / "out" / "report.html").is_file()
    code, _, err = main(*arguments)
    assert code == 2
    assert "already holds results" in err
    assert main(*arguments, "--overwrite")[0] == 0
    code, out, _ = main("exit", checkpoint, "--export-layers", 2, "--output", tmp_path / "short")
    assert code == 0
    assert "2 of 3" in out
    assert json.loads((tmp_path / "short" / "config.json").read_text())["num_hidden_layers"] == 2
    assert (tmp_path / "short" / "tokenizer.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--thresholds", "0,0.5"), "thresholds"),
        (("--thresholds", "1.5"), "thresholds"),
        (("--thresholds", "high"), "expected numbers such as 0.5,0.9"),
        (("--rule", "hope"), "rule"),
        (("--min-layer", "0"), "min_layer"),
        (("--min-layer", "9"), "min_layer is 9, but the model has 3 layers"),
        (("--target-accuracy-drop", "-0.1"), "target_accuracy_drop"),
        (("--export-layers", "9"), "has 3 layers, so its first 9 cannot be exported"),
        (("--export-layers", "0"), "export_layers"),
        (("--memory-budget", "much"), "Expected a size such as 500MB"),
        (("--memory-budget", "1KB"), "One layer with embeddings and head takes"),
        (("--export-layers", "2", "--effective-depth", "0.1"), "Leave all but one of them out"),
        (("--push-to-hub", "me/model"), "--push-to-hub uploads a checkpoint"),
    ],
)
def test_a_mistake_ends_with_one_message(main, checkpoint, tmp_path, arguments, message):
    code, _, err = main("exit", checkpoint, "--data", checkpoint / "text.txt", "--output", tmp_path / "out", *arguments)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()


def test_data_are_needed(main, checkpoint, tmp_path):
    code, _, err = main("exit", checkpoint, "--output", tmp_path / "out")
    assert code == 2
    assert "A sweep needs --data" in err
    code, _, err = main("exit", checkpoint, "--output", tmp_path / "out", "--effective-depth", "0.1")
    assert code == 2
    assert "needs --data" in err


def test_sizes_and_defaults():
    assert file_size("500MB") == 500 * 10**6
    assert file_size("1.5 GiB") == 3 * 2**29
    settings = layer(ExitSettings, {})
    assert settings.rule == ["confidence"]
    assert settings.thresholds[-1] == 1.0
    assert not settings.exports

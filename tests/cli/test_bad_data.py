"""A bad image: measure and exit name the file and end with exit code 2; `--skip-bad` continues."""

from __future__ import annotations

from pathlib import Path

import pytest

from fulldepth.data.corpus import digit_rows
from fulldepth.results import Results
from fulldepth.settings import layer
from fulldepth.training import TrainSettings, train

RECIPE = {
    **{"steps": 1, "global_batch_size": 4, "eval_every": 1, "save_every": 1, "task": "image-classification"},
    "model": {"type": "vit", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    | {"num_attention_heads": 2, "image_size": 8, "patch_size": 4},
}


def images(folder):
    """Digits 0 to 2 as PNG files, four of each class."""
    for row in [row for label in range(3) for row in digit_rows("train") if row["label"] == label]:
        place = folder / str(row["label"])
        place.mkdir(parents=True, exist_ok=True)
        if (number := len(list(place.iterdir()))) < 4:
            row["image"]().save(place / f"{number}.png")
    return folder


@pytest.mark.slow
def test_a_bad_image_is_named_or_skipped_and_a_run_stands_for_its_last_checkpoint(main, tmp_path):
    data = images(tmp_path / "data")
    recipe, run = RECIPE | {"data": {"name": str(data), "validation_share": 0.4}}, tmp_path / "good"
    train(layer(TrainSettings, recipe), run)
    (data / "0" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n no image")
    commands = {
        "measure": ("measure", run / "checkpoint-1", "--data", data),
        "exit": ("exit", run, "--data", data, "--repeats", 1, "--threshold", "0.5"),
    }
    for name, command in commands.items():
        code, out, err = main(*command, "--output", tmp_path / name)
        assert code == 2, (name, out, err)
        assert "0/1.png" in " ".join(err.split()), (name, err)
        assert "Traceback" not in err
        code, out, err = main(*command, "--skip-bad", "--output", tmp_path / f"{name}-skipped")
        assert code == 0, (name, err)
        meta = Results.load(tmp_path / f"{name}-skipped").meta
        (warning,) = [line for line in meta["warnings"] if "left out of" in line or "skipped" in line]
        assert "1 " in warning
        assert "0/1.png" in warning
    assert Path(meta["model"]["name"]) == run / "checkpoint-1"
    assert any("its last checkpoint, checkpoint-1, is read" in line for line in meta["warnings"])

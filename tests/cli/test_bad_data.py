"""Bad data: train, measure and exit name the place and end with exit code 2; `--skip-bad` continues."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from fulldepth.data.corpus import digit_rows
from fulldepth.results import Results

VIT = {"type": "vit", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VIT |= {"image_size": 8, "patch_size": 4}
BERT = {"type": "bert", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
STEP = {"steps": 1, "global_batch_size": 4, "eval_every": 1, "save_every": 1}
RECIPES = {
    "images": {**STEP, "task": "image-classification", "model": VIT},
    "texts": {
        **STEP,
        "task": "text-classification",
        "model": BERT,
        "tokenizer": "wordpiece:300",
        "sequence_length": 16,
    },
}


def images(folder: Path) -> Path:
    """Digits 0 to 2 as PNG files, four of each class."""
    for row in [row for label in range(3) for row in digit_rows("train") if row["label"] == label]:
        place = folder / str(row["label"])
        place.mkdir(parents=True, exist_ok=True)
        if (number := len(list(place.iterdir()))) < 4:
            row["image"]().save(place / f"{number}.png")
    return folder


def texts(folder: Path) -> Path:
    folder.mkdir(parents=True)
    rows = [{"text": f"film {number}", "label": number % 2} for number in range(12)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder / "rows.jsonl"


MAKE = {"images": images, "texts": texts}


def damage(path: Path) -> None:
    (path / "0" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n no image")


def line(text: str, label: object) -> Callable[[Path], None]:
    def add(path: Path) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"text": text, "label": label}) + "\n")

    return add


CASES = {
    "corrupt image": ("images", damage, "0/1.png"),
    "label outside the classes": ("texts", line("odd", 7), "line 13"),
}
"""Case -> kind of data, its defect, and the place that the message names."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of each kind, trained for one step on good data."""
    from fulldepth.settings import layer
    from fulldepth.training import TrainSettings, train

    folder = tmp_path_factory.mktemp("good")
    for kind, recipe in RECIPES.items():
        data = {"data": {"name": str(MAKE[kind](folder / kind)), "validation_share": 0.4}}
        train(
            layer(TrainSettings, recipe, data | ({"model": {"num_labels": 2}} if kind == "texts" else {})),
            folder / f"{kind}-run",
        )
    return {kind: folder / f"{kind}-run" / "checkpoint-1" for kind in RECIPES}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_bad_entry_is_named_or_skipped(main, checkpoints, tmp_path, case):
    kind, spoil, place = CASES[case]
    path = MAKE[kind](tmp_path / "data")
    spoil(path)
    recipe = RECIPES[kind] | {"data": {"name": str(path), "validation_share": 0.4}}
    if kind == "texts":
        recipe["model"] = BERT | {"num_labels": 2}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    commands = {
        "train": ("train", tmp_path / "recipe.yaml"),
        "measure": ("measure", checkpoints[kind], "--data", path),
        "exit": ("exit", checkpoints[kind], "--data", path, "--repeats", 1, "--threshold", "0.5"),
    }
    for name, command in commands.items():
        code, out, err = main(*command, "--output", tmp_path / name)
        assert code == 2, (name, out, err)
        assert place in " ".join(err.split()), (name, err)
        assert "Traceback" not in err
        skip = "data.skip_bad=true" if name == "train" else "--skip-bad"
        code, out, err = main(*command, skip, "--output", tmp_path / f"{name}-skipped")
        assert code == 0, (name, err)
        warnings = Results.load(tmp_path / f"{name}-skipped").meta["warnings"]
        (warning,) = [line for line in warnings if "left out of" in line or "skipped" in line]
        assert "1 " in warning
        assert place in warning


@pytest.mark.slow
def test_the_folder_of_a_run_stands_for_its_last_checkpoint(main, checkpoints, tmp_path):
    run = checkpoints["images"].parent
    code, _, err = main("exit", run, "--data", images(tmp_path / "data"), "--repeats", 0, "--output", tmp_path / "out")
    assert code == 0, err
    meta = Results.load(tmp_path / "out").meta
    assert Path(meta["model"]["name"]) == checkpoints["images"]
    assert any("its last checkpoint, checkpoint-1, is read" in line for line in meta["warnings"])

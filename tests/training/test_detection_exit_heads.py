"""A detector trained with a head for each layer: its record, its steps, its checkpoints, and where it starts from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fulldepth.training.settings import TrainSettings
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from exit.detector_world import objects, pictures, pixels
from exit.plain_detector import HEADS_FILE, answers, precision, set_loss
from fulldepth.data.shapes import write_shapes
from fulldepth.errors import FulldepthError
from fulldepth.settings.layers import layer as layered
from fulldepth.training import train
from fulldepth.training.plan import detector_lines
from training.conftest import DETR

RECIPE: dict[str, Any] = {
    "task": "detection",
    "method": "multi-exit",
    "objective": {"multi_exit": {"schedule": "alternate"}},
    "model": DETR,
    "initializer": {"distribution": "glorot"},
    "data": {"name": "shapes:32x12/train", "validation": "shapes:32x6/validation", "image_size": 32},
    "steps": 4,
    "global_batch_size": 4,
    "learning_rate": 1e-2,
    "eval_every": 2,
    "save_every": 1,
}
FILES = ("model.safetensors", HEADS_FILE)


def asked(**changes: Any) -> TrainSettings:
    return layered(TrainSettings, RECIPE, changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A finished run and its results."""
    folder = tmp_path_factory.mktemp("run") / "multi-exit"
    return folder, train(asked(), folder)


def heads(folder: Path, step: int) -> dict[str, Tensor]:
    return load_file(folder / f"checkpoint-{step}" / HEADS_FILE)


def test_the_record_holds_each_layer_read_by_its_own_heads(run: tuple[Path, Any], tmp_path: Path) -> None:
    folder, results = run
    data = write_shapes(tmp_path / "data", "shapes:32x6/validation")
    checkpoint, targets = folder / "checkpoint-4", objects(data)
    logits, boxes = answers(checkpoint, pixels(checkpoint, pictures(data)))
    rows = results.table[results.table.step == 4].set_index(["measure", "statistic", "layer"]).value
    for layer in (1, 2, 3):
        own = logits[layer - 1], boxes[layer - 1]
        for name, value in set_loss(*own, targets).items():
            assert rows["detection_loss", name, layer] == pytest.approx(float(value), abs=1e-5)
        for name, share in precision(*own, targets).items():
            assert rows["average_precision", name, layer] == pytest.approx(share, abs=1e-6)
    values = results.table[(results.table.measure == "penalty") & (results.table.step == 4)]
    assert set(values.site) >= {"multi_exit"}
    assert len({round(rows["detection_loss", "mean", layer], 4) for layer in (1, 2, 3)}) == 3


def test_heads_move_in_even_steps_only(run: tuple[Path, Any]) -> None:
    folder, _ = run
    first, second, third, fourth = (heads(folder, step) for step in (1, 2, 3, 4))
    names = [f"{kind}.{layer}.weight" for kind in ("exit_box_heads", "exit_heads") for layer in (1, 2)]
    assert sorted(first) == names
    for name in names:
        assert (first[name] != second[name]).all()
        assert torch.equal(second[name], third[name])
        assert (third[name] != fourth[name]).all()


def test_a_run_that_was_cut_off_ends_with_the_same_weights(run: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = run
    for last in (1, 2):
        cut = tmp_path / str(last)
        shutil.copytree(folder, cut)
        for step in range(last + 1, 5):
            shutil.rmtree(cut / f"checkpoint-{step}")
        train(asked(), cut, resume=True)
        for name in FILES:
            whole, resumed = (load_file(each / "checkpoint-4" / name) for each in (folder, cut))
            assert whole.keys() == resumed.keys()
            assert all(torch.equal(whole[key], resumed[key]) for key in whole)


def test_training_starts_from_stored_heads_of_the_same_classes(run: tuple[Path, Any], tmp_path: Path) -> None:
    checkpoint = run[0] / "checkpoint-4"
    still = {"steps": 2, "learning_rate": 1e-12, "weight_decay": 0.0}
    start = {"model": {"checkpoint": str(checkpoint)}, **still}
    stored = load_file(checkpoint / HEADS_FILE)

    def begun(name: str, **changes: Any) -> tuple[dict[str, Tensor], list[str]]:
        recipe = {key: value for key, value in RECIPE.items() if key not in ("model", "initializer")}
        results = train(layered(TrainSettings, recipe, start, changes), tmp_path / name)
        path = tmp_path / name / "checkpoint-2" / HEADS_FILE
        return load_file(path) if path.is_file() else {}, results.meta["warnings"]

    same, warnings = begun("same")
    assert all(torch.allclose(same[name], weight, atol=1e-6) for name, weight in stored.items())
    assert any("heads of layers 1 to L-1 are those of" in line for line in warnings)

    data = write_shapes(tmp_path / "data", "shapes:32x12/train")
    content = json.loads(data.read_text())
    content["categories"] = [{**each, "name": f"other {each['id']}"} for each in content["categories"]]
    data.write_text(json.dumps(content))
    other, warnings = begun("other", data={"name": str(data), "validation": str(data)})
    assert all((other[name] - weight).abs().max() > 1e-3 for name, weight in stored.items())
    assert any("are for other classes" in line for line in warnings)

    none, warnings = begun("aligned", method="aligned", objective={"multi_exit": None})
    assert not none
    assert any("method=aligned leaves out all but the last layer's" in line for line in warnings)


def test_heads_that_do_not_fit_end_a_run_that_starts_from_them(run: tuple[Path, Any], tmp_path: Path) -> None:
    shutil.copytree(run[0] / "checkpoint-4", tmp_path / "model")
    content = (tmp_path / "model" / HEADS_FILE).read_bytes()
    (tmp_path / "model" / HEADS_FILE).write_bytes(content[:-4] + b"\0\0\xc0\x7f")
    changes = {"model": {"checkpoint": str(tmp_path / "model")}}
    recipe = {key: value for key, value in RECIPE.items() if key not in ("model", "initializer")}
    with pytest.raises(FulldepthError, match=r"exit_.*weight holds NaN or infinity"):
        train(layered(TrainSettings, recipe, changes), tmp_path / "run")


@pytest.mark.parametrize("precision", ["autocast", "bfloat16"])
def test_heads_are_trained_in_lower_precision(tmp_path: Path, precision: str) -> None:
    results = train(asked(precision=precision, steps=2, save_every=2), tmp_path / "run")
    losses = results.table[results.table.measure == "detection_loss"].value
    assert bool(torch.isfinite(torch.tensor(losses.to_numpy())).all())
    dtype = torch.float32 if precision == "autocast" else torch.bfloat16
    assert {weight.dtype for weight in heads(tmp_path / "run", 2).values()} == {dtype}


def test_the_dry_run_counts_the_heads(run: tuple[Path, Any]) -> None:
    config = AutoConfig.from_pretrained(run[0] / "checkpoint-4")
    counts = [
        int(dict((name, value) for name, value, _ in detector_lines(settings, config))["parameters"].replace(",", ""))
        for settings in (asked(), asked(method="baseline", objective={"multi_exit": None}))
    ]
    assert counts[0] - counts[1] == 2 * (4 + 4) * DETR["d_model"]
    assert counts[0] == run[1].meta["model"]["parameters"]


def test_a_norm_between_the_layers_is_not_trained(tmp_path: Path) -> None:
    with pytest.raises(FulldepthError, match="normalise the states between the layers"):
        train(asked(model={"auxiliary_loss": True}), tmp_path / "run")

"""`task: detection`: a tiny DETR is trained, resumed, recorded and measured; unfit data and settings are refused."""

import io
import json
import shutil
import sys
from contextlib import suppress

import numpy as np
import pytest
import torch
import yaml
from fulldepth.training.methods import resolved
from fulldepth.training.settings import TrainSettings
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, DetrForObjectDetection

from fulldepth import measure
from fulldepth.cli import main
from fulldepth.data import open_source
from fulldepth.data.labelled import Collator, Item
from fulldepth.data.sequences import Picture
from fulldepth.data.shapes import draw, write_shapes
from fulldepth.errors import FulldepthError
from fulldepth.metrics import average_precision, detection_loss
from fulldepth.results import Results
from fulldepth.settings import layers as recipes
from fulldepth.training import train
from fulldepth.training.labelled import labelled_data
from fulldepth.training.model import build_config, meta_model
from training.conftest import DETR

RECIPE = {
    "task": "detection",
    "model": DETR,
    "initializer": {"distribution": "glorot"},
    "data": {"name": "shapes:32x12/train", "validation": "shapes:32x6/validation", "image_size": 32},
    "steps": 4,
    "global_batch_size": 4,
    "learning_rate": 1e-3,
    "backbone_learning_rate": 1e-4,
    "eval_every": 2,
    "save_every": 2,
}


def settings(**changes):
    """The recipe with changes; mappings change single keys."""
    merged = {**RECIPE}
    for key, value in changes.items():
        merged[key] = {**merged[key], **value} if isinstance(value, dict) and key in merged else value
    return TrainSettings.model_validate(merged)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of aligned training."""
    folder = tmp_path_factory.mktemp("run") / "aligned"
    return folder, train(settings(method="aligned", augmentation={"flip": True}), folder)


def test_the_record_holds_every_layer_and_agrees_with_a_measurement(run):
    folder, results = run
    table = results.table
    assert (results.meta["model"]["num_layers"], results.meta["model"]["class"]) == (3, "DetrForObjectDetection")
    last = table[table.step == 4]
    recorded = {
        (m, s, int(layer)): value
        for m, s, layer, value in zip(last.measure, last.statistic, last.layer.fillna(0), last.value, strict=True)
        if m in ("average_precision", "detection_loss")
    }
    assert {key[2] for key in recorded} == {1, 2, 3}
    assert float(last[last.measure == "validation_loss"].value.iloc[0]) == recorded["detection_loss", "mean", 3]
    assert {"ce", "aligned"} >= set(table[table.measure == "penalty"].site)
    names = ["average_precision", "detection_loss"]
    measured = measure(folder / "checkpoint-4", "shapes:32x6/validation", measures=names)
    again = {(r.measure, r.statistic, int(r.layer)): r.value for r in measured.table.itertuples()}
    assert {key: again[key] for key in recorded} == pytest.approx(recorded, abs=1e-5)
    assert "average_precision" in measured.figures()
    assert "average_precision" in measured.headline


def test_the_measures_are_those_of_the_stock_model_on_the_whole_set(run):
    """The last layer by transformers' own forward pass, all images in one batch."""
    folder, results = run
    model = DetrForObjectDetection.from_pretrained(folder / "checkpoint-4").eval()
    processor = AutoImageProcessor.from_pretrained(folder / "checkpoint-4")
    pictures = [
        Picture(lambda i=i: draw("validation", 32, i)[0], objects=draw("validation", 32, i)[1]) for i in range(6)
    ]
    batch = Collator(processor=processor)([Item(picture, 0, index) for index, picture in enumerate(pictures)])
    labels = batch.pop("labels")
    with torch.no_grad():
        found = model(**batch)
    last = (
        results.table[(results.table.step == 4) & (results.table.layer == 3)].set_index(["measure", "statistic"]).value
    )
    loss = detection_loss(found.logits, found.pred_boxes, labels)
    assert loss.item() == pytest.approx(last["detection_loss", "mean"], abs=1e-5)
    expected = average_precision(found.logits, found.pred_boxes, labels)
    assert expected["ap50"] == pytest.approx(last["average_precision", "ap50"], abs=1e-9)
    assert (model.config.num_labels, model.config.id2label[1]) == (3, "square")
    assert not model.config.auxiliary_loss


def test_a_resumed_run_ends_as_the_whole_one(run, tmp_path):
    folder, results = run
    shutil.copytree(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoint-4")
    again = train(settings(method="aligned", augmentation={"flip": True}), tmp_path / "run", resume=True)
    final = results.table[results.table.step == 4].set_index(["measure", "site", "statistic", "layer"]).value
    other = again.table[again.table.step == 4].set_index(["measure", "site", "statistic", "layer"]).value
    kept = [key for key in final.index if key[0] in ("validation_loss", "average_precision", "detection_loss")]
    assert other[kept].tolist() == pytest.approx(final[kept].tolist(), abs=1e-6)


def test_the_backbone_is_trained_with_its_own_rate(run):
    """transformers freezes its whole ResNet; here it moves, by at most its rate a step (AdamW)."""
    folder, _ = run
    first, last = (load_file(folder / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4))
    moved = {name: (last[name] - weight).abs().max().item() for name, weight in first.items()}
    backbone = [value for name, value in moved.items() if "backbone" in name and name.endswith("convolution.weight")]
    others = [value for name, value in moved.items() if "decoder" in name and name.endswith("proj.weight")]
    assert all(0 < value < 5e-4 for value in backbone)
    assert max(others) > 2 * max(backbone)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"auxiliary_loss": True}}, "method=aligned has the losses"),
        ({"model": {"num_queries": 2}}, r"An image has \d objects, and the model 2 queries"),
        ({"method": "cr"}, "cannot be trained with coherence"),
        ({"objective": {"aligned": {"positions": 0.5}}}, "detection matches all queries"),
        ({"data": {"name": "corpus:builtin/train"}}, "trains on images with boxes"),
        ({"model": {"type": "llama"}}, "no detector"),
        (
            {"model": {"backbone_config": {**DETR["backbone_config"], "num_channels": 1}}},
            "Images are read with 3 channels",
        ),
    ],
)
def test_unfit_settings_are_refused(changes, message, tmp_path):
    with pytest.raises(FulldepthError, match=message):
        train(settings(**changes), tmp_path / "run")


def test_bad_entries_end_the_command_with_their_place_unless_skipped(tmp_path, capsys, monkeypatch):
    path = write_shapes(tmp_path / "set", "shapes:32x8/train")
    content = json.loads(path.read_text())
    content["annotations"][3]["category_id"] = 9
    path.write_text(json.dumps(content))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "steps": 1, "data": {"name": str(path), "image_size": 32}}))
    arguments = ["fulldepth", "train", str(recipe), "--output", str(tmp_path / "run")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as leaving:
        main()
    assert leaving.value.code == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "annotations[3] (id 4): category_id 9 is not among the categories" in error
    monkeypatch.setattr(sys, "argv", [*arguments, "--set", "data.skip_bad=true"])
    with suppress(SystemExit):
        main()
    assert "skipped 1 annotation with defects" in Results.load(tmp_path / "run").meta["warnings"][0]


DAMAGE = {
    "torn": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "text": lambda content: b"<html>404 Not Found</html>",
    "small": lambda content: png(Image.new("RGB", (31, 32))),
}


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("part", ["train", "validation"])
def test_damaged_image_files_are_found_before_training_unless_skipped(damage, part, tmp_path):
    for name in ("train", "validation"):
        write_shapes(tmp_path / name, f"shapes:32x6/{name}")
    file = tmp_path / part / "images" / "000004.png"
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    data = {
        name: str(tmp_path / folder / "instances.json") for name, folder in (("name", "train"), ("validation",) * 2)
    }
    with pytest.raises(FulldepthError, match=r"000004\.png"):
        train(settings(data=data, steps=1), tmp_path / "run")
    assert not (tmp_path / "run" / "results.json").exists()
    results = train(settings(data={**data, "skip_bad": True}, steps=1), tmp_path / "run")
    (warning,) = [line for line in results.meta["warnings"] if "left out" in line]
    assert warning.startswith("1 bad row is left out of instances.json")
    assert "000004.png" in warning
    assert results.meta["data"]["train_sequences"] == (5 if part == "train" else 6)


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1"])
def test_images_of_other_channels_are_read_as_rgb(mode, tmp_path):
    path = write_shapes(tmp_path, "shapes:32x2/train")
    suffix = "jpg" if mode == "CMYK" else "png"
    content = json.loads(path.read_text())
    content["images"][0]["file_name"] = f"other.{suffix}"
    path.write_text(json.dumps(content))
    Image.new("RGB", (32, 32), (0, 255, 0)).convert(mode).save(tmp_path / "images" / f"other.{suffix}")
    pixels = np.asarray(open_source(path).records[0].image())
    assert pixels.shape == (32, 32, 3)
    if mode not in ("L", "LA", "1"):
        assert np.abs(pixels.astype(int) - (0, 255, 0)).max() <= 8  # JPEG rounds


def test_grey_values_of_16_bits_are_refused(tmp_path):
    """Pillow would make all values above 255 white."""
    path = write_shapes(tmp_path, "shapes:32x2/train")
    Image.fromarray(np.full((32, 32), 3000, np.uint16)).save(tmp_path / "images" / "000001.png")
    with pytest.raises(FulldepthError, match=r"000001\.png: its pixels have more than 8 bits \(mode I;16\)"):
        open_source(path).records[0].image()


@pytest.mark.parametrize("part", ["train", "validation"])
def test_sets_with_nothing_to_find_are_refused_before_training(part, tmp_path):
    """Crowds are no targets."""
    path = write_shapes(tmp_path / "set", "shapes:32x4/train")
    content = json.loads(path.read_text())
    content["annotations"] = [{**entry, "iscrowd": 1} for entry in content["annotations"]]
    path.write_text(json.dumps(content))
    data = {"name" if part == "train" else "validation": str(path)}
    with pytest.raises(FulldepthError, match=f"instances.json has no object in any {part}"):
        train(settings(data=data), tmp_path / "run")


def test_held_out_images_are_not_trained_on():
    data = labelled_data(settings(data={"name": "shapes:32x20/train", "validation": None, "validation_share": 0.2}))
    train, validation = data.train.source.records, data.validation.source.records
    assert (len(train), len(validation)) == (16, 4)
    contents = [np.asarray(record.image()).tobytes() for record in (*train, *validation)]
    assert len(set(contents)) == 20


def test_the_recipes(tmp_path):
    """`tiny-detr` runs in smoke size; `detr-coco` has the 41 M parameters of Carion et al. 2020, Table 1."""
    small = {"data": {"name": "shapes:64x8/train", "validation": "shapes:64x4/validation"}, "steps": 1}
    tiny = recipes.layer(TrainSettings, recipes.read("tiny-detr", "train"), {**small, "global_batch_size": 4})
    assert train(tiny, tmp_path / "run").meta["headline"]["validation_ap50"]["unit"] == "1"
    paper = recipes.layer(TrainSettings, recipes.read("detr-coco", "train"))
    config = build_config(paper.model, task="detection", classes=[f"class {index}" for index in range(91)])
    assert round(meta_model(config, "detection").num_parameters() / 1e6) in (41, 42)
    assert resolved(paper).objective.terms["aligned"]["schedule"] == "always"

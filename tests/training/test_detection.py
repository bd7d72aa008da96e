"""`task: detection`: a tiny DETR is trained, resumed, recorded and measured; unfit data and settings are refused."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoImageProcessor, CLIPImageProcessorPil, DetrForObjectDetection, DetrImageProcessorPil

from drawn_shapes import draw, shapes, write_shapes
from fulldepth import measure
from fulldepth.data import ImageRecord
from fulldepth.data.images import image_value
from fulldepth.data.labelled import Collator
from fulldepth.metrics import average_precision
from fulldepth.settings import layers as recipes
from fulldepth.settings.train import TrainSettings
from fulldepth.training import train
from fulldepth.training.model import build_config, meta_model
from json_files import change_json, read_json
from refusals import refused
from training.conftest import DETR

RECIPE = {
    "task": "detection",
    "model": DETR,
    "initializer": {"distribution": "glorot"},
    "data": {"name": shapes("32x12/train"), "validation": shapes("32x6/validation"), "image_size": 32},
    "steps": 4,
    "global_batch_size": 4,
    "learning_rate": 1e-3,
    "backbone_learning_rate": 1e-4,
    "eval_every": 2,
    "save_every": 2,
}


def settings(**changes):
    """The recipe with changes; mappings change single keys."""
    return recipes.layer(TrainSettings, RECIPE, changes)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of aligned training."""
    folder = tmp_path_factory.mktemp("run") / "aligned"
    return folder, train(settings(method="aligned", augmentation={"flip": True}), folder)


def test_the_backbone_is_trained_with_its_own_rate(run):
    """transformers freezes its whole ResNet; here it moves, by at most its rate a step (AdamW)."""
    folder, _ = run
    first, last = (load_file(folder / f"checkpoint-{step}" / "model.safetensors") for step in (2, 4))
    moved = {name: (last[name] - weight).abs().max().item() for name, weight in first.items()}
    backbone = [value for name, value in moved.items() if "backbone" in name and name.endswith("convolution.weight")]
    others = [value for name, value in moved.items() if "decoder" in name and name.endswith("proj.weight")]
    assert all(0 < value < 5e-4 for value in backbone)
    assert max(others) > 2 * max(backbone)


def stock(folder):
    """The last layer's output and loss by transformers' own forward pass, all images in one batch."""
    model = DetrForObjectDetection.from_pretrained(folder / "checkpoint-4").eval()
    processor = AutoImageProcessor.from_pretrained(folder / "checkpoint-4")
    drawn = [draw("validation", 32, index) for index in range(6)]
    pictures = [ImageRecord(image=image_value(image, "drawn"), objects=objects) for image, objects in drawn]
    batch = Collator(processor=processor)(pictures)
    with torch.no_grad():
        return model, batch, model(**batch, output_hidden_states=True)


def test_the_record_is_that_of_the_stock_model_and_of_a_measurement(run):
    folder, results = run
    model, batch, found = stock(folder)
    last = results.table.query("step == 4")
    assert float(last[last.measure == "validation_loss"].value.iloc[0]) == pytest.approx(found.loss.item(), abs=1e-5)
    recorded = {
        (statistic, int(layer)): value
        for measure, statistic, layer, value in zip(last.measure, last.statistic, last.layer, last.value, strict=True)
        if measure == "average_precision"
    }
    assert {layer for _, layer in recorded} == {1, 2, 3}
    expected = average_precision(found.logits, found.pred_boxes, batch["labels"])
    assert {name: recorded[name, 3] for name in expected} == pytest.approx(expected, abs=1e-9)
    assert (model.config.num_labels, model.config.id2label[1]) == (3, "square")
    measured = measure(folder / "checkpoint-4", shapes("32x6/validation"), measures=["average_precision"])
    again = {(row.statistic, int(row.layer)): row.value for row in measured.table.itertuples()}
    assert {key: again[key] for key in recorded} == pytest.approx(recorded, abs=1e-9)
    assert "average_precision" in measured.figures()
    assert "average_precision" in measured.headline


def test_unfit_settings_and_data_are_refused(tmp_path):
    path = write_shapes(tmp_path / "set", "32x4/train")
    change_json(path, annotations=[{**entry, "iscrowd": 1} for entry in read_json(path)["annotations"]])
    one_channel = {**DETR["backbone_config"], "num_channels": 1}
    for changes, named in (
        ({"model": {"auxiliary_loss": True}}, "auxiliary_loss"),
        ({"model": {"num_queries": 2}}, "num_queries"),
        ({"method": "cr"}, "coherence"),
        ({"method": "multi-exit"}, "multi_exit"),
        ({"objective": {"aligned": {"positions": 0.5}}}, "positions"),
        ({"data": {"name": "corpus:builtin/train"}}, "corpus:builtin"),
        ({"model": {"type": "llama"}}, "llama"),
        ({"model": {"backbone_config": one_channel}}, "num_channels"),
        ({"data": {"name": str(path)}}, "instances.json"),
        ({"data": {"validation": str(path)}}, "instances.json"),
    ):
        with refused(named):
            train(settings(**changes), tmp_path / "run")
    with refused("crop"):
        recipes.layer(TrainSettings, {"task": "detection", "augmentation": {"crop": 4}})


def test_the_papers_detector_has_its_size():
    """`detr-coco` has the 41 M parameters of Carion et al. 2020, Table 1."""
    paper = recipes.layer(TrainSettings, recipes.read("detr-coco", "train"))
    config = build_config(paper.model, task="detection", classes=[f"class {index}" for index in range(91)])
    assert round(meta_model(config, "detection").num_parameters() / 1e6) in (41, 42)


def test_a_run_from_scratch_reads_images_by_the_named_processor(tmp_path):
    size = {"shortest_edge": 24, "longest_edge": 40}
    named = DetrImageProcessorPil(size=size, image_mean=[0.1, 0.2, 0.3], do_convert_annotations=True)
    named.save_pretrained(tmp_path / "processor")
    changes = {"processor": str(tmp_path / "processor"), "data": {"image_size": None}, "steps": 1}
    train(settings(**changes), tmp_path / "run")
    saved = AutoImageProcessor.from_pretrained(tmp_path / "run" / "checkpoint-1")
    assert (dict(saved.size), [*saved.image_mean]) == (size, [0.1, 0.2, 0.3])


def test_a_processor_beside_a_size_or_one_that_crops_is_refused(tmp_path):
    with refused("processor=somewhere and data.image_size=32 both state the size of images"):
        settings(processor="somewhere")
    CLIPImageProcessorPil().save_pretrained(tmp_path / "crops")
    with refused(r"a CLIPImageProcessor\w*, crops images .do_center_crop., and boxes would not follow"):
        train(settings(processor=str(tmp_path / "crops"), data={"image_size": None}), tmp_path / "run")

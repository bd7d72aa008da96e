"""A detector's numbers over images of several sizes are those of each image alone, whatever the size of the batches.

A batch of images of different shapes is padded, and convolutions of the backbone read the padding.
"""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    DetrConfig,
    DetrForObjectDetection,
    DetrImageProcessorPil,
    ResNetConfig,
    ViTImageProcessorPil,
)

from fulldepth import measure
from fulldepth.data import open_source, prepare
from fulldepth.metrics import average_precision
from fulldepth.settings import layers as recipes
from fulldepth.settings.train import TrainSettings
from fulldepth.training import train
from training.conftest import DETR

SIZES = [(40, 30), (30, 40), (40, 30), (52, 30), (30, 30), (60, 60), (40, 30), (30, 40), (33, 30), (52, 30)]
"""Width and height of each image. (30, 30) and (60, 60) have one shape after processing."""


class Alone:
    """What stock transformers computes for each image by itself: the oracle."""

    def __init__(self, folder):
        random = np.random.default_rng(0)
        model = DetrForObjectDetection.from_pretrained(folder / "model").eval()
        processor = DetrImageProcessorPil.from_pretrained(folder / "model")
        images, annotations, angles = [], [], []
        states = []
        for layer in model.model.decoder.layers:
            layer.register_forward_hook(lambda _, __, output: states.append(output))
        self.logits, self.boxes, self.targets = [], [], []
        for number, (width, height) in enumerate(SIZES):
            image = Image.fromarray(random.integers(0, 255, (height, width, 3), dtype=np.uint8))
            image.save(folder / f"{number}.png")
            images.append({"id": number, "file_name": f"{number}.png", "width": width, "height": height})
            with torch.no_grad():
                out = model(**processor(image, return_tensors="pt"))
            cosine = torch.nn.functional.cosine_similarity(states[-2].double(), states[-1].double(), dim=-1)
            angles.append((1 - cosine) / 2)
            self.logits.append(out.logits[0])
            self.boxes.append(out.pred_boxes[0])
            queries = random.choice(12, 4, replace=False)  # objects near some predictions, so that precision is not 0
            classes = out.logits[0, queries, :-1].argmax(-1)
            relative = out.pred_boxes[0, queries].double().numpy() + random.normal(0, 0.01, (4, 4))
            scale = np.array([width, height, width, height])
            for kind, (x, y, w, h) in zip(classes.tolist(), relative * scale, strict=True):
                left, top, right, bottom = max(x - w / 2, 0), max(y - h / 2, 0), min(x + w / 2, width), y + h / 2
                box = [left, top, right - left, min(bottom, height) - top]
                entry = {"id": len(annotations) + 1, "image_id": number, "category_id": kind + 1, "iscrowd": 0}
                annotations.append({**entry, "bbox": box, "area": box[2] * box[3]})
            mine = [entry for entry in annotations if entry["image_id"] == number]
            kept = np.array([entry["bbox"] for entry in mine])
            centred = np.concatenate([kept[:, :2] + kept[:, 2:] / 2, kept[:, 2:]], axis=1) / scale
            self.targets.append({"class_labels": classes, "boxes": torch.from_numpy(centred)})
        categories = [{"id": index + 1, "name": f"class {index}"} for index in range(3)]
        self.file = folder / "instances.json"
        self.file.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
        self.displacement = float(torch.cat(angles).mean())
        """Of the last layer."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detector")
    torch.manual_seed(0)
    sizes = {name: value for name, value in DETR.items() if name not in ("type", "num_queries", "backbone_config")}
    backbone = {name: value for name, value in DETR["backbone_config"].items() if name != "model_type"}
    flags = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    config = DetrConfig(**sizes, **flags, backbone_config=ResNetConfig(**backbone), num_queries=12, num_labels=3)
    model = DetrForObjectDetection(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.xavier_uniform_(parameter)
    model.save_pretrained(folder / "model")
    DetrImageProcessorPil(size={"shortest_edge": 32, "longest_edge": 64}).save_pretrained(folder / "model")
    return folder, Alone(folder)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_a_measured_detector_reads_every_image_as_if_alone(alone, batch_size):
    folder, expected = alone
    measures = ["average_precision", "displacement"]
    results = measure(folder / "model", expected.file, measures=measures, batch_size=batch_size)
    residual = results.table.query("site == 'residual' and layer == 3")
    last = residual.set_index(["measure", "statistic"]).value
    precision = average_precision(expected.logits, expected.boxes, expected.targets)
    assert precision["ap"] > 0.05, "a precision of zero would say nothing"
    found = {name: float(last["average_precision", name]) for name in precision}
    assert found == pytest.approx(precision, abs=1e-9)
    assert float(last["displacement", "mean"]) == pytest.approx(expected.displacement, rel=1e-5)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 10])
def test_validation_during_training_reads_every_image_as_if_alone(alone, tmp_path, micro_batch_size):
    folder, expected = alone
    recipe = {
        "task": "detection",
        "model": {"checkpoint": str(folder / "model")},
        "data": {"name": str(expected.file), "validation": str(expected.file)},
        "steps": 1,
        "global_batch_size": 10,
        "learning_rate": 1e-3,
    }
    settings = recipes.layer(TrainSettings, recipe, {"micro_batch_size": micro_batch_size})
    table = train(settings, tmp_path / "run").table
    start = table[(table.step == 0) & (table.layer == 3)].set_index(["measure", "statistic"]).value
    precision = average_precision(expected.logits, expected.boxes, expected.targets)
    assert {name: float(start["average_precision", name]) for name in precision} == pytest.approx(precision, abs=1e-9)
    assert float(start["displacement", "mean"]) == pytest.approx(expected.displacement, rel=1e-5)


def test_batches_hold_images_of_one_shape_after_processing(alone):
    """Every image is in one batch, batches are as full as they can be, and nothing is padded."""
    folder, expected = alone
    processor = DetrImageProcessorPil.from_pretrained(folder / "model")
    data = prepare(open_source(expected.file), task="detection", processor=processor)
    groups = data.groups(2)
    assert sorted(index for group in groups for index in group) == list(range(len(SIZES)))
    assert sorted(map(len, groups)) == [1, 1, 2, 2, 2, 2], "3 of 40 x 30, 1 of 33 x 30, and 2 of three other shapes"
    for batch in data.batches(8):
        assert bool(batch.inputs["pixel_mask"].all())


def test_images_of_several_sizes_share_batches_where_the_processor_makes_them_equal():
    sizes = [(40, 30), (30, 40), (64, 20), (50, 50), (41, 33)]
    rows = [{"image": Image.new("RGB", size, (number, 0, 0))} for number, size in enumerate(sizes)]
    for processor in (
        ViTImageProcessorPil(size={"height": 32, "width": 32}),
        CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
    ):
        data = prepare(open_source(rows), task="representation", processor=processor)
        assert sorted(map(len, data.groups(4))) == [1, 4]

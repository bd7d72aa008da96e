"""A detector with heads for every decoder layer: measured, cut, against the plain oracle."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

import fulldepth
from exit.detector_world import objects, pictures, pixels, world
from exit.plain_detector import HEADS_FILE, answers, precision, set_loss
from fulldepth.errors import FulldepthError
from fulldepth.exit import export_layers

NAMES = ["average_precision", "detection_loss"]
Answers = tuple[Tensor, Tensor, list[dict[str, Tensor]]]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and its images."""
    return world(tmp_path_factory.mktemp("world"))


@pytest.fixture(scope="module")
def plain(places: tuple[Path, Path]) -> Answers:
    """`[L, N, Q, C+1]` logits and `[L, N, Q, 4]` boxes by the oracle, and the true objects."""
    checkpoint, data = places
    return *answers(checkpoint, pixels(checkpoint, pictures(data))), objects(data)


def check_measures(results: Any, logits: Tensor, boxes: Tensor, targets: list[dict[str, Tensor]]) -> None:
    """Every layer's average precision and set loss, as `measure` gives them in float64."""
    for layer in range(1, len(logits) + 1):
        own = logits[layer - 1], boxes[layer - 1]
        expected = {
            "average_precision": precision(*own, targets),
            "detection_loss": {name: float(value) for name, value in set_loss(*own, targets).items()},
        }
        for measure, values in expected.items():
            found = {name: results.values(measure, name)[layer] for name in values}
            assert found == pytest.approx(values, abs=1e-6), (measure, layer)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
def test_an_exported_model_ends_in_the_heads_of_its_last_layer(
    places: tuple[Path, Path], plain: Answers, tmp_path: Path, layers: int, request: pytest.FixtureRequest
) -> None:
    if layers == 1:
        request.getfixturevalue("without_fresh_process")
    checkpoint, data = places
    logits, boxes, _ = plain
    made = export_layers(checkpoint, tmp_path / "short", export_layers=layers)
    assert made.logit_error < 1e-5
    stock, report = tf.AutoModelForObjectDetection.from_pretrained(
        tmp_path / "short", output_loading_info=True, dtype=torch.float64
    )
    assert not any(report.values())
    assert (type(stock), stock.config.decoder_layers) == (tf.DetrForObjectDetection, layers)
    inputs = pixels(tmp_path / "short", pictures(data))
    output = stock.eval()(**{name: v.double() if v.is_floating_point() else v for name, v in inputs.items()})
    torch.testing.assert_close(output.logits, logits[layers - 1], rtol=0, atol=1e-9)
    torch.testing.assert_close(output.pred_boxes, boxes[layers - 1], rtol=0, atol=1e-9)
    assert (tmp_path / "short" / HEADS_FILE).is_file() == (layers > 1)
    if layers > 1:
        for found, expected in zip(answers(tmp_path / "short", inputs), (logits, boxes), strict=True):
            torch.testing.assert_close(found, expected[:layers], rtol=0, atol=1e-9)
        kept, original = load_file(tmp_path / "short" / HEADS_FILE), load_file(checkpoint / HEADS_FILE)
        assert sorted(kept) == [name for name in sorted(original) if int(name.split(".")[1]) < layers]
        assert all(torch.equal(weight, original[name]) for name, weight in kept.items())


def test_malformed_box_heads_are_refused(places: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint, data = places
    heads, box = load_file(checkpoint / HEADS_FILE), "exit_box_heads.2.weight"
    shutil.copytree(checkpoint, tmp_path / "model")
    cases: dict[str, dict[str, Tensor]] = {
        "exit_box_heads": {name: weight for name, weight in heads.items() if "box" not in name},
        "exit_heads": {name: weight for name, weight in heads.items() if "box" in name},
        box: {**heads, box: torch.ones(5, 32)},
    }
    for part, tensors in cases.items():
        save_file(tensors, tmp_path / "model" / HEADS_FILE)
        with pytest.raises(FulldepthError, match=rf"{HEADS_FILE}[:.] .*{part}"):
            fulldepth.measure(tmp_path / "model", data, measures=NAMES)


def test_a_norm_between_the_layers_is_measured_but_not_cut(tmp_path: Path) -> None:
    """`auxiliary_loss`: the final norm also stands between the layers; earlier layers are read with it once."""
    checkpoint, data = world(tmp_path, "detr-auxiliary")
    logits, boxes = answers(checkpoint, pixels(checkpoint, pictures(data)))
    results = fulldepth.measure(checkpoint, data, measures=NAMES, dtype="float64")
    check_measures(results, logits, boxes, objects(data))
    with pytest.raises(FulldepthError, match="its final norm also stands between layers"):
        export_layers(checkpoint, tmp_path / "short", export_layers=2)
    assert json.loads((checkpoint / "config.json").read_text())["auxiliary_loss"]

"""Early exit of a detector's decoder, against stock models with fewer decoder layers and a plain loop."""

from __future__ import annotations

import copy

import pytest
import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoModelForObjectDetection,
    DetrForObjectDetection,
    DetrImageProcessorPil,
)

import tiny_models
from fulldepth import exit
from fulldepth.data.shapes import CLASSES, draw
from fulldepth.early_exit import EarlyExit, Exit, open_checkpoint, prepare_subject, read
from fulldepth.early_exit.costs import flops_of
from fulldepth.errors import FulldepthError
from fulldepth.metrics.average_precision import average_precision
from fulldepth.settings.exit import ExitSettings

DATA, RULES = "shapes:32x12/train", ["confidence", "margin", "entropy", "patience"]


def build(name="detr"):
    """A tiny DETR of 3 decoder layers in float64, whose probabilities cover (0, 1)."""
    model = tiny_models.build(name, dtype=torch.float64)
    model.config.id2label = dict(enumerate(CLASSES))
    model.config.label2id = {name: index for index, name in enumerate(CLASSES)}
    with torch.no_grad():
        model.class_labels_classifier.weight.mul_(6.0)
    return model


def stopped(model, layers):
    """The stock model with the first decoder layers of another."""
    config = copy.deepcopy(model.config)
    config.decoder_layers = layers
    cut = DetrForObjectDetection(config).to(torch.float64).eval()
    kept = {name: value for name, value in model.state_dict().items() if name in cut.state_dict()}
    cut.load_state_dict(kept)
    return cut


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    folder = tmp_path_factory.mktemp("detr")
    build().save_pretrained(folder)
    settings = ExitSettings(dtype="float64")
    return prepare_subject(open_checkpoint(str(folder), settings), DATA, settings)


@torch.no_grad()
def stock_outputs(subject):
    """Logits `[L, N, Q, C+1]` and boxes of stock models with 1..L decoder layers, image by image; and the objects."""
    models = [stopped(subject.checkpoint.model, layers) for layers in (1, 2, 3)]
    batches = [subject.sequences.collate([index]) for index in range(len(subject.sequences))]
    outputs = [[model(**subject.inputs(batch.inputs)) for batch in batches] for model in models]
    logits = torch.stack([torch.cat([one.logits for one in layer]) for layer in outputs])
    boxes = torch.stack([torch.cat([one.pred_boxes for one in layer]) for layer in outputs])
    return logits, boxes, [batch.objects[0] for batch in batches]


def value(probabilities, rule):
    """Mean over the queries `[Q, C+1]` of a rule's value."""
    top = probabilities.sort(-1, descending=True).values
    if rule == "confidence":
        return float(top[:, 0].mean())
    if rule == "margin":
        return float((top[:, 0] - top[:, 1]).mean())
    entropy = -(probabilities * probabilities.log()).sum(-1)
    return float((1 - entropy / torch.tensor(float(probabilities.shape[-1])).log()).mean())


def leave(logits, rule, threshold):
    """The layer after which an image leaves, from logits `[L, Q, C+1]`."""
    last, same = len(logits), 0
    for layer in range(1, last):
        equal = layer > 1 and bool((logits[layer - 1].argmax(-1) == logits[layer - 2].argmax(-1)).all())
        same = same + 1 if equal else 1
        sure = same / last if rule == "patience" else value(logits[layer - 1].softmax(-1), rule)
        if threshold < 1 and sure > threshold:
            return layer
    return last


def test_images_leave_with_the_outputs_of_a_decoder_that_stops_there(subject):
    logits, boxes, _ = stock_outputs(subject)
    early, left_early = EarlyExit(subject), set()
    for rule in RULES:
        at_first = [] if rule == "patience" else [value(image.softmax(-1), rule) for image in logits[0]]
        threshold = sum(at_first) / len(at_first) if at_first else 0.6
        when = Exit(rule, threshold, 1, 3)
        inputs = subject.inputs(subject.sequences.collate(range(len(subject.sequences))).inputs)
        (own_logits, own_boxes), left = early.run(inputs, when)
        assert left.tolist() == [leave(logits[:, image], rule, threshold) for image in range(logits.shape[1])]
        images = torch.arange(logits.shape[1])
        torch.testing.assert_close(own_logits, logits[left - 1, images], rtol=0, atol=1e-9)
        torch.testing.assert_close(own_boxes, boxes[left - 1, images], rtol=0, atol=1e-9)
        left_early |= set(left.tolist())
    assert left_early == {1, 2, 3}


def test_the_sweep_gives_the_average_precision_of_what_left(subject):
    logits, boxes, objects = stock_outputs(subject)
    thresholds = [0.35, 0.6, 1.0]
    results = exit.sweep(
        subject.checkpoint.model,
        subject.sequences,
        rule=["entropy", "patience"],
        thresholds=thresholds,
        batch_size=5,
        rounds=1,
    )
    images = range(logits.shape[1])
    full = average_precision(logits[-1], boxes[-1], objects)["ap"]
    assert results.meta["full"]["average_precision"] == pytest.approx(full, abs=1e-12)
    for row in results.meta["exits"]:
        left = [leave(logits[:, image], row["rule"], row["threshold"]) for image in images]
        assert row["exits"] == [left.count(layer) for layer in (1, 2, 3)]
        chosen = [
            (logits[layer - 1, image], boxes[layer - 1, image]) for image, layer in zip(images, left, strict=True)
        ]
        plain = average_precision(*zip(*chosen, strict=True), objects)["ap"]
        assert row["average_precision"] == pytest.approx(plain, abs=1e-12)
        assert row["drop"] == pytest.approx(full - plain, abs=1e-12)
        same = [(own.argmax(-1) == logits[-1, image].argmax(-1)).double() for image, (own, _) in enumerate(chosen)]
        assert row["agreement"] == pytest.approx(float(torch.stack(same).mean()))
        assert row["measured_speedup"] > 0
        assert row["theoretical_speedup"] == pytest.approx(1 / row["flops_share"])
    for layer in (1, 2, 3):
        plain = average_precision(logits[layer - 1], boxes[layer - 1], objects)
        assert results.values("average_precision", "ap50")[layer] == pytest.approx(plain["ap50"], abs=1e-12)


@torch.no_grad()
def test_only_decoder_layers_are_saved(subject):
    """Operations by the formula of matrix products and convolutions, counted apart for the parts of a DETR."""
    early = EarlyExit(subject)
    inputs = subject.inputs(subject.sequences.collate([0, 1]).inputs)
    flops = flops_of(early, inputs)
    model, config = subject.checkpoint.model, subject.checkpoint.model.config
    queries, width, wide = config.num_queries, config.d_model, config.decoder_ffn_dim
    positions = model(**inputs).encoder_last_hidden_state.shape[1]
    own = 2 * queries * width * width * 4 + 4 * queries * queries * width  # self-attention
    cross = 2 * queries * width * width * 2 + 2 * positions * width * width * 2 + 4 * queries * positions * width
    mlp = 2 * 2 * queries * width * wide
    assert flops.layers == pytest.approx([own + cross + mlp] * 3)
    assert flops.heads == pytest.approx([2 * queries * width * (config.num_labels + 1)] * 3)
    boxes = 2 * queries * (2 * width * width + 4 * width)
    assert flops.answers == pytest.approx([boxes] * 3)
    total = flops.before + 3 * (own + cross + mlp) + flops.heads[-1] + boxes
    assert flops.full == pytest.approx(total)
    two, one = Exit("confidence", 0.5, 1, 3), torch.tensor([0, 1, 0])
    expected = (flops.before + 2 * (own + cross + mlp) + 2 * flops.heads[0] + boxes) / flops.full
    assert flops.share(one, two) == pytest.approx(expected)
    assert flops.share(torch.tensor([0, 0, 4]), Exit("confidence", 1.0, 1, 3)) == 1.0


def test_a_norm_between_the_layers_is_applied_once_before_the_next(tmp_path):
    """With `auxiliary_loss` the final norm also stands between decoder layers."""
    model = build("detr-auxiliary")
    model.save_pretrained(tmp_path)
    settings = ExitSettings(dtype="float64")
    subject = prepare_subject(open_checkpoint(str(tmp_path), settings), DATA, settings)
    inputs = subject.inputs(subject.sequences.collate(range(6)).inputs)
    early = EarlyExit(subject)
    with torch.no_grad():
        output = model(**inputs)
    (logits, boxes), left = early.run(inputs, Exit("patience", 0.99, 1, 3))
    assert left.tolist() == [3] * 6
    torch.testing.assert_close(logits, output.logits, rtol=0, atol=1e-9)
    torch.testing.assert_close(boxes, output.pred_boxes, rtol=0, atol=1e-9)
    readings = read(subject, ["confidence"], tokens=None, seed=0)
    (_, _), left = early.run(inputs, (when := Exit("confidence", 0.6, 1, 3)))
    assert left.tolist() == readings.layers(when)[:6].tolist()


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
def test_the_exported_first_layers_are_the_early_exit_there(tmp_path, layers):
    """By stock transformers alone, in float32, with the processor of the checkpoint."""
    build().float().save_pretrained(tmp_path / "whole")
    processor = DetrImageProcessorPil(size={"shortest_edge": 40, "longest_edge": 60}, image_mean=[0.4, 0.5, 0.6])
    processor.save_pretrained(tmp_path / "whole")
    made = exit.export_layers(tmp_path / "whole", tmp_path / "short", export_layers=layers)
    assert (made.layers, made.num_layers) == (layers, 3)
    assert made.logit_error < 1e-5
    assert f"the first {layers} of 3 decoder layers" in (tmp_path / "short" / "README.md").read_text()
    settings = ExitSettings()
    subject = prepare_subject(open_checkpoint(str(tmp_path / "whole"), settings), DATA, settings)
    inputs = subject.inputs(subject.sequences.collate(range(6)).inputs)
    (logits, boxes), left = EarlyExit(subject).run(inputs, Exit("confidence", 1e-6, layers, 3))
    assert left.tolist() == [layers] * 6
    short = AutoModelForObjectDetection.from_pretrained(tmp_path / "short")
    assert (type(short), short.config.decoder_layers) == (DetrForObjectDetection, layers)
    images = [draw("train", 32, index)[0] for index in range(6)]
    own = short(**AutoImageProcessor.from_pretrained(tmp_path / "short")(images=images, return_tensors="pt"))
    torch.testing.assert_close(own.logits, logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.pred_boxes, boxes, rtol=1e-5, atol=1e-6)


def test_a_calibrated_threshold_keeps_the_average_precision(subject):
    results = exit.sweep(
        subject.checkpoint.model, subject.sequences, target_accuracy_drop=0.2, rounds=0, thresholds=[0.5, 1.0]
    )
    chosen = [row for row in results.meta["exits"] if row["calibrated"]]
    assert {row["split"] for row in chosen} == {"calibration", "report"}
    assert next(row["drop"] for row in chosen if row["split"] == "calibration") <= 0.2
    assert all(row["measured_speedup"] is None for row in chosen)


def test_images_without_boxes_are_refused(subject, tmp_path):
    for name in ("circle", "square"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (32, 32)).save(tmp_path / name / "0.png")
    with pytest.raises(FulldepthError, match="has no boxes, and DetrForObjectDetection is judged by its average"):
        exit.sweep(subject.checkpoint.name, str(tmp_path))

"""Training of detectors: the task, its losses per layer in the objective, and the replaced loss function."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

import tiny_models
from drawn_shapes import draw
from fulldepth.losses import Objective, add_exit_heads, use_detection_loss
from losses.trained_step import states_of, step
from refusals import refused


def batch(size, empty=()):
    pixels, labels = [], []
    for index in range(size):
        image, objects = draw("train", 48, index)
        pixels.append(torch.from_numpy(np.asarray(image, dtype=np.float32) / 255).permute(2, 0, 1))
        keep = slice(0, 0 if index in empty else None)
        boxes = torch.tensor(objects.relative, dtype=torch.float32)[keep]
        labels.append({"class_labels": torch.tensor(objects.classes)[keep], "boxes": boxes})
    return {"pixel_values": torch.stack(pixels), "labels": labels}


@pytest.fixture
def model():
    return tiny_models.build("detr").eval()


def stock_layers(model, inputs):
    """transformers' own loss of each decoder layer, whose state goes through the final norm and both heads once."""
    _, (_, *states) = states_of(model.model.decoder.layers, lambda: model.model(inputs["pixel_values"]))
    losses, stock = [], type(model).loss_function.fget(model)
    for state in map(model.model.decoder.layernorm, states):
        logits, boxes = model.class_labels_classifier(state), model.bbox_predictor(state).sigmoid()
        losses.append(stock(logits, inputs["labels"], model.device, boxes, model.config)[0])
    return losses


@pytest.mark.parametrize("weights", ["linear", "sum"])
def test_aligned_is_the_weighted_sum_of_the_losses_of_transformers(model, weights):
    inputs = batch(4, empty=(2,))
    shares = {"linear": [1 / 6, 2 / 6, 3 / 6], "sum": [1.0] * 3}[weights]
    expected = sum(share * loss for share, loss in zip(shares, stock_layers(model, inputs), strict=True))
    loss, parts = step(model, Objective(aligned={"weights": weights, "schedule": "always"}), inputs)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert list(parts) == ["ce", "aligned"]
    query = model.model.query_position_embeddings.weight
    ours, theirs = (torch.autograd.grad(value, [query])[0] for value in (loss, expected))
    assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_the_replaced_loss_is_transformers_and_takes_batches_without_objects(model):
    inputs = batch(3)
    stock = model(**inputs).loss
    use_detection_loss(model)
    assert model(**inputs).loss.item() == pytest.approx(stock.item(), abs=1e-6)
    assert torch.isfinite(model(**batch(2, empty=(0, 1))).loss)
    for target in inputs["labels"]:  # crowds are no targets
        crowd = {"class_labels": target["class_labels"][:1], "boxes": target["boxes"][:1] / 2}
        size = len(target["boxes"])
        target.update({name: torch.cat([value, crowd[name]]) for name, value in target.items()})
        target["crowd"] = torch.tensor([False] * size + [True])
    assert model(**inputs).loss.item() == pytest.approx(stock.item(), abs=1e-6)
    model.class_labels_classifier.bias.data.fill_(torch.nan)
    assert model(**inputs).loss.isnan()


def test_layers_of_a_detector_have_no_heads_of_their_own(model):
    with refused("is a detector; exit heads are for"):
        add_exit_heads(model)

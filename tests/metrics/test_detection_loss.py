"""The set loss against transformers' own loss of a DETR, its auxiliary outputs included, and against brute force."""

from itertools import permutations

import numpy as np
import pytest
import torch

import tiny_models
from drawn_shapes import draw
from fulldepth.execution import capture
from fulldepth.hf import Classifier, DetectionHeads, anatomy_candidates
from fulldepth.metrics import DetectionLoss, Detections, Observation, SetLoss, Setup, detection_loss


def batch(size, empty=()):
    """Pixels and targets of a few images of shapes; those in `empty` without objects."""
    pixels, targets = [], []
    for index in range(size):
        image, objects = draw("train", 48, index)
        pixels.append(torch.from_numpy(np.asarray(image, dtype=np.float32) / 255).permute(2, 0, 1))
        keep = slice(0, 0 if index in empty else None)
        targets.append(
            {
                "class_labels": torch.tensor(objects.classes)[keep],
                "boxes": torch.tensor(objects.relative, dtype=torch.float32)[keep],
            }
        )
    return torch.stack(pixels), targets


def layers_of(model, pixels):
    """Logits and boxes of every decoder layer as our heads read them."""
    anatomy = anatomy_candidates(model)[0]
    heads = DetectionHeads(Classifier(anatomy))
    with capture(anatomy, ["residual"], grad=True) as activations:
        model(pixel_values=pixels)
        states = activations["residual"]
    depth = len(states) - 1
    return [heads.read(states[layer], layer) for layer in range(1, depth + 1)]


def test_every_layer_equals_the_auxiliary_losses_of_transformers():
    model = tiny_models.build("detr-auxiliary").eval()
    with torch.no_grad():  # so that applying the norm twice is not the same as once
        model.model.decoder.layernorm.weight.uniform_(0.5, 1.5)
        model.model.decoder.layernorm.bias.uniform_(-0.5, 0.5)
    pixels, targets = batch(4, empty=(1,))
    stock = model(pixel_values=pixels, labels=targets)
    options = SetLoss.of(model.config)
    total = 0.0
    for layer, (logits, boxes) in enumerate(layers_of(model, pixels), start=1):
        suffix = "" if layer == model.config.decoder_layers else f"_{layer - 1}"
        parts = options.parts(options.sums(logits, boxes, targets))
        for ours, theirs in {"class": "loss_ce", "l1": "loss_bbox", "giou": "loss_giou"}.items():
            assert parts[ours].item() == pytest.approx(stock.loss_dict[theirs + suffix].item(), abs=1e-6)
        total = total + parts["mean"]
    assert total.item() == pytest.approx(stock.loss.item(), abs=1e-5)
    (ours,), (theirs,) = (
        torch.autograd.grad(loss, [model.model.query_position_embeddings.weight]) for loss in (total, stock.loss)
    )
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-4)


def test_a_plain_detr_is_read_as_its_own_loss_reads_it():
    model = tiny_models.build("detr").eval()
    pixels, targets = batch(3)
    logits, boxes = layers_of(model, pixels)[-1]
    expected = model(pixel_values=pixels, labels=targets)
    torch.testing.assert_close(boxes, expected.pred_boxes)
    assert detection_loss(logits, boxes, targets).item() == pytest.approx(expected.loss.item(), abs=1e-6)


def brute_force(logits, boxes, labels, true):
    """The set loss of one image in float64, over every assignment of its objects to queries."""
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)

    def giou(box, other):
        (ax, ay, aw, ah), (bx, by, bw, bh) = box, other
        low = (max(ax - aw / 2, bx - bw / 2), max(ay - ah / 2, by - bh / 2))
        high = (min(ax + aw / 2, bx + bw / 2), min(ay + ah / 2, by + bh / 2))
        shared = max(0, high[0] - low[0]) * max(0, high[1] - low[1])
        hull = (max(ax + aw / 2, bx + bw / 2) - min(ax - aw / 2, bx - bw / 2)) * (
            max(ay + ah / 2, by + bh / 2) - min(ay - ah / 2, by - bh / 2)
        )
        union = aw * ah + bw * bh - shared
        return shared / union - (hull - union) / hull

    def cost(query, number):
        distance = np.abs(boxes[query] - true[number]).sum()
        return -probabilities[query, labels[number]] + 5 * distance - 2 * giou(boxes[query], true[number])

    orders = permutations(range(len(logits)), len(labels))
    best = min(orders, key=lambda order: sum(cost(query, number) for number, query in enumerate(order)))
    classes = np.full(len(logits), logits.shape[1] - 1)
    classes[list(best)] = labels
    weights = np.where(classes == logits.shape[1] - 1, 0.1, 1.0)
    entropy = -(weights * np.log(probabilities[np.arange(len(logits)), classes])).sum() / weights.sum()
    pairs = [(boxes[query], true[number]) for number, query in enumerate(best)]
    distance = np.mean([np.abs(box - other).sum() for box, other in pairs])
    return entropy + 5 * distance + 2 * np.mean([1 - giou(*pair) for pair in pairs])


@pytest.mark.parametrize("seed", range(3))
def test_the_matching_is_the_best_of_all(seed):
    random = np.random.default_rng(seed)
    logits, labels = random.normal(size=(5, 4)), random.integers(0, 3, 3)
    boxes, true = random.uniform(0.2, 0.6, (5, 4)), random.uniform(0.2, 0.6, (3, 4))
    target = {"class_labels": torch.from_numpy(labels), "boxes": torch.from_numpy(true)}
    crowd = {  # a crowd is no target
        "class_labels": torch.cat([target["class_labels"], torch.tensor([1])]),
        "boxes": torch.cat([target["boxes"], torch.full((1, 4), 0.5)]),
        "crowd": torch.tensor([False, False, False, True]),
    }
    expected = brute_force(logits, boxes, labels, true)
    for given in (target, crowd):
        loss = detection_loss(torch.from_numpy(logits)[None], torch.from_numpy(boxes)[None], [given])
        assert float(loss) == pytest.approx(expected, abs=1e-12)


def test_batches_without_objects_and_broken_predictions_give_a_loss():
    """transformers' own loss fails on both: it reshapes an empty matrix, and refuses boxes that are NaN."""
    none = [{"class_labels": torch.zeros(0, dtype=torch.int64), "boxes": torch.zeros(0, 4)}] * 2
    logits = torch.randn(2, 5, 4, requires_grad=True)
    loss = detection_loss(logits, torch.rand(2, 5, 4), none)
    labels = torch.full((10,), 3)
    torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels))
    loss.backward()
    assert detection_loss(logits, torch.full((2, 5, 4), torch.nan), none).isnan()


def test_the_accumulator_divides_once():
    """The mean over two unequal batches is the loss of all images at once."""
    random = torch.Generator().manual_seed(3)
    logits, boxes = torch.randn(2, 4, 6, 4, generator=random), torch.rand(2, 4, 6, 4, generator=random) * 0.4 + 0.1
    targets = batch(4, empty=(2,))[1]
    measure = DetectionLoss(Setup(num_layers=2, width=4, num_sequences=4))
    for part in (slice(0, 1), slice(1, 4)):
        mask = torch.ones(len(targets[part]), 6, dtype=torch.bool)
        detections = Detections(logits[:, part], boxes[:, part], targets[part])
        measure.update(Observation({}, mask, mask, torch.arange(4)[part], detections=detections))
    means = {row.layer: row.value for row in measure.rows() if row.statistic == "mean"}
    assert means == pytest.approx(
        {layer + 1: float(detection_loss(logits[layer], boxes[layer], targets)) for layer in (0, 1)}, abs=1e-5
    )

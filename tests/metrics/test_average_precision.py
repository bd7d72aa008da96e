"""Average precision, which is computed by COCO's own code, against examples computed by hand."""

import numpy as np
import pytest
import torch

from fulldepth.metrics import AveragePrecision, Detections, Observation, Setup, average_precision
from metrics.oracle import jackknife

CLASSES, QUERIES = 3, 12
BOX = [0.25, 0.25, 0.2, 0.2]
MISS = [0.75, 0.25, 0.2, 0.2]


def scene(random, objects):
    """Random objects, and queries near some of them: (logits, boxes, target)."""
    true = np.concatenate([random.uniform(0.2, 0.8, (objects, 2)), random.uniform(0.1, 0.4, (objects, 2))], axis=1)
    near = random.integers(0, max(objects, 1), QUERIES)
    boxes = true[near] if objects else random.uniform(0.2, 0.4, (QUERIES, 4))
    boxes = np.abs(boxes + random.normal(0, 0.02, boxes.shape)) + 1e-3
    labels = random.integers(0, CLASSES, objects)
    logits = random.normal(0, 1, (QUERIES, CLASSES + 1))
    if objects:
        logits[np.arange(QUERIES), labels[near]] += 1.5
    target = {
        "class_labels": torch.from_numpy(labels),
        "boxes": torch.from_numpy(true).reshape(-1, 4),
        "crowd": torch.from_numpy(random.uniform(size=objects) < 0.15),
    }
    return torch.from_numpy(logits), torch.from_numpy(boxes), target


def certain(*scores_and_classes):
    """Logits whose probability of a class is the given score."""
    rows = []
    for score, index in scores_and_classes:
        row = torch.full((CLASSES + 1,), 1e-9, dtype=torch.float64)
        row[index], row[-1] = score, 1 - score
        rows.append(row.log())
    return torch.stack(rows)


def test_examples_by_hand():
    """Two objects. A hit, then a miss, then a hit: precision 1 up to recall 0.5 (51 points), 2/3 beyond (50)."""
    target = {
        "class_labels": torch.tensor([0, 0]),
        "boxes": torch.tensor([[0.25, 0.25, 0.2, 0.2], [0.75, 0.75, 0.2, 0.2]]),
    }
    boxes = torch.tensor([[0.25, 0.25, 0.2, 0.2], [0.25, 0.75, 0.2, 0.2], [0.75, 0.75, 0.2, 0.2]])
    got = average_precision([certain((0.9, 0), (0.8, 0), (0.7, 0))], [boxes], [target])
    assert got["ap50"] == pytest.approx((51 * 1 + 50 * 2 / 3) / 101)
    # an IoU of 0.63 counts at three of ten thresholds
    shifted = torch.tensor([[0.25 + 0.045, 0.25, 0.2, 0.2]])  # 0.155 / 0.245
    one = {name: value[:1] for name, value in target.items()}
    got = average_precision([certain((0.9, 0))], [shifted], [one])
    assert (got["ap50"], got["ap75"]) == pytest.approx((1.0, 0.0))
    assert got["ap"] == pytest.approx(0.3)
    # two detections on a crowd are neither right nor wrong; on an object, the second is a miss; on nothing, both are
    order = [certain((0.8, 0), (0.9, 0), (0.85, 0))], [boxes[[0, 2, 2]]]
    group = {**target, "crowd": torch.tensor([False, True])}
    assert average_precision(*order, [group])["ap50"] == pytest.approx(1.0)
    assert average_precision(*order, [target])["ap50"] == pytest.approx((51 * 1 + 50 * 2 / 3) / 101)
    assert average_precision(*order, [one])["ap50"] == pytest.approx(1 / 3)


def test_images_and_classes_by_hand():
    """Class 0: a surer miss in the other image, precision 1/2. Class 1: a hit, found by its name and not its place.

    A detection of class 2, of which there is no object, and what is surest of "no object" count for nothing.
    """
    boxes = torch.tensor([[0.25, 0.25, 0.2, 0.2], [0.75, 0.75, 0.2, 0.2]])
    targets = [{"class_labels": torch.tensor([label]), "boxes": boxes[:1]} for label in (0, 1)]
    first, second = certain((0.9, 0), (0.01, 1)), certain((0.8, 1), (0.95, 0), (0.7, 2))
    found = average_precision([first, second], [boxes, boxes[[0, 1, 1]]], targets)
    assert (found["ap50"], found["ap"]) == pytest.approx((0.75, 0.75))


def test_the_accumulator_reads_every_layer_whatever_the_batches():
    random = np.random.default_rng(9)
    layers = [[scene(random, 3) for _ in range(6)] for _ in range(2)]
    targets = [target for *_, target in layers[0]]  # of both layers

    def ap(layer, images):
        return average_precision(*([layer[i][part] for i in images] for part in (0, 1)), [targets[i] for i in images])

    def rows(*batches):
        measure = AveragePrecision(Setup(num_layers=2, width=4, num_sequences=6))
        for batch in batches:
            read = [torch.stack([torch.stack([layer[i][part] for i in batch]) for layer in layers]) for part in (0, 1)]
            none = torch.ones(len(batch), QUERIES, dtype=torch.bool)
            detections = Detections(*read, [targets[i] for i in batch])
            measure.update(Observation({}, none, none, torch.tensor(batch), detections=detections))
        return measure.rows()

    found = rows([0, 1, 2, 3, 4, 5])
    assert rows([4, 5], [0, 1, 2, 3]) == found
    expected = {}
    for number, layer in enumerate(layers, start=1):
        for name, value in ap(layer, range(6)).items():
            error = jackknife(range(6), lambda kept, layer=layer, name=name: ap(layer, kept)[name])
            expected |= {(number, name): value, (number, f"standard_error_of_{name}"): pytest.approx(error)}
    assert {(row.layer, row.statistic): row.value for row in found} == expected
    assert {row.count for row in found} == {sum(int((~target["crowd"]).sum()) for target in targets)}


def logits(*rows):
    """[Q, C+1] logits of probabilities, the last of which is that of no object."""
    return torch.tensor(rows, dtype=torch.float64).log()


def objects(*boxes, **more):
    return {"class_labels": torch.zeros(len(boxes), dtype=torch.int64), "boxes": torch.tensor(boxes), **more}


def test_a_score_is_the_probability_among_all_classes_and_no_object():
    """0.3 of all is more than 0.25, although 0.25 of 0.3 is a larger share of the objects than 0.3 of 0.5."""
    scores = logits([0.3, 0.2, 0.5], [0.25, 0.05, 0.7])
    found = average_precision([scores], [torch.tensor([BOX, MISS])], [objects(BOX)])
    assert found["ap50"] == pytest.approx(1.0)
    found = average_precision([scores], [torch.tensor([MISS, BOX])], [objects(BOX)])
    assert found["ap50"] == pytest.approx(0.5)


def test_a_crowd_is_no_object_that_could_be_missed():
    """One of two objects is found: half of the recall, 51 of 101 points; all of it where the other is a crowd."""
    crowd = [0.75, 0.75, 0.2, 0.2]
    given = [logits([0.9, 0.05, 0.05])], [torch.tensor([BOX])]
    assert average_precision(*given, [objects(BOX, crowd)])["ap50"] == pytest.approx(51 / 101)
    both = objects(BOX, crowd, crowd=torch.tensor([False, True]))
    assert average_precision(*given, [both])["ap50"] == pytest.approx(1.0)


@pytest.mark.parametrize(("misses", "expected"), [(11, 1 / 12), (99, 1 / 100), (100, 0.0)])
def test_a_hundred_detections_of_a_class_count_in_an_image(misses, expected):
    """The hit comes after so many surer misses."""
    rows = [[0.9 - at / 1000, 0.01, 0.09 + at / 1000] for at in range(misses + 1)]
    found = average_precision([logits(*rows)], [torch.tensor([MISS] * misses + [BOX])], [objects(BOX)])
    assert found["ap50"] == pytest.approx(expected)

"""Agreement of a detector's layers, against loops over queries."""

import numpy as np
import pytest
import torch

from fulldepth.metrics import DetectionAgreement, Detections, Observation, Setup, detection_agreement

LAYERS, IMAGES, QUERIES = 3, 5, 4


def share(box, other):
    """Intersection over union of two (centre x, centre y, width, height)."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = box, other
    width = min(ax + aw / 2, bx + bw / 2) - max(ax - aw / 2, bx - bw / 2)
    height = min(ay + ah / 2, by + bh / 2) - max(ay - ah / 2, by - bh / 2)
    shared = max(0.0, width) * max(0.0, height)
    return shared / (aw * ah + bw * bh - shared)


def predictions(seed):
    random = np.random.default_rng(seed)
    logits = random.normal(size=(LAYERS, IMAGES, QUERIES, 4))
    return torch.from_numpy(logits), torch.from_numpy(random.uniform(0.2, 0.5, (LAYERS, IMAGES, QUERIES, 4)))


def plain(logits, boxes):
    """Layer -> the three shares, query by query."""
    found = {}
    for layer in range(LAYERS):
        same, same_objects, overlaps = [], [], []
        for image in range(IMAGES):
            for query in range(QUERIES):
                now, last = (int(logits[index, image, query].argmax()) for index in (layer, -1))
                same.append(now == last)
                if last != 3:
                    same_objects.append(now == last)
                    overlaps.append(share(*(boxes[index, image, query].tolist() for index in (layer, -1))))
        found[layer] = {"class": np.mean(same), "object_class": np.mean(same_objects), "box_iou": np.mean(overlaps)}
    return found


def test_agreement_equals_loops_over_queries():
    logits, boxes = predictions(0)
    got = detection_agreement(logits, boxes)
    for layer, expected in plain(logits, boxes).items():
        assert {name: float(values[layer]) for name, values in got.items()} == pytest.approx(expected, abs=1e-12)
    assert all(float(values[-1]) == pytest.approx(1.0) for values in got.values())


def test_standard_errors_are_those_of_a_ratio_over_images():
    logits, boxes = predictions(1)
    measure = DetectionAgreement(Setup(num_layers=LAYERS, width=4, num_sequences=IMAGES))
    for part in (slice(0, 2), slice(2, None)):
        mask = torch.ones(logits[:, part].shape[1:3], dtype=torch.bool)
        found = Detections(logits[:, part], boxes[:, part])
        measure.update(Observation({}, mask, mask, torch.arange(IMAGES)[part], detections=found))
    rows = {(row.layer, row.statistic): row for row in measure.rows()}
    expected = plain(logits, boxes)[0]
    whole = expected["box_iou"]
    seen = (logits[-1].argmax(-1) != 3).sum(1).tolist()
    residuals = []  # of the ratio estimator, by image
    for image, number in enumerate(seen):
        mean = float(detection_agreement(logits[:, [image]], boxes[:, [image]])["box_iou"][0]) if number else 0.0
        residuals.append(number * (mean - whole))
    error = np.sqrt(IMAGES / (IMAGES - 1) * np.square(residuals).sum()) / sum(seen)
    assert rows[1, "box_iou"].value == pytest.approx(whole)
    assert rows[1, "standard_error_of_box_iou"].value == pytest.approx(error)
    objects = int((logits[-1].argmax(-1) != 3).sum())
    assert (rows[1, "box_iou"].count, rows[1, "class"].count) == (objects, IMAGES * QUERIES)


def test_a_decoder_of_one_layer_agrees_with_itself():
    logits, boxes = (part[:1] for part in predictions(2))
    measure = DetectionAgreement(Setup(num_layers=1, width=4, num_sequences=IMAGES))
    mask = torch.ones(IMAGES, QUERIES, dtype=torch.bool)
    measure.update(Observation({}, mask, mask, torch.arange(IMAGES), detections=Detections(logits, boxes)))
    rows = {row.statistic: row.value for row in measure.rows() if row.layer == 1}
    assert [rows[name] for name in DetectionAgreement.statistics] == pytest.approx([1.0, 1.0, 1.0])

"""Average precision against COCO's protocol written again with plain loops, and examples computed by hand."""

import numpy as np
import pytest
import torch

from fulldepth.metrics import AveragePrecision, Detections, Observation, Setup, average_precision
from metrics.oracle import jackknife

CLASSES, QUERIES = 3, 12


def share(box, other, crowd=False):
    """Intersection over union of two (centre x, centre y, width, height); over the first's area for crowds."""
    (ax, ay, aw, ah), (bx, by, bw, bh) = box, other
    width = min(ax + aw / 2, bx + bw / 2) - max(ax - aw / 2, bx - bw / 2)
    height = min(ay + ah / 2, by + bh / 2) - max(ay - ah / 2, by - bh / 2)
    shared = max(0.0, width) * max(0.0, height)
    return shared / (aw * ah) if crowd else shared / (aw * ah + bw * bh - shared)


def of_class(images, index, threshold):
    """AP of one class at one threshold, by the text of the protocol: sort, match, interpolate at 101 recalls."""
    flags, positives = [], 0  # (score, order) -> True, False or None = ignored
    for detections, objects in images:
        mine = sorted((d for d in detections if d[1] == index), key=lambda d: -d[0])[:100]
        true = [o for o in objects if o[0] == index]
        positives += sum(not crowd for _, _, crowd in true)
        used = set()
        for score, _, box in mine:
            free = [
                (share(box, other), number)
                for number, (_, other, crowd) in enumerate(true)
                if not crowd and number not in used and share(box, other) >= min(threshold, 1 - 1e-10)
            ]
            if free:
                used.add(max(free)[1])
                flags.append((score, True))
            elif any(crowd and share(box, other, True) >= threshold for _, other, crowd in true):
                continue
            else:
                flags.append((score, False))
    if not positives:
        return None
    flags.sort(key=lambda flag: -flag[0])
    points, hits = [], 0
    for number, (_, right) in enumerate(flags, start=1):
        hits += right
        points.append((hits / positives, hits / number))
    best = [max((p for r, p in points if r >= recall), default=0.0) for recall in np.linspace(0, 1, 101)]
    return sum(best) / 101


def plain(images):
    """ap, ap50, ap75."""
    table = {}
    for threshold in [0.5, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95]:
        values = [of_class(images, index, threshold) for index in range(CLASSES)]
        table[threshold] = np.mean([value for value in values if value is not None])
    return {"ap": np.mean(list(table.values())), "ap50": table[0.5], "ap75": table[0.75]}


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


def as_lists(logits, boxes, target):
    """The detections (score, class, box) and objects (class, box, crowd) of a scene."""
    probabilities = torch.softmax(logits, -1)[:, :-1]
    scores, classes = probabilities.max(-1)
    detections = list(zip(scores.tolist(), classes.tolist(), boxes.tolist(), strict=True))
    names = ("class_labels", "boxes", "crowd")
    return detections, list(zip(*(target[name].tolist() for name in names), strict=True))


def test_average_precision_equals_the_protocol_in_plain_loops():
    random = np.random.default_rng(0)
    scenes = [scene(random, int(objects)) for objects in random.integers(0, 6, 12)]
    got = average_precision(*zip(*scenes, strict=True))
    assert got == pytest.approx(plain([as_lists(*each) for each in scenes]), abs=1e-12)
    assert 0.05 < got["ap50"] < 0.95


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
    # a detection on a crowd is neither right nor wrong; without the crowd it halves the precision
    group = {**target, "crowd": torch.tensor([False, True])}
    order = [certain((0.8, 0), (0.9, 0))], [boxes[[0, 2]]]
    assert average_precision(*order, [group])["ap50"] == pytest.approx(1.0)
    assert average_precision(*order, [one])["ap50"] == pytest.approx(0.5)


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

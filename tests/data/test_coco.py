"""Detection data: hand-made files in COCO's format, their defects, and the synthetic shapes."""

import copy
import re
from functools import reduce
from operator import getitem

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from PIL import Image
from torch.testing import assert_close

from data.test_images import Processor
from drawn_shapes import CLASSES, SCRIPT, draw, shapes
from fulldepth.data import open_source, prepare
from fulldepth.data.labelled import check_rows, number_labels
from json_files import write_json
from refusals import refused

GOOD = {
    "images": [
        {"id": 7, "file_name": "b.png", "width": 40, "height": 20},
        {"id": 3, "file_name": "a.png", "width": 20, "height": 20},
    ],
    "categories": [{"id": 18, "name": "dog"}, {"id": 2, "name": "car"}],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 18, "bbox": [10, 5, 20, 10], "iscrowd": 0},
        {"id": 2, "image_id": 7, "category_id": 2, "bbox": [0, 0, 4, 20.5], "iscrowd": 1},
    ],
}


@pytest.fixture
def written(tmp_path):
    """`written(changes)` writes the good file with changes at paths such as `annotations.0.bbox`, and its images."""

    def write(changes=None, folder="images"):
        content = copy.deepcopy(GOOD)
        for path, value in (changes or {}).items():
            *above, last = (int(key) if key.isdigit() else key for key in path.split("."))
            reduce(getitem, above, content)[last] = value
        (tmp_path / folder).mkdir(exist_ok=True)
        Image.new("RGB", (40, 20), (200, 0, 0)).save(tmp_path / folder / "b.png")
        Image.new("RGB", (20, 20), (0, 200, 0)).save(tmp_path / folder / "a.png")
        path = tmp_path / "instances.json"
        write_json(path, content)
        return path

    return write


def test_a_hand_made_file_is_read_as_written(written):
    source = open_source(written())
    assert (source.kind, source.class_names) == ("objects", ("car", "dog"))  # by the categories' ids
    first, second = source.records
    assert first.objects.classes == (1, 0)
    assert first.objects.boxes == ((10, 5, 20, 10), (0, 0, 4, 20))  # half a pixel outside is cut off
    assert first.objects.crowd == (False, True)
    assert_allclose(first.objects.relative[0], (0.5, 0.5, 0.5, 0.5))
    assert (first.image().size, second.image().size, len(second.objects.classes)) == ((40, 20), (20, 20), 0)


def test_a_box_that_leaves_its_image_by_a_pixel_is_cut_off_at_every_edge(written):
    boxes = {(-1.0, -0.5, 11.0, 5.5): (0, 0, 10, 5), (30.0, 15.0, 11.0, 5.5): (30, 15, 10, 5)}
    for box, expected in boxes.items():
        first, _ = open_source(written({"annotations.0.bbox": [*box]})).records
        assert first.objects.boxes[0] == expected


def test_the_layout_of_coco_is_found(written, tmp_path):
    path = written(folder="val2017")
    (tmp_path / "annotations").mkdir()
    moved = path.rename(tmp_path / "annotations" / "instances_val2017.json")
    assert open_source(moved).records[0].image().size == (40, 20)


DEFECTS = [
    ({"annotations.1.image_id": 99}, "annotations[1] (id 2): image_id 99 is not among the images"),
    ({"annotations.0.category_id": 3}, "annotations[0] (id 1): category_id 3 is not among the categories"),
    *(
        ({"annotations.0.bbox": box}, f"annotations[0] (id 1): the box {box} has no area, or is not inside its image")
        for box in ([21.5, 5.0, 20.0, 10.0], [3.0, 5.0, 0.0, 10.0], [-1.5, 5.0, 20.0, 10.0], [3.0, 11.5, 9.0, 10.0])
    ),
    ({"annotations.0.bbox": [3, 5, float("nan"), 10]}, "annotations[0] (id 1): bbox"),
    ({"annotations.0.iscrowd": 2}, "annotations[0] (id 1): iscrowd"),
    ({"annotations.0.image_id": "7"}, "annotations[0] (id 1): image_id is '7'"),
    ({"annotations.0": None}, "annotations[0]"),
    ({"images.1.file_name": "c.png"}, "images[1] (id 3)"),
    ({"images.1.file_name": "../a.png"}, "images[1] (id 3): file_name is '../a.png', expected a relative path"),
    ({"images.1.id": 7}, "images[1] (id 7): another image has the same id"),
    ({"images.1.width": None}, "images[1] (id 3): width"),
    ({"images.1": "a.png"}, "images[1]"),
]


@pytest.mark.parametrize(("changes", "where"), DEFECTS)
def test_defects_are_refused_with_their_entry_and_skipped_on_request(written, changes, where):
    path, kind = written(changes), where.split("s[")[0]
    with refused(re.escape(f"instances.json {where}") + ".*--skip-bad"):
        open_source(path)
    source = open_source(path, skip_bad=True)
    assert f"1 {kind}s" in source.warnings[0]
    count = sum(len(record.objects.classes) for record in source.records)
    assert (len(source), count) == ((2, 1) if kind == "annotation" else (1, 2))


BAD = [
    ({"categories": "dogs"}, "categories"),
    ({"categories.1.id": 18}, r"categories\[1\] \(id 18\)"),
    ({"categories.1.name": "\ud800"}, r"categories\[1\]"),
    ({"images": [], "annotations": []}, "holds no images without defects"),
    ("caf\u00e9".encode("latin-1"), "not valid JSON"),
    (b"[]", "not in COCO's format"),
    (b'[{"text": "a"}]', "Rows of other data belong into a .jsonl file, one object on a line"),
]


@pytest.mark.parametrize(("changes", "place"), BAD)
def test_files_of_another_format_are_refused(written, changes, place):
    path = written(None if isinstance(changes, bytes) else changes)
    if isinstance(changes, bytes):
        path.write_bytes(changes)
    for skip_bad in (False, True):
        with refused(place):
            open_source(path, skip_bad=skip_bad)


def test_categories_are_told_apart(written):
    """Names that differ in case alone are two classes; names that are equal as far as they are read are refused."""
    source = open_source(written({"categories.0.name": "CAR"}))
    rows = check_rows(source, "detection", source.class_names)
    assert rows.class_names == ("car", "CAR")
    assert [record.objects.classes for record in rows.records] == [(1, 0), ()]
    with refused(r"categories\[1\] \(id 2\)"):
        open_source(written({"categories.0.name": "n" * 300 + "1", "categories.1.name": "n" * 300 + "2"}))


def test_objects_follow_the_classes_of_the_model(written):
    """Names decide as soon as one agrees; objects of other classes are refused or left out; an unused one may be
    unknown.
    """
    source, options = open_source(written()), {"task": "detection", "processor": Processor()}
    numbered = number_labels(source, ["dog", "N/A", "Car"])
    prepared = prepare(numbered, **options)
    objects = prepared.collate([0]).objects[0]
    assert objects["class_labels"].tolist() == [0, 2]
    assert_close(objects["boxes"], torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.05, 0.5, 0.1, 1.0]]))
    assert objects["crowd"].tolist() == [False, True]
    assert prepared.num_targets == 1  # crowds are no targets
    for classes, place in ((["cat", "car"], r"row 1: .* dog"), (["thing"], "thing")):
        with refused(place):
            number_labels(source, classes)
    kept = number_labels(source, ["cat", "car"], skip_bad=True)
    assert [record.objects.classes for record in kept.records] == [(1,), ()]
    assert "1 bad" in kept.warnings[-1]
    more = written({"categories": [*GOOD["categories"], {"id": 1, "name": "things"}]})
    unused = number_labels(open_source(more), ["dog", "car"])
    assert unused.records[0].objects.classes == (0, 1)


def test_an_image_of_another_size_than_stated_is_refused_when_it_is_read(written):
    source = open_source(written({"images.0.width": 41}))
    with refused(r"images\[0\] \(id 7\) is stated to have 41 x 20 pixels; its file b\.png has 40"):
        source.records[0].image()


def test_the_shapes_of_the_example_are_what_they_are_drawn_from():
    """Boxes hold the pixels of their shapes, through the file."""
    source = open_source(shapes("64x5/train"))
    assert source.class_names == CLASSES
    for index, record in enumerate(source.records):
        image, objects = draw("train", 64, index)
        assert record.objects == objects
        assert np.array_equal(np.asarray(record.image()), np.asarray(image))
        pixels = np.asarray(image)[:, :, None, :] == np.array(SCRIPT["COLOURS"])
        drawn = pixels.all(-1).any(-1)  # [64, 64]: a pixel has the colour of a shape
        covered = np.zeros_like(drawn)
        for x, y, width, height in np.array(objects.boxes, dtype=int):
            covered[y : y + height, x : x + width] = True
        assert drawn[covered].mean() > 0.4
        assert drawn[~covered].mean() < 0.001

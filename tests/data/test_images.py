import io

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from transformers.image_utils import load_image

from fulldepth.data import open_source, prepare
from fulldepth.data.labelled import number_labels
from refusals import refused


def picture(value, size=4):
    return Image.fromarray(np.full((size, size, 3), value, dtype=np.uint8))


def save(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    picture(value).save(path)


def pixel(record):
    return int(np.asarray(record.image())[0, 0, 0])


def pixels(records):
    """The first number and the label of each image."""
    return [(pixel(record), record.label) for record in records]


class Processor:
    """Scales to [0, 1]; the simplest image processor there is."""

    def __call__(self, images, return_tensors):
        assert return_tensors == "pt"
        arrays = [torch.tensor(np.asarray(image)).permute(2, 0, 1).float() / 255 for image in images]
        return {"pixel_values": torch.stack(arrays), "sizes": [image.size for image in images]}

    def to_dict(self):
        return {"scale": 255}


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "pets"
    for i, (split, label) in enumerate([(s, c) for s in ("train", "test") for c in ("dog", "cat", "bird")]):
        for j in range(4):
            save(root / split / label / f"{j}.png", 40 * i + j)
    (root / "README.md").write_text("pets")
    return root


def test_splits_and_classes(folder):
    source = open_source(folder)
    assert (source.name, source.kind, source.class_names) == ("pets/test", "images", ("bird", "cat", "dog"))
    assert pixels(source.records[::4]) == [(200, 0), (160, 1), (120, 2)]
    assert pixel(open_source(folder, split="train").records[0]) == 80
    assert [r.label for r in open_source(folder, limit=3, order="first").records] == [0, 0, 0]
    assert open_source(folder, limit=3).class_names == ("bird", "cat", "dog")


def test_other_folders(tmp_path):
    """Classes without splits, no classes, one class, a folder around everything."""
    for number, name in enumerate("xy"):
        save(tmp_path / "a" / name / "1.png", number)
        save(tmp_path / "b" / f"{name}.png", number)
        save(tmp_path / "c" / "around" / "train" / name / "1.png", number)
        save(tmp_path / "d" / ("train", "car")[number] / "1.png", number)
        save(tmp_path / "e" / ("test", "val")[number] / "1.png", number)
        save(tmp_path / "f" / ("train", "more")[number] / "x" / "1.png", number)
    assert pixels(open_source(tmp_path / "a").records) == [(0, 0), (1, 1)]
    assert [r.label for r in open_source(tmp_path / "b").records] == [None, None]
    for folder, options, expected in (
        ("d", {}, [(1, 0), (0, 1)]),  # a class may be called train
        ("d", {"split": "train"}, [(0, None)]),
        ("e", {}, [(1, None)]),
        ("f", {}, [(0, 0)]),
    ):
        assert pixels(open_source(tmp_path / folder, **options).records) == expected
    save(tmp_path / "c" / "__MACOSX" / "train" / "x" / "0.png", 3)
    assert [r.label for r in open_source(tmp_path / "c").records] == [0, 1]


def test_a_folder_of_text_with_a_picture_is_refused_and_both_are_named(tmp_path):
    text, picture = tmp_path / "d.jsonl", tmp_path / "figures" / "fig.png"
    text.write_text('{"text": "a"}\n')
    save(picture, 1)
    with refused(r"images \(figures/fig.png\) and text \(d.jsonl\)"):
        open_source(tmp_path)
    save(tmp_path / "more" / "fig.png", 1)
    assert pixels(open_source(tmp_path).records) == [(1, 0), (1, 1)]  # a table beside class folders


def test_images_from_mappings_and_datasets(tmp_path):
    buffer = io.BytesIO()
    picture(9).save(buffer, "PNG")
    save(tmp_path / "x.png", 8)
    values = [picture(7), buffer.getvalue(), str(tmp_path / "x.png"), {"bytes": buffer.getvalue(), "path": None}]
    source = open_source([{"image": v, "label": i} for i, v in enumerate(values)])
    assert pixels(source.records) == [(7, 0), (9, 1), (8, 2), (9, 3)]
    features = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["n", "m"])})
    table = datasets.Dataset.from_dict({"img": [picture(5), picture(6)], "label": [1, 0]}, features=features)
    source = open_source(table)
    assert source.class_names == ("n", "m")
    assert pixels(source.records) == [(5, 1), (6, 0)]


@pytest.mark.parametrize("orientation", [None, *range(1, 9)])
def test_photos_are_turned_as_datasets_and_transformers_turn_them(tmp_path, orientation):
    """Against the numpy operation that EXIF 2.3 defines for each orientation, for every way in."""
    upright = {
        2: np.fliplr,
        3: lambda stored: np.rot90(stored, 2),
        4: np.flipud,
        5: lambda stored: stored.swapaxes(0, 1),
        6: lambda stored: np.rot90(stored, -1),
        7: lambda stored: np.rot90(stored, 2).swapaxes(0, 1),
        8: np.rot90,
    }
    path = tmp_path / "photos" / "cat" / "1.jpg"
    path.parent.mkdir(parents=True)
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    Image.fromarray(np.arange(8 * 16 * 3, dtype=np.uint8).reshape(8, 16, 3)).save(path, exif=exif)
    stored = np.asarray(Image.open(path))
    expected = upright.get(orientation, np.asarray)(stored)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    encoded = datasets.Dataset.from_dict({"image": [str(path)], "label": [0]}, features=features)
    assert np.array_equal(np.asarray(load_image(str(path))), expected)
    sources = [path.parent.parent, encoded]
    sources += [[{"image": value, "label": 0}] for value in (str(path), path.read_bytes(), Image.open(path))]
    for source in sources:
        assert np.array_equal(np.asarray(open_source(source).records[0].image()), expected)


@pytest.mark.filterwarnings("ignore:.*Corrupt EXIF data")
def test_a_photo_with_damaged_exif_data_is_read_as_it_is_stored(tmp_path):
    picture(9).save(tmp_path / "x.jpg", exif=b"Exif\0\0II*\0\x08\0\0\0\xff\xff")
    assert pixel(open_source([{"image": str(tmp_path / "x.jpg"), "label": 0}]).records[0]) == 9


def test_prepared_images_hold_the_pixels_and_labels(folder):
    source = open_source(folder)
    numbered = number_labels(source, ["DOG", "CAT", "BIRD"])
    data = prepare(numbered, task="image-classification", processor=Processor())
    assert data.num_classes == 3
    assert data.num_targets == len(data) == 12
    seen = []
    for batch in data.batches(5):
        assert list(batch.inputs) == ["pixel_values"]
        assert batch.attention_mask is None
        for image, label in zip(batch.inputs["pixel_values"], batch.labels, strict=True):
            assert image.unique().numel() == 1
            seen.append((round(float(image[0, 0, 0]) * 255), int(label)))
    assert seen == [(40 * i + j, i - 3) for i in (5, 4, 3) for j in range(4)]  # bird, cat, dog


def test_hash_and_sample_of_images(folder):
    def data(**settings):
        return prepare(open_source(folder), task="representation", processor=Processor(), **settings)

    assert data(max_sequences=6).hash != data(max_sequences=6, seed=1).hash


JPEG = io.BytesIO()
Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(JPEG, "JPEG")
BROKEN = {
    "b.jpg": JPEG.getvalue()[:-900],
    "c.jpg": b"",
    "eps.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",  # never handed to Ghostscript
}


@pytest.mark.parametrize("name", BROKEN)
def test_damaged_images_are_named(tmp_path, name):
    (tmp_path / name).write_bytes(BROKEN[name])
    with refused(name):
        prepare(open_source(tmp_path), task="representation", processor=Processor())


def test_images_that_do_not_fit_are_refused(folder):
    for data, options, name in (
        (folder, {"split": "validation"}, "pets has no split 'validation'. It has: test, train"),
        ([{"image": 3}], {}, "rows row 1, 'image' is of type int, expected an image, its bytes or its path"),
    ):
        with refused(name):
            open_source(data, **options)
    for task, name in (("causal-lm", "pets/test"), ("representation", "image processor")):
        with refused(name):
            prepare(open_source(folder), task=task)


@pytest.mark.parametrize(
    ("shape", "kind", "words"),
    [
        ((4, 4), np.uint16, "its pixels have more than 8 bits .mode I;16"),
        ((1, 201), np.uint8, "it has 201 x 1 pixels. .* no edge more than 200 times as long as the other"),
        ((1, 200), np.uint8, None),
    ],
)
def test_images_that_would_be_cut_off_or_blown_up_are_refused(shape, kind, words, tmp_path):
    Image.fromarray(np.full(shape, 9, kind)).save(tmp_path / "x.png")
    (record,) = open_source(tmp_path).records
    if words is None:
        assert pixel(record) == 9
        return
    with refused(f"Cannot read the image .*x.png: {words}"):
        record.image()


@pytest.mark.parametrize("entry", ["test/cat/gone.png", "test/wolf", "train/gone.txt"])
def test_a_link_that_leads_nowhere_is_named_not_left_out(folder, tmp_path, entry):
    """An image, a class, another file: each would be missing without a word."""
    (folder / entry).symlink_to(tmp_path / "nowhere")
    with refused(f"{entry}: the link leads nowhere"):
        open_source(folder)


def test_a_link_to_a_class_folder_is_followed_and_one_to_itself_refused(folder, tmp_path):
    whole = pixels(open_source(folder).records)
    (folder / "test" / "cat").rename(tmp_path / "elsewhere")
    (folder / "test" / "cat").symlink_to(tmp_path / "elsewhere")
    assert pixels(open_source(folder).records) == whole
    (folder / "test" / "dog" / "up").symlink_to(folder)
    with refused("leads to a folder that holds it"):
        open_source(folder)

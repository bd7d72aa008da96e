"""Data files from anyone: read within bounds, or refused in one message that names the file."""

import contextlib
import io
import os
import resource
import struct
import warnings
import zlib
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import fulldepth.data.files
from fulldepth.data import open_documents, open_source, prepare
from fulldepth.data.tokens import WordFinder, plain_ids
from refusals import refuses


def read_all(data):
    """Open the data and decode every image."""
    source = open_source(data)
    for record in source.records:
        if record.image is not None:
            record.image()
    return source


def picture(size=(4, 4), kind="PNG", value=7):
    buffer = io.BytesIO()
    Image.new("RGB", size, (value,) * 3).save(buffer, kind)
    return buffer.getvalue()


@contextlib.contextmanager
def little_memory(spare=1 << 30):
    """Allow the process `spare` bytes of address space beyond what it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# Text and rows


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_devices_pipes_and_folders_are_no_files(tmp_path, suffix):
    device, pipe, folder = (tmp_path / f"{name}{suffix}" for name in ("device", "pipe", "folder"))
    device.symlink_to("/dev/zero")
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (device, pipe, folder):
        refuses(read_all, path, path.name)
        refuses(lambda p: list(open_documents(p)), path, path.name)


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".tsv"])
def test_a_line_without_end(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(fulldepth.data.files, "LONGEST_LINE", 1 << 20)
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"x" * (1 << 20) + b"y")
    refuses(read_all, path, path.name, "1 MiB")
    path.write_bytes((b"x" * 2**19 + b"\n") * 3)
    if suffix == ".txt":
        assert len(open_source(path).records[0].text) == 3 * (2**19 + 1)


@pytest.mark.parametrize("label", [10**9, "9" * 4000, 1e300])
def test_a_label_that_would_make_a_billion_classes(label):
    refuses(read_all, [{"text": "a", "label": 0}, {"text": "b", "label": label}], "rows row 2", "below 1,000,000")


# Parquet


def test_a_small_parquet_file_that_stands_for_a_large_one(tmp_path):
    path = tmp_path / "bomb.parquet"
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(4000, np.int32)), pa.array(["x" * 4_000_000]))
    pq.write_table(pa.table({"text": text}), path, compression="zstd")
    assert path.stat().st_size < 100_000
    with little_memory():
        refuses(read_all, path, "bomb.parquet", "1 GiB")


@pytest.mark.parametrize(
    "table",
    [
        {"text": [None, "a"]},
        {"text": [["a"], ["b"]]},
        {"image": [{"bytes": None, "path": "/dev/zero"}]},
        {"text": ["a"], "label": [float("nan")]},
        {"text": [b"\xff\xfe"]},
        {},
    ],
)
def test_parquet_columns_of_another_kind(tmp_path, table):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(table), path)
    refuses(read_all, path)


# Images


def png(width, height):
    """The start of a PNG that declares a size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = chunk(b"IDAT", zlib.compress(bytes(10**6)))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + rows + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(10_000, 10_000), (2**31 - 1, 2**31 - 1), (1, 60_000)])
def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path, size):
    content = png(*size)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.png").write_bytes(content)
    pq.write_table(pa.table({"image": [{"bytes": content, "path": None}]}), tmp_path / "a.parquet")
    places = [tmp_path / "folder", tmp_path / "a.parquet"]
    with little_memory(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for place in places:
            refuses(read_all, place, "a.p", "pixels" if size[0] < 10**9 else "")


def test_images_of_a_data_set_are_decoded_by_our_decoders_only(tmp_path):
    features = datasets.Features({"image": datasets.Image(decode=False)})
    values = [{"bytes": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "path": None}]
    table = datasets.Dataset.from_dict({"image": values}, features=features).cast_column("image", datasets.Image())
    refuses(read_all, table, "row 1", "cannot identify")
    stream = table.to_iterable_dataset()
    refuses(lambda data: open_source(data, limit=1).records[0].image(), stream, "row 1", "cannot identify")
    good = datasets.Dataset.from_dict({"image": [{"bytes": picture(value=9), "path": None}]}, features=features)
    image = open_source(good.cast_column("image", datasets.Image())).records[0].image()
    assert np.asarray(image).max() == np.asarray(image).min() == 9


class BrokenProcessor:
    """An image processor whose settings make no sense."""

    def __init__(self, result):
        self.result = result

    def __call__(self, images, return_tensors):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


@pytest.mark.parametrize("result", [TypeError("x" * 5000), None])
def test_a_processor_that_fails(result):
    source = open_source([{"image": picture()}])
    data = prepare(source, task="representation", processor=BrokenProcessor(result))
    refuses(lambda d: next(d.batches(1)), data, "BrokenProcessor")


# Data sets and tokenizers that fail while they are used


def test_any_error_of_a_data_set_names_it():
    def rows():
        yield {"text": "fine"}
        raise KeyError("lost")

    stream = datasets.IterableDataset.from_generator(
        rows, features=datasets.Features({"text": datasets.Value("string")})
    )
    refuses(open_source, stream, "datasets.Dataset", limit=5)


class PanicException(BaseException):
    """What a Rust library raises when it panics."""


class BrokenTokenizer:
    """Loads, and fails when it is used."""

    name_or_path = "some/tokenizer"
    unk_token_id = eos_token_id = 1

    def __init__(self, result, text="a"):
        self.result, self.text = result, text

    def __call__(self, *texts, **options):
        if isinstance(self.result, BaseException):
            raise self.result
        return {"input_ids": self.result}

    def decode(self, ids, **options):
        if isinstance(self.text, BaseException):
            raise self.text
        return self.text


@pytest.mark.parametrize("result", [PanicException("no entry found"), None, [1, None], [[1]], [-1]])
def test_a_tokenizer_that_fails(result):
    refuses(lambda text: plain_ids(BrokenTokenizer(result), text), "text", "some/tokenizer")
    text = b"bytes" if isinstance(result, list) else result
    refuses(WordFinder(BrokenTokenizer([5], text), ["word"]).find, [5, 6], "some/tokenizer")

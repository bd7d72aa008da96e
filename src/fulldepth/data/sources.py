"""`open_source`: whatever the person has (a file, a folder, a Hub name, Python objects) as one `Source`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import datasets
from PIL import Image

from fulldepth.data.corpus import PARTS, novels
from fulldepth.data.files import READERS, folder_source
from fulldepth.data.images import SPLITS, SUFFIXES, folder_images, zip_images
from fulldepth.data.records import (
    Columns,
    Record,
    Source,
    choose_columns,
    class_indices,
    clean_text,
    from_rows,
    image_value,
)
from fulldepth.errors import FulldepthError, one_line, unknown
from fulldepth.files import reading, reading_each

CORPUS = "corpus:"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
"""A Hub data set: `name` or `owner/name`, and a configuration after a colon where it has several."""
KNOWN = (
    f"a file ({', '.join(READERS)}), a folder or .zip of images, a folder of .txt files, a Hub data set, corpus:builtin"
)


def open_source(data: Any, *, split: str | None = None, limit: int | None = None) -> Source:
    """Open data for reading.

    Args:
        data: a path (`.txt`: one document; `.jsonl`, `.tsv`, `.parquet`: rows with `text` or `sentence` and perhaps
            `label`, two sentences, or `prompt` + `response`; a folder or `.zip` of images, with class sub-folders or
            not, below `train|validation|test` or not; a folder of `.txt`), `corpus:builtin` (its held-out part) or
            `corpus:builtin/train`, a Hub data set (`name` or `name:configuration`), or Python objects: texts,
            mappings with the keys named above, a `datasets.Dataset`. A `Source` is returned as it is.
        split: which split of an image folder, of the built-in corpus or of a Hub data set; by default the validation
            or test split where there is one.
        limit: read at most this many records: the first, of images some spread evenly over all.

    Raises:
        FulldepthError: if there is nothing to read there, or it is not what its name promises.
    """
    if limit is not None and limit < 1:
        raise FulldepthError(f"At least one record must be read, got the limit {limit}.")
    if isinstance(data, Source):
        return data
    if isinstance(data, str | Path):
        return _from_name(str(data), split, limit)
    if isinstance(
        data, datasets.Dataset | datasets.IterableDataset | datasets.DatasetDict | datasets.IterableDatasetDict
    ):
        return _from_dataset("datasets.Dataset", data, split, limit)
    if isinstance(data, Sequence) and not isinstance(data, bytes):
        return _from_objects(data[:limit])
    raise FulldepthError(
        f"Cannot read data of type {type(data).__name__}. Expected {KNOWN}, or a list of texts or mappings."
    )


def _from_name(name: str, split: str | None, limit: int | None) -> Source:
    if name.startswith(CORPUS):
        return _builtin(name, split, limit)
    with reading(one_line(name)):  # the name may be none at all
        path = Path(name).expanduser()
        is_folder = path.is_dir()
    if is_folder:
        return _from_folder(path, split, limit)
    suffix = path.suffix.lower()
    if path.is_file() and suffix == ".zip":
        return zip_images(path, split, limit)
    if path.is_file() and suffix in READERS:
        if split is not None:
            raise FulldepthError(f"The split {split!r} was asked for, but {path} is one file and has no splits.")
        return READERS[suffix](path, limit)
    if path.exists():
        raise FulldepthError(f"{path} has the suffix {path.suffix!r}, which fulldepth does not read. Expected {KNOWN}.")
    if suffix in (*READERS, ".zip") or not HUB_NAME.fullmatch(name):
        raise FulldepthError(f"There is no file or folder {one_line(name)}. Expected {KNOWN}.")
    return _from_hub(name, split, limit)


def _builtin(name: str, split: str | None, limit: int | None) -> Source:
    corpus, _, part = name.removeprefix(CORPUS).partition("/")
    if corpus != "builtin":
        raise unknown("corpus", name, ["corpus:builtin", "corpus:builtin/train"])
    part = part or split or "heldout"
    if part not in PARTS:
        raise unknown("part of the built-in corpus", part, PARTS)
    texts = [novel.text for novel in novels() if novel.part == part]
    return Source(f"corpus:builtin/{part}", "text", [Record(text=text) for text in texts[:limit]])


def _from_folder(path: Path, split: str | None, limit: int | None) -> Source:
    with reading(path):
        texts = sorted(file for file in path.iterdir() if file.suffix.lower() == ".txt" and file.is_file())
        has_images = any(file.suffix.lower() in SUFFIXES for file in path.rglob("*"))
    if texts and not has_images:
        if split is not None:
            raise FulldepthError(f"The split {split!r} was asked for, but {path} holds text files and has no splits.")
        return folder_source(path, texts, limit)
    if has_images:
        return folder_images(path, split, limit)
    have = one_line(", ".join(sorted({f.suffix or "(no suffix)" for f in path.rglob("*") if f.is_file()})) or "nothing")
    raise FulldepthError(f"The folder {path} holds no images and no .txt files. Found: {have}. Expected {KNOWN}.")


def _from_hub(name: str, split: str | None, limit: int | None) -> Source:
    repository, _, configuration = name.partition(":")
    # with a limit, only what is read is fetched
    data = load_hub(repository, configuration or None, split=split, streaming=limit is not None)
    return _from_dataset(name, data, split, limit)


def load_hub(repository: str, configuration: str | None, *, split: str | None, streaming: bool) -> Any:
    """A data set of the Hub, as `datasets.load_dataset` gives it: one split, or a mapping of all where none is named.

    Raises:
        FulldepthError: if there is none, or it cannot be reached.
    """
    try:
        return datasets.load_dataset(repository, configuration, split=split, streaming=streaming)
    except Exception as error:  # whatever the network, the repository's files and their readers raise
        offline = " The Hub is switched off by HF_HUB_OFFLINE." if datasets.config.HF_HUB_OFFLINE else ""
        name = f"{repository}:{configuration}" if configuration else repository
        raise FulldepthError(
            f"{name} is no file or folder here, and loading it as a Hub data set failed: {one_line(error).rstrip('.')}."
            f"{offline} Expected {KNOWN}."
        ) from error


def _from_dataset(name: str, data: Any, split: str | None, limit: int | None) -> Source:
    if isinstance(data, dict):
        chosen = split or next((s for s in SPLITS if s in data), next(iter(data)))
        if chosen not in data:
            raise FulldepthError(f"{name} has no split {chosen!r}. It has: {', '.join(data)}.")
        name, data = f"{name}/{chosen}", data[chosen]
    data = _undecoded(data)
    if isinstance(data, datasets.IterableDataset):
        if limit is None:
            raise FulldepthError(f"{name} is streamed and may have no end: give a limit.")
        with reading(name):
            rows = list(data.take(limit))
        return _from_table(name, data.features or {}, rows, choose_columns(rows[0] if rows else (), name))
    if limit is not None:
        data = data.select(range(min(limit, len(data))))
    columns = choose_columns(data.column_names, name)
    if columns.kind == "images":  # decoded one by one, when they are used
        labels = [(f"{name} row {i}", label) for i, label in enumerate(data[columns.label])] if columns.label else []
        classes, names = class_indices(labels, _class_names(data.features, columns.label))
        images = [partial(_dataset_image, data, i, columns.first) for i in range(len(data))]
        found = classes or [None] * len(images)
        return Source(name, "images", [Record(image=i, label=c) for i, c in zip(images, found, strict=True)], names)
    rows = data.select_columns([column for column in columns[1:] if column is not None])
    return _from_table(name, data.features, rows, columns)


def _undecoded(data: Any) -> Any:
    """The data set with images as they are stored: `datasets` would hand them to any decoder that Pillow has."""
    is_plain = isinstance(data, datasets.IterableDataset) or data.format["type"] is None
    for column, feature in (data.features or {}).items():
        if isinstance(feature, datasets.Image) and is_plain:
            data = data.cast_column(column, datasets.Image(decode=False))
    return data


def _from_table(name: str, features: Mapping[str, Any], rows: Iterable[Any], columns: Columns) -> Source:
    numbered = ((f"{name} row {i}", row) for i, row in enumerate(reading_each(name, rows)))
    return from_rows(name, numbered, _class_names(features, columns.label))


def _class_names(features: Mapping[str, Any], label: str | None) -> tuple[str, ...]:
    feature = features.get(label) if label else None
    return tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else ()


def _dataset_image(data: datasets.Dataset, index: int, column: str) -> Image.Image:
    where = f"in row {index} of the data set"
    with reading(f"the image {where}"):
        value = data[index][column]
    return image_value(value, where)()


def _from_objects(data: Sequence[Any]) -> Source:
    if not data:
        raise FulldepthError("The list of data is empty. Expected texts or mappings.")
    if all(isinstance(item, str) for item in data):
        return Source("texts", "text", [Record(text=clean_text(item)) for item in data])
    if all(isinstance(item, Mapping) for item in data):
        return from_rows("rows", ((f"Item {i}", item) for i, item in enumerate(data)))
    kinds = ", ".join(sorted({type(item).__name__ for item in data}))
    raise FulldepthError(f"A list of data must hold texts only or mappings only, got {kinds}.")

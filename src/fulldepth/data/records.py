"""What a source holds: records of one kind, made from rows (mappings) by the names of their columns."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import read_bytes

IMAGE_COLUMNS = ("image", "img")
TEXT_COLUMNS = ("text", "sentence")
TEXT_PAIR_COLUMNS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("#1 String", "#2 String"),
)
PROMPT_COLUMNS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("context", "target"),
)
LABEL_COLUMNS = ("label", "labels", "fine_label", "Quality")
EXPECTED = "text (or sentence, or sentence1 + sentence2) or image, with or without label; or prompt + response"
IMAGE_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF")
"""Formats whose decoders only decode; Pillow would run other programs for some of the rest."""

MOST_IMAGE_BYTES = 256 << 20
"""Largest image file."""
MOST_PIXELS = 64 * 10**6
MOST_RATIO = 200
"""Long edge over short edge."""
MOST_CLASSES = 10**6

SURROGATES = re.compile("[\ud800-\udfff]")

ImageLoader = Callable[[], Image.Image]


@dataclass(frozen=True, slots=True)
class Record:
    """One example. A text (perhaps with a second one beside it), a prompt with its response, or an image."""

    text: str | None = None
    second: str | None = None
    """The second text of a pair such as premise and hypothesis."""
    prompt: str | None = None
    response: str | None = None
    image: ImageLoader | None = None
    """Decodes the image, in RGB, when called."""
    label: int | None = None
    """Class index, None where unknown."""


@dataclass(frozen=True)
class Source:
    """Where sequences come from: a name to show, and records of one kind."""

    name: str
    kind: str
    """`text`, `pairs` (prompt and response), `labelled-text` or `images`."""
    records: Sequence[Record]
    class_names: tuple[str, ...] = ()
    """Name of each class index; empty where classes have none."""

    def __len__(self) -> int:
        return len(self.records)


class Columns(NamedTuple):
    """The columns that hold what we read; `kind` is `text`, `pairs` or `images`."""

    kind: str
    first: str
    second: str | None
    label: str | None


def choose_columns(names: Iterable[str], where: str) -> Columns:
    """Which of the columns `names` to read.

    Raises:
        FulldepthError: if none of them is known; `where` says where they are.
    """
    have = list(names)
    label = next((name for name in LABEL_COLUMNS if name in have), None)
    for name in IMAGE_COLUMNS:
        if name in have:
            return Columns("images", name, None, label)
    for first, second in TEXT_PAIR_COLUMNS:
        if first in have and second in have:
            return Columns("text", first, second, label)
    for name in TEXT_COLUMNS:
        if name in have:
            return Columns("text", name, None, label)
    for first, second in PROMPT_COLUMNS:
        if first in have and second in have:
            return Columns("pairs", first, second, None)
    found = ", ".join(map(repr, have)) or "none"
    raise FulldepthError(f"{where} has none of the columns that fulldepth reads. Got: {found}. Expected: {EXPECTED}.")


def from_rows(name: str, rows: Iterable[tuple[str, Mapping[str, Any]]], class_names: Sequence[str] = ()) -> Source:
    """A source from rows, each with words that say where it stands. The first row decides which columns are read.

    Raises:
        FulldepthError: if there is no row, a row lacks a column, or a value is not of the right type.
    """
    columns: Columns | None = None
    values: list[tuple[Any, Any]] = []
    labels: list[tuple[str, Any]] = []
    for where, row in rows:
        if columns is None:
            columns = choose_columns(row, where)
        require_columns(row, (columns.first, columns.second, columns.label), where)
        read = image_value if columns.kind == "images" else text_value
        first = read(row[columns.first], f"{where}, {columns.first!r}")
        second = None if columns.second is None else text_value(row[columns.second], f"{where}, {columns.second!r}")
        values.append((first, second))
        labels.append((where, row[columns.label] if columns.label else None))
    if columns is None:
        raise FulldepthError(f"{name} is empty. Expected rows with the columns {EXPECTED}.")
    classes, names = class_indices(labels, class_names)
    if columns.kind == "images":
        return Source(
            name, "images", [Record(image=v, label=c) for (v, _), c in zip(values, classes, strict=True)], names
        )
    if columns.kind == "pairs":
        return Source(name, "pairs", [Record(prompt=first, response=second) for first, second in values])
    kind = "text" if all(c is None for c in classes) else "labelled-text"
    records = [Record(text=v, second=w, label=c) for (v, w), c in zip(values, classes, strict=True)]
    return Source(name, kind, records, names)


def require_columns(row: Mapping[str, Any], columns: Iterable[str | None], where: str) -> None:
    """Refuse a row that lacks one of the columns.

    Raises:
        FulldepthError: if it does; `where` says where the row stands.
    """
    for column in columns:
        if column is not None and column not in row:
            have = one_line(", ".join(map(repr, row)) or "nothing")
            raise FulldepthError(f"{where} has no {column!r}. It has: {have}.")


def class_indices(
    labels: Sequence[tuple[str, Any]], class_names: Sequence[str] = ()
) -> tuple[list[int | None], tuple[str, ...]]:
    """Class indices and class names of raw labels (each with where it stands): whole numbers, digits or names.

    Numbers stay as they are, negative ones (a hidden test label) become None; names are numbered in sorted order.

    Raises:
        FulldepthError: if a label is neither, or numbers and names are mixed.
    """
    known = [(where, label) for where, label in labels if label is not None]
    if all(isinstance(label, str) for _, label in known) and not all(_is_digits(label) for _, label in known):
        names = tuple(sorted({label for _, label in known}))
        index = {label: i for i, label in enumerate(names)}
        return [None if label is None else index[label] for _, label in labels], names
    classes = [None if label is None else _whole(where, label) for where, label in labels]
    return [None if c is None or c < 0 else c for c in classes], tuple(class_names)


def _is_digits(label: str) -> bool:
    return label.removeprefix("-").isdecimal()


def _whole(where: str, label: Any) -> int:
    digits = isinstance(label, str) and _is_digits(label) and len(label) < 20
    if digits or isinstance(label, int) or (isinstance(label, float) and label.is_integer()):
        index = int(label)
        if index < MOST_CLASSES:
            return index
    shown = one_line(repr(label), 100)
    raise FulldepthError(
        f"{where}: the label {shown} is not a class. Expected a whole number below {MOST_CLASSES:,} or, throughout, "
        "names."
    )


def text_value(value: Any, where: str) -> str:
    """A cell that must hold text, ready for a tokenizer; `where` says where it stands.

    Raises:
        FulldepthError: if it holds something else.
    """
    if not isinstance(value, str):
        raise FulldepthError(f"{where} is {_kind_of(value)}, expected text.")
    return clean_text(value)


def clean_text(text: str) -> str:
    """`text` with halves of surrogate pairs (JSON can hold them, UTF-8 and tokenizers cannot) replaced by U+FFFD."""
    return SURROGATES.sub("\ufffd", text)


def _kind_of(value: Any) -> str:
    return "empty (null)" if value is None else f"of type {type(value).__name__}"


def image_value(value: Any, where: str) -> ImageLoader:
    """A loader for an image given as a Pillow image, a path, bytes, or a {bytes, path} mapping.

    Raises:
        FulldepthError: if it is none of these.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, Image.Image):
        return partial(_rgb, value, where)
    if isinstance(value, bytes):
        return partial(decode_image, value, where)
    if isinstance(value, str | Path):
        return partial(read_image, Path(value))
    raise FulldepthError(f"{where} is {_kind_of(value)}, expected an image, its bytes or its path.")


def _rgb(image: Image.Image, where: str) -> Image.Image:
    """The image in RGB; one that would take too much memory is refused before it is decoded.

    A thin strip is too: a processor that scales its short edge up would make its long edge endless.
    """
    width, height = image.size
    if width * height > MOST_PIXELS or not 1 <= max(width, height) <= MOST_RATIO * min(width, height):
        raise FulldepthError(
            f"Cannot read the image {where}: it has {width:,} x {height:,} pixels. Expected at most {MOST_PIXELS:,}, "
            f"and no edge more than {MOST_RATIO} times as long as the other."
        )
    try:
        return image.convert("RGB")
    except Exception as error:  # as in `decode_image`
        reason = one_line(error) or type(error).__name__
        raise FulldepthError(
            f"Cannot read the image {where}: {reason}. Expected a whole file, one of {', '.join(IMAGE_FORMATS)}."
        ) from error


def read_image(path: Path) -> Image.Image:
    """The image in a file, in RGB.

    Raises:
        FulldepthError: if it cannot be read.
    """
    return decode_image(read_bytes(path, most=MOST_IMAGE_BYTES), str(path))


def decode_image(data: bytes, where: str) -> Image.Image:
    """The image encoded in `data`, in RGB.

    Raises:
        FulldepthError: if it is corrupt, cut short, too large or of a format that is not read.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                return _rgb(image, where)
    except FulldepthError:
        raise
    except Exception as error:  # a decoder of a damaged file raises whatever its parser meets
        reason = one_line(str(error).split("<_io")[0]) or type(error).__name__
        raise FulldepthError(
            f"Cannot read the image {where}: {reason}. Expected a whole file, one of {', '.join(IMAGE_FORMATS)}."
        ) from error

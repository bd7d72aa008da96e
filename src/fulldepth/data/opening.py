"""`open_data`: opens the data argument of every command, as rows.

`sources` converts rows to records for measuring, `documents` to training text, `conversations` to prompts with
responses, and `examples` to token ids for the search.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from fulldepth.data import digits
from fulldepth.data.coco import coco_rows
from fulldepth.data.columns import IMAGE_COLUMNS, LABEL_COLUMNS, Rows
from fulldepth.data.corpus import PARTS, builtin_texts
from fulldepth.data.files import ROWS, folder_files, parquet_classes, parquet_rows, parquet_shape, path_of
from fulldepth.data.images import (
    SPLITS,
    ImageLoader,
    Pick,
    StoredImage,
    folder_images,
    has_images,
    image_content,
    image_value,
)
from fulldepth.errors import FulldepthError, one_line, unknown
from fulldepth.files import reading, reading_each

CORPUS, DIGITS = "corpus:builtin", "digits:builtin"
BUILTIN: dict[str, tuple[tuple[str, ...], Callable[[str], Sequence[Any]], tuple[str, ...]]] = {
    CORPUS: (PARTS, builtin_texts, ()),
    DIGITS: (digits.PARTS, digits.digit_rows, digits.CLASSES),
}
"""Built-in data -> parts (to train on, held out), function of the part, names of the classes."""
TABLES = datasets.Dataset | datasets.IterableDataset | datasets.DatasetDict | datasets.IterableDatasetDict
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
"""A Hub data set: `name` or `owner/name`, and a configuration after a colon where it has several."""
Choice = Callable[[Iterable[str], str], Sequence[str]]
"""(names of the columns, location for messages) -> the columns to read."""


@dataclass(frozen=True)
class Opened:
    """Opened data in one of three forms: `files`, a `table`, or `items`."""

    name: str
    """For messages and results."""
    files: tuple[Path, ...] = ()
    """Text files and tables, in the order of their paths."""
    path: Path | None = None
    """The file or folder of `files`."""
    table: Any = field(default=None, repr=False)
    """One split, a `Dataset` or `IterableDataset`."""
    repository: str | None = None
    """Repository of a table from the Hub."""
    items: Sequence[Any] = field(default=(), repr=False)
    """Texts or mappings."""
    labels: tuple[str, ...] = ()
    """Names of the classes in the column `label` of `items`."""
    limit: int | None = None
    """Most rows to read; None = all."""
    warnings: tuple[str, ...] = ()
    """Sentences on entries that were skipped."""

    @property
    def is_plain(self) -> bool:
        """Whether the data are texts without columns (for a folder, by its first file)."""
        if self.files:
            return self.files[0].suffix.lower() == ".txt"
        return self.table is None and bool(self.items) and isinstance(self.items[0], str)

    @property
    def is_stream(self) -> bool:
        """Whether the rows can only be read in their order, and may have no end."""
        return isinstance(self.table, datasets.IterableDataset)

    def rows(self, choose: Choice | None = None) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(location, row) pairs, read anew by each call; a text is a row with `text`.

        Args:
            choose: selects the columns to read of tables that are stored by column; None = all.
        """
        if self.files:
            rows: Rows = (row for file in self.files for row in _file_rows(file, choose))
        elif self.table is not None:
            rows = table_rows(self.name, self.table, choose)
        else:
            mappings = ({"text": item} if isinstance(item, str) else item for item in self.items)
            rows = ((f"{self.name} row {number}", row) for number, row in enumerate(mappings, start=1))
        return islice(iter(rows), self.limit)

    def class_names(self, column: str | None) -> tuple[str, ...]:
        """Names of the classes whose indices a column holds; empty if they have none.

        Raises:
            FulldepthError: if several files name different classes.
        """
        tables = [path for path in self.files if path.suffix.lower() == ".parquet"]
        if column is not None and tables:
            named = {parquet_classes(path, column): path.name for path in tables}
            if len(named) > 1:
                raise FulldepthError(f"The classes of {' and '.join(list(named.values())[:2])} have different names.")
            return next(iter(named))
        feature = (self.table.features or {}).get(column) if self.table is not None else None
        return tuple(feature.names) if isinstance(feature, datasets.ClassLabel) else self.labels


def open_data(
    data: Any,
    *,
    config: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    streaming: bool = False,
    held_out: bool = False,
    images: bool = False,
    skip_bad: bool = False,
    pick: Pick | None = None,
    suffixes: Sequence[str] = tuple(ROWS),
) -> Opened:
    """Open a data argument; rows are read lazily.

    Args:
        data: a `.txt`, `.jsonl`, `.tsv` or `.parquet` file; a folder of them, sub-folders included, in the order of
            their paths; `corpus:builtin`, `corpus:builtin/train` or `corpus:builtin/heldout`; a Hub data set (`name` or
            `name:configuration`); a data set of `datasets`, or a mapping of its splits; a list of texts or of mappings;
            with `images`, `digits:builtin`, or a split of it.
        config: configuration of a Hub data set.
        split: split of a data set or of a folder of images, part of the corpus; None: see `held_out`.
        limit: most rows to read: the first ones (of a Hub data set only these are downloaded); not of `images`.
        streaming: read a Hub data set as a stream instead of downloading it first.
        held_out: without `split`, take the validation or test split, or the corpus's held-out part, where there is one.
        images: also accept a folder of images, and a `.json` file in COCO's format.
        skip_bad: leave out bad entries of a file in COCO's format, and count them (`warnings`).
        pick: chooses among images in folders and files in COCO's format, by the identities of their paths; other data
            are opened whole. None = all.
        suffixes: of the files to read.

    Raises:
        FulldepthError: if there is nothing of that name, or `limit` is less than 1.
    """
    if limit is not None and limit < 1:
        raise FulldepthError(f"At least one row must be read, got the limit {limit}.")
    expected = _expected(suffixes, images=images)
    if isinstance(data, TABLES):
        name, table = _one_split("datasets.Dataset", data, split, held_out=held_out)
        return _opened_table(name, table, None, limit)
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        return _opened_list(data, limit)
    if not isinstance(data, str | Path):
        kind = type(data).__name__
        raise FulldepthError(f"Cannot read data of type {kind}. Expected {expected}, or a list of texts or mappings.")
    name, path = str(data), path_of(str(data))
    if name.partition(":")[0] in ("corpus", *(["digits"] if images else [])) and ":" in name:
        return _opened_builtin(name, split, limit, held_out)
    if path.exists():
        found = _pictures(path, split, held_out, skip_bad, pick) if images else None
        if found is None and (split is not None or config is not None):
            raise FulldepthError(f"{path} has no splits and no configurations. Leave out {split or config!r}.")
        return found or Opened(path.name, tuple(_list_files(path, suffixes, images=images)), path, limit=limit)
    if not _may_be_on_hub(name, path):
        raise FulldepthError(f"There is no file or folder {one_line(name)}. Expected {expected}.")
    repository, config, full = _hub_parts(name, config)
    with _loading(full, expected):
        loaded = datasets.load_dataset(repository, config, split=split, streaming=streaming or limit is not None)
    full = full if isinstance(loaded, dict) else f"{full}/{split}"
    full, table = _one_split(full, loaded, split, held_out=held_out)
    return _opened_table(full, table, repository, limit)


def _opened_list(data: Sequence[Any], limit: int | None) -> Opened:
    if all(isinstance(item, Mapping) for item in data):
        return Opened("rows", items=data, limit=limit)
    if all(isinstance(item, str) for item in data):
        return Opened("texts", items=data, limit=limit)
    kinds = ", ".join(sorted({type(item).__name__ for item in data}))
    raise FulldepthError(f"A list of data must hold texts only or mappings only, got {kinds}.")


def _opened_builtin(name: str, split: str | None, limit: int | None, held_out: bool) -> Opened:
    key, _, part = name.partition("/")
    if key not in BUILTIN:
        raise unknown("built-in data", name, BUILTIN)
    parts, read, labels = BUILTIN[key]
    part = part or split or parts[held_out]
    return Opened(f"{key}/{part}", items=read(part), labels=labels, limit=limit)


def _pictures(path: Path, split: str | None, held_out: bool, skip_bad: bool, pick: Pick | None) -> Opened | None:
    """The images of a file in COCO's format, or of a folder; None if the path is neither."""
    if path.suffix.lower() == ".json" and path.is_file():
        coco = coco_rows(path, skip_bad=skip_bad, pick=pick)
        return Opened(coco.name, items=coco.rows, labels=coco.classes, warnings=tuple(coco.warnings))
    if not path.is_dir() or not has_images(path):
        return None
    pictures = folder_images(path, split, held_out=held_out, pick=pick)
    return Opened(pictures.name, items=pictures.rows, labels=pictures.classes)


def hub_classes(name: str, config: str | None = None) -> tuple[str, ...] | None:
    """Names of the classes that the information on a Hub data set states; no row is downloaded.

    Returns:
        The names, empty if it states none; None if `open_data` would not take `name` for a Hub data set.

    Raises:
        FulldepthError: if the information cannot be read.
    """
    path = path_of(name)
    if name.startswith(tuple(BUILTIN)) or path.exists() or not _may_be_on_hub(name, path):
        return None
    repository, config, full = _hub_parts(name, config)
    with _loading(full, _expected(tuple(ROWS), images=True)):
        features = datasets.load_dataset_builder(repository, config).info.features or {}
    column = features.get(next((label for label in LABEL_COLUMNS if label in features), ""))
    return tuple(column.names) if isinstance(column, datasets.ClassLabel) else ()


def _may_be_on_hub(name: str, path: Path) -> bool:
    """Whether a name that is neither built in nor a path here can be a Hub data set's."""
    return path.suffix.lower() not in (*ROWS, ".json") and HUB_NAME.fullmatch(name) is not None


def _hub_parts(name: str, config: str | None) -> tuple[str, str | None, str]:
    """Repository and configuration of a Hub data set, and both together."""
    repository, _, configuration = name.partition(":")
    if config and configuration and config != configuration:
        raise FulldepthError(f"Two configurations were asked for: {configuration!r} in {name}, and {config!r}.")
    config = config or configuration or None
    return repository, config, ":".join(filter(None, [repository, config]))


@contextmanager
def _loading(full: str, expected: str) -> Iterator[None]:
    """Turn any exception of the network, or of readers of the repository's files, into a refusal."""
    try:
        yield
    except Exception as error:
        offline = " The Hub is switched off by HF_HUB_OFFLINE." if datasets.config.HF_HUB_OFFLINE else ""
        raise FulldepthError(
            f"{full} is no file or folder here, and loading it as a Hub data set failed: {one_line(error).rstrip('.')}."
            f"{offline} Expected {expected}."
        ) from error


def _expected(suffixes: Sequence[str], *, images: bool) -> str:
    """What the data may be, for messages."""
    pictures = "a folder of images, a .json file in COCO's format, " if images else ""
    built_in = ", ".join(BUILTIN if images else [CORPUS])
    return f"a file ({', '.join(suffixes)}), a folder of them, {pictures}a Hub data set, {built_in}"


def _list_files(path: Path, suffixes: Sequence[str], *, images: bool) -> list[Path]:
    """The file itself, or the files in a folder and its sub-folders, sorted by path; hidden ones are ignored."""
    if not path.is_dir():
        if path.suffix.lower() in suffixes:
            return [path]
        unpack = " Unpack the archive and give its folder." if path.suffix.lower() in (".zip", ".tar", ".gz") else ""
        raise FulldepthError(f"{path} has the suffix {path.suffix!r}. Expected one of: {', '.join(suffixes)}.{unpack}")
    with reading(path):
        inside = [f for f in folder_files(path) if not any(p.startswith(".") for p in f.relative_to(path).parts)]
        files = sorted(f for f in inside if f.suffix.lower() in suffixes)
    if not files:
        have = one_line(", ".join(sorted({f.suffix or "(no suffix)" for f in inside})) or "nothing")
        kinds = ("images and no " if images else "") + ", ".join(suffixes)
        raise FulldepthError(f"The folder {path} holds no {kinds} files. Found: {have}.")
    return files


def _opened_table(name: str, table: Any, repository: str | None, limit: int | None) -> Opened:
    """A table whose images are not decoded by `datasets`, which would use any decoder of Pillow."""
    if isinstance(table, datasets.IterableDataset) or table.format["type"] is None:
        for column, feature in (table.features or {}).items():
            if isinstance(feature, datasets.Image):
                table = table.cast_column(column, datasets.Image(decode=False))
    if limit is not None and isinstance(table, datasets.Dataset):
        table = table.select(range(min(limit, len(table))))
    return Opened(name, table=table, repository=repository, limit=limit)


def _one_split(name: str, data: Any, split: str | None, *, held_out: bool) -> tuple[str, Any]:
    """One of the splits, if `data` has several, and its full name."""
    if not isinstance(data, dict):
        return name, data
    fallback = next(iter(data)) if held_out or len(data) == 1 else "train"
    chosen = split or next((name for name in (SPLITS if held_out else ("train",)) if name in data), fallback)
    if chosen not in data:
        raise FulldepthError(f"{name} has no split {chosen!r}. It has: {', '.join(data)}.")
    return f"{name}/{chosen}", data[chosen]


def _file_rows(path: Path, choose: Choice | None) -> Rows:
    suffix = path.suffix.lower()
    if choose and suffix == ".parquet":
        return parquet_rows(path, list(choose(parquet_shape(path)[0], path.name)))
    return ROWS[suffix](path)


def table_rows(name: str, table: Any, choose: Choice | None) -> Rows:
    """(location, row) pairs of a table, of the chosen columns; images are read on use."""
    if choose and isinstance(table, datasets.Dataset):
        columns = choose(table.column_names, name)
        if columns[0] in IMAGE_COLUMNS:
            return _image_rows(name, table, *columns)
        table = table.select_columns(list(columns))
    return ((f"{name} row {number}", row) for number, row in enumerate(reading_each(name, table), start=1))


def _image_rows(name: str, table: datasets.Dataset, image: str, *others: str) -> Rows:
    """Rows whose images are read on use; the `others` are captions and labels."""
    values = {column: table[column] for column in others}
    for index in range(len(table)):
        cell = partial(_cell, table, index, image)
        stored = StoredImage(cell, partial(cell, image_content))
        yield f"{name} row {index + 1}", {image: stored, **{column: values[column][index] for column in others}}


def _cell(
    table: datasets.Dataset, index: int, column: str, use: Callable[[ImageLoader], Any] = lambda load: load()
) -> Any:
    """The image of a row, or what `use` makes of it: stored, or decoded if the data set transforms its rows."""
    where = f"in row {index + 1} of the data set"
    with reading(f"the image {where}"):
        value = table[index][column]
    load = image_value(value, where)
    return load() if use is None else use(load)

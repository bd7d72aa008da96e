"""`open_data`: opens the data argument of every command, as rows that are read in order, by number, or as a sample.

`sources` converts rows to records for measuring, `open_documents` to training text, `conversations` to prompts with
responses, and `examples` to token ids for the search.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import datasets
import numpy as np
from huggingface_hub import HfApi

from fulldepth.core.errors import FulldepthError, one_line, unknown
from fulldepth.core.files import reading, reading_each, sha256_of
from fulldepth.data.coco import coco_rows
from fulldepth.data.columns import IMAGE_COLUMNS, RESPONSE_COLUMNS, Choice, column_texts, text_column
from fulldepth.data.corpus import BUILTIN, CORPUS, END_OF_TEXT
from fulldepth.data.files import SUFFIXES, count_rows, folder_files, parquet_classes, read_rows, text_lines
from fulldepth.data.images import SPLITS, StoredImage, folder_images, image_value

TABLES = datasets.Dataset | datasets.IterableDataset | datasets.DatasetDict | datasets.IterableDatasetDict
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?(:[\w.-]+)?")
"""A Hub data set: `name` or `owner/name`, and a configuration after a colon where it has several."""
OWN = ("own", "own:chat", "own:text")
"""Names of text that a model has yet to write (`fulldepth.skip.own_text`)."""
COMMIT = re.compile(r"@([0-9a-f]{40})\b")
Order = Literal["random", "first"]
"""Which rows or windows a limit takes: a uniform sample, or the first ones."""
TOKEN_CHARACTERS = 32
"""Characters of text that are read for each token of the windows; four to eight times what text has."""
SHUFFLED = 4
"""Rows of a stream that are read for each row of a sample of it."""
PIECES = "piece of text"
"""What a part of a plain text is called."""
PIECE = 8192
"""Characters after which a long plain text is cut at the next empty line."""


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
    items: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """The rows."""
    labels: tuple[str, ...] = ()
    """Names of the classes in the column `label` of `items`."""
    warnings: tuple[str, ...] = ()
    """Sentences on entries that were skipped."""

    @property
    def is_plain(self) -> bool:
        """True if the files are texts without columns (for a folder, by its first file)."""
        return bool(self.files) and self.files[0].suffix.lower() == ".txt"

    @property
    def is_stream(self) -> bool:
        """True if the rows can only be read in their order, and may have no end."""
        return isinstance(self.table, datasets.IterableDataset)

    def __len__(self) -> int:
        """Number of rows, found without reading them."""
        if self.files:
            return sum(map(count_rows, self.files))
        return len(self.items if self.table is None else self.table)

    def rows(self, choose: Choice | None = None, numbers: Sequence[int] | None = None) -> Iterator[tuple[str, Any]]:
        """(location, row) pairs, read anew by each call; a text is a row with `text`.

        Args:
            choose: selects the columns to read of tables that are stored by column; None = all.
            numbers: of the rows to read, from 0, ascending; None = all.
        """
        if self.files:
            before = 0
            for file in self.files:
                rows_of_file = None
                if numbers is not None:
                    count = count_rows(file)
                    inside = numbers[bisect_left(numbers, before) : bisect_left(numbers, before + count)]
                    rows_of_file = [number - before for number in inside]
                    before += count
                if rows_of_file != []:
                    yield from read_rows(file, choose, rows_of_file)
        elif self.table is not None:
            yield from self._table_rows(choose, numbers)
        else:
            for number in range(len(self.items)) if numbers is None else numbers:
                yield f"{self.name} row {number + 1}", self.items[number]

    def _table_rows(self, choose: Choice | None, numbers: Sequence[int] | None) -> Iterator[tuple[str, Any]]:
        name = self.name
        table = self.table
        if choose and not self.is_stream:
            image, *other_columns = columns = choose(table.column_names, name)
            if image in IMAGE_COLUMNS:  # images are read on use
                values = {column: table[column] for column in other_columns}

                def stored(index: int) -> StoredImage:
                    where = f"in row {index + 1} of the data set"

                    def load() -> StoredImage:
                        with reading(f"the image {where}"):
                            value = table[index][image]
                        return image_value(value, where)  # stored, or decoded if the data set transforms its rows

                    return StoredImage(lambda: load()(), lambda: load().content())

                for index in range(len(table)) if numbers is None else numbers:
                    row = {image: stored(index), **{column: values[column][index] for column in other_columns}}
                    yield f"{name} row {index + 1}", row
                return
            table = table.select_columns(list(columns))
        table = table if numbers is None else table.select(numbers)
        for place, row in enumerate(reading_each(name, table)):
            yield f"{name} row {(place if numbers is None else numbers[place]) + 1}", row

    def sampled(
        self, columns: Sequence[str], limit: int, *, seed: int = 0, order: Order = "random", window: int | None = None
    ) -> Iterator[tuple[str, Any]]:
        """A sample of at most `limit` rows in the order of the data: little more than these rows is read.

        Args:
            columns: that are read.
            limit: most rows; with `window`, most windows.
            seed: of the sample, which is drawn by the numbers of the rows; of a stream, from its first rows.
            order: `first` takes the first rows.
            window: tokens of windows of text: as many rows as hold several times the text of `limit` windows.
        """
        characters = (window or 0) * limit * TOKEN_CHARACTERS

        def choose(names: Iterable[str], _: str) -> Sequence[str]:
            further = [name for name in names if name in RESPONSE_COLUMNS]  # the first file may lack them
            return list(dict.fromkeys([*columns, *further]))

        if self.is_stream or order == "first":
            shuffles = order == "random" and limit > 1
            table = self.table.shuffle(seed=seed, buffer_size=SHUFFLED * limit) if shuffles else self.table
            left = characters
            for number, (where, row) in enumerate(replace(self, table=table).rows(choose)):
                if (left <= 0) if characters else (number == limit):
                    return
                yield where, row
                left -= _characters(row, columns)
            return
        count = len(self)
        taken = limit
        if characters:  # the first rows tell about how long a text is
            sizes = [_characters(row, columns) for _, row in islice(self.rows(choose), limit)]
            taken = max(limit, int(1.2 * characters * len(sizes) / max(1, sum(sizes))))
        while taken < count:
            numbers = np.random.default_rng(seed).choice(count, taken, replace=False)
            rows = list(self.rows(choose, sorted(numbers.tolist())))
            held = sum(_characters(row, columns) for _, row in rows)
            if held >= characters:
                yield from rows
                return
            taken = max(2 * taken, int(1.2 * taken * characters / max(1, held)))
        yield from self.rows(choose)

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

    def identity(self, column: str | None = None) -> dict[str, Any]:
        """JSON values that identify the content, without reading it where that is possible; else the texts are read."""
        if self.path is not None:
            stats = [(str(file.relative_to(self.path)), file.stat()) for file in self.files]
            files = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
            return {"path": str(self.path.resolve()), "files": files}
        if self.table is None:
            digests = map(sha256_of, column_texts(self.rows(), column))
            return {"texts": sha256_of("".join(digests))}
        if self.repository is not None:
            matches = (COMMIT.search(address) for address in self.table.info.download_checksums or ())
            revision = next((match.group(1) for match in matches if match), None)
            with suppress(Exception):  # of the network: the data are identified by name only
                revision = revision or HfApi().dataset_info(self.repository).sha
            return {"name": self.name, "revision": revision}
        if self.is_stream:
            raise FulldepthError(
                "Nothing identifies a streamed data set that was made in Python, so a run on it could not resume. "
                "Give a `datasets.Dataset`."
            )
        return {"fingerprint": self.table._fingerprint}


def _characters(row: Mapping[str, Any], columns: Sequence[str]) -> int:
    return sum(len(value) for column in columns if isinstance(value := row.get(column), str))


def open_data(
    data: Any,
    *,
    config: str | None = None,
    split: str | None = None,
    streaming: bool = False,
    held_out: bool = False,
    images: bool = False,
    skip_bad: bool = False,
    suffixes: Sequence[str] = SUFFIXES,
) -> Opened:
    """Open a data argument; rows are read lazily.

    Args:
        data: a `.txt`, `.jsonl`, `.tsv` or `.parquet` file; a folder of them, sub-folders included, in the order of
            their paths; `corpus:builtin`, `corpus:builtin/train` or `corpus:builtin/heldout`; a Hub data set (`name` or
            `name:configuration`), of which one split is read; a data set of `datasets`, or a mapping of its splits; a
            list of texts or of mappings; with `images`, `digits:builtin`, or a split of it.
        config: configuration of a Hub data set.
        split: split of a data set or of a folder of images, part of the corpus; None: see `held_out`.
        streaming: read a Hub data set as a stream instead of downloading the split first.
        held_out: without `split`, take the validation or test split, or the corpus's held-out part, where there is one.
        images: also accept a folder of images, and a `.json` file in COCO's format.
        skip_bad: leave out bad entries of a file in COCO's format, and count them (`warnings`).
        suffixes: of the files to read.

    Raises:
        FulldepthError: if there is nothing of that name.
    """
    built_in = list(BUILTIN) if images else [CORPUS]
    expected = ["a folder of images", "a .json file in COCO's format"] if images else []
    expected = [f"a file ({', '.join(suffixes)})", "a folder of them", *expected, "a Hub data set", *built_in]
    if isinstance(data, TABLES):
        splits = data if isinstance(data, dict) else None
        split_name = None if splits is None else _split("datasets.Dataset", splits, split, held_out)
        name = "datasets.Dataset" if split_name is None else f"datasets.Dataset/{split_name}"
        return _opened_table(name, data if splits is None else splits[split_name], None)
    if isinstance(data, Sequence) and not isinstance(data, str | bytes):
        kinds = {isinstance(item, Mapping) - isinstance(item, str) for item in data}
        if kinds - {1} and kinds != {-1}:
            types = ", ".join(sorted({type(item).__name__ for item in data}))
            raise FulldepthError(f"A list of data must hold texts only or mappings only, got {types}.")
        if kinds == {-1}:
            return Opened("texts", items=[{"text": text} for text in data])
        return Opened("rows", items=data)
    if not isinstance(data, str | Path):
        raise FulldepthError(f"Cannot read data of type {type(data).__name__}. Expected {', '.join(expected)}, a list.")
    name = str(data)
    with reading(one_line(name)):
        path = Path(name).expanduser()
        exists = path.exists()
    if ":" in name and name.partition(":")[0] in {key.partition(":")[0] for key in built_in}:
        key, _, part = name.partition("/")
        if key not in BUILTIN:
            raise unknown("built-in data", name, BUILTIN)
        parts, read, labels = BUILTIN[key]
        part = part or split or parts[held_out]
        return Opened(f"{key}/{part}", items=read(part), labels=labels)
    if exists:
        if images and path.suffix.lower() == ".json" and path.is_file():
            rows, classes, warnings = coco_rows(path, skip_bad=skip_bad)
            return Opened(path.name, items=rows, labels=classes, warnings=warnings)
        if images and path.is_dir() and (images_found := folder_images(path, split, held_out=held_out)):
            title, rows, classes = images_found
            if title == path.name and len(classes) < 2:  # neither splits nor classes
                _refuse_mixed(path, suffixes, rows[0]["image"].name)
            return Opened(title, items=rows, labels=classes)
        if split is not None or config is not None:
            raise FulldepthError(f"{path} has no splits and no configurations. Leave out {split or config!r}.")
        return Opened(path.name, tuple(_list_files(path, suffixes, images=images)), path)
    if name in OWN:
        raise FulldepthError(
            f"{name} is text that a model writes itself. fulldepth skip search and skip heal let it write, into the "
            "file own.jsonl of their output folder; give that file here."
        )
    if path.suffix.lower() in (*SUFFIXES, ".json") or HUB_NAME.fullmatch(name) is None:
        raise FulldepthError(f"There is no file or folder {one_line(name)}. Expected {', '.join(expected)}.")
    return _open_hub(name, config, split, held_out, streaming, expected)


def _refuse_mixed(path: Path, suffixes: Sequence[str], image: str) -> None:
    """Refuse a folder of images that also holds files of text: either could be meant."""
    texts = (f for f in sorted(folder_files(path)) if f.suffix.lower() in suffixes and not f.name.startswith("."))
    if (text := next(texts, None)) is not None:
        raise FulldepthError(
            f"{path} holds images ({one_line(image, 100)}) and text ({one_line(text.relative_to(path), 100)}). "
            "Give one of them, in a file or folder of its own."
        )


def _open_hub(
    name: str, config: str | None, split: str | None, held_out: bool, streaming: bool, expected: Sequence[str]
) -> Opened:
    repository, _, configuration = name.partition(":")
    if config and configuration and config != configuration:
        raise FulldepthError(f"Two configurations were asked for: {configuration!r} in {name}, and {config!r}.")
    config = config or configuration or None
    full = ":".join(filter(None, [repository, config]))
    try:
        split_name = split or _split(full, datasets.get_dataset_split_names(repository, config), None, held_out)
        loaded = datasets.load_dataset(repository, config, split=split_name, streaming=streaming)
    except FulldepthError:
        raise
    except Exception as error:  # of the network, or of readers of the repository's files
        offline = " The Hub is switched off by HF_HUB_OFFLINE." if datasets.config.HF_HUB_OFFLINE else ""
        raise FulldepthError(
            f"{full} is no file or folder here, and loading it as a Hub data set failed: {one_line(error).rstrip('.')}."
            f"{offline} Expected {', '.join(expected)}."
        ) from error
    return _opened_table(f"{full}/{split_name}", loaded, repository)


def _opened_table(name: str, table: Any, repository: str | None) -> Opened:
    """A table whose images are not decoded by `datasets`, which would use any decoder of Pillow."""
    if isinstance(table, datasets.IterableDataset) or table.format["type"] is None:
        for column, feature in (table.features or {}).items():
            if isinstance(feature, datasets.Image):
                table = table.cast_column(column, datasets.Image(decode=False))
    return Opened(name, table=table, repository=repository)


def _split(name: str, splits: Iterable[str], split: str | None, held_out: bool) -> str:
    """Name of one of the splits: the given one, else one to validate or train on, else the first."""
    names = list(splits)
    wanted = (split,) if split else SPLITS if held_out else ("train",)
    split_name = next((candidate for candidate in wanted if candidate in names), None)
    if split_name is None and (split or not (held_out or len(names) == 1)):
        raise FulldepthError(f"{name} has no split {split or 'train'!r}. It has: {', '.join(names)}.")
    return split_name or names[0]


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


@dataclass(frozen=True)
class Documents:
    """Texts in a fixed order, read lazily; can be iterated repeatedly."""

    name: str
    identity: Mapping[str, Any] = field(repr=False)
    """JSON values that identify the text: files with sizes and times, or a data set with its revision."""
    read: Callable[[], Iterator[str]] = field(repr=False)
    is_stream: bool = False
    sources: int | None = None
    """Number of files or novels that are cut into these documents; None = they are documents of their own."""

    @property
    def unit(self) -> str:
        """Name of one of these texts: a `document`, or a `piece of text` of one."""
        return "document" if self.sources is None else PIECES

    def __iter__(self) -> Iterator[str]:
        return self.read()

    def rows(self) -> Iterator[dict[str, str]]:
        """The documents as rows with `text`; at least one."""
        text = None
        for text in self:
            yield {"text": text}
        if text is None:
            raise FulldepthError(f"{self.name} is empty: it holds no text.")


def open_documents(
    data: Any,
    *,
    column: str | None = None,
    config: str | None = None,
    split: str | None = None,
    streaming: bool = False,
    held_out: bool = False,
    articles: bool = False,
) -> Documents:
    """Open text for training.

    Args:
        data: as for `open_data`. A row of a table is a document. Plain text
            (novels of the built-in corpus, `.txt` files) is cut into one or more documents by `text_pieces`, so that
            parts of it can be held out. `Documents` are returned unchanged.
        column: column that holds the text; None = `text` or `sentence`.
        config: configuration of a Hub data set.
        split: split of a Hub data set, part of the built-in corpus; None: see `held_out`.
        streaming: read a Hub data set as a stream instead of downloading it first.
        held_out: without `split`, take the part to validate on, as `open_data` does, in place of the training part.
        articles: rows are lines of articles (WikiText), which are the documents, see `articles_of`.

    Returns:
        The documents, which are read when they are iterated over.

    Raises:
        FulldepthError: if there is nothing to read, or the data are not of the named kind.
    """
    if isinstance(data, Documents):
        return data
    opened = open_data(data, config=config, split=split, streaming=streaming, held_out=held_out)

    def read() -> Iterator[str]:
        texts = (text for _, text in document_pieces(opened, column))
        return articles_of(texts) if articles else texts

    identity = {**opened.identity(column), "column": column, "piece": PIECE, "articles": articles}
    sources = None if articles or not is_cut(opened) else len(opened.files or opened.items)
    return Documents(opened.name, identity, read, opened.is_stream, sources)


def is_cut(opened: Opened) -> bool:
    """Return True if all documents are plain texts, which are cut into pieces: files, novels of the built-in corpus."""
    plain = all(file.suffix.lower() == ".txt" for file in opened.files)
    return plain if opened.files else opened.name.startswith(CORPUS)


def document_pieces(opened: Opened, column: str | None = None) -> Iterator[tuple[int, str]]:
    """The texts that `open_documents` makes of data, each with the number of its file, novel or row."""
    number = 0
    for part in [replace(opened, files=(file,)) for file in opened.files] or [opened]:
        documents: Iterable[Iterable[str]]
        if opened.files and part.is_plain:
            documents = [text_pieces(text_lines(part.files[0]))]
        elif opened.name.startswith(CORPUS):
            documents = (text_pieces(io.StringIO(row["text"])) for row in opened.items)
        else:
            rows = part.rows(lambda names, where: [text_column(names, column, where)])
            documents = ([text] for text in column_texts(rows, column))
        for pieces in documents:
            yield from ((number, piece) for piece in pieces)
            number += 1


def text_pieces(lines: Iterable[str], piece: int = PIECE) -> Iterator[str]:
    """Cut plain text, given as lines, into documents of at least `piece` characters, whose concatenation is the text.

    A document ends at the first empty line after `piece` characters, or at the first line end after twice as many. A
    line with only `<|endoftext|>` also ends a document, and is dropped.
    """
    parts: list[str] = []
    size = 0
    for line in lines:
        marked = line.strip() == END_OF_TEXT
        if not marked:
            parts.append(line)
            size += len(line)
        if marked or size >= 2 * piece or (size >= piece and not line.strip()):
            if parts:
                yield "".join(parts)
            parts = []
            size = 0
    if parts:
        yield "".join(parts)


def articles_of(texts: Iterable[str]) -> Iterator[str]:
    """The articles of texts that are lines, or rows of one line each: from a heading ` = Title = ` after an empty line
    to the next (WikiText); ` = = Section = = ` starts none.
    """
    parts: list[str] = []
    for text in texts:
        for line in (text if text.endswith("\n") else text + "\n").splitlines(keepends=True):
            words = line.split()
            heading = len(words) > 2 and words[0] == words[-1] == "=" and "=" not in (words[1], words[-2])
            if heading and parts and not parts[-1].strip() and any(map(str.strip, parts)):
                yield "".join(parts)
                parts = []
            parts.append(line)
    if parts:
        yield "".join(parts)


def sampled_texts(opened: Opened, window: int, limit: int | None, seed: int = 0) -> list[tuple[int, str]]:
    """Texts that hold a uniform sample of `limit` windows of `window` tokens, each with the number of its document; of
    plain text, or without limit, all.

    Raises:
        FulldepthError: as for `open_documents`, while the rows are read.
    """
    first = None if is_cut(opened) or limit is None else next(opened.rows(), None)
    if first is None or limit is None:
        return list(document_pieces(opened))
    column = text_column(first[1], None, first[0])
    return list(enumerate(column_texts(opened.sampled([column], limit, seed=seed, window=window), column)))

"""Fingerprints of measurements: hashes of everything that affects their results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fulldepth import __version__
from fulldepth.data import Sequences, Source, content_hash
from fulldepth.files import reading
from fulldepth.hf import packaged
from fulldepth.results import DOCUMENT, GROUPS, PAGE, TABLE
from fulldepth.settings.measure import MeasureSettings

SPEED_ONLY = {"batch_size", "device", "device_map"}
"""Settings that do not affect the results."""
NOT_READ = {".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".md", ".log"}
"""Suffixes of pickled weights, optimiser states and notes, which are never read."""
RESULT_FILES = {DOCUMENT, TABLE, GROUPS, PAGE}
"""Files of results, which may be written into the model's own folder."""
TOKENIZER = ("*token*", "vocab*", "merges*", "*.model", "chat_template*")
"""Files of a tokenizer."""


@dataclass(frozen=True)
class Contents:
    """File hashes of a checkpoint, a tokenizer or another path."""

    place: str
    """Absolute path, or Hub name."""
    files: tuple[tuple[str, str], ...] = ()
    """(name, sha256) of every file that may be read; empty for a Hub name."""

    @property
    def weights(self) -> frozenset[tuple[str, str]]:
        """The files that hold weights."""
        return frozenset(entry for entry in self.files if entry[0].endswith(".safetensors"))


def contents(place: str | Path) -> Contents:
    """Hash the files of a local path; a Hub name is identified by the name alone.

    Only files at the top level of a folder count; subfolders may hold results, logs and other checkpoints. A folder
    without a tokenizer gets the one in its parent folder, as in loading.

    Raises:
        FulldepthError: if a file cannot be read.
    """
    path = Path(packaged(str(place)))
    if not path.exists():
        return Contents(str(place))
    path = path.resolve()
    if path.is_file():
        return Contents(str(path), ((path.name, _sha256(path)),))
    own = [(file.name, _sha256(file)) for file in _files(path, "*")]
    if not {"tokenizer.json", "tokenizer_config.json"} & {name for name, _ in own}:
        parent_files = {file for pattern in TOKENIZER for file in _files(path.parent, pattern)}
        own += [(f"../{file.name}", _sha256(file)) for file in sorted(parent_files)]
    return Contents(str(path), tuple(own))


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    """The files at the top level of a folder that may affect the results, sorted by name."""
    for file in sorted(folder.glob(pattern)):
        if file.is_file() and not (file.name.startswith(".") or file.suffix in NOT_READ or file.name in RESULT_FILES):
            yield file


def _sha256(file: Path) -> str:
    with reading(file), file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fingerprints(models: Sequence[Contents], data: Source | Sequences, settings: MeasureSettings) -> list[str]:
    """For each model, sha256 of everything that affects its results: models, data, settings, version."""
    other_contents = [place and contents(place).__dict__ for place in (settings.reference, settings.tokenizer)]
    settings_read = settings.model_dump(exclude=SPEED_ONLY | {"reference", "tokenizer"})
    shared = [__version__, data.name, content_hash(data), other_contents, settings_read]
    return [digest([*shared, model.place, model.files]) for model in models]


def digest(document: Any) -> str:
    """sha256 of a document's JSON."""
    return "sha256:" + hashlib.sha256(json.dumps(document, sort_keys=True, default=str).encode()).hexdigest()

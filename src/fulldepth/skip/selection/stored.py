"""Schema of `progress.json`, the progress of a search on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field, JsonValue

from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import read_json, validated
from fulldepth.settings import Settings

PROGRESS = "progress.json"
SCHEMA_VERSION = 1
MOST_BYTES = 1 << 30
"""Largest file. It holds a number for each sequence, variant and chunk."""

Spent = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Summed = Annotated[float, Field(ge=-1e30, le=1e30)]
"""Nats; far above any loss, and small enough to be squared."""
Layers = Annotated[str, Field(pattern=r"^([1-9][0-9]{0,5}(,[1-9][0-9]{0,5})*)?$", max_length=100_000)]
"""Skipped layers of a variant, such as `3,7`; empty for the unmodified model."""
Chunk = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class StoredProgress(Settings):
    """The entries of `progress.json`."""

    schema_version: int
    of: dict[str, JsonValue]
    """Model, data and settings that the progress belongs to."""
    log: list[tuple[Spent, Spent, Spent]]
    """Forwards, FLOPs and seconds spent by the end of each step."""
    tasks: dict[str, JsonValue]
    """Name of a task -> its result."""
    sums: dict[Literal["loss", "kl", "scaled"], dict[Layers, dict[Chunk, list[Summed]]]]
    """Kind -> variant -> chunk -> summed loss of each sequence, in nats."""


def read_progress(path: Path, fingerprint: Mapping[str, Any]) -> StoredProgress:
    """The progress in a file.

    Args:
        path: the file.
        fingerprint: model, data and settings that the progress must belong to.

    Raises:
        FulldepthError: if it cannot be read, does not fit the schema, or belongs to another search.
    """
    try:
        document = read_json(path, most=MOST_BYTES)
        version = document.get("schema_version") if isinstance(document, dict) else None
        other = type(version) is int and version != SCHEMA_VERSION
        stored = None if other else validated(path, document, StoredProgress)
    except FulldepthError as error:
        raise damaged(path, error) from error
    if stored is None:
        raise FulldepthError(f"{path} has schema version {version}, this fulldepth reads {SCHEMA_VERSION}.")
    before, current = stored.of, json.loads(json.dumps(dict(fingerprint)))
    different = [
        f"{one_line(name, 60)} was {one_line(repr(before.get(name)), 80)}, is {one_line(repr(current.get(name)), 80)}"
        for name in sorted({*before, *current})
        if before.get(name) != current.get(name)
    ]
    if different:
        raise FulldepthError(f"{path} holds another search: {'; '.join(different[:4])}. Choose another output folder.")
    return stored


def damaged(path: Path | None, reason: object) -> FulldepthError:
    """The error for an unusable progress file, with advice."""
    why = one_line(reason).removeprefix(f"Cannot read {path}: ").rstrip(".")
    return FulldepthError(f"The progress in {path} is damaged: {why}. Remove the file to start the search again.")


def check_task(path: Path | None, name: str, value: Any, kind: Any) -> Any:
    """The stored result of a task.

    Raises:
        FulldepthError: if it is not of type `kind`.
    """
    try:
        pydantic.TypeAdapter(kind).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, ("tasks", name, *problem["loc"])))
        raise damaged(path, f"{one_line(where, 120)}: {problem['msg']}") from error
    return value

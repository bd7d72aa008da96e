"""Generated responses in a search's folder: written once, reused after a restart, never over other files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import atomic, read_document
from fulldepth.settings import Settings
from fulldepth.skip.responses import FILE, Responses

NOTES = "responses.json"
"""File that describes how the responses beside it were generated."""


class StoredNotes(Settings):
    """The entries of `responses.json`, which is written before the responses."""

    asked: dict[str, JsonValue]
    """Model, prompts and settings that determine the responses."""
    made: dict[str, JsonValue]
    """`Responses.settings`."""
    sha256: str
    """Digest of `responses.jsonl`."""


def stored_responses(folder: Path, asked: Mapping[str, Any], generate: Callable[[], Responses]) -> dict[str, Any]:
    """Write generated responses into `folder`, or reuse those of an earlier start with the same settings.

    Args:
        folder: for `responses.jsonl` and `responses.json`.
        asked: settings that determine the responses, as plain values.
        generate: generates the responses.

    Returns:
        `Responses.settings`, as stored.

    Raises:
        FulldepthError: if the folder holds other responses, or incomplete files of these names.
    """
    stored = _read(folder, asked)
    if stored is None:
        responses = generate()
        digest = hashlib.sha256(responses.text().encode()).hexdigest()
        notes = {"asked": dict(asked), "made": responses.settings, "sha256": digest}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with atomic(folder / NOTES) as part:
                part.write_text(json.dumps(notes, indent=2), encoding="utf-8")
        except OSError as error:
            raise FulldepthError(f"Cannot write into {folder}: {error.strerror or error}.") from error
        responses.save(folder / FILE)
        stored = read_document(folder / NOTES, StoredNotes)
    return dict(stored.made)


def check_data(data: Any, folder: Path) -> None:
    """Refuse to write the responses over the file that the prompts are read from."""
    target = folder / FILE
    if isinstance(data, str | Path) and target.exists() and Path(data).exists() and target.samefile(data):
        raise FulldepthError(
            f"The prompts are in {data}, which the generated responses would replace. Choose another output folder."
        )


def _read(folder: Path, asked: Mapping[str, Any]) -> StoredNotes | None:
    """The notes of an earlier start; None if the responses have to be generated."""
    notes, responses = folder / NOTES, folder / FILE
    if not notes.exists():
        if responses.exists():
            raise FulldepthError(
                f"{responses} exists without {NOTES}, which describes its generation. It is never written over; choose "
                "another output folder."
            )
        return None
    again = f"Remove {notes} and {responses} to generate the responses again, or choose another output folder."
    try:
        stored = read_document(notes, StoredNotes)
    except FulldepthError as error:
        raise FulldepthError(f"{error} {again}") from error
    current = json.loads(json.dumps(dict(asked)))
    different = [
        f"{name} was {one_line(repr(stored.asked.get(name)), 80)}, is {one_line(repr(value), 80)}"
        for name, value in current.items()
        if stored.asked.get(name) != value
    ]
    if different:
        raise FulldepthError(f"{folder} holds other responses: {'; '.join(different[:4])}. {again}")
    if not responses.exists():  # killed between the two files
        return None
    with responses.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != stored.sha256:
            raise FulldepthError(f"{responses} has changed since it was generated. {again}")
    return stored

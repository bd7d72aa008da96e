"""`Answers`: a model's answers to the requests of the harness, kept on disk so that a killed run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from fulldepth.errors import FulldepthError

Scored = list[tuple[float, bool]]
"""Of one request, for each exit layer: the log-probability of the continuation, and whether it is the greedy one."""
MOST_LINE = 64 << 20
"""Longest line of a file in bytes."""


class Answers:
    """Key of a request -> answer: for log-likelihoods one pair per exit layer, for generation the text.

    Args:
        path: file of lines of JSON, the first with `identity`; None = in memory only.
        identity: what the answers depend on. A file with another identity, or a link, is replaced.
        layers: number of exit layers of a scored request.

    Use as a context manager; every batch is written at once.
    """

    def __init__(self, path: Path | None, identity: Mapping[str, Any], layers: int) -> None:
        self.path, self.identity, self.layers = path, json.loads(json.dumps(identity)), layers
        self._answers: dict[str, Any] = {}
        self._file: Any = None
        self.reused = 0
        """Answers that were read from the file."""

    def __enter__(self) -> Self:
        if self.path is not None:
            if self.path.parent.is_symlink():
                raise FulldepthError(
                    f"{self.path.parent} is a link; remove it, so that answers are written in its place."
                )
            length = 0 if self.path.is_symlink() else self._read(self.path)
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                if not length:
                    self.path.unlink(missing_ok=True)  # a link is removed, and not followed
                self._file = self.path.open("r+b" if length else "xb")
                self._file.seek(length)
                self._file.truncate()
                if not length:
                    self._write([self.identity])
            except OSError as error:
                raise FulldepthError(f"Cannot write {self.path}: {error.strerror or error}.") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def __contains__(self, key: str) -> bool:
        return key in self._answers

    def __getitem__(self, key: str) -> Any:
        return self._answers[key]

    def put(self, answers: Mapping[str, Any]) -> None:
        """Add answers, and write them.

        Raises:
            FulldepthError: if they cannot be written.
        """
        self._answers.update(answers)
        if self._file is not None:
            try:
                self._write([[key, value] for key, value in answers.items()])
            except OSError as error:
                raise FulldepthError(f"Cannot write {self.path}: {error.strerror or error}.") from error

    def _write(self, values: Iterable[Any]) -> None:
        self._file.write("".join(json.dumps(value) + "\n" for value in values).encode())
        self._file.flush()

    def _read(self, path: Path) -> int:
        """Read the file's answers; returns the length in bytes of the part that is valid, 0 for another identity."""
        valid = 0
        with suppress(OSError), path.open("rb") as file:
            while (line := file.readline(MOST_LINE)).endswith(b"\n"):
                entry = None
                with suppress(ValueError, RecursionError):
                    entry = json.loads(line)
                if valid == 0:
                    if entry != self.identity:
                        return 0
                elif (pair := self._checked(entry)) is not None:
                    self._answers.update([pair])
                else:
                    break
                valid += len(line)
        self.reused = len(self._answers)
        return valid

    def _checked(self, entry: Any) -> tuple[str, Any] | None:
        """A key with its answer; None for anything else."""
        match entry:
            case [str(key), str(text)]:
                return key, text
            case [str(key), [*pairs]] if len(pairs) == self.layers:
                if all(isinstance(pair, list) and list(map(type, pair)) == [float, bool] for pair in pairs):
                    return key, [(number, greedy) for number, greedy in pairs]
        return None


def key_of(kind: str, *parts: Any) -> str:
    """A key of a request: a hash of its kind and its parts (plain values)."""
    return hashlib.sha256(json.dumps([kind, *parts], default=str).encode()).hexdigest()[:32]

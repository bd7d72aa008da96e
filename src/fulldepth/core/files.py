"""Reads and writes files safely: size limits, validation, atomic writes, locks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pydantic
from filelock import FileLock, Timeout

from fulldepth.core.errors import FulldepthError, one_line

MOST_BYTES = 64 << 20
"""Default size limit of a document in bytes."""
MOST_DEPTH = 64
"""Maximum nesting of lists and mappings in a document."""
MOST_DIGITS = 100
"""Maximum number of digits of an integer in a document."""
LOCK = ".lock"
ABANDONED = 7 * 24 * 3600
"""Seconds after which a temporary file of another machine counts as abandoned."""

T = TypeVar("T")


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Convert any exception that a library raises while it reads a file into `Cannot read PATH: reason`.

    Rust libraries raise bare `Exception`, and `BaseException` when they panic, so both are caught. Keep only
    the library's call in the body: errors in our own code must not be reported as errors of the file.

    Raises:
        FulldepthError: for any exception except `FulldepthError` itself, interruption and exit.
    """
    try:
        yield
    except (FulldepthError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise FulldepthError(f"Cannot read {path}: {_reason(error)}.") from error


def reading_each(path: str | Path, items: Iterable[T]) -> Iterator[T]:
    """Iterate over the items that a library reads from a file, with its exceptions converted as by `reading`."""
    iterator = iter(items)
    while True:
        with reading(path):
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def _reason(error: BaseException) -> str:
    """The reason for an error, in one line without a full stop."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error).rstrip(".") or type(error).__name__


def read_bytes(path: str | Path, *, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises:
        FulldepthError: if it is not a regular file (a device or a pipe may never end), is larger, or cannot be read.
    """
    path = Path(path)
    with reading(path):
        if not path.is_file():
            raise FulldepthError(f"Cannot read {path}: it is {'not a regular file' if path.exists() else 'missing'}.")
        with path.open("rb") as file:
            content = file.read(most + 1)
    if len(content) > most:
        raise FulldepthError(f"Cannot read {path}: it is larger than {most / (1 << 20):,.0f} MiB.")
    return content


def read_json(path: str | Path, *, most: int = MOST_BYTES, allow_constants: bool = False) -> Any:
    """The value in a JSON file.

    Args:
        path: the file.
        most: largest size in bytes.
        allow_constants: accept NaN and infinities, which are not JSON but which Python writes.

    Raises:
        FulldepthError: if it is not valid JSON, a key appears twice, a number has more than `MOST_DIGITS` digits or is
            beyond float64, or it is larger than `most` bytes or nested deeper than `MOST_DEPTH`.
    """
    content = read_bytes(path, most=most)
    constant = None if allow_constants else _refuse_constant
    with reading(path):
        try:
            value = json.loads(
                content,
                object_pairs_hook=unique_keys,
                parse_constant=constant,
                parse_int=_integer,
                parse_float=_finite,
            )
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise FulldepthError(f"Cannot read {path}: it is not valid JSON: {_reason(error)}.") from error
    if not _is_shallow(value):
        raise FulldepthError(f"Cannot read {path}: it is nested deeper than {MOST_DEPTH} levels.")
    return value


def read_document(path: str | Path, schema: type[T], *, most: int = MOST_BYTES) -> T:
    """The value in a JSON file, validated strictly against a schema.

    Args:
        path: the file.
        schema: a pydantic model, or any type that pydantic understands, such as `dict[str, list[float]]`.
        most: largest size in bytes.

    Raises:
        FulldepthError: as `read_json`, or if the value does not match the schema; names the first invalid entry.
    """
    return validated(path, read_json(path, most=most), schema)


def validated(path: str | Path, value: Any, schema: type[T]) -> T:
    """Validate a value that was read from a JSON file strictly against a schema, and return it.

    Raises:
        FulldepthError: if it does not match; names the file and the first invalid entry, or the version of the
            schema if the file has another one.
    """
    try:
        return pydantic.TypeAdapter(schema).validate_json(json.dumps(value), strict=True)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if problem["loc"] == ("schema_version",) and problem["type"] == "literal_error":
            raise FulldepthError(
                f"Cannot read {path}: it has schema_version {one_line(repr(problem['input']), 20)}, "
                f"this fulldepth reads {problem['ctx']['expected']}."
            ) from error
        where = ".".join(map(str, problem["loc"])) or "the document"
        raise FulldepthError(f"Cannot read {path}: {one_line(where)}: {one_line(problem['msg'])}.") from error


def write_text(target: Path, text: str) -> Path:
    """Write a file atomically, in a folder that is created if absent.

    Raises:
        FulldepthError: if it cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic(target) as part:
            part.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FulldepthError(f"Cannot write {target}: {error.strerror or error}.") from error
    return target


def append_text(target: Path, text: str) -> None:
    """Append to a file, which is created if absent.

    Raises:
        FulldepthError: if it cannot be written; a part of the text may have been.
    """
    try:
        with target.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise FulldepthError(f"Cannot write {target}: {error.strerror or error}.") from error


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; refuses duplicate keys (`json` would silently keep the last one)."""
    result = dict(pairs)
    if len(result) < len(pairs):
        (key, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"the key {one_line(key, 100)!r} appears twice")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")


def _integer(digits: str) -> int:
    """An integer of at most `MOST_DIGITS` digits, so that products of a few stay within float64."""
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it holds a number of {len(digits):,} digits")
    return int(digits)


def _finite(text: str) -> float:
    """A float within the range of float64."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"the number {one_line(text, 40)} is too large")
    return number


def _is_shallow(value: Any) -> bool:
    """Return True if lists and mappings are nested at most `MOST_DEPTH` deep. Does not recurse."""
    level = [value]
    for _ in range(MOST_DEPTH + 1):
        inner = [list(v.values()) if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        if not inner:
            return True
        level = [item for items in inner for item in items]
    return False


@contextmanager
def atomic(path: str | Path) -> Iterator[Path]:
    """Write to a temporary name beside `path`, then rename, so that readers see the old file or the complete new one.

    Yields the temporary path; on an exception the old file stays and the temporary one is removed. The temporary file
    of a killed process is removed by the next one that writes the same file, and by `remove_leftovers`.
    """
    target = Path(path)
    remove_leftovers(target.parent, target.name)
    part = temporary_name(target)
    try:
        yield part
        with part.open("r+b") as file:  # Windows flushes only what is open for writing
            os.fsync(file.fileno())
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Write a folder under a temporary name beside `path`, then rename it; `path` must not exist.

    Yields the temporary folder, empty; on an exception it is removed.
    """
    target = Path(path)
    remove_leftovers(target.parent, target.name)
    part = temporary_name(target)
    shutil.rmtree(part, ignore_errors=True)  # left by an earlier process with the same id, as in a container
    part.mkdir(parents=True)
    try:
        yield part
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def temporary_name(target: Path) -> Path:
    """The name under which this process writes `target`: `.NAME.HOST-PID.part`."""
    return target.with_name(f".{target.name}.{_host()}-{os.getpid()}.part")


def remove_leftovers(folder: str | Path, name: str | None = None) -> list[Path]:
    """Remove temporary files and folders that killed processes left at the top level of `folder`; return them.

    Only those of the target `name` if one is given. A temporary name is abandoned if its process no longer runs on this
    machine, or if another machine made it more than `ABANDONED` seconds ago.
    """
    pattern = re.compile(rf"\.{'.+' if name is None else re.escape(name)}\.([^.]+)-(\d+)\.part")
    removed = []
    with contextlib.suppress(OSError):
        for path in Path(folder).iterdir():
            match = pattern.fullmatch(path.name)
            if match is None or not _is_abandoned(path, match[1], int(match[2])):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _is_abandoned(path: Path, host: str, process: int) -> bool:
    if host != _host():
        return time.time() - path.lstat().st_mtime > ABANDONED
    try:
        return not psutil.pid_exists(process)  # os.kill(process, 0) would interrupt the process on Windows
    except OverflowError:
        return True


def _host() -> str:
    """The machine's name without the characters that separate the parts of a temporary name."""
    return re.sub(r"[^A-Za-z0-9_]", "_", socket.gethostname()) or "host"


def check_outside(output: str | Path | None, *data: Any) -> None:
    """Refuse an output folder that is, or lies in, a folder of data: results there would be read as data.

    Args:
        output: the folder; None = no output.
        data: data arguments; arguments that are not folders are ignored.

    Raises:
        FulldepthError: names the output and the folder of data.
    """
    for source in data if output is not None else ():
        if isinstance(source, str | Path) and Path(source).is_dir():
            folder = Path(source).resolve()
            target = Path(str(output)).resolve()
            if target == folder or folder in target.parents:
                raise FulldepthError(
                    f"The output {output} lies in the folder of the data, {source}, so results there would be read as "
                    "data. Choose an output outside of it."
                )


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Lock a folder while this process writes there; it is created if absent, and removed if it stays empty.

    The lock is released when the process ends. Nested use is allowed.

    Raises:
        FulldepthError: if another process holds the lock, or the folder cannot be written.
    """
    target = Path(folder)
    absent = [parent for parent in (target, *target.absolute().parents) if not parent.exists()]
    try:
        target.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.resolve() / LOCK, timeout=0, is_singleton=True)
        lock.acquire()
    except Timeout as error:
        raise FulldepthError(
            f"Another fulldepth process is writing into {target}. Wait for it, or choose another folder."
        ) from error
    except OSError as error:
        raise FulldepthError(f"Cannot write into {target}: {error.strerror or error}.") from error
    try:
        remove_leftovers(target)
        yield
    finally:
        with contextlib.suppress(OSError):
            if lock.lock_counter == 1:  # outermost use; a waiting process notices that the file was removed
                Path(lock.lock_file).unlink()
        lock.release()
        for parent in absent:
            with contextlib.suppress(OSError):  # it holds something, or was removed already
                parent.rmdir()


def sha256_of(content: str | bytes) -> str:
    """Return the SHA-256 of bytes, or of a text in UTF-8, in hexadecimal digits."""
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def sha256_of_file(path: Path) -> str:
    """Return the SHA-256 of a file's content in hexadecimal digits.

    Raises:
        FulldepthError: if it cannot be read.
    """
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Fingerprint:
    """SHA-256 over parts, each hashed with its length, so that their boundaries matter."""

    def __init__(self, *settings: str) -> None:
        self._sha = hashlib.sha256()
        for setting in settings:
            self.add(setting.encode())

    def add(self, part: bytes) -> None:
        """Add one part."""
        self._sha.update(len(part).to_bytes(8, "little"))
        self._sha.update(part)

    def __str__(self) -> str:
        return f"sha256:{self._sha.hexdigest()}"

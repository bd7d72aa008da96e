"""Reads untrusted `.zip` archives: sizes are checked before decompression, and nothing is extracted to disk.

Any problem with an archive or a member is a `FulldepthError` that names it.
"""

from __future__ import annotations

import os
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import reading

MOST_MEMBER_BYTES = 256 << 20
"""Bytes of one member, decompressed."""
MOST_MEMBERS = 5_000_000
SPARE_BYTES, EXPANSION = 1 << 30, 200
"""Limit of all members together: `SPARE_BYTES` plus `EXPANSION` times the archive's size."""
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2)
"""Compression methods whose decoders need little memory for any archive."""


def open_archive(path: Path) -> zipfile.ZipFile:
    """Open an archive and check its members against the limits."""
    if not path.is_file():
        raise FulldepthError(f"Cannot read {path}: it is not a regular file.")
    with reading(path):
        archive = zipfile.ZipFile(path)
    try:
        _check_members(path, [info for info in archive.infolist() if not _is_folder(info)])
    except FulldepthError:
        archive.close()
        raise
    return archive


class Archive:
    """A checked archive, opened anew in each process: forked processes would move each other's place in one file.

    Args:
        path: of the archive.

    Raises:
        FulldepthError: as `open_archive`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = (os.getpid(), open_archive(path))

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_opened": (None, None)}

    @property
    def names(self) -> list[PurePosixPath]:
        """Names of the files in it."""
        return member_names(self._archive)

    def read(self, member: str) -> bytes:
        """The content of a member; see `read_member`."""
        return read_member(self._archive, member)

    @property
    def _archive(self) -> zipfile.ZipFile:
        process, archive = self._opened
        if process != os.getpid():
            archive = open_archive(self.path)
            self._opened = (os.getpid(), archive)
        return archive


def member_names(archive: zipfile.ZipFile) -> list[PurePosixPath]:
    """Names of the files in an archive."""
    return [PurePosixPath(info.filename) for info in archive.infolist() if not _is_folder(info)]


def _is_folder(info: zipfile.ZipInfo) -> bool:
    return info.filename.endswith("/")


def _check_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    if len(members) > MOST_MEMBERS:
        raise FulldepthError(f"Cannot read {path}: it has {len(members):,} members. Expected at most {MOST_MEMBERS:,}.")
    total, limit = sum(info.file_size for info in members), SPARE_BYTES + EXPANSION * path.stat().st_size
    if total > limit:
        raise FulldepthError(
            f"Cannot read {path}: its members are {total:,} bytes decompressed. Expected at most {limit:,} of an "
            "archive of its size."
        )
    names: set[str] = set()
    for info in members:
        if problem := _problem(info, names):
            raise FulldepthError(f"Cannot read {path}: its member {one_line(info.filename, 200)!r} {problem}.")
        names.add(info.filename)


def _problem(info: zipfile.ZipInfo, names: set[str]) -> str | None:
    """The problem with a member, or None; `names` are those of the members before it."""
    path = PurePosixPath(info.filename)
    if not info.filename:
        return "has no name"
    if path.is_absolute() or ".." in path.parts or "\\" in info.filename:
        return "is named so that it lies outside the archive"
    if info.filename in names:
        return "occurs twice"
    if info.flag_bits & 0x1:
        return "is encrypted"
    if info.compress_type not in METHODS:
        return f"is compressed by method {info.compress_type}, which is not read; use deflate"
    if info.file_size > MOST_MEMBER_BYTES:
        return f"is {info.file_size:,} bytes decompressed; expected at most {MOST_MEMBER_BYTES:,}"
    return None


def read_member(archive: zipfile.ZipFile, member: str) -> bytes:
    """The content of a member, whose size must be that in the archive's directory."""
    with reading(f"the image {archive.filename}/{one_line(member, 200)}"):
        size = archive.getinfo(member).file_size
        with archive.open(member) as file:
            content = file.read(size + 1)
    if len(content) != size:
        where = f"{archive.filename}/{one_line(member, 200)}"
        raise FulldepthError(f"Cannot read the image {where}: it has another size than the archive says.")
    return content

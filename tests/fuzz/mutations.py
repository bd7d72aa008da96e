"""Mutations of the files of a case. Each is drawn from a seeded generator and described in words."""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from fuzz import binaries, documents

Bytes = Callable[[random.Random, bytes], tuple[bytes, str]]

SUFFIXES: dict[str, list[Bytes]] = {
    ".json": [documents.json_file],
    ".jsonl": [documents.json_lines],
    ".yaml": [documents.yaml_file],
    ".safetensors": [binaries.safetensors_header, binaries.safetensors_weights],
    ".parquet": [binaries.parquet],
    ".png": [binaries.picture],
    ".pt": [binaries.pickled],
    ".pth": [binaries.pickled],
    ".bin": [binaries.pickled],
}
"""Mutations that know a format; they need a file that is still whole."""


def flip_bits(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    changed = bytearray(content)
    places = sorted(int(rng.random() * len(content)) for _ in range(rng.choice([1, 1, 2, 4, 16]))) if content else []
    for place in places:
        changed[place] ^= 1 << rng.randrange(8)
    return bytes(changed), f"flip bits in bytes {places}"


def overwrite(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    start, length = int(rng.random() * len(content)), rng.choice([1, 4, 16, 256])
    noise = rng.choice([rng.randbytes(length), b"\x00" * length, b"\xff" * length, b"9" * length, b"[" * length])
    return content[:start] + noise + content[
        start + length :
    ], f"overwrite {length} bytes at {start} with {noise[:4]!r}"


def cut(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    kept = int(rng.random() * len(content))
    return content[:kept], f"cut to {kept} of {len(content)} bytes"


def insert(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    place = int(rng.random() * (len(content) + 1))
    text = rng.choice(
        [b"\x00", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b'"', b"{", b"]", b",", b"\r", b"\x1b[31m", b"NaN"]
    )
    return content[:place] + text + content[place:], f"insert {text!r} at {place}"


REPLACEMENTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "twice": lambda content: content * 2,
    "only white space": lambda _: b" \n\n",
    "only NUL bytes": lambda content: b"\x00" * len(content),
    "with a byte order mark": lambda content: b"\xef\xbb\xbf" + content,
    "as UTF-16": lambda content: content.decode("utf-8", "replace").encode("utf-16"),
    "as Latin-1 with umlauts": lambda content: content.replace(b"a", b"\xe4"),
    "with Windows line ends": lambda content: content.replace(b"\n", b"\r\n"),
    "without line ends": lambda content: content.replace(b"\n", b""),
    "with a long line": lambda content: content + b"z" * 3_000_000 + b"\n",
    "null": lambda _: b"null",
    "a number": lambda _: b"42",
    "a list": lambda _: b"[]",
    "a mapping": lambda _: b"{}",
    "a deep list": lambda _: documents.RAW_TEXTS["deep list"].encode(),
    "an error page": lambda _: b"<!DOCTYPE html><html><body>404 Not Found</body></html>",
    "a Git LFS pointer": lambda _: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"
    ),
}


def replace(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    how = rng.choice(list(REPLACEMENTS))
    return REPLACEMENTS[how](content), how


RAW: list[Bytes] = [flip_bits, flip_bits, overwrite, cut, cut, insert, replace, replace]


def change_content(rng: random.Random, path: Path) -> str:
    """Change what is in a file: half of the time in the terms of its format."""
    content = path.read_bytes()
    known = SUFFIXES.get(path.suffix, [])
    if known and rng.random() < 0.65:
        try:
            new, words = rng.choice(known)(rng, content)
        except Exception:  # an earlier mutation broke the format
            new, words = cut(rng, content)
    else:
        new, words = rng.choice(RAW)(rng, content)
    path.write_bytes(new)
    return words


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def delete(rng: random.Random, path: Path, others: list[Path]) -> str:
    _remove(path)
    return "delete"


def swap(rng: random.Random, path: Path, others: list[Path]) -> str:
    other = rng.choice(others)
    content = other.read_bytes() if other.is_file() else b""
    _remove(path)
    path.write_bytes(content)
    return f"content of {other}"


def link(rng: random.Random, path: Path, others: list[Path]) -> str:
    target = rng.choice(
        ["/dev/zero", "/dev/stdin", "/dev/null", "/dev/urandom", path.name, "nowhere", "/proc/self/mem"]
    )
    _remove(path)
    path.symlink_to(target)
    return f"symbolic link to {target}"


def fifo(rng: random.Random, path: Path, others: list[Path]) -> str:
    _remove(path)
    os.mkfifo(path)
    return "a pipe that nobody writes to"


def folder(rng: random.Random, path: Path, others: list[Path]) -> str:
    _remove(path)
    path.mkdir()
    return "an empty folder"


def forbid(rng: random.Random, path: Path, others: list[Path]) -> str:
    path.chmod(0)
    return "no permission to read"


def forbid_folder(rng: random.Random, path: Path, others: list[Path]) -> str:
    path.parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    return f"no permission to write into {path.parent}"


def add_beside(rng: random.Random, path: Path, others: list[Path]) -> str:
    """Add a file that a glob may find."""
    name = rng.choice(["checkpoint-9", "checkpoint-x", "adapter_config.json", "model.safetensors", "pytorch_model.bin"])
    name = rng.choice([name, ".hidden", "results.json", "progress.json", "naïve ✓", "model-00001-of-00002.safetensors"])
    new = path.parent / name
    if new.exists():
        return delete(rng, path, others)
    if rng.random() < 0.4:
        new.mkdir()
        return f"an empty folder {new.name} beside it"
    new.write_bytes(rng.choice([b"", b"{}", b"text", b"\x80\x04N."]))
    return f"a small file {new.name} beside it"


PLACES: dict[Callable[[random.Random, Path, list[Path]], str], int] = {
    delete: 4,
    swap: 4,
    link: 3,
    fifo: 1,
    folder: 2,
    forbid: 1,
    forbid_folder: 1,
    add_beside: 2,
}


def mutate_file(rng: random.Random, targets: list[list[Path]]) -> tuple[Path, str]:
    """Change one file of the groups in `targets`; each group is drawn as often.

    Returns:
        The file and, in words, what happened to it.
    """
    path = rng.choice(rng.choice([group for group in targets if group]))
    if path.is_file() and not path.is_symlink() and rng.random() < 0.8:
        return path, change_content(rng, path)
    others = [other for group in targets for other in group if other != path and other.is_file()] or [path]
    if not (path.exists() or path.is_symlink()):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
        return path, "an empty file again"
    how = rng.choices(list(PLACES), list(PLACES.values()))[0]
    return path, how(rng, path, others)

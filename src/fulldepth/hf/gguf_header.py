"""Reads the metadata and the tensor table of a GGUF file, and checks every count against the size of the file.

The package `gguf` does not check counts: on a damaged file it may loop 2^60 times.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import reading
from fulldepth.hf.file_checks import Weights

SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
"""Number of a metadata type -> its `struct` format; 8 is a string, 9 an array."""
STRING, ARRAY = 8, 9
MOST_DIMENSIONS = 4
ABSENT = (-1, 2**32 - 1)
"""Ids of special tokens that do not exist."""


@dataclass(frozen=True)
class Header:
    """The metadata and the tensor table of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    """Arrays are tuples; strings in arrays are bytes."""
    tensors: dict[str, Tensor]
    size: int
    """Bytes of metadata and tensor table, from the start of the file."""

    @property
    def architecture(self) -> str:
        """Such as `llama`."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def entries(self) -> dict[str, Any]:
        """The metadata of the architecture, without its name in front."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}

    @property
    def weights(self) -> Weights:
        """As `check_model_files` returns it for safetensors; all tensors are floating point after dequantisation."""
        elements = sum(prod(tensor.shape) for tensor in self.tensors.values())
        return Weights(dict.fromkeys(self.tensors, "F32"), self.path.stat().st_size, elements, torch.float32)


class Tensor(NamedTuple):
    """Entry of the tensor table: shape in torch's order, number of the ggml type, offset in bytes."""

    shape: tuple[int, ...]
    kind: int
    offset: int


@lru_cache(maxsize=4)
def _read(path: Path, size: int, mtime: int) -> Header:
    with reading(path), path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        return _Reader(path, data).header()


def read_header(path: Path) -> Header:
    """Read the metadata and the tensor table of a GGUF file; repeated reads are cached.

    Raises:
        FulldepthError: if the package `gguf` is missing, or the file is truncated, damaged, or not GGUF version 2 or 3.
    """
    if find_spec("gguf") is None:
        raise FulldepthError(f"{path} is a GGUF file, which needs the package gguf: pip install 'fulldepth[gguf]'.")
    with reading(path):
        status = path.stat()
    return _read(path, status.st_size, status.st_mtime_ns)


def in_parts(path: Path, parts: int) -> FulldepthError:
    """The error for one of several files that hold one model."""
    return FulldepthError(
        f"{path} is one of the {parts} parts of a model, which transformers cannot read one by one. Join them with "
        f"llama.cpp (`llama-gguf-split --merge FIRST-PART MERGED{path.suffix}`) and name the merged file."
    )


@contextmanager
def without_absent_ids(path: Path) -> Iterator[Path]:
    """The file, or a temporary copy of its metadata without the special tokens that are marked as absent.

    Converters mark a token that the vocabulary lacks with the id -1 (unsigned: 2**32 - 1), which transformers looks up.
    The copy is as long as the file, but its tensors are not stored.
    """
    header = read_header(path)
    absent = [key for key, value in header.metadata.items() if key.endswith("_token_id") and value in ABSENT]
    if not absent:
        yield path
        return
    with reading(path), path.open("rb") as file:
        content = file.read(header.size)
    for key in absent:
        named = struct.pack("<Q", len(key)) + key.encode()
        content = content.replace(named, named[:-2] + b"no", 1)  # a key that nobody reads
    with TemporaryDirectory(prefix="fulldepth-") as folder:
        copy = Path(folder) / path.name
        copy.write_bytes(content)
        with copy.open("r+b") as file:
            file.truncate(path.stat().st_size)
        yield copy


class _Reader:
    """Reads a GGUF file front to back; refuses counts that the rest of the file cannot hold."""

    def __init__(self, path: Path, data: mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def header(self) -> Header:
        magic = self._bytes(4)
        if magic != b"GGUF":
            raise FulldepthError(f"{self.path} is no GGUF file: it starts with {magic!r}.")
        version = self._scalar("<I")
        if version not in (2, 3):
            raise FulldepthError(f"{self.path} is GGUF of version {version}; expected 2 or 3 in little-endian order.")
        num_tensors, num_entries = self._count(24), self._count(12)
        metadata = {self._string(): self._value(self._scalar("<I")) for _ in range(num_entries)}
        if metadata.get("split.count", 1) not in (0, 1):
            raise in_parts(self.path, metadata["split.count"])
        tensors: dict[str, Tensor] = {}
        for _ in range(num_tensors):
            name = self._string()
            if name in tensors:
                raise FulldepthError(f"{self.path} holds the tensor {one_line(name, 100)!r} twice.")
            dimensions = self._scalar("<I")
            if not 1 <= dimensions <= MOST_DIMENSIONS:
                raise FulldepthError(f"{self.path}: {one_line(name, 100)!r} has {dimensions} dimensions.")
            shape = tuple(self._scalar("<Q") for _ in range(dimensions))[::-1]
            tensors[name] = Tensor(shape, self._scalar("<I"), self._scalar("<Q"))
        end = self.position
        self._check_data(tensors, metadata.get("general.alignment", 32))
        return Header(self.path, metadata, tensors, end)

    def _check_data(self, tensors: dict[str, Tensor], alignment: Any) -> None:
        block_sizes = _block_sizes()
        if not isinstance(alignment, int) or alignment < 1:
            raise FulldepthError(f"{self.path}: general.alignment is {one_line(alignment, 40)}.")
        start = -(-self.position // alignment) * alignment
        for name, tensor in tensors.items():
            if tensor.kind not in block_sizes:
                raise FulldepthError(f"{self.path}: {one_line(name, 100)!r} is of the unknown type {tensor.kind}.")
            elements, nbytes = block_sizes[tensor.kind]
            if start + tensor.offset + prod(tensor.shape) // elements * nbytes > len(self.data):
                raise FulldepthError(
                    f"{self.path} is cut short: {one_line(name, 100)!r} ends behind its {len(self.data):,} bytes."
                )

    def _bytes(self, count: int) -> bytes:
        if count > len(self.data) - self.position:
            raise FulldepthError(f"{self.path} is cut short: it ends after {len(self.data):,} bytes.")
        self.position += count
        return self.data[self.position - count : self.position]

    def _scalar(self, form: str) -> Any:
        return struct.unpack(form, self._bytes(struct.calcsize(form)))[0]

    def _count(self, least: int) -> int:
        """Read the number of items of at least `least` bytes each."""
        count = int(self._scalar("<Q"))
        if count * least > len(self.data) - self.position:
            raise FulldepthError(f"{self.path} is damaged or cut short: it announces {count:,} items.")
        return count

    def _string(self) -> str:
        return self._bytes(self._count(1)).decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise FulldepthError(f"{self.path} is damaged: metadata of the unknown type {kind}.")
        kind = self._scalar("<I")
        if kind in SCALARS:
            form = SCALARS[kind][1]
            count = self._count(struct.calcsize(form))
            return struct.unpack(f"<{count}{form}", self._bytes(count * struct.calcsize(form)))
        if kind != STRING:
            raise FulldepthError(f"{self.path}: metadata holds an array of the type {kind}, which is not read.")
        return tuple(self._bytes(self._count(1)) for _ in range(self._count(8)))


@lru_cache(maxsize=1)
def _block_sizes() -> dict[int, tuple[int, int]]:
    """Number of a ggml type -> (weights per block, bytes per block)."""
    from gguf import GGML_QUANT_SIZES  # noqa: PLC0415

    return {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}

"""`WeightFiles`: writes weights into safetensors files of bounded size."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


class WeightFiles:
    """The weight files of a checkpoint, with transformers' names; each is written as soon as it is full.

    Args:
        folder: of the checkpoint.
        most_bytes: largest size of a file; a larger weight has a file of its own.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0
        """Of `_waiting`."""
        self._written: list[list[str]] = []
        """Names of the weights in each file."""
        self._total = 0

    def make_room(self, size: int) -> None:
        """Write the current file unless it has room for weights of `size` bytes."""
        if self._bytes + size > self._most_bytes:
            self._flush()

    def add(self, name: str, weight: Tensor) -> None:
        """Add a weight to the current file, or to a new one if that is full."""
        self.make_room(weight.nbytes)
        self._waiting[name] = weight.detach().contiguous().cpu()
        self._bytes += weight.nbytes

    def close(self, parameters: int) -> None:
        """Write the last file, rename all files, and write an index if there are several.

        Args:
            parameters: number of elements in the model's weights.
        """
        self._flush()
        count = len(self._written)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        for number, name in enumerate(names):
            self._path(number).rename(self._folder / name)
        if count > 1:
            index = {
                "metadata": {"total_parameters": parameters, "total_size": self._total},
                "weight_map": {
                    weight: name for name, held in zip(names, self._written, strict=True) for weight in held
                },
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        if not self._waiting:
            return
        save_file(self._waiting, self._path(len(self._written)), metadata={"format": "pt"})
        self._written.append(list(self._waiting))
        self._total += self._bytes
        self._waiting, self._bytes = {}, 0

    def _path(self, number: int) -> Path:
        """Temporary name of a file: the final one contains the number of files."""
        return self._folder / f"unfinished-{number}.safetensors"

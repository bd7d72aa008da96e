"""Weights in safetensors files of bounded size, each written as soon as it is full."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


class WeightFiles:
    """The files of weights of a checkpoint, named as transformers names them.

    Args:
        folder: of the checkpoint.
        most: bytes of weights in one file; a larger weight has a file of its own.
    """

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        self._most = most
        self._waiting: dict[str, Tensor] = {}
        self._bytes = 0
        """Of `_waiting`."""
        self._written: list[list[str]] = []
        """Names of the weights in each file."""
        self._total = 0

    def make_room(self, size: int) -> None:
        """Write the file unless weights of so many bytes still go into it."""
        if self._bytes + size > self._most:
            self._flush()

    def add(self, name: str, weight: Tensor) -> None:
        """Put a weight into the file, or into the next one if this one is full."""
        self.make_room(weight.nbytes)
        self._waiting[name] = weight.detach().contiguous().cpu()
        self._bytes += weight.nbytes

    def close(self, parameters: int) -> None:
        """Write what is left, give the files their names, and list them if there are several.

        Args:
            parameters: numbers in the model's weights.
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
        """Name of a file while it is not known how many there will be."""
        return self._folder / f"unfinished-{number}.safetensors"

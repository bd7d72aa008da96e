"""Standalone program: converts a checkpoint to GGUF, loads it with llama-cpp-python and computes its logits.

    python -P with_llama_cpp.py FOLDER IDS.pt LOGITS.pt convert_hf_to_gguf.py

The converter is llama.cpp's own; the source distribution of llama-cpp-python holds it in `vendor/llama.cpp`. Everything
is float32, the cache too. A folder without a tokenizer is converted without a vocabulary. Writes the logits of the ids;
the last line of the output is a JSON object with the class and the largest difference of logits with and without a
cache, relative.
"""

from __future__ import annotations

import json
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from llama_cpp import Llama

FLOAT32 = 0
"""ggml's number for float32."""


def convert(folder: Path, converter: Path, target: Path) -> None:
    """Write the GGUF file in float32."""
    sys.path.insert(0, str(converter.parent))
    sys.argv = [str(converter), str(folder), "--outtype", "f32", "--outfile", str(target)]
    with ExitStack() as undo:
        if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            sys.argv[1] = undo.enter_context(tempfile.TemporaryDirectory())
            undo.enter_context(without_vocabulary(folder, Path(sys.argv[1]), converter))
        runpy.run_path(str(converter), run_name="__main__")


@contextmanager
def without_vocabulary(folder: Path, links: Path, converter: Path) -> Iterator[None]:
    """Let the converter write a model without vocabulary, from links to its files in `links`."""
    for path in folder.absolute().iterdir():
        try:
            (links / path.name).symlink_to(path)
        except OSError:  # Windows allows links to administrators and developers only
            shutil.copy(path, links / path.name)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = config["vocab_size"]
    tokenizer = {"model": {"vocab": {str(token): token for token in range(size)}}, "added_tokens": []}
    (links / "tokenizer.json").write_text(
        json.dumps(tokenizer), encoding="utf-8"
    )  # Gemma 3's length is read from there

    def set_vocab(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(size)

    kind = runpy.run_path(str(converter))["get_model_class"](config["architectures"][0])
    with patch.object(kind, "set_vocab", set_vocab):
        yield


def logits(model: Any, ids: list[int], spans: list[tuple[int, int]]) -> np.ndarray:
    """[T, V] logits of one sequence, span by span."""
    model.reset()
    for begin, end in spans:
        model.eval(ids[begin:end])
    return np.array(model.scores[: len(ids)])


def main(folder: str, ids_file: str, logits_file: str, converter: str) -> None:
    """Convert and load the checkpoint, write its logits, print the report."""
    ids = torch.load(ids_file, weights_only=True).tolist()
    length = len(ids[0])
    start = max(1, length - 4)
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "model.gguf"
        convert(Path(folder), Path(converter), path)
        options: dict[str, Any] = {"logits_all": True, "type_k": FLOAT32, "type_v": FLOAT32, "flash_attn": False}
        model = Llama(str(path), n_ctx=max(length, 256), n_gpu_layers=0, use_mmap=False, verbose=False, **options)
        all_at_once = np.stack([logits(model, row, [(0, length)]) for row in ids])
        spans = [(0, start), *((at, at + 1) for at in range(start, length))]
        again = np.stack([logits(model, row, spans) for row in ids])
    torch.save(torch.from_numpy(all_at_once), logits_file)
    error = float(np.abs(again - all_at_once).max() / max(np.abs(all_at_once).max(), 1e-30))
    kind = model.metadata.get("general.architecture", "unknown")
    print(json.dumps({"class": f"llama.cpp {kind}", "cache_error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])

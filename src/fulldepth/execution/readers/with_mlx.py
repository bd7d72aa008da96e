"""Standalone program: loads a checkpoint with mlx-lm and computes its logits.

    python -P with_mlx.py FOLDER IDS.pt LOGITS.pt

Writes the logits of the ids; the last line of the output is a JSON object with the class and the largest difference of
logits with and without a cache, relative.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model


def main(folder: str, ids_file: str, logits_file: str) -> None:
    """Load the checkpoint, write its logits, print the report."""
    model, _ = load_model(Path(folder))
    ids = mx.array(torch.load(ids_file, weights_only=True).numpy())
    logits = np.array(model(ids).astype(mx.float32))
    start = max(1, ids.shape[1] - 4)
    cache = make_prompt_cache(model)
    spans = [(0, start), *((at, at + 1) for at in range(start, ids.shape[1]))]
    parts = [np.array(model(ids[:, begin:end], cache=cache).astype(mx.float32)) for begin, end in spans]
    torch.save(torch.from_numpy(logits), logits_file)
    error = float(np.abs(np.concatenate(parts, axis=1) - logits).max() / max(np.abs(logits).max(), 1e-30))
    print(json.dumps({"class": f"{type(model).__module__}.{type(model).__name__}", "cache_error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])

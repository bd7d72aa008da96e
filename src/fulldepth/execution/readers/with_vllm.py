"""Standalone program: loads a checkpoint with vLLM on the CPU in float32 and computes its logits.

    python -P with_vllm.py FOLDER IDS.pt LOGITS.pt [carried]

`carried`: with the code that the folder has. Writes the logits of the ids; the last line of the output is a JSON object
with the class and the largest difference of logits with and without a cache, relative: those of the tokens that it
generates, one by one and read again at once.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

from vllm import LLM, SamplingParams

GENERATED = 4


def row(entries: Any, size: int) -> np.ndarray:
    """[V] logits of one position, in the order of the vocabulary."""
    logits = np.full(size, np.nan, dtype=np.float32)
    for token, entry in entries.items():
        logits[token] = entry.logprob
    return logits


def compute(model: Any, ids: Sequence[Sequence[int]], size: int, generated: int) -> list[tuple[np.ndarray, list[int]]]:
    """For each sequence: [T - 1 + generated, V] logits, and the tokens that were generated."""
    settings = SamplingParams(
        temperature=0.0, max_tokens=generated, logprobs=-1, prompt_logprobs=-1, ignore_eos=True, detokenize=False
    )
    results = []
    for answer in model.generate([{"prompt_token_ids": list(sequence)} for sequence in ids], settings, use_tqdm=False):
        entries = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
        results.append((np.stack([row(entry, size) for entry in entries]), list(answer.outputs[0].token_ids)))
    return results


def main(folder: str, ids_file: str, logits_file: str, kind: str = "") -> None:
    """Load the checkpoint, write its logits, print the report."""
    ids = torch.load(ids_file, weights_only=True).tolist()
    model = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=len(ids[0]) + GENERATED + 1,
        skip_tokenizer_init=True,
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**26,
        trust_remote_code=kind == "carried",
    )
    size = model.llm_engine.model_config.get_vocab_size()
    one_by_one = compute(model, ids, size, GENERATED)
    at_once = compute(model, [[*sequence, *new] for sequence, (_, new) in zip(ids, one_by_one, strict=True)], size, 1)
    prompt_logits = np.stack([logits[: len(ids[0])] for logits, _ in one_by_one])
    new = range(len(ids[0]), len(ids[0]) + GENERATED - 1)
    errors = [np.abs(a[new] - b[new]).max() for (a, _), (b, _) in zip(one_by_one, at_once, strict=True)]
    torch.save(torch.from_numpy(prompt_logits), logits_file)
    name = model.apply_model(lambda inner: f"{type(inner).__module__}.{type(inner).__name__}")[0]
    print(json.dumps({"class": name, "cache_error": float(max(errors) / max(np.abs(prompt_logits).max(), 1e-30))}))


if __name__ == "__main__":
    main(*sys.argv[1:])

# ruff: noqa: PLC0415  # one of the readers is installed
"""Standalone program for `readers.py`: logits of checkpoints by mlx-lm, llama.cpp or vLLM, all in float32.

    python -P other_readers.py mlx|llama.cpp|vllm JOBS.json

A job is a list: the checkpoint's folder, a file with the ids, the file to write the logits to, and for llama.cpp the
path of its own converter (the source distribution of llama-cpp-python holds it in `vendor/llama.cpp`), for vLLM
`carried` if it may run the code in the folder. Each job prints one line of JSON: the class, and the largest difference
of logits with and without a cache, relative; or why it failed. Runs in an interpreter that has the reader and torch.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

FLOAT32 = 0
"""ggml's number for float32."""
GENERATED = 4
"""Tokens that vLLM generates one by one, to compare with one pass."""
Read = tuple[np.ndarray, float, str]
"""[B, T, V] logits, the largest difference with and without a cache, and the class."""


def spans_of(length: int) -> list[tuple[int, int]]:
    """Most of a sequence, then token by token."""
    start = max(1, length - 4)
    return [(0, start), *((at, at + 1) for at in range(start, length))]


def with_mlx(folder: str, ids: torch.Tensor) -> Read:
    """By mlx-lm."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(Path(folder))
    tokens = mx.array(ids.numpy())
    logits = np.array(model(tokens).astype(mx.float32))
    cache = make_prompt_cache(model)
    parts = [
        np.array(model(tokens[:, begin:end], cache=cache).astype(mx.float32)) for begin, end in spans_of(ids.shape[1])
    ]
    error = float(np.abs(np.concatenate(parts, axis=1) - logits).max())
    return logits, error, f"{type(model).__module__}.{type(model).__name__}"


def with_llama_cpp(folder: str, ids: torch.Tensor, converter: str) -> Read:
    """By llama-cpp-python, after conversion to GGUF; a folder without a tokenizer is converted without a vocabulary."""
    from llama_cpp import Llama

    length = ids.shape[1]
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "model.gguf"
        convert(Path(folder), Path(converter), path)
        options: dict[str, Any] = {"logits_all": True, "type_k": FLOAT32, "type_v": FLOAT32, "flash_attn": False}
        model = Llama(str(path), n_ctx=max(length, 256), n_gpu_layers=0, use_mmap=False, verbose=False, **options)

        def logits(row: Sequence[int], spans: Sequence[tuple[int, int]]) -> np.ndarray:
            model.reset()
            for begin, end in spans:
                model.eval(row[begin:end])
            return np.array(model.scores[:length])

        at_once = np.stack([logits(row, [(0, length)]) for row in ids.tolist()])
        again = np.stack([logits(row, spans_of(length)) for row in ids.tolist()])
    return (
        at_once,
        float(np.abs(again - at_once).max()),
        f"llama.cpp {model.metadata.get('general.architecture', 'unknown')}",
    )


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
def without_vocabulary(folder: Path, copy: Path, converter: Path) -> Iterator[None]:
    """Let the converter write a model without vocabulary, from a copy of its files."""
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    size = config["vocab_size"]
    tokenizer = {"model": {"vocab": {str(token): token for token in range(size)}}, "added_tokens": []}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")  # Gemma 3's length is read from there

    def set_vocab(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(size)

    kind = runpy.run_path(str(converter))["get_model_class"](config["architectures"][0])
    with patch.object(kind, "set_vocab", set_vocab):
        yield


def with_vllm(folder: str, ids: torch.Tensor, kind: str = "") -> Read:
    """By vLLM on the CPU."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm import LLM, SamplingParams

    length = ids.shape[1]
    model = LLM(
        folder,
        dtype="float32",
        enforce_eager=True,
        max_model_len=length + GENERATED + 1,
        skip_tokenizer_init=True,
        max_logprobs=-1,
        logprobs_mode="raw_logits",
        enable_prefix_caching=False,
        kv_cache_memory_bytes=2**26,
        trust_remote_code=kind == "carried",
    )
    size = model.llm_engine.model_config.get_vocab_size()

    def row(entries: Any) -> np.ndarray:
        logits = np.full(size, np.nan, dtype=np.float32)
        for token, entry in entries.items():
            logits[token] = entry.logprob
        return logits

    def compute(rows: Sequence[Sequence[int]], generated: int) -> list[tuple[np.ndarray, list[int]]]:
        """For each sequence: [T - 1 + generated, V] logits, and the tokens that were generated."""
        settings = SamplingParams(
            temperature=0.0, max_tokens=generated, logprobs=-1, prompt_logprobs=-1, ignore_eos=True, detokenize=False
        )
        answers = model.generate([{"prompt_token_ids": list(tokens)} for tokens in rows], settings, use_tqdm=False)
        return [
            (
                np.stack([row(entry) for entry in (*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs)]),
                list(answer.outputs[0].token_ids),
            )
            for answer in answers
        ]

    one_by_one = compute(ids.tolist(), GENERATED)
    whole = compute([[*tokens, *new] for tokens, (_, new) in zip(ids.tolist(), one_by_one, strict=True)], 1)
    new = slice(length, length + GENERATED - 1)
    prompts = np.stack([logits[:length] for logits, _ in one_by_one])
    error = max(np.abs(a[new] - b[new]).max() for (a, _), (b, _) in zip(one_by_one, whole, strict=True))
    name = model.apply_model(lambda inner: f"{type(inner).__module__}.{type(inner).__name__}")[0]
    return prompts, float(error), name


READERS = {"mlx": with_mlx, "llama.cpp": with_llama_cpp, "vllm": with_vllm}


def main(reader: str, jobs: str) -> None:
    """Read every checkpoint, write its logits, print the reports."""
    for folder, ids_file, logits_file, *further in json.loads(Path(jobs).read_text(encoding="utf-8")):
        try:
            logits, error, name = READERS[reader](folder, torch.load(ids_file, weights_only=True), *further)
            torch.save(torch.from_numpy(logits), logits_file)
            relative = error / max(float(np.abs(logits).max()), 1e-30)
            print(json.dumps({"class": name, "cache_error": relative}), flush=True)
        except (Exception, SystemExit) as reason:
            print(json.dumps({"failed": " ".join(f"{type(reason).__name__}: {reason}".split())[:300]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

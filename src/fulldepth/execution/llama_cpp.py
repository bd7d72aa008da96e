"""Runs GGUF files by llama.cpp, in this process (the package `xllamacpp`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.execution.latency import Trial
from fulldepth.execution.scoring import ScoredBatch
from fulldepth.hf.gguf import read_header

F16 = 2
"""Bytes of a number in llama.cpp's cache."""
CELLS = 256
"""llama.cpp rounds the length of a slot down to a multiple of this."""
FORCED = 1e9
"""Added to the logit of the token that llama.cpp is to pick."""


class LlamaCpp:
    """A GGUF file that llama.cpp runs on as many threads as torch: one sequence at a time, or one in each slot.

    Args:
        path: the file; of any architecture that llama.cpp knows.

    Raises:
        FulldepthError: if the package xllamacpp is missing, or the header of the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        if find_spec("xllamacpp") is None:
            raise FulldepthError(f"llama.cpp runs {path}, which needs the package xllamacpp: pip install xllamacpp.")
        self.path = path
        self.header = read_header(path)
        self._server: Any = None

    @property
    def vocab_size(self) -> int:
        """V: rows of the embedding; 0 if there is none."""
        return self.header.shapes.get("token_embd.weight", (0,))[0]

    @property
    def tokens(self) -> tuple[bytes, ...]:
        """The vocabulary's tokens; empty if the file holds no tokenizer."""
        return self.header.metadata.get("tokenizer.ggml.tokens", ())

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of all tensors in the file."""
        from gguf import GGUFReader  # noqa: PLC0415

        return sum(int(tensor.n_bytes) for tensor in GGUFReader(self.path).tensors)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, in float16, from the metadata.

        Layers without attention have none. Sliding windows, which bound the cache of long texts, are not considered.
        """
        entries = self.header.entries

        def by_layer(value: Any) -> tuple[int, ...]:
            return value if isinstance(value, tuple) else (value,) * entries["block_count"]

        heads = by_layer(entries["attention.head_count"])
        width = entries.get("attention.key_length", entries["embedding_length"] // max(1, *heads))
        kv_heads = sum(by_layer(entries.get("attention.head_count_kv", heads)))
        return kv_heads * (width + entries.get("attention.value_length", width)) * F16

    @contextmanager
    def serving(self, positions: int, device: torch.device, slots: int = 1) -> Iterator[None]:
        """Load the file, and release it on leaving.

        Args:
            positions: the longest sequence that is to be run.
            device: on the CPU llama.cpp uses no GPU; elsewhere it puts all layers on its own choice of GPUs.
            slots: sequences that can run at once.

        Raises:
            FulldepthError: if llama.cpp cannot load the file or run the model.
        """
        from xllamacpp import CommonParams, Server  # noqa: PLC0415

        params = CommonParams()
        params.model.path = str(self.path)
        params.n_ctx = slots * -(-positions // CELLS) * CELLS if slots > 1 else positions
        params.n_parallel = slots
        params.fit_params = False
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
        params.n_gpu_layers = 0 if device.type == "cpu" else -1
        params.warmup = False
        params.cache_ram_mib = 0
        params.n_ctx_checkpoints = 0
        params.verbosity = 1  # errors
        try:
            self._server = Server(params)
        except RuntimeError as error:
            raise FulldepthError(
                f"llama.cpp cannot load {self.path} (architecture {one_line(self.header.architecture, 60)}): "
                f"{one_line(error, 200)} llama.cpp's own message stands above."
            ) from error
        try:
            self._complete([0], 1)  # also because a server that has never answered may not end
            yield
        finally:
            self._server = None

    def run(self, ids: Tensor, context: int) -> Trial:
        """Run prefill and decoding, timed by llama.cpp.

        The decoded tokens are those that it picks (greedily), and the time of a token includes the pick.

        Args:
            ids: `[1, context + N]`; N tokens are decoded after the prompt.
            context: number of tokens of the prompt.
        """
        steps = ids.shape[1] - context
        # The first token comes from the logits of the prompt, before llama.cpp's clock of the decoding starts.
        answer = self._complete(ids[0, :context].tolist(), steps + 1, cache_prompt=False, ignore_eos=True)
        times = answer["timings"]
        return Trial(times["prompt_ms"] / 1e3, times["predicted_ms"] / 1e3 / steps)

    def losses(self, batch: ScoredBatch) -> Tensor:
        """`-log q(target)` in nats of every target, `[R]`.

        llama.cpp states the probability only of a token that it generates, so every target is generated, forced by a
        bias that the stated probability does not contain. This takes as long as generating the text. Of a token that
        ends within a character it states none; its probability is read from those of all other tokens.
        """
        losses = []
        letter = self.tokens.index(b"a")
        for (row, at), target in zip(batch.where.nonzero().tolist(), batch.targets.tolist(), strict=True):
            prompt = batch.inputs["input_ids"][row, : at + 1].tolist()  # padding is on the right
            stated = self._complete(prompt, 1, logprobs=1, logit_bias=[[target, FORCED]])["choices"][0]["logprobs"]
            if stated is None:
                every = self._complete(prompt, 1, logprobs=self.vocab_size, logit_bias=[[letter, FORCED]])
                (first,) = every["choices"][0]["logprobs"]["content"]
                (stated,) = [token for token in first["top_logprobs"] if token["id"] == target]
            else:
                (stated,) = stated["content"]
            losses.append(-stated["logprob"])
        return torch.tensor(losses, dtype=torch.float64)

    def stream(self, prompt: list[int], count: int, arrived: Callable[[dict[str, Any]], bool]) -> None:
        """Generate `count` tokens after a prompt of token ids, past the end of a text, without earlier prompts' cache.

        Several threads may call this at once, one for each slot.

        Args:
            prompt: token ids.
            count: number of tokens.
            arrived: called with every answer of the server, the last of which has no token.

        Raises:
            FulldepthError: if llama.cpp refuses the prompt, or ends early.
        """
        answers: list[dict[str, Any]] = [{}]

        def received(answer: dict[str, Any]) -> bool:
            answers[0] = answer
            return arrived(answer)

        options = {"max_tokens": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False, "stream": True}
        self._server.handle_completions({"prompt": prompt, **options}, received)
        last = answers[0]
        generated = last.get("usage", {}).get("completion_tokens")
        if generated != count:
            reason = last["error"].get("message") if "error" in last else f"{generated} of {count} tokens came back."
            raise FulldepthError(f"llama.cpp cannot serve {self.path}: {one_line(reason, 200)}")

    def _complete(self, prompt: list[int], count: int, **options: Any) -> dict[str, Any]:
        """llama.cpp's answer to a prompt of token ids: `count` tokens, picked greedily."""
        answer: dict[str, Any] = self._server.handle_completions(
            {"prompt": prompt, "max_tokens": count, "temperature": 0, **options}
        )
        if "error" in answer:
            raise FulldepthError(f"llama.cpp cannot run {self.path}: {one_line(answer['error'].get('message'), 200)}")
        return answer

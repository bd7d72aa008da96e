"""Models under load: several clients whose requests a server runs together (continuous batching).

Every client sends its next prompt as soon as its last one is answered. Each request asks for the same number of new
tokens, picked greedily, past the end of a text if the model gives one.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.execution.llama_cpp import LlamaCpp

GPU_SHARE = 0.9
"""Share of a GPU's memory that all models in vLLM use together."""


class Load(NamedTuple):
    """Times of one round of requests."""

    seconds: float
    """From the first request to the last token."""
    first_tokens: list[float]
    """Seconds from each request to its first token, in the order of the prompts."""


class Serves(Protocol):
    """Interface of a served model."""

    def serve(self, prompts: Sequence[list[int]], new_tokens: int, clients: int) -> Load:
        """Answer prompts of token ids, `clients` at a time.

        Raises:
            FulldepthError: if a request gets fewer than `new_tokens` tokens.
        """


class LlamaServer:
    """A GGUF file in llama.cpp's server, in this process, with one slot for each client.

    A token that ends within a character is reported together with the next one.
    """

    def __init__(self, model: LlamaCpp) -> None:
        self.model = model

    def serve(self, prompts: Sequence[list[int]], new_tokens: int, clients: int) -> Load:
        """See `Serves`."""

        def request(prompt: list[int]) -> float:
            sent = time.perf_counter()
            arrivals: list[float] = []

            def arrived(_: Any) -> bool:
                arrivals.append(time.perf_counter())
                return False

            self.model.stream(prompt, new_tokens, arrived)
            return arrivals[0] - sent

        start = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            first_tokens = list(pool.map(request, prompts))
        return Load(time.perf_counter() - start, first_tokens)


class VllmServer:
    """A checkpoint in vLLM's engine, which runs in a process of its own."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self._requests = 0

    def serve(self, prompts: Sequence[list[int]], new_tokens: int, clients: int) -> Load:
        """See `Serves`."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.sampling_params import RequestOutputKind  # noqa: PLC0415

        options = {"temperature": 0.0, "max_tokens": new_tokens, "ignore_eos": True, "detokenize": False}
        sampling = SamplingParams(**options, output_kind=RequestOutputKind.DELTA)
        start = time.perf_counter()
        sent: dict[str, float] = {}
        arrived: dict[str, float] = {}
        counts: dict[str, int] = {}
        unfinished = 0
        waiting = list(prompts)[::-1]
        while waiting or unfinished:
            while waiting and unfinished < clients:
                name = str(self._requests)
                self._requests += 1
                unfinished += 1
                sent[name] = time.perf_counter()
                self.engine.add_request(name, {"prompt_token_ids": waiting.pop()}, sampling)
            for output in self.engine.step():
                name = output.request_id
                arrived.setdefault(name, time.perf_counter())
                counts[name] = counts.get(name, 0) + len(output.outputs[0].token_ids)
                unfinished -= output.finished
        seconds = time.perf_counter() - start
        if short := [count for count in counts.values() if count != new_tokens]:
            raise FulldepthError(f"vLLM answered with {short[0]} tokens; {new_tokens} were asked for.")
        return Load(seconds, [arrived[name] - moment for name, moment in sent.items()])


def check_vllm(folder: str) -> None:
    """Refuse a checkpoint folder where vLLM is not installed.

    Raises:
        FulldepthError: with what can be served without it.
    """
    if find_spec("vllm") is None:
        raise FulldepthError(
            f"{folder} is served by vLLM, which is not installed: pip install vllm. Without it .gguf files can be "
            "served, by llama.cpp (pip install xllamacpp)."
        )


@contextmanager
def in_vllm(
    folder: str,
    *,
    slots: int,
    positions: int,
    models: int,
    dtype: str,
    seed: int,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Iterator[VllmServer]:
    """Load a checkpoint into vLLM, and end its process on leaving.

    Args:
        folder: of a transformers checkpoint, or its Hub name.
        slots: most requests at once.
        positions: longest prompt with its new tokens.
        models: number of models that share the GPU's memory.
        dtype: of weights and cache; `auto` = the checkpoint's, which vLLM lowers from float32 to bfloat16.
        seed: of the engine.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether code of the checkpoint may run.

    Raises:
        FulldepthError: if vLLM is not installed, or does not load the checkpoint.
    """
    check_vllm(folder)
    from vllm import LLM  # noqa: PLC0415

    try:
        model = LLM(
            folder,
            revision=revision,
            trust_remote_code=trust_remote_code,
            dtype=dtype,
            seed=seed,
            skip_tokenizer_init=True,
            max_num_seqs=slots,
            max_model_len=positions,
            enable_prefix_caching=False,
            gpu_memory_utilization=GPU_SHARE / models,
        )
    except Exception as error:
        raise FulldepthError(f"vLLM does not load {folder}: {one_line(error, 300)}") from error
    engine = model.llm_engine
    try:
        yield VllmServer(engine)
    finally:
        engine.engine_core.shutdown()
        del model, engine
        gc.collect()


@contextmanager
def in_llama_cpp(model: LlamaCpp, slots: int, positions: int, device: torch.device) -> Iterator[LlamaServer]:
    """Load a GGUF file with `slots` slots of `positions` tokens; arguments and errors as `LlamaCpp.serving`."""
    with model.serving(positions, device, slots):
        yield LlamaServer(model)

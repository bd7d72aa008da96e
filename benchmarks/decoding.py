"""What one decoded token costs beside a Llama of the same shape, as ratios measured in turn in one run. With --memory:
the peak memory of a prompt and of a decoded token, parameters left out, and the cache, as LIME's Table 6 compares them.

    python benchmarks/decoding.py                    # about three minutes on one core
    python benchmarks/decoding.py --sizes 24x1024 --batches 1 --groups 4
    python benchmarks/decoding.py --device cuda --sizes 12x768
    python benchmarks/decoding.py --memory --sizes 12x768 --batches 4 --prompt 512

Every model decodes one token a round after a prompt of its own cache, and forgets it again.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from fulldepth.architectures import DepthLlamaConfig, DepthLlamaForCausalLM
from fulldepth.hf.caches import CACHE
from meters import Run, in_turn, peak, processor_seconds, ratios, seconds
from rows import MIB, Goal, print_goals

KINDS: dict[str, dict[str, Any]] = {
    "serial": {},
    "static": {"memory": "static"},
    "dynamic": {"memory": "dynamic"},
    "kv": {"memory": "kv"},
    "tree": {"residual": "tree"},
    "tree, static": {"residual": "tree", "memory": "static"},
    "Hyper-Connections": {"residual": "hyper"},
}
GOAL = 1.2
"""Time of a token of a model with memory to one of Llama."""


class Decoding:
    """A model in the middle of generation: a context that gives the call that decodes one more token."""

    def __init__(self, model: LlamaForCausalLM | DepthLlamaForCausalLM, prompt: torch.Tensor) -> None:
        self.model, self.prompt, self.cache = model.eval(), prompt, DynamicCache(config=model.config)
        with torch.inference_mode():
            model(prompt, **{CACHE: self.cache}, use_cache=True)

    def __enter__(self) -> Run:
        return self._decode

    def __exit__(self, *_: object) -> None:
        self.cache.crop(-1)

    @torch.inference_mode()
    def _decode(self) -> None:
        self.model(self.prompt[:, -1:], **{CACHE: self.cache}, use_cache=True)


def llama(layers: int, width: int, groups: int) -> LlamaConfig:
    """Heads of 64 channels, `groups` query heads to each key/value head, an MLP of 8/3 of the width."""
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=8 * width // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64 // groups,
    )


def decoding(options: argparse.Namespace, layers: int, width: int, batch: int, groups: int) -> Iterator[Goal]:
    """Every kind against Llama."""
    config = llama(layers, width, groups)
    models, prompt = models_and_prompt(options, config, batch)
    steps = {name: Decoding(model, prompt) for name, model in models.items()}
    clock = processor_seconds if options.device == "cpu" and options.threads == 1 else seconds
    taken = in_turn(steps, options.device, options.budget, 10, options.tokens, clock)
    print(
        f"Llama, {layers} x {width}, {batch} sequences: {1000 * statistics.median(taken['Llama']):.2f} ms a token",
        file=sys.stderr,
    )
    heads = f"{config.num_attention_heads} : {config.num_key_value_heads} heads"
    for name, switches in KINDS.items():
        goal = GOAL if "memory" in switches else None
        yield Goal(name, f"{layers} x {width}, {heads}, batch {batch}", ratios(taken, name, "Llama"), goal, quartiles)


def memory(options: argparse.Namespace, layers: int, width: int, batch: int, groups: int) -> Iterator[Goal]:
    """Bytes that inference holds at its peak beyond the parameters, and bytes of the cache, to those of Llama."""
    config = llama(layers, width, groups)
    models, prompt = models_and_prompt(options, config, batch)
    taken: dict[str, dict[str, int]] = {}
    for name, model in models.items():
        Decoding(model, prompt[:1, :8])  # makes what is made once
        held: list[Decoding] = []
        of_prompt = peak(lambda model=model, held=held: held.append(Decoding(model, prompt)), options.device)
        with held[0] as decode:
            of_token = peak(decode, options.device)
        cached = sum(layer.keys.nbytes + layer.values.nbytes for layer in held[0].cache.layers)
        taken[name] = {"peak of the prompt": of_prompt, "peak of a token": of_token, "cache": cached}
    sizes = ", ".join(f"{what} {size / MIB:.1f} MiB" for what, size in taken["Llama"].items())
    print(f"Llama, {layers} x {width}, {batch} sequences of {options.prompt} tokens: {sizes}", file=sys.stderr)
    case = f"{layers} x {width}, {config.num_key_value_heads} key/value heads, batch {batch} x {options.prompt}"
    for name in KINDS:
        for what, reference in taken["Llama"].items():
            yield Goal(f"{name}: {what}", case, [taken[name][what] / reference], None)


def models_and_prompt(
    options: argparse.Namespace, config: LlamaConfig, batch: int
) -> tuple[dict[str, Any], torch.Tensor]:
    """Llama and every kind, and a random prompt, on the device."""
    prompt = torch.randint(0, config.vocab_size, (batch, options.prompt), generator=torch.Generator().manual_seed(0))
    models: dict[str, Any] = {"Llama": LlamaForCausalLM(config)}
    for name, switches in KINDS.items():
        models[name] = DepthLlamaForCausalLM(DepthLlamaConfig.from_llama(config, **switches))
    return {name: model.to(options.device) for name, model in models.items()}, prompt.to(options.device)


def quartiles(values: list[float]) -> str:
    """Median and the middle half."""
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", metavar="LxD", default=["12x256", "12x768"], help="default: %(default)s")
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8], help="sequences (default: %(default)s)")
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 4], help="query heads to a key/value head")
    parser.add_argument("--prompt", type=int, default=64, help="tokens in the cache (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=60, help="rounds at most (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of one table's part (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of one, processor time counts (default: %(default)s)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--memory", action="store_true", help="memory in place of times")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, float32")
    cases = [
        (*(int(number) for number in size.split("x")), batch, groups)
        for size in options.sizes
        for groups in options.groups
        for batch in options.batches
    ]
    compare = memory if options.memory else decoding
    print_goals((row for case in cases for row in compare(options, *case)), judge_times=True)


if __name__ == "__main__":
    main()

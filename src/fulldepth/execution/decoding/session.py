"""State shared by all ways of decoding: the sequences, the cache and the counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from fulldepth.execution.decoding.choice import Choice
from fulldepth.execution.decoding.sequences import Sequences
from fulldepth.execution.decoding.stats import Stats
from fulldepth.execution.layer_runner import LayerRunner


class Session:
    """Sequences that are decoded together, and the cache of their keys and values.

    Between steps the cache of every layer holds all positions of the active sequences except the last token's; policies
    that let layers fall behind keep their own account. Shorter sequences are shifted to the right, in the cache too.

    Args:
        runner: verified by `decoding_runner`.
        sequences: prompts.
        choice: how tokens are chosen.
    """

    def __init__(self, runner: LayerRunner, sequences: Sequences, choice: Choice) -> None:
        self.runner, self.sequences, self.choice = runner, sequences, choice
        self.num_layers = runner.anatomy.num_layers
        self.cache = runner.new_cache()
        self.alive: list[int] = []
        """Indices, among the sequences that were active before the last `commit`, of those that still are."""
        self._slides = any(getattr(layer, "is_sliding", False) for layer in self.cache.layers)
        self.progress: Callable[[int], None] = lambda done: None
        """Called with the number of positions by which the longest sequence has grown."""
        self.stats = Stats(
            self.num_layers,
            sequences=len(sequences.tokens),
            prompt_tokens=sequences.prompt_tokens,
            prompt_length=sequences.prompt_length,
        )

    def clock(self) -> float:
        """Seconds; on an accelerator, after everything that was started has finished."""
        device = self.sequences.tokens.device
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    def begin(self, ids: Tensor, mask: Tensor, start: int) -> Tensor:
        """h_0 of the positions from `start` of `ids: [A, W]`, for `run`."""
        return self.runner.begin({"input_ids": ids[:, start:], "attention_mask": mask}, self.cache)

    def run(self, layers: Sequence[int], states: Tensor, skipped: Collection[int] = ()) -> Tensor:
        """`LayerRunner.run`, counted; layers that are switched off whole (`skipped`) are not."""
        for layer in layers:
            if layer not in skipped:
                self.count(layer, states.shape[0] * states.shape[1])
        return self.runner.run(layers, states)

    def write(self, layers: Sequence[int], states: Tensor) -> None:
        """`LayerRunner.write`, counted: as positions that ran where it has to run the layers whole."""
        whole = self.runner.write(layers, states)
        for layer in layers:
            if whole:
                self.count(layer, states.shape[0] * states.shape[1])
            else:
                self.stats.projected[layer - 1] += states.shape[0] * states.shape[1]

    def count(self, layer: int, positions: int) -> None:
        """Count a call of a 1-based layer."""
        self.stats.layer_calls[layer - 1] += 1
        self.stats.layer_positions[layer - 1] += positions

    def step(self) -> None:
        """Decode one token of every active sequence with the model's own forward pass."""
        ids, mask = self.sequences.window()
        start = self.cache.get_seq_length()
        logits = self.runner.forward({"input_ids": ids[:, start:], "attention_mask": mask}, self.cache)
        for layer in range(1, self.num_layers + 1):
            self.count(layer, len(ids) * (ids.shape[1] - start))
        self.commit([[token] for token in self.choice.choose(self.choice.scores(logits)).tolist()])

    def commit(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        """Append tokens to the active sequences; returns how many each got.

        Cuts the cache to the positions of known tokens except the last, and removes sequences that ended.
        """
        sequences = self.sequences
        before, width, longest = list(sequences.active), sequences.width, max(sequences.lengths)
        counts = sequences.add(tokens)
        self.progress(max(sequences.lengths) - longest)
        active = set(sequences.active)
        self.alive = alive = [index for index, row in enumerate(before) if row in active]
        if not alive:
            return counts
        if len(alive) < len(before):
            self.cache.batch_select_indices(torch.tensor(alive, device=sequences.tokens.device))
        kept = [width - 1 + counts[index] for index in alive]
        if self._slides or min(kept) < self.cache.get_seq_length():
            self.cache.crop(kept if min(kept) < max(kept) else kept[0])
        if padding := max(kept) + 1 - sequences.width:
            self.cache.drop_first(padding)
        return counts

"""How a run reads predictions: the sampled positions, and the lens grid of a few sequences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fulldepth.core.distributed import Processes
from fulldepth.core.errors import shortened
from fulldepth.core.targets import IGNORE
from fulldepth.data import Batch, decode_ids
from fulldepth.execution import TopTokens, read_layers, top_tokens
from fulldepth.execution.flops import token_products, weight_products
from fulldepth.execution.lens import PositionSample
from fulldepth.hf import Classifier
from fulldepth.metrics import LinearMaps, Readout, saturation_layer
from fulldepth.settings.measure import LINEAR_LENS, MeasureSettings
from fulldepth.subject import Subject

LONGEST = 40
"""Maximum number of characters of a token."""
MOST_POSITIONS = 1024
LEAST_POSITIONS = 128
"""Bounds of the number of positions that the lens reads unless it is given."""
PASSES = 1.25
"""Most cost of their products with the head, in forward passes over the data."""


def lens_limit(subject: Subject, settings: MeasureSettings) -> int | None:
    """Return the largest number of positions that the lens reads; None = all, as with a head that reads sequences.

    With `auto`, the operations of the L + 1 products of the head at these positions are at most `PASSES` times those of
    a forward pass with logits (without the products of queries and keys); between `LEAST_POSITIONS` and
    `MOST_POSITIONS`. A large vocabulary over little text makes them fewer.
    """
    classifier = subject.verified.classifier
    if classifier is not None and not classifier.per_token:
        return None
    if settings.lens_tokens != "auto":
        return settings.lens_tokens
    anatomy = subject.anatomy
    sequences = subject.sequences
    modules = [] if anatomy.head is None else anatomy.head_modules(anatomy.head)
    head = sum(weight_products(part) for module in modules for part in module.modules())
    tokens = sum(sequences.lengths)
    if not head or not tokens:
        return MOST_POSITIONS
    affordable = PASSES * tokens * token_products(anatomy.model) / ((anatomy.num_layers + 1) * head)
    return max(LEAST_POSITIONS, min(MOST_POSITIONS, int(affordable)))


class LensReader:
    """Applies the last layer's classifier to every layer at a seeded sample of positions, batch by batch.

    The lens grid is made of the same readings of the first sequences of the data, for models that predict tokens.

    Args:
        subject: model and data.
        settings: sizes of the sample and the grid, seed.
        process: this process; each reads the grid's sequences among its own.
        maps: of the linear lens; None = it is not measured.
    """

    def __init__(
        self, subject: Subject, settings: MeasureSettings, process: Processes, maps: LinearMaps | None = None
    ) -> None:
        self.subject = subject
        self.maps = maps
        self.grid_maps = maps if set(settings.measures or ()) <= set(LINEAR_LENS) else None
        """Maps of the linear lens that the grid shows; None = it shows the plain lens."""
        self.top = settings.grid_top
        self.positions = settings.grid_positions
        self.sample = PositionSample(subject.sequences, lens_limit(subject, settings), settings.seed)
        task = subject.anatomy.task
        has_grid = task in ("causal-lm", "masked-lm", "seq2seq-lm") and subject.sequences.task == task
        self.samples = settings.grid_samples if has_grid else 0
        self.process = process
        self.shown: dict[int, dict[str, Any]] = {}
        """Index of a sequence -> its entry in the lens grid, of the sequences that this process has read."""

    def grid(self) -> dict[str, Any] | None:
        """The lens grid of all processes as plain data; None if there is none. Every process calls it."""
        entries_by_sample = {
            index: entry for entries in self.process.gather(self.shown) for index, entry in entries.items()
        }
        if not entries_by_sample:
            return None
        grid: dict[str, Any] = {"samples": [entries_by_sample[index] for index in sorted(entries_by_sample)]}
        return grid if self.grid_maps is None else {**grid, "linear": True}

    def read(
        self,
        classifier: Classifier,
        batch: Batch,
        targets: Tensor,
        mask: Tensor,
        states: Tensor,
        advance: Callable[[], None],
    ) -> Readout:
        """The lens at the sampled positions of a batch.

        Args:
            classifier: the model's head.
            batch: the sequences.
            targets: `[B, T]` for token heads, `[B]` for sequence heads.
            mask: `[B, T]` bool, False = padding.
            states: `[L+1, B, T, D]` residual stream.
            advance: called after each layer, for a progress bar.
        """
        if not classifier.per_token:
            return read_layers(classifier, states, targets, classifier.sample_mask(batch.inputs, mask), advance)
        targets = self.sample.targets(targets, batch.sequence)
        in_grid = mask & (mask.long().cumsum(1) <= self.positions)
        in_grid &= (batch.sequence.to(mask.device) < self.samples)[:, None]
        if in_grid.any() and batch.token_ids is not None and batch.targets is not None:
            if self.grid_maps is None:
                top = top_tokens(classifier, states, in_grid, self.top)
            else:
                mapped = self.grid_maps(states[:, in_grid])  # [L+1, P, D]
                top = top_tokens(
                    classifier.shared(), mapped, torch.ones_like(mapped[0, :, 0], dtype=torch.bool), self.top
                )
            self.shown |= self._entries(batch, batch.token_ids, batch.targets, in_grid, top)
        return read_layers(classifier, states, targets, mask, advance)

    def read_linear(self, classifier: Classifier, batch: Batch, targets: Tensor, states: Tensor) -> Readout:
        """The linear lens at the positions that `read` reads; arguments as for it. The last layer's head reads all."""
        assert self.maps is not None, "the linear lens is fitted"
        targets = self.sample.targets(targets, batch.sequence)
        where = (targets != IGNORE).to(states.device)
        mapped = self.maps(states[:, where])[:, None]  # [L+1, 1, M, D]
        labels = targets[where.to(targets.device)][None]
        readout = read_layers(classifier.shared(), mapped, labels, torch.ones_like(labels))
        return replace(readout, row=where.nonzero()[:, 0])

    def _entries(
        self, batch: Batch, ids: Tensor, targets: Tensor, in_grid: Tensor, top: TopTokens
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The shown positions `[B, T]` of each sequence, with their tokens by rank `[L+1, P, k]`, as plain data."""
        if batch.masked_inputs is not None:
            ids = batch.masked_inputs["input_ids"]
        in_grid = in_grid.cpu()
        tokenizer = self.subject.tokenizer
        rows = in_grid.any(1).nonzero()[:, 0].tolist()
        lengths = in_grid.sum(1)[rows].tolist()
        parts = zip(rows, top.token.split(lengths, 1), top.probability.split(lengths, 1), strict=True)
        for index, token, probability in parts:
            rounded = torch.round(probability.double(), decimals=4).tolist()
            cells = [
                [
                    [[show(tokenizer, token), p] for token, p in zip(*ranks, strict=True)]
                    for ranks in zip(*row, strict=True)
                ]
                for row in zip(token.tolist(), rounded, strict=True)
            ]
            entry = {
                "title": f"Sequence {int(batch.sequence[index]) + 1}",
                "tokens": [show(tokenizer, token) for token in ids[index, in_grid[index]].tolist()],
                "targets": [
                    "" if target == IGNORE else show(tokenizer, target)
                    for target in targets[index, in_grid[index]].tolist()
                ],
                "saturation": saturation_layer(token[1:, :, 0]).tolist(),
                "grid": [[ranks[0] for ranks in row] for row in cells],
            }
            more = {"more": [[ranks[1:] for ranks in row] for row in cells]} if self.top > 1 else {}
            yield int(batch.sequence[index]), entry | more


def show(tokenizer: Any, token: int) -> str:
    """A token as text, at most `LONGEST` characters; its id if there is no tokenizer."""
    if tokenizer is None:
        return f"#{token}"
    return shortened(decode_ids(tokenizer, [token]), LONGEST)

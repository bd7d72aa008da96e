"""Unbiased HSIC averaged over blocks of consecutive sequences, so that every token counts in bounded memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fulldepth.metrics.accumulator import Accumulator
from fulldepth.metrics.base import POSITION_BITS, Observation, Setup, later_than_first
from fulldepth.metrics.hsic import hsic_of_views
from fulldepth.uncertainty import GROUPS

FREE = -1
"""Number of the block in a free slot."""
SLOTS = 2
"""Incomplete blocks that are kept: the first and the last of a process."""
FEWEST = 4
"""Tokens of the smallest block that unbiased HSIC is defined for."""


class HsicBlocks(Accumulator):
    r"""Sums over blocks of :math:`n_b \, \mathrm{HSIC}_1` for every pair of layers, with :math:`n_b` tokens in a block.

    Block `b` consists of the sequences `b m .. b m + m - 1`, with the largest power of two `m` for which it has at most
    half as many tokens as the shared sample; a sequence with more than that is cut into blocks of equal length. Blocks
    therefore depend on the data only. The states of a block that spreads over several batches are kept until it is
    complete, at most two such blocks at a time, which suffices for ascending sequences. A third one, which sequences in
    another order need, ends the lowest early, as a smaller block. Blocks that lie in several processes are completed
    when the result is computed.

    Args:
        setup: sizes.
    """

    hsic: Tensor
    terms: Tensor
    tokens: Tensor
    features: Tensor
    keys: Tensor
    numbers: Tensor
    seen: Tensor
    held: Tensor

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup, layers, views = setup, setup.num_layers + 1, len(setup.views)
        longest = setup.counted_length or setup.sequence_length
        self.capacity = max(FEWEST, setup.reservoir_tokens // 2)
        self.together = (
            1 << max(1, self.capacity // max(longest, 1)).bit_length() - 1
        )  # so that batches end where blocks do
        self.groups = min(max(1, -(-setup.num_sequences // self.together)), GROUPS)
        for name, shape in (("hsic", (views, layers, layers)), ("terms", (views, layers)), ("tokens", (views,))):
            self.add(name, (self.groups, *shape), device=setup.device)
        slots = SLOTS if self.together > 1 else 0
        room = self.together * longest
        self.add(
            "features",
            (slots, room, layers, setup.width),
            dtype=torch.float32,
            fill=None,
            reduce="cat",
            device=setup.device,
        )
        self.add("keys", (slots, room), dtype=torch.int64, reduce="cat", device=setup.device)
        for name, fill in (("numbers", FREE), ("seen", 0), ("held", 0)):
            self.add(name, (slots,), dtype=torch.int64, fill=fill, reduce="cat")

    def update(self, observation: Observation) -> None:
        """Add one batch."""
        blocks = observation.sequence.cpu() // self.together
        owner = observation.keys >> POSITION_BITS  # [N] sequence of each counted token
        for number in blocks.unique().tolist():
            index = (owner // self.together == number).nonzero().flatten()
            sequences = int((blocks == number).sum())
            size = min(self.together, self.setup.num_sequences - number * self.together)
            if sequences >= size:
                self._add_sums(self._sums(number, observation.tokens, observation.keys, index))
            else:
                self._keep(number, observation.tokens[:, index], observation.keys[index], sequences, size)

    def _keep(self, number: int, features: Tensor, keys: Tensor, sequences: int, size: int) -> None:
        """Keep the tokens `[S, n, D]` of some sequences of a block of `size` sequences until it is complete."""
        slot = self._slot(number)
        held, count = int(self.held[slot]), features.shape[1]
        self.features[slot, held : held + count] = features.transpose(0, 1).to(self.features)
        self.keys[slot, held : held + count] = keys.to(self.keys)
        self.held[slot] += count
        self.seen[slot] += sequences
        if int(self.seen[slot]) >= size:
            self._close(slot)

    def _slot(self, number: int) -> int:
        """The slot of a block; a new one if needed."""
        for wanted in (number, FREE):
            if len(found := (self.numbers == wanted).nonzero()):
                slot = int(found[0])
                break
        else:
            slot = int(self.numbers.argmin())
            self._close(slot)
        self.numbers[slot] = number
        return slot

    def _close(self, slot: int) -> None:
        """Add the block in a slot, and free it."""
        held = int(self.held[slot])
        features, keys = self.features[slot, :held].transpose(0, 1), self.keys[slot, :held]
        self._add_sums(self._sums(int(self.numbers[slot]), features, keys))
        self.numbers[slot], self.seen[slot], self.held[slot] = FREE, 0, 0

    def _add_sums(self, sums: tuple[Tensor, Tensor, Tensor]) -> None:
        """Add to the states."""
        for state, value in zip((self.hsic, self.terms, self.tokens), sums, strict=True):
            state += value.to(state)

    def _sums(
        self, number: int, features: Tensor, keys: Tensor, index: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What a block adds to `hsic`, `terms` and `tokens`; `index` picks its tokens, None = all."""
        hsic, terms, tokens = (
            torch.zeros(state.shape, dtype=state.dtype) for state in (self.hsic, self.terms, self.tokens)
        )
        index = torch.arange(len(keys), device=keys.device) if index is None else index
        order = index[keys[index].argsort()]  # batches and processes in any order give the same rounding
        later = later_than_first(keys)
        for part in order.tensor_split(max(1, -(-len(order) // self.capacity))):
            if len(part) < FEWEST:
                continue
            for view, found in enumerate(hsic_of_views(features, later, True, part)[: hsic.shape[1]]):
                if found.tokens >= FEWEST:
                    at = (number % self.groups, view)
                    hsic[at] += found.tokens * found.values.cpu()
                    terms[at] += found.tokens * found.terms.cpu()
                    tokens[at] += found.tokens
        return hsic, terms, tokens

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """`[G, views, S, S]` sums of HSIC, `[G, views, S]` of the terms that it is the difference of, and `[G, views]`
        tokens, over all processes.
        """
        sums = [state.clone() for state in (self.hsic, self.terms, self.tokens)]
        numbers, held = self.numbers.flatten(), self.held.flatten().tolist()
        features = self.features.flatten(0, -4)  # [slots, room, S, D]
        keys = self.keys.flatten(0, -2)
        for number in numbers.unique().tolist():
            if number != FREE:
                slots = (numbers == number).nonzero().flatten().tolist()
                states = torch.cat([features[slot, : held[slot]] for slot in slots]).transpose(0, 1)
                found = torch.cat([keys[slot, : held[slot]] for slot in slots])
                for state, value in zip(sums, self._sums(number, states, found), strict=True):
                    state += value.to(state)
        return sums[0], sums[1], sums[2]

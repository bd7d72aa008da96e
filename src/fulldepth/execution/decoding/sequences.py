"""Prompts and their continuations of different lengths, in the layout of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from fulldepth.errors import FulldepthError

Stop = Callable[[Tensor], bool]
"""Whether a sequence ends, from its tokens `[1, T]`."""


class Sequences:
    """Tokens of B sequences, each with its own length; a sequence ends at an end token, a rule, or the maximum length.

    Args:
        input_ids: `[B, P]` prompts.
        attention_mask: `[B, P]`, 0 = left padding; None = no padding.
        max_length: maximum length, prompt and padding included.
        end_tokens: tokens that end a sequence; they are kept.
        padding: token that fills sequences that ended before the longest.
        stops: further rules, checked after every token.
        notify: called with each new token; for batches of one sequence only.

    Raises:
        FulldepthError: for right padding, and prompts without a token.
    """

    def __init__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        *,
        max_length: int,
        end_tokens: Collection[int] = (),
        padding: int = 0,
        stops: Sequence[Stop] = (),
        notify: Callable[[int], None] | None = None,
    ) -> None:
        rows, self.prompt_length = input_ids.shape
        self._prompt_mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        self.max_length, self._padding, self._stops, self._notify = max_length, padding, stops, notify
        self._end_tokens = frozenset(end_tokens)
        self.tokens = input_ids.new_full((rows, max(max_length, self.prompt_length)), padding)
        """[B, max_length]; entries from `lengths[b]` on are free for drafts."""
        self.tokens[:, : self.prompt_length] = input_ids
        self.lengths = [self.prompt_length] * rows
        self.active = list(range(rows))
        """Sequences that have not ended."""
        self._check()

    def _check(self) -> None:
        if not self.tokens.shape[0] or not self.prompt_length or not bool(self._prompt_mask.any(1).all()):
            raise FulldepthError("A prompt is empty; every sequence needs at least one token.")
        if bool((self._prompt_mask[:, 1:] < self._prompt_mask[:, :-1]).any()):
            raise FulldepthError("Prompts of different lengths must be padded on the left (attention_mask 0 0 1 1).")

    @property
    def width(self) -> int:
        """W, length of the longest active sequence."""
        return max(self.lengths[row] for row in self.active)

    @property
    def room(self) -> int:
        """Tokens that the shortest active sequence may still get."""
        return self.max_length - min(self.lengths[row] for row in self.active)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, without padding."""
        return int(self._prompt_mask.sum())

    def is_end(self, token: int) -> bool:
        """Whether a token ends a sequence."""
        return token in self._end_tokens

    def window(self) -> tuple[Tensor, Tensor]:
        """Tokens and mask of the active sequences, `[A, W]` each, shorter ones shifted to the right."""
        width, rows = self.width, self.active
        if all(self.lengths[row] == width for row in rows):
            ids, prompt = self.tokens[rows, :width], self._prompt_mask[rows]
            return ids, torch.cat([prompt, prompt.new_ones(len(rows), width - self.prompt_length)], dim=1)
        ids = self.tokens.new_full((len(rows), width), self._padding)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            length = self.lengths[row]
            ids[index, width - length :] = self.tokens[row, :length]
            mask[index, width - length :] = 1
            mask[index, width - length : width - length + self.prompt_length] = self._prompt_mask[row]
        return ids, mask

    def add(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        """Append tokens to the active sequences, up to the end of each; returns how many each got.

        Sequences that end are no longer in `active` afterwards.

        Args:
            tokens: new tokens of each active sequence.
        """
        counts, active = [], []
        for row, new in zip(self.active, tokens, strict=True):
            count, ended = self._extend(row, new)
            counts.append(count)
            if not ended:
                active.append(row)
        self.active = active
        return counts

    def _extend(self, row: int, tokens: Sequence[int]) -> tuple[int, bool]:
        """Append tokens to one sequence until it ends: their number, and whether it ended."""
        for count, token in enumerate(tokens, start=1):
            length = self.lengths[row]
            self.tokens[row, length] = token
            self.lengths[row] = length + 1
            if self._notify is not None:
                self._notify(token)
            ended = token in self._end_tokens or length + 1 >= self.max_length
            if ended or any(stop(self.tokens[row : row + 1, : length + 1]) for stop in self._stops):
                return count, True
        return len(tokens), False

    def result(self) -> Tensor:
        """[B, prompt + new] all sequences, shorter ones padded on the right."""
        longest = max(self.lengths)
        result = self.tokens[:, :longest].clone()
        for row, length in enumerate(self.lengths):
            result[row, length:] = self._padding
        return result

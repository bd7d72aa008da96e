"""Choice of the next token from logits: greedy or sampled, and acceptance of drafts that keeps the distribution."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from fulldepth.execution.decoding.sequences import Sequences

WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)


class Choice:
    """Chooses tokens as `generate` does, with its processors of logits.

    Args:
        sequences: the sequences, which processors read; drafts are stored after their tokens.
        processors: of transformers (suppressed tokens, repetition penalty, temperature, nucleus, ...).
        sample: draw from the distribution; else the token of the largest score.
        generator: source of random numbers; None = torch's global one.
    """

    def __init__(
        self,
        sequences: Sequences,
        processors: LogitsProcessorList,
        *,
        sample: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        self.sequences, self._processors = sequences, processors
        self.samples, self._generator = sample, generator

    def scores(self, logits: Tensor, drafts: int = 0) -> Tensor:
        """[A, V] processed scores in float32, as in `generate`.

        Args:
            logits: `[A, V]` of the active sequences.
            drafts: number of drafts after each sequence that the token follows.
        """
        logits = logits.to(self.sequences.tokens.device, torch.float32)
        if not self._processors:
            return logits
        sequences, groups = self.sequences, defaultdict(list)
        for index, row in enumerate(sequences.active):
            groups[sequences.lengths[row] + drafts].append(index)
        scores = torch.empty_like(logits)
        for length, indices in groups.items():
            # Processors may hold values of each sequence of the batch, so they get all of them.
            rows = [sequences.active[index] for index in indices]
            whole = logits.new_zeros(len(sequences.tokens), logits.shape[1])
            whole[rows] = logits[indices]
            scores[indices] = self._process(sequences.tokens[:, :length], whole)[rows]
        return scores

    def _process(self, tokens: Tensor, scores: Tensor) -> Tensor:
        return self._processors(cast(torch.LongTensor, tokens), cast(torch.FloatTensor, scores))

    def warped(self, logits: Tensor) -> Tensor:
        """[N, V] scores with temperature and truncation only, which do not depend on the tokens before."""
        logits = logits.float()
        for processor in self._processors:
            if isinstance(processor, WARPERS):
                logits = processor(cast(Any, None), logits)
        return logits

    def choose(self, scores: Tensor) -> Tensor:
        """[A] tokens from processed scores `[A, V]`."""
        return self.draw(scores.softmax(-1)) if self.samples else scores.argmax(-1)

    def draw(self, probabilities: Tensor) -> Tensor:
        """[A] tokens drawn from `[A, V]`."""
        return torch.multinomial(probabilities, 1, generator=self._generator).squeeze(1)

    def accept(self, logits: Tensor, drafts: Tensor, draft_scores: list[Tensor]) -> list[list[int]]:
        """New tokens of each active sequence: the drafts that the model confirms, and one token of its own.

        Greedy: drafts are confirmed as long as they equal the model's choice. Sampled: draft x with probability q(x)
        is confirmed with probability `min(1, p(x) / q(x))`; after the first that is not, a token is drawn from
        `max(p - q, 0)`, normalised. Tokens then have the model's distribution p (Leviathan et al. 2023, Theorem 1;
        Chen et al. 2023, Theorem 1).

        Args:
            logits: `[A, N, V]` of the model, at the last known token and the drafts; without the last draft, no token
                follows the drafts if all are confirmed.
            drafts: `[A, K]`, K = N - 1 or N.
            draft_scores: `[A, V]` processed scores of which each draft was chosen.
        """
        scores = torch.stack([self.scores(logits[:, at], at) for at in range(logits.shape[1])], dim=1)
        if not self.samples:
            chosen = scores.argmax(-1)  # [A, N]
            agrees = chosen[:, : drafts.shape[1]] == drafts
            confirmed = agrees.long().cumprod(1).sum(1).tolist()
            rows = zip(drafts.tolist(), chosen.tolist(), confirmed, strict=True)
            return [draft[:count] + own[count : count + 1] for draft, own, count in rows]
        model = scores.softmax(-1)
        drafted = [score.softmax(-1) for score in draft_scores]
        return [
            self._accept_row(model[index], drafts[index].tolist(), [q[index] for q in drafted])
            for index in range(len(drafts))
        ]

    def _accept_row(self, model: Tensor, drafts: list[int], drafted: list[Tensor]) -> list[int]:
        """New tokens of one sequence from `model: [N, V]` and `drafted`, K tensors `[V]` of probabilities."""
        chances = torch.rand(len(drafts), generator=self._generator, device=model.device).tolist()
        for at, (token, q, chance) in enumerate(zip(drafts, drafted, chances, strict=True)):
            p = model[at]
            if chance * float(q[token]) < float(p[token]):
                continue
            rest = (p - q).clamp(min=0)
            rest = rest if float(rest.sum()) > 0 else p  # p = q up to rounding
            return [*drafts[:at], int(self.draw(rest[None]))]
        last = model[len(drafts) :]
        return [*drafts, int(self.draw(last[:1]))] if len(last) else drafts

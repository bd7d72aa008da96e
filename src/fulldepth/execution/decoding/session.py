"""What is decoded: tokens of a batch, the choice of the next ones, the cache, and counts and times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from fulldepth.errors import FulldepthError
from fulldepth.execution.latency import now
from fulldepth.execution.layer_runner import LayerRunner

Stop = Callable[[Tensor], bool]
"""Whether a sequence ends, from its tokens `[1, T]`."""


@dataclass
class Stats:
    """Counts and times of one generation.

    The pass of the prompts is counted in `prompt_positions`, not in `layer_positions`, `layer_calls` and `seconds`.
    Padding counts as it is computed.
    """

    num_layers: int
    mode: str = "plain"
    """`plain`, `speculative` or `early-exit`: how most tokens were decoded."""
    reason: str = "Every layer runs for every token."
    """Why this mode was used."""
    sequences: int = 0
    new_tokens: list[int] = field(default_factory=list)
    """[B] new tokens of each sequence."""
    tokens: int = 0
    """New tokens of all sequences."""
    prompt_seconds: float = 0.0
    """Time of the pass of the prompts, which also gives the first token of each."""
    seconds: float = 0.0
    """Time of all later tokens."""
    prompt_length: int = 0
    """Positions of each prompt, with padding."""
    prompt_positions: list[int] = field(default_factory=list)
    """[L] positions (of all sequences) that ran through each layer in the pass of the prompts."""
    layer_positions: list[int] = field(default_factory=list)
    """[L] positions that ran through each layer later, also those of the prompts that early exit had left out."""
    layer_calls: list[int] = field(default_factory=list)
    """[L] how often each layer ran, on any number of positions at once."""
    speculate_from: int | None = None
    """E: the layers that draft, which run once for drafts and their confirmation."""
    draft_length: int | None = None
    """K: largest number of draft tokens in a round."""
    rounds: int = 0
    """Rounds of drafting and verification."""
    sequence_rounds: int = 0
    """Rounds, each counted once for every sequence in it."""
    drafted: int = 0
    """Draft tokens of all sequences."""
    accepted: int = 0
    """Draft tokens that the full model confirmed."""
    added: int = 0
    """Tokens that rounds of speculation added."""
    paid: bool | None = None
    """Whether the rounds of the trial were faster than plain steps; None without a trial."""
    trial_seconds: float | None = None
    """Time that the trial lost against plain decoding; 0 where its rounds were faster, None without a trial."""
    exits: list[int] | None = None
    """[L] number of tokens that left at each layer (early exit)."""
    exit_layers: list[list[int]] | None = None
    """For each sequence the exit layer of each new token (early exit)."""

    def __post_init__(self) -> None:
        for name in ("prompt_positions", "layer_positions", "layer_calls"):
            setattr(self, name, [0] * self.num_layers)

    @property
    def acceptance(self) -> float | None:
        """Share of the draft tokens that the full model confirmed; None without drafts."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens after the first of each sequence, per second; None if there are none."""
        later = self.tokens - self.sequences
        return later / self.seconds if later > 0 and self.seconds > 0 else None

    @property
    def tokens_per_round(self) -> float | None:
        """Mean number of tokens that a round of speculation adds to a sequence; None without rounds."""
        return self.added / self.sequence_rounds if self.sequence_rounds else None

    @property
    def layers_computed(self) -> float | None:
        """Layers that were computed for a position, prompts included: 0..L, and L for plain decoding.

        The sum of `prompt_positions` and `layer_positions` over the positions that plain decoding of the same tokens
        runs: the prompts, and all new tokens but the last of each sequence. Drafts can make it larger than L.
        """
        positions = self.sequences * (self.prompt_length - 1) + self.tokens
        return (sum(self.prompt_positions) + sum(self.layer_positions)) / positions if self.tokens else None

    @property
    def theoretical_speedup(self) -> float | None:
        """L over `layers_computed`; None without early exit."""
        return self.num_layers / self.layers_computed if self.exits and self.layers_computed else None

    def as_dict(self) -> dict[str, Any]:
        """All entries and derived values, as plain values for JSON."""
        derived = ("acceptance", "tokens_per_second", "tokens_per_round", "layers_computed", "theoretical_speedup")
        return asdict(self) | {name: getattr(self, name) for name in derived}


class TokenRows:
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
        end_tokens: Collection[int],
        padding: int,
        stops: Sequence[Stop],
        notify: Callable[[int], None],
    ) -> None:
        rows, self.prompt_length = input_ids.shape
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask.long()
        if not bool(mask.any(1).all()):
            raise FulldepthError("A prompt is empty; every sequence needs at least one token.")
        if bool((mask[:, 1:] < mask[:, :-1]).any()):
            raise FulldepthError("Prompts of different lengths must be padded on the left (attention_mask 0 0 1 1).")
        self._padding, self._stops, self._notify = padding, stops, notify
        self.max_length, self.end_tokens = max_length, frozenset(end_tokens)
        self.tokens = input_ids.new_full((rows, max(max_length, self.prompt_length)), padding)
        """[B, max_length]; entries from `lengths[b]` on are free for drafts."""
        self.tokens[:, : self.prompt_length] = input_ids
        self._mask = torch.ones_like(self.tokens)
        self._mask[:, : self.prompt_length] = mask
        self.lengths = [self.prompt_length] * rows
        self.active = list(range(rows))
        """Sequences that have not ended."""

    @property
    def width(self) -> int:
        """W, length of the longest active sequence."""
        return max(self.lengths[row] for row in self.active)

    def window(self) -> tuple[Tensor, Tensor]:
        """Tokens and mask of the active sequences, `[A, W]` each, shorter ones shifted to the right."""
        lengths = torch.tensor([self.lengths[row] for row in self.active], device=self.tokens.device)
        width = self.width
        place = torch.arange(width, device=lengths.device) + lengths[:, None] - width  # [A, W]
        at, before = place.clamp(min=0), place < 0
        ids = self.tokens[self.active].gather(1, at).masked_fill(before, self._padding)
        return ids, self._mask[self.active].gather(1, at).masked_fill(before, 0)

    def add(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        """Append new tokens of each active sequence, up to its end; returns how many each got.

        Sequences that end are no longer in `active` afterwards.
        """
        counts, active = [], []
        for row, new in zip(self.active, tokens, strict=True):
            before, ended = self.lengths[row], False
            for token in new:
                self.tokens[row, self.lengths[row]] = token
                self.lengths[row] += 1
                self._notify(token)
                ended = token in self.end_tokens or self.lengths[row] >= self.max_length
                ended = ended or any(stop(self.tokens[row : row + 1, : self.lengths[row]]) for stop in self._stops)
                if ended:
                    break
            counts.append(self.lengths[row] - before)
            if not ended:
                active.append(row)
        self.active = active
        return counts

    def result(self) -> Tensor:
        """[B, prompt + new] all sequences, shorter ones padded on the right."""
        result = self.tokens[:, : max(self.lengths)].clone()
        for row, length in enumerate(self.lengths):
            result[row, length:] = self._padding
        return result


class Choice:
    """Chooses tokens as `generate` does, with its processors of logits.

    Args:
        sequences: the sequences, which processors read; drafts are stored after their tokens.
        processors: of transformers (suppressed tokens, repetition penalty, temperature, nucleus, ...).
        sample: draw from the distribution; else the token of the largest score.
        generator: source of random numbers; None = torch's global one.
    """

    def __init__(
        self, sequences: TokenRows, processors: LogitsProcessorList, sample: bool, generator: torch.Generator | None
    ) -> None:
        self._sequences, self._processors = sequences, processors
        self._samples, self._generator = sample, generator

    def scores(self, logits: Tensor, drafts: int = 0) -> Tensor:
        """[A, V] processed scores in float32, as in `generate`.

        Args:
            logits: `[A, V]` of the active sequences.
            drafts: number of drafts after each sequence that the token follows.
        """
        sequences, groups = self._sequences, defaultdict(list)
        logits = logits.to(sequences.tokens.device, torch.float32)
        if not self._processors:
            return logits
        for index, row in enumerate(sequences.active):
            groups[sequences.lengths[row] + drafts].append(index)
        scores = torch.empty_like(logits)
        for length, indices in groups.items():
            # Processors may hold values of each sequence of the batch, so they get all of them.
            rows = [sequences.active[index] for index in indices]
            whole = logits.new_zeros(len(sequences.tokens), logits.shape[1])
            whole[rows] = logits[indices]
            tokens = cast(torch.LongTensor, sequences.tokens[:, :length])
            scores[indices] = self._processors(tokens, cast(torch.FloatTensor, whole))[rows]
        return scores

    def choose(self, scores: Tensor) -> Tensor:
        """[A] tokens from processed scores `[A, V]`."""
        return self._draw(scores.softmax(-1)) if self._samples else scores.argmax(-1)

    def _draw(self, probabilities: Tensor) -> Tensor:
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
        if not self._samples:
            chosen = scores.argmax(-1)  # [A, N]
            confirmed = (chosen[:, : drafts.shape[1]] == drafts).long().cumprod(1).sum(1).tolist()
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
            return [*drafts[:at], int(self._draw(rest[None]))]
        last = model[len(drafts) :]
        return [*drafts, int(self._draw(last[:1]))] if len(last) else drafts


class DecodingSession:
    """Sequences that are decoded together, and the cache of their keys and values.

    Between steps the cache of every layer holds all positions of the active sequences except the last token's; early
    exit lets later layers fall behind. Shorter sequences are shifted to the right, in the cache too.

    Args:
        runner: verified by `decoding_runner`.
        sequences: prompts.
        choice: how tokens are chosen.
        progress: called with the number of positions by which the longest sequence has grown.
    """

    def __init__(
        self, runner: LayerRunner, sequences: TokenRows, choice: Choice, progress: Callable[[int], None]
    ) -> None:
        self.runner, self.sequences, self.choice, self._progress = runner, sequences, choice, progress
        self.num_layers = runner.anatomy.num_layers
        self.cache = runner.new_cache()
        self.alive: list[int] = []
        """Indices, among the sequences that were active before the last `commit`, of those that still are."""
        self._slides = any(getattr(layer, "is_sliding", False) for layer in self.cache.layers)
        rows, length = len(sequences.tokens), sequences.prompt_length
        self.stats = Stats(self.num_layers, sequences=rows, prompt_length=length)

    def clock(self) -> float:
        """The time in seconds."""
        return now(self.sequences.tokens.device)

    def begin(self, ids: Tensor, mask: Tensor, start: int) -> Tensor:
        """h_0 of the positions from `start` of `ids: [A, W]`, for `run`."""
        return self.runner.begin({"input_ids": ids[:, start:], "attention_mask": mask}, self.cache)

    def run(self, layers: Sequence[int], states: Tensor) -> Tensor:
        """`LayerRunner.run`, counted."""
        self._count(layers, states)
        return self.runner.run(layers, states)

    def _count(self, layers: Sequence[int], states: Tensor) -> None:
        """Count a call of 1-based layers on `[A, T, ...]`."""
        for layer in layers:
            self.stats.layer_calls[layer - 1] += 1
            self.stats.layer_positions[layer - 1] += states.shape[0] * states.shape[1]

    def step(self) -> None:
        """Decode one token of every active sequence with the model's own forward pass."""
        ids, mask = self.sequences.window()
        new = ids[:, self.cache.get_seq_length() :]
        logits = self.runner.forward({"input_ids": new, "attention_mask": mask}, self.cache)
        self._count(range(1, self.num_layers + 1), new)
        self.append(logits)

    def append(self, logits: Tensor) -> None:
        """Choose one token of every active sequence from `logits: [A, V]`, and append it."""
        self.commit([[token] for token in self.choice.choose(self.choice.scores(logits)).tolist()])

    def commit(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        """Append tokens to the active sequences; returns how many each got.

        Cuts the cache to the positions of known tokens except the last, and removes sequences that ended.
        """
        sequences = self.sequences
        before, width, longest = list(sequences.active), sequences.width, max(sequences.lengths)
        counts = sequences.add(tokens)
        self._progress(max(sequences.lengths) - longest)
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

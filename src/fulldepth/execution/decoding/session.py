"""`DecodingSession`: the tokens of a batch, the choice of the next ones, the cache, and counts and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from fulldepth.core.errors import FulldepthError
from fulldepth.execution.latency import now
from fulldepth.execution.layer_runner import LayerRunner


@dataclass
class Stats:
    """Counts and times of one generation.

    The pass of the prompts is counted in `prompt_positions`, not in `layer_positions`, `layer_calls` and `seconds`.
    Padding counts as it is computed.
    """

    num_layers: int
    sequences: int
    prompt_length: int
    """Positions of each prompt, with padding."""
    mode: str = "plain"
    """`plain`, `speculative` or `early-exit`: how most tokens were decoded."""
    reason: str = "Every layer runs for every token."
    """Why this mode was used."""
    new_tokens: list[int] = field(default_factory=list)
    """[B] new tokens of each sequence."""
    prompt_seconds: float = 0.0
    """Time of the pass of the prompts, which also gives the first token of each."""
    seconds: float = 0.0
    """Time of all later tokens."""
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
    drafted: int = 0
    """Draft tokens."""
    accepted: int = 0
    """Draft tokens that the full model confirmed."""
    added: int = 0
    """Tokens that rounds of speculation added."""
    paid: bool | None = None
    """Whether the rounds of the trial were faster than plain steps; None without a trial."""
    trial_seconds: float | None = None
    """Time that the trial lost against plain decoding; 0 where its rounds were faster, None without a trial."""
    exit_layers: list[list[int]] | None = None
    """For each sequence the exit layer of each new token (early exit)."""

    def __post_init__(self) -> None:
        self.new_tokens = [0] * self.sequences
        self.begin()

    def begin(self) -> None:
        """Count layers from 0."""
        self.layer_calls = [0] * self.num_layers
        self.layer_positions = [0] * self.num_layers

    def count(self, layers: Sequence[int], positions: int) -> None:
        """Count one call of 1-based layers on a number of positions, of all sequences."""
        for layer in layers:
            self.layer_calls[layer - 1] += 1
            self.layer_positions[layer - 1] += positions

    @property
    def tokens(self) -> int:
        """New tokens of all sequences."""
        return sum(self.new_tokens)

    @property
    def exits(self) -> list[int] | None:
        """[L] number of tokens that left at each layer (early exit)."""
        if self.exit_layers is None:
            return None
        return [sum(row.count(layer) for row in self.exit_layers) for layer in range(1, self.num_layers + 1)]

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
        """Mean number of tokens that a round of speculation adds; None without rounds."""
        return self.added / self.rounds if self.rounds else None

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
        """Return all entries and derived values as plain values for JSON."""
        derived = [name for name, value in vars(Stats).items() if isinstance(value, property)]
        return asdict(self) | {name: getattr(self, name) for name in derived}


class DecodingSession:
    """Sequences that are decoded together, and the cache of their keys and values.

    Between steps the cache of every layer holds all positions except the last token's; early exit lets later layers
    fall behind. A sequence ends where the stopping criteria say so. Tokens are chosen as `generate` chooses them, with
    its processors of logits.

    Args:
        runner: verified by `decoding_runner`.
        input_ids: `[B, P]` prompts.
        mask: `[B, P]`, 0 = left padding, 1 = a token.
        config: of the generation: largest length, end tokens, padding, and whether tokens are drawn.
        processors: of logits (suppressed tokens, repetition penalty, temperature, nucleus, ...).
        criteria: the rules by which sequences end; end tokens are kept.
        generator: source of random numbers; None = torch's global one.
        progress: called with the number of positions by which the active sequences have grown.

    Raises:
        FulldepthError: for right padding, and prompts without a token.
    """

    def __init__(
        self,
        runner: LayerRunner,
        input_ids: Tensor,
        mask: Tensor,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        *,
        generator: torch.Generator | None,
        progress: Callable[[int], None],
    ) -> None:
        rows, length = input_ids.shape
        if not bool(mask.any(1).all()):
            raise FulldepthError("A prompt is empty; every sequence needs at least one token.")
        if bool((mask[:, 1:] < mask[:, :-1]).any()):
            raise FulldepthError("Prompts of different lengths must be padded on the left (attention_mask 0 0 1 1).")
        self.runner = runner
        self.cache = runner.new_cache()
        self.num_layers = runner.anatomy.num_layers
        self._samples = bool(config.do_sample)
        self._generator = generator
        self._progress = progress
        self._processors = processors
        self._criteria = criteria
        ends = config._eos_token_tensor
        padding = config._pad_token_tensor
        self.end_tokens: list[int] = [] if ends is None else ends.tolist()
        self.max_length = int(config.max_length)
        self.tokens = input_ids.new_full((rows, self.max_length), 0 if padding is None else int(padding))
        """[B, max_length]; entries from `length` on are free for drafts."""
        self.tokens[:, :length] = input_ids
        self._mask = torch.ones_like(self.tokens)
        self._mask[:, :length] = mask
        self.length = length
        """Positions of every active sequence, prompt and padding included."""
        self.active = list(range(rows))
        """Sequences that have not ended."""
        self.stats = Stats(self.num_layers, rows, length)

    def clock(self) -> float:
        """The time in seconds."""
        return now(self.tokens.device)

    @property
    def start(self) -> int:
        """First position that layer 1 has not run on: that of the last token, or 0 before the first step."""
        return self.length - 1 if self.length > self.stats.prompt_length else 0

    def batch(self, start: int, end: int | None = None) -> dict[str, Tensor]:
        """Inputs of the active sequences from position `start` to `end` (None: the last), with the mask from 0 on."""
        ids, mask = (part[self.active, : end or self.length] for part in (self.tokens, self._mask))
        return {"input_ids": ids[:, start:], "attention_mask": mask}

    def begin(self, start: int, end: int | None = None) -> Tensor:
        """h_0 of these positions, for `run`."""
        return self.runner.begin(self.batch(start, end), self.cache)

    def run(self, layers: Sequence[int], states: Tensor) -> Tensor:
        """`LayerRunner.run`, counted."""
        self.stats.count(layers, states.shape[0] * states.shape[1])
        return self.runner.run(layers, states)

    def step(self) -> None:
        """Decode one token of every active sequence with the model's own forward pass."""
        batch = self.batch(self.start)
        logits = self.runner.forward(batch, self.cache)
        self.stats.count(range(1, self.num_layers + 1), batch["input_ids"].numel())
        self.append(self.choose(self.scores(logits))[:, None])

    def scores(self, logits: Tensor, drafts: int = 0) -> Tensor:
        """[A, V] processed scores in float32, as in `generate`.

        Args:
            logits: `[A, V]` of the active sequences.
            drafts: number of drafts that the token follows.
        """
        # Processors may hold values of each sequence of the batch, so they get all of them.
        whole = torch.zeros(len(self.tokens), logits.shape[1], device=self.tokens.device)
        whole[self.active] = logits.to(whole)
        tokens = cast(torch.LongTensor, self.tokens[:, : self.length + drafts])
        return self._processors(tokens, cast(torch.FloatTensor, whole))[self.active]

    def choose(self, scores: Tensor) -> Tensor:
        """[A] tokens from processed scores `[A, V]`."""
        return self._draw(scores.softmax(-1)) if self._samples else scores.argmax(-1)

    def _draw(self, probabilities: Tensor) -> Tensor:
        return torch.multinomial(probabilities, 1, generator=self._generator).squeeze(1)

    def accept(self, logits: Tensor, drafts: Sequence[int], draft_scores: Sequence[Tensor]) -> list[int]:
        """New tokens of the only sequence: the drafts that the model confirms, and one token of its own.

        Greedy: drafts are confirmed as long as they equal the model's choice. Sampled: draft x with probability q(x)
        is confirmed with probability `min(1, p(x) / q(x))`; after the first that is not, a token is drawn from
        `max(p - q, 0)`, normalised. Tokens then have the model's distribution p (Leviathan et al. 2023, Theorem 1;
        Chen et al. 2023, Theorem 1).

        Args:
            logits: `[N, V]` of the model, at the last known token and the drafts; without the last draft, no token
                follows the drafts if all are confirmed.
            drafts: K tokens, K = N - 1 or N.
            draft_scores: `[1, V]` processed scores of which each draft was chosen.
        """
        scores = torch.cat([self.scores(row[None], at) for at, row in enumerate(logits)])
        if not self._samples:
            likeliest = scores.argmax(-1).tolist()
            count = shared_beginning(likeliest, drafts)
            return [*drafts[:count], *likeliest[count : count + 1]]
        model = scores.softmax(-1)
        chances = torch.rand(len(drafts), generator=self._generator, device=model.device).tolist()
        for at, (token, score, chance) in enumerate(zip(drafts, draft_scores, chances, strict=True)):
            p = model[at]
            q = score[0].softmax(-1)
            if chance * float(q[token]) < float(p[token]):
                continue
            rest = (p - q).clamp(min=0)
            rest = rest if float(rest.sum()) > 0 else p  # p = q up to rounding
            return [*drafts[:at], int(self._draw(rest[None]))]
        last = model[len(drafts) :]
        return [*drafts, *self._draw(last[:1]).tolist()] if len(last) else [*drafts]

    def append(self, tokens: Tensor) -> list[int]:
        """Append `tokens: [A, N]` to the active sequences, where N > 1 only for a single one, which may end before N.

        Cuts the cache to the positions of known tokens except the last, and removes sequences that ended; returns
        which of those that were active (0..A-1) still are.
        """
        for column in tokens.T:
            self.tokens[self.active, self.length] = column
            self.length += 1
            self._progress(1)
            for row in self.active:
                self.stats.new_tokens[row] += 1
            known = cast(torch.LongTensor, self.tokens[:, : self.length])
            ended = self._criteria(known, cast(torch.FloatTensor, None))[self.active].tolist()
            if all(ended):
                break
        alive = [index for index, end in enumerate(ended) if not end]
        if 0 < len(alive) < len(ended):
            self.cache.batch_select_indices(torch.tensor(alive, device=self.tokens.device))
        self.active = [self.active[index] for index in alive]
        self.cache.crop(self.length - 1)
        return alive

    def result(self) -> Tensor:
        """[B, prompt + new] all sequences, shorter ones padded on the right."""
        return self.tokens[:, : self.length]


def shared_beginning(first: Sequence[int], second: Sequence[int]) -> int:
    """Number of tokens at the beginning in which two sequences agree."""
    return [*(a == b for a, b in zip(first, second, strict=False)), False].index(False)

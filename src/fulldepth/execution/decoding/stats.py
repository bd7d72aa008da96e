"""What a generation did: counts of layers, positions and drafts, and times."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Stats:
    """Counts and times of one generation.

    The pass of the prompts is counted in `prompt_positions`, not in `layer_positions`, `layer_calls` and `seconds`.
    Padding counts as it is computed; layers that a drafting model skips whole do not count.
    """

    num_layers: int
    mode: str = "plain"
    """`plain`, `speculative` or `early-exit`: how most tokens were decoded."""
    reason: str = "Every layer runs for every token."
    """Why this mode was used, in one sentence."""
    sequences: int = 0
    prompt_tokens: int = 0
    """Tokens of all prompts, without padding."""
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
    projected: list[int] = field(default_factory=list)
    """[L] positions of which a layer computed nothing but keys and values (policy `propagate`)."""
    lens_positions: int = 0
    """Readings with the whole head in early exit: positions, once for each layer at which they were read."""
    rounds: int = 0
    """Rounds of drafting and verification."""
    drafted: int = 0
    """Draft tokens of all sequences."""
    accepted: int = 0
    """Draft tokens that the full model confirmed."""
    speculate_from: int | None = None
    """E: drafts come from the first E layers."""
    draft_length: int | None = None
    """K: number of draft tokens per round, at most (of the last round, if it was chosen automatically)."""
    chosen_by: str = "given"
    """`given` or `measured`: where E and K come from."""
    paid: bool | None = None
    """Whether speculation was measurably faster than plain decoding; False where it was given up, None if unknown."""
    candidates: list[dict[str, Any]] = field(default_factory=list)
    """Measured candidates: `layer`, `draft_length`, `acceptance`, `tokens_per_round`, `predicted_speedup`."""
    exits: list[int] | None = None
    """[L] number of tokens that left at each layer (early exit)."""
    exit_layers: list[list[int]] | None = None
    """For each sequence the exit layer of each new token (early exit)."""

    def __post_init__(self) -> None:
        for name in ("prompt_positions", "layer_positions", "layer_calls", "projected"):
            if not getattr(self, name):
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

    added: int = 0
    """Tokens that rounds of speculation added."""
    sequence_rounds: int = 0
    """Rounds, each counted once for every sequence in it."""

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
        if not self.exits or not self.layers_computed:
            return None
        return self.num_layers / self.layers_computed

    def as_dict(self) -> dict[str, Any]:
        """All entries and derived values, as plain values for JSON."""
        derived = ("acceptance", "tokens_per_second", "tokens_per_round", "layers_computed", "theoretical_speedup")
        return asdict(self) | {name: getattr(self, name) for name in derived}

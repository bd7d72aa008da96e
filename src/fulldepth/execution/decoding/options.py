"""Options of `generate` that choose layers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from typing import NamedTuple

from fulldepth.errors import FulldepthError, unknown
from fulldepth.execution.decoding.rules import RULES
from fulldepth.hf import Scalars

POLICIES = ("recompute", "propagate")
AUTO = "auto"
LEAST_CANDIDATES = 2
BOUNDED_RULES = ("confidence", "margin")
"""Rules whose value over some tokens bounds the value over all."""
MOST_DRAFTS = 64


class DraftPlan(NamedTuple):
    """Parts of layers that the drafting model skips."""

    layers: Collection[int]
    """1-based."""
    granularity: str = "attention"
    """`attention`, `mlp` or `layer`."""
    scalars: Scalars | None = None
    """Factors of what remains, see `hf.Switches`."""


@dataclass(frozen=True)
class Options:
    """Checked options, see `generate`.

    Raises:
        FulldepthError: for values out of range, and options that exclude each other.
    """

    num_layers: int
    """L."""
    threshold: float | None = None
    """In (0, 1]: a token leaves where the value of `rule` exceeds it, so that 1 is the full model."""
    rule: str = "confidence"
    """`confidence`, `margin`, `entropy` or `patience`, see `decoding.rules`."""
    policy: str = "recompute"
    """What layers that a token did not visit know of it. `recompute`: they are run when a later token needs them, which
    is exact; `propagate`: their keys and values are computed from the state at the exit, cheap and approximate."""
    min_layer: int = 1
    """First layer at which a token may leave."""
    exit_layer: int | None = None
    """Layer 1..L-1 at which every token leaves."""
    lens_candidates: int | None = None
    """Number of most probable tokens of the last layer that was read whole: a layer is first read for them alone, and
    whole only if a token could leave there (`decoding.candidates`). For `confidence` and `margin`; None = whole."""
    speculate_from: int | str | None = None
    """E in 1..L-1; `auto`: chosen by measured acceptance and layer times, plain decoding where none pays."""
    draft_length: int | str = AUTO
    """K, largest number of drafts per round; `auto`: chosen by measurement, plain decoding where none pays."""
    draft_threshold: float | None = None
    """In (0, 1]: the drafting of a round ends where the largest probability of the next draft is below it."""
    plan: DraftPlan | None = None
    """The model without these parts drafts, instead of the first layers alone; with `draft_length="auto"`, 4 tokens a
    round, and decoding becomes plain where rounds are slower."""

    def __post_init__(self) -> None:
        if self.plan is not None and (self.speculate_from is not None or self.exit_layer is not None):
            raise FulldepthError("A plan's model drafts; it excludes speculate_from and exit_layer.")
        for name in ("threshold", "draft_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise FulldepthError(f"{name} is {value}; expected a number in (0, 1].")
        if self.rule not in RULES:
            raise unknown("rule", self.rule, RULES)
        if self.policy not in POLICIES:
            raise unknown("policy", self.policy, POLICIES)
        self._check_layers()
        length = self.draft_length
        if length != AUTO and not (isinstance(length, int) and 1 <= length <= MOST_DRAFTS):
            raise FulldepthError(f"draft_length is {length!r}; expected 1 to {MOST_DRAFTS}, or 'auto'.")
        if self.exit_layer is not None and (self.threshold is not None or self.speculate_from is not None):
            raise FulldepthError("exit_layer ends every token at one layer; it excludes threshold and speculate_from.")
        if self.threshold is not None and self.mode == "speculative":
            raise FulldepthError(
                "threshold is for early exit; with drafts, draft_threshold ends the drafting of a round."
            )
        self._check_used("threshold", self.threshold, ("rule", "policy", "min_layer", "lens_candidates"))
        drafter = self.speculate_from if self.plan is None else self.plan
        self._check_used("speculate_from or a plan", drafter, ("draft_length", "draft_threshold"))
        self._check_candidates()

    def _check_used(self, needed: str, value: object, names: Collection[str]) -> None:
        """Refuse options that differ from their defaults while what they belong to is not asked for."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in names if value is None else ():
            if getattr(self, name) != defaults[name]:
                raise FulldepthError(f"{name} has no effect without {needed}; set {needed}, or leave out {name}.")

    def _check_candidates(self) -> None:
        count = self.lens_candidates
        if count is None:
            return
        if not isinstance(count, int) or count < LEAST_CANDIDATES:
            raise FulldepthError(f"lens_candidates is {count!r}; expected {LEAST_CANDIDATES} tokens or more.")
        if self.rule not in BOUNDED_RULES:
            raise FulldepthError(
                f"lens_candidates needs the rule {' or '.join(BOUNDED_RULES)}; {self.rule} reads the whole vocabulary."
            )

    def _check_layers(self) -> None:
        last = self.num_layers - 1
        if not 1 <= self.min_layer <= self.num_layers:
            raise FulldepthError(f"min_layer is {self.min_layer}; expected a layer from 1 to {self.num_layers}.")
        for name in ("exit_layer", "speculate_from"):
            value = getattr(self, name)
            if value is None or (name == "speculate_from" and value == AUTO):
                continue
            if not isinstance(value, int) or not 1 <= value <= last:
                raise FulldepthError(
                    f"{name} is {value!r}; expected a layer from 1 to {last}"
                    f"{' or auto' if name == 'speculate_from' else ''} (the model has {self.num_layers} layers)."
                )

    @property
    def mode(self) -> str:
        """`plain`, `speculative` or `early-exit`."""
        if self.speculate_from is not None or self.plan is not None:
            return "speculative"
        return "plain" if self.threshold is None and self.exit_layer is None else "early-exit"

    @property
    def measures(self) -> bool:
        """Whether E or K is chosen by measurement, so that decoding may also be plain."""
        return self.mode == "speculative" and AUTO in (self.speculate_from, self.draft_length)

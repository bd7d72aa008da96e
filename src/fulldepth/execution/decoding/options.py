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
    speculate_from: int | str | None = None
    """E in 1..L-1; `auto`: a third of the layers, and a trial."""
    draft_length: int | str = AUTO
    """K, largest number of drafts per round; `auto`: 4, and a trial, after which decoding is plain where rounds are
    slower."""
    draft_threshold: float | None = None
    """In (0, 1]: the drafting of a round ends where the largest probability of the next draft is below it."""
    plan: DraftPlan | None = None
    """The model without these parts drafts, instead of the first layers alone."""

    def __post_init__(self) -> None:
        for name, known in (("rule", RULES), ("policy", POLICIES)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        for name in ("threshold", "draft_threshold"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise FulldepthError(f"{name} is {value}; expected a number in (0, 1].")
        for name, most, others in (
            ("min_layer", self.num_layers, ()),
            ("exit_layer", self.num_layers - 1, (None,)),
            ("speculate_from", self.num_layers - 1, (None, AUTO)),
            ("draft_length", MOST_DRAFTS, (AUTO,)),
        ):
            value = getattr(self, name)
            if value not in others and not (isinstance(value, int) and 1 <= value <= most):
                raise FulldepthError(f"{name} is {value!r}; expected a whole number from 1 to {most}.")
        drafter = self.speculate_from if self.plan is None else self.plan
        drafts, leaves = drafter is not None, self.threshold is not None
        for wrong, message in (
            (self.plan is not None and self.speculate_from is not None, "A plan's model drafts; omit speculate_from."),
            (self.exit_layer is not None and (drafts or leaves), "exit_layer excludes threshold, drafts and plans."),
            (drafts and leaves, "threshold is for early exit; with drafts, draft_threshold ends a round's drafting."),
        ):
            if wrong:
                raise FulldepthError(message)
        defaults = {field.name: field.default for field in fields(self)}
        for needed, is_set, names in (
            ("threshold", leaves, ("rule", "policy", "min_layer")),
            ("speculate_from or a plan", drafts, ("draft_length", "draft_threshold")),
        ):
            for name in names:
                if not is_set and getattr(self, name) != defaults[name]:
                    raise FulldepthError(f"{name} has no effect without {needed}; set {needed}, or leave out {name}.")

    @property
    def mode(self) -> str:
        """`plain`, `speculative` or `early-exit`."""
        if self.speculate_from is not None or self.plan is not None:
            return "speculative"
        return "plain" if self.threshold is None and self.exit_layer is None else "early-exit"

"""Watches rounds of speculation: adapts K, and ends speculation where plain decoding is faster."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fulldepth.execution.decoding.choosing import LEAST, Estimate, Times, estimates
from fulldepth.execution.decoding.speculation import Round
from fulldepth.uncertainty import FEWEST_ROUNDS, SIGNIFICANT, ratio_error

WINDOW = 4
"""Rounds between two decisions."""
PATIENCE = 2
"""Windows in a row that must be slower than plain decoding to end speculation."""
HOPELESS = 0.8
"""Speed-up of one window below which speculation ends at once."""


class Trial:
    """Compares rounds with plain decoding, and ends them where they are slower.

    Args:
        plain: seconds of a token in plain decoding.
        drafter: what drafts, for `reason`.
        allowance: seconds that rounds may lose against plain decoding before they end.
    """

    def __init__(self, plain: float, drafter: str, allowance: float = math.inf) -> None:
        self._plain_token, self._drafter, self._allowance = plain, drafter, allowance
        self.pays = True
        self._window: list[tuple[Round, float]] = []
        self._slow, self._plain_seconds, self._seconds = 0, 0.0, 0.0
        self._rounds: list[tuple[float, float]] = []
        """Seconds of each round, and those that plain decoding takes for its tokens."""

    def note(self, done: Round, seconds: float) -> None:
        """Take account of one round."""
        self._window.append((done, seconds))
        self._rounds.append((seconds, self._plain(done)))
        self._plain_seconds += self._plain(done)
        self._seconds += seconds
        if len(self._window) == WINDOW:
            self._decide()
            self._window = []
        self.pays &= self._seconds - self._plain_seconds <= self._allowance

    def _plain(self, done: Round) -> float:
        """Seconds that plain decoding takes for the tokens of a round."""
        return done.added / done.sequences * self._plain_token

    def _decide(self) -> None:
        """At the end of a window: compare it with plain decoding."""
        speedup = sum(self._plain(done) for done, _ in self._window) / sum(seconds for _, seconds in self._window)
        self._slow = self._slow + 1 if speedup < 1 else 0
        self.pays = self._slow < PATIENCE and speedup >= HOPELESS

    @property
    def reason(self) -> str:
        """The decision, in one sentence."""
        speedup = self._plain_seconds / self._seconds if self._seconds else 1.0
        error = self._error
        stated = f"{speedup:.2f}" if not math.isfinite(error) else f"{speedup:.2f} ± {error:.2f}"
        rounds = f"the rounds with drafts of {self._drafter} decoded {stated} times as fast as plainly"
        if not self.pays:
            return f"Plain decoding after a trial: {rounds}."
        return f"Speculation pays: {rounds}." if self.measured else f"No measurable difference: {rounds}."

    @property
    def measured(self) -> bool:
        """Whether the rounds were measurably faster than plain decoding: at least 9 rounds, and 2 standard errors."""
        faster = self._plain_seconds - self._seconds
        return len(self._rounds) >= FEWEST_ROUNDS and faster > SIGNIFICANT * self._error * self._seconds

    @property
    def _error(self) -> float:
        """Standard error of the speed-up over rounds, for the measured time of a plain token."""
        seconds, plain = zip(*self._rounds, strict=True) if self._rounds else ((), ())
        return float(ratio_error(plain, seconds)) if len(self._rounds) > 1 else math.nan


class Control(Trial):
    """Decides after every few rounds whether speculation pays, and which K is best.

    Args:
        times: measured, of plain decoding and of layers.
        num_layers: L.
        chosen: E and K with the largest predicted speed-up.
        lengths: candidates for K.
        allowance: as of `Trial`.
    """

    def __init__(
        self, times: Times, num_layers: int, chosen: Estimate, lengths: Sequence[int], allowance: float = math.inf
    ) -> None:
        super().__init__(times.plain, f"layers 1 to {chosen.layer}", allowance)
        self._times, self._num_layers, self._chosen, self._lengths = times, num_layers, chosen, lengths
        self.length = chosen.draft_length
        """K of the next round."""
        self.pays = self.hopeful = chosen.predicted_speedup >= LEAST
        self._accepted, self._rejected = 2 * chosen.acceptance, 2 * (1 - chosen.acceptance)  # weight of the estimate

    def note(self, done: Round, seconds: float) -> None:
        """Take account of one round."""
        self._accepted += done.accepted
        self._rejected += done.rejected
        super().note(done, seconds)

    def _decide(self) -> None:
        """At the end of a window: compare it with plain decoding, fit the times, choose K again."""
        super()._decide()
        for done, seconds in self._window:
            if done.drafts:
                self._times.fit(self._num_layers, self._chosen.layer, done.drafts, seconds)
        acceptance = self._accepted / (self._accepted + self._rejected)
        made = estimates(self._times, self._num_layers, self._chosen.layer, acceptance, self._lengths)
        self.length = max(made, key=lambda each: each.predicted_speedup).draft_length

    @property
    def reason(self) -> str:
        """The decision, in one sentence."""
        chosen = self._chosen
        if self.hopeful:
            return super().reason
        return (
            f"Plain decoding: with {chosen.acceptance:.0%} of the drafts of layer {chosen.layer} accepted, "
            f"speculation would take {1 / chosen.predicted_speedup:.2f} times as long."
        )

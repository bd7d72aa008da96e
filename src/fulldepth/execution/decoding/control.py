"""Watches rounds of speculation: adapts K, and ends speculation where plain decoding is faster."""

from __future__ import annotations

from collections.abc import Sequence

from fulldepth.execution.decoding.choosing import LEAST, Estimate, Times, estimates
from fulldepth.execution.decoding.speculation import Round

WINDOW = 4
"""Rounds between two decisions."""
PATIENCE = 2
"""Windows in a row that must be slower than plain decoding to end speculation."""
HOPELESS = 0.8
"""Speed-up of one window below which speculation ends at once."""


class Control:
    """Decides after every few rounds whether speculation pays, and which K is best.

    Args:
        times: measured, of plain decoding and of layers.
        num_layers: L.
        chosen: E and K with the largest predicted speed-up.
        lengths: candidates for K.
    """

    def __init__(self, times: Times, num_layers: int, chosen: Estimate, lengths: Sequence[int]) -> None:
        self._times, self._num_layers, self._chosen, self._lengths = times, num_layers, chosen, lengths
        self.length = chosen.draft_length
        """K of the next round."""
        self.pays = self.hopeful = chosen.predicted_speedup >= LEAST
        self._accepted, self._rejected = 2 * chosen.acceptance, 2 * (1 - chosen.acceptance)  # weight of the estimate
        self._window: list[tuple[Round, float]] = []
        self._slow, self._added, self._plain_seconds, self._seconds = 0, 0, 0.0, 0.0

    def note(self, done: Round, seconds: float) -> None:
        """Take account of one round."""
        self._window.append((done, seconds))
        self._accepted += done.accepted
        self._rejected += done.rejected
        self._plain_seconds += self._plain(done)
        self._seconds += seconds
        if len(self._window) == WINDOW:
            self._decide()

    def _plain(self, done: Round) -> float:
        """Seconds that plain decoding takes for the tokens of a round."""
        return done.added / done.sequences * self._times.plain

    def _decide(self) -> None:
        """At the end of a window: compare it with plain decoding, fit the times, choose K again."""
        speedup = sum(self._plain(done) for done, _ in self._window) / sum(seconds for _, seconds in self._window)
        self._slow = self._slow + 1 if speedup < 1 else 0
        self.pays = self._slow < PATIENCE and speedup >= HOPELESS
        for done, seconds in self._window:
            if done.drafts:
                self._times.fit(self._num_layers, self._chosen.layer, done.drafts, seconds)
        acceptance = self._accepted / (self._accepted + self._rejected)
        made = estimates(self._times, self._num_layers, self._chosen.layer, acceptance, self._lengths)
        self.length = max(made, key=lambda each: each.predicted_speedup).draft_length
        self._window = []

    @property
    def reason(self) -> str:
        """The decision, in one sentence."""
        chosen = self._chosen
        if not self.hopeful:
            return (
                f"Plain decoding: with {chosen.acceptance:.0%} of the drafts of layer {chosen.layer} accepted, "
                f"speculation would take {1 / chosen.predicted_speedup:.2f} times as long."
            )
        speedup = self._plain_seconds / self._seconds if self._seconds else chosen.predicted_speedup
        rounds = f"the rounds with drafts of layers 1 to {chosen.layer} decoded {speedup:.2f} times as fast as plainly"
        if not self.pays:
            return f"Plain decoding after a trial: {rounds}."
        return f"Speculation pays: {rounds}."

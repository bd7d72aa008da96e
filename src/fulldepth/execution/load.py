"""How busy other programs kept the machine during a run: times of busy machines are not compared."""

from __future__ import annotations

import platform

import psutil

from fulldepth.distributed import current

GUESTS = ("guest", "guest_nice")
"""Times that are part of others."""


class OtherLoad:
    """Share of the machine's CPU time that processes outside the run have used since this was made."""

    def __init__(self) -> None:
        self._start = _times()

    def share(self) -> float:
        """In [0, 1], of all cores; all processes of a distributed run must call this together."""
        total, busy, own = (now - then for now, then in zip(_times(), self._start, strict=True))
        return min(1.0, max(0.0, busy - own) / total) if total > 0 else 0.0


def _times() -> tuple[float, float, float]:
    """CPU seconds so far: of the machine, busy ones, those of the run's processes on it and their children."""
    machine = psutil.cpu_times()._asdict()
    total = sum(seconds for name, seconds in machine.items() if name not in GUESTS)
    idle = machine["idle"] + machine.get("iowait", 0.0)
    process = psutil.Process()
    own = sum(process.cpu_times()[:4])  # user and system, also of children that have ended
    for child in process.children(recursive=True):
        try:
            own += sum(child.cpu_times()[:2])
        except psutil.Error:  # it has just ended
            continue
    here = platform.node()
    return total, total - idle, sum(part for node, part in current().gather((here, own)) if node == here)

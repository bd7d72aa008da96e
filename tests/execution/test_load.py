"""How busy other programs keep the machine, against a program that is started here."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from fulldepth.execution.load import OtherLoad


def test_another_program_is_seen_and_our_own_work_is_not() -> None:
    own = OtherLoad()
    start, until = time.process_time(), time.perf_counter() + 1.0
    while time.perf_counter() < until:
        sum(range(1000))
    worked = (time.process_time() - start) / psutil.cpu_count()  # our share of the machine, in one second
    assert 0 <= own.share() <= 1.1 - worked
    detached = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1]]); print(p.pid)"
    spin = "import time; t = time.time() + 1.5\nwhile time.time() < t: pass"
    ended = subprocess.run([sys.executable, "-c", detached, spin], capture_output=True, text=True, check=True)
    other = OtherLoad()
    busy = psutil.Process(int(ended.stdout))  # its parent has ended: it is no child of this process
    start = sum(busy.cpu_times()[:2])
    time.sleep(0.8)
    used, share = sum(busy.cpu_times()[:2]) - start, other.share()
    assert share >= 0.5 * used / (psutil.cpu_count() * 0.8)

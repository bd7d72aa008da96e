"""The order in which models take turns, how busy other programs are, bytes of weights and caches by hand."""

from __future__ import annotations

import mmap
import subprocess
import sys
import time

import psutil
import pytest
import torch

from fulldepth.execution import latency
from fulldepth.execution.latency import OtherLoad, Runner, order
from fulldepth.execution.memory import AllocationTracker, cache_bytes, parameter_bytes, peak_bytes, reset_peak, run_peak
from tiny_models import build, token_ids


@pytest.mark.parametrize("count", [2, 3])
def test_everybody_is_first_and_runs_once_a_round(count):
    rounds = [order(count, number, seed=4) for number in range(2 * count)]
    assert all(sorted(found) == list(range(count)) for found in rounds)
    assert sorted(found[0] for found in rounds[:count]) == list(range(count))
    assert len({tuple(found) for found in rounds}) >= count
    assert rounds == [order(count, number, seed=4) for number in range(2 * count)]


def test_another_program_is_seen_and_our_own_work_is_not():
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


def test_what_children_of_a_child_have_used_is_our_own_work():
    """Servers compile in processes of their own, which have ended while the server goes on."""
    spin = "import time\nwhile time.process_time() < 0.5: pass"
    server = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}]); print(flush=True); input()"
    before = latency._times()[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", server], text=True, **pipes) as child:
        child.stdout.readline()  # the child of the child has ended, and the child has not
        assert latency._times()[2] - before >= 0.5
        child.communicate("")


def test_a_window_bounds_the_cache():
    ids = token_ids(3, 30)
    held = cache_bytes(Runner(build("gemma2")).run(ids, 25).cache)
    assert held == 2 * 3 * 2 * 8 * 4 * (30 + 2 * 7)  # one full layer, two with a window of 8: the last 7 are kept


def test_what_lives_is_counted_while_it_lives():
    known = torch.zeros(100)
    with AllocationTracker([known]) as tracker:
        first = known + 1
        known.add_(first)
        view = first[:10]
        del first
        assert tracker.now == 400  # the view keeps it
        second = torch.cat([known, known])
        assert tracker.now == 1200
        del view
        third = second * 2
        assert tracker.now == 1600
        del second
    del third
    assert (tracker.now, tracker.peak) == (0, 1600)


def test_tied_weights_count_once():
    model = build("gpt2")
    assert model.lm_head.weight is model.get_input_embeddings().weight
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_bytes(model) == 4 * numbers
    assert parameter_bytes(model.bfloat16()) == 2 * numbers


def use_memory(size):
    """Write so many bytes of new memory and give them back; an allocator may hand out what is resident already."""
    with mmap.mmap(-1, size) as memory:
        for _ in range(size >> 20):
            memory.write(b"1" * (1 << 20))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux keeps a peak that can be reset")
def test_the_peak_is_of_the_run_and_not_of_the_process():
    size = 300 << 20
    use_memory(size)
    reset_peak()
    resident = psutil.Process().memory_info().rss
    assert run_peak(torch.device("cpu")) < resident + size // 2  # what was freed before does not count
    use_memory(size)
    assert run_peak(torch.device("cpu")) >= resident + size * 0.9


def test_decoding_is_timed_by_the_token(monkeypatch):
    """Two seconds for the prompt, six for the three tokens after it."""
    clock = iter([1.0, 3.0, 9.0])
    monkeypatch.setattr(latency, "now", lambda device: next(clock))
    trial = latency.Runner(build("llama")).run(token_ids(2, 15), 12)
    assert (trial.prefill, trial.decode) == (2.0, 2.0)


def test_the_peak_is_the_weights_and_what_lives_beside_them():
    model, ids = build("llama"), token_ids(2, 4)
    weights = sum(part.nbytes for part in (*model.parameters(), *model.buffers()))
    assert peak_bytes(model, ids, lambda: torch.zeros(1000) + 1) == weights + 2 * 4000

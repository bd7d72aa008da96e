"""A fork server: one process imports everything once, and each job runs in a fork of it, under limits.

The parent must not start threads or run tensor operations before it forks, so everything beyond imports and file
comparison happens in children.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import resource
import shutil
import signal
import stat
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "200",
    "NO_COLOR": "1",
}
GIB = 1 << 30
SAMPLE = 0.2
"""Seconds between two looks at a job that takes long."""


class Limits(NamedTuple):
    """What a job may use."""

    cpu: int = 30
    """Seconds of CPU in one process; more is a hang."""
    asleep: float = 20.0
    """Seconds in which the job hardly uses a core; more is a hang. (Progress bars keep using a little.)"""
    memory: int = 6 * GIB
    """Bytes of address space above the parent's."""
    resident: int = 3 * GIB
    """Bytes of memory above the parent's; more is a failure, not an end."""
    file: int = 1 * GIB
    """Bytes of one written file."""


class Ending(NamedTuple):
    """How a job ended."""

    code: int | None
    """Exit code; None if a signal ended it."""
    signal: int | None
    hang: str | None
    """Why it was stopped, if it was."""
    wall: float
    cpu: float
    """Seconds of CPU, of the job and what it has waited for."""
    peak: int
    """Most resident bytes."""


def isolate(root: Path) -> None:
    """Give this process (and its children) a home of its own; call it before anything is imported."""
    os.environ.update(QUIET)
    home = str(root / "home")
    os.environ.update(HOME=home, HF_HOME=f"{home}/hf", TMPDIR=str(root / "tmp"), XDG_CACHE_HOME=f"{home}/cache")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
        os.environ.pop(name, None)


def fresh(folder: Path) -> Path:
    """An empty folder."""
    if folder.exists():
        remove(folder)
    folder.mkdir(parents=True)
    return folder


def folder(path: Path) -> Path:
    """The folder, made if absent."""
    path.mkdir(parents=True, exist_ok=True)
    return path


def remove(folder: Path) -> None:
    """Remove a folder, whatever a job has done to its permissions."""
    for inner, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            if not os.stat(inner).st_mode & stat.S_IWUSR:
                os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def warm(names: Iterable[str]) -> None:
    """Import modules; what cannot be imported is left to the jobs."""
    import torch

    torch.set_num_threads(1)
    for name in names:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def run(job: Callable[[], int], logs: Path, limits: Limits) -> Ending:
    """Run `job` in a fork; standard output and error go to `logs/stdout` and `logs/stderr`.

    Its standard input is a pipe that says `y` and then stays open: a question is answered, who reads on waits for ever.
    """
    reader, writer = os.pipe()
    os.write(writer, b"y\n" * 20)
    sys.stdout.flush()
    sys.stderr.flush()
    ceiling = _address_space() + limits.memory
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        _run_child(job, logs, limits, ceiling, reader, writer)
    os.close(reader)
    hang, status, usage = _wait(child, limits)
    os.close(writer)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the job has started and left
    ended = os.waitstatus_to_exitcode(status)
    if ended in (-signal.SIGKILL, -signal.SIGXCPU) and hang is None:
        hang = f"more than {limits.cpu} seconds of CPU"
    wall, cpu = time.monotonic() - start, usage.ru_utime + usage.ru_stime
    return Ending(ended if ended >= 0 else None, -ended if ended < 0 else None, hang, wall, cpu, usage.ru_maxrss * 1024)


def _run_child(job: Callable[[], int], logs: Path, limits: Limits, ceiling: int, reader: int, writer: int) -> None:
    """The child's side; never returns."""
    code = 70
    try:
        os.setsid()
        os.dup2(reader, 0)
        os.close(reader)
        os.close(writer)
        for number, name in ((1, "stdout"), (2, "stderr")):
            file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, number)
            os.close(file)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (pytest and others replace the streams; a program has these)
        sys.stdout = sys.__stdout__ = open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(  # noqa: SIM115
            2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1
        )
        for number in (signal.SIGUSR1, signal.SIGXCPU):
            faulthandler.register(number, file=2, all_threads=True)
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_CPU, limits.cpu, limits.cpu + 2)
        _limit(resource.RLIMIT_FSIZE, limits.file)
        _limit(resource.RLIMIT_AS, ceiling)
        code = job()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _limit(what: int, soft: int, hard: int | None = None) -> None:
    with contextlib.suppress(ValueError, OSError):  # not every system has every limit
        resource.setrlimit(what, (soft, soft if hard is None else hard))


def _wait(child: int, limits: Limits) -> tuple[str | None, int, resource.struct_rusage]:
    """Wait for the end of a job, or end it: (why it was stopped, status, what it used)."""
    start, pause, used = time.monotonic(), 0.002, 0.0
    busy: deque[bool] = deque(maxlen=int(limits.asleep / SAMPLE))
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        if done:
            return None, status, usage
        time.sleep(pause)
        if pause < SAMPLE:
            pause = min(pause * 1.2, SAMPLE)
            continue
        cpu, waiting = _activity(child)
        busy.append(waiting or cpu > used + SAMPLE / 4)
        used = cpu
        hang = (
            f"asleep for {limits.asleep:.0f} seconds"
            if len(busy) == busy.maxlen and sum(busy) < 0.1 * len(busy)
            else None
        )
        if time.monotonic() - start > 8 * limits.cpu:
            hang = f"longer than {8 * limits.cpu} seconds"
        if hang:
            os.kill(child, signal.SIGUSR1)  # the child shows where it is
            time.sleep(0.3)
            os.killpg(child, signal.SIGKILL)
            _, status, usage = os.wait4(child, 0)
            return hang, status, usage


def _activity(session: int) -> tuple[float, bool]:
    """Seconds of CPU that the processes of a session have used, and whether one runs or waits for a core or a disk."""
    total, waiting = 0.0, not os.path.isdir("/proc/self")
    for entry in [] if waiting else os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path("/proc", entry, "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session:
                    total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
                    waiting = waiting or fields[0] in "RD"
    return total, waiting


def _address_space() -> int:
    """Bytes of address space of this process."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 64 * GIB

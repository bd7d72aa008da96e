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
import sys
import time
import traceback
from typing import NamedTuple

import psutil

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "COLUMNS": "200",
    "NO_COLOR": "1",
}
GIB = 1 << 30


class Limits(NamedTuple):
    """What a job may use."""

    cpu: int = 30
    """Seconds of CPU in one process; more is a hang."""
    wall: float = 240.0
    """Seconds in all; more is a hang."""
    memory: int = 6 * GIB
    """Bytes of address space above the parent's."""
    resident: int = 3 * GIB
    """Bytes of memory above the parent's; more is a failure, not an end."""
    file: int = 1 * GIB
    """Bytes of one written file."""


class Ending(NamedTuple):
    """How a job ended."""

    code: int
    """Exit code; negative: the signal that ended it."""
    hang: str | None
    """Why it was stopped, if it was."""
    peak: int
    """Most resident bytes above the parent's."""


def isolate(root):
    """Give this process (and its children) a home of its own; call it before anything is imported."""
    home = str(root / "home")
    os.environ.update(QUIET, HOME=home, HF_HOME=f"{home}/hf", TMPDIR=str(root / "tmp"), XDG_CACHE_HOME=f"{home}/cache")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "PYTEST_CURRENT_TEST", "PYTEST_XDIST_WORKER"):
        os.environ.pop(name, None)


def fresh(folder):
    """Make an empty folder, whatever a job has done to its permissions."""
    for inner, _, _ in os.walk(folder):
        with contextlib.suppress(OSError):
            os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def warm(names):
    """Import modules; what cannot be imported is left to the jobs."""
    import torch

    torch.set_num_threads(1)
    for name in names:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def run(job, logs, limits):
    """Run `job` in a fork; standard output and error go to `logs/stdout` and `logs/stderr`.

    Its standard input is a pipe that says `y` and then stays open: a question is answered, who reads on waits for ever.
    """
    reader, writer = os.pipe()
    os.write(writer, b"y\n" * 20)
    sys.stdout.flush()
    sys.stderr.flush()
    before = psutil.Process().memory_info()
    deadline = time.monotonic() + limits.wall
    child = os.fork()
    if child == 0:
        os.close(writer)
        _run_child(job, logs, limits, before.vms + limits.memory, reader)
    os.close(reader)
    hang = None
    while not (ended := os.wait4(child, os.WNOHANG))[0]:
        time.sleep(0.01)
        if time.monotonic() > deadline:
            hang = f"longer than {limits.wall:.0f} seconds"
            os.kill(child, signal.SIGUSR1)  # the child shows where it is
            time.sleep(0.3)
            os.kill(child, signal.SIGKILL)
            ended = os.wait4(child, 0)
            break
    os.close(writer)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the job has started and left
    code = os.waitstatus_to_exitcode(ended[1])
    inherited = before.rss - before.shared  # a fork starts without the pages of libraries
    if code in (-signal.SIGKILL, -signal.SIGXCPU) and hang is None:
        hang = f"more than {limits.cpu} seconds of CPU"
    return Ending(code, hang, ended[2].ru_maxrss * 1024 - inherited)


def _run_child(job, logs, limits, ceiling, reader):
    """The child's side; never returns."""
    code = 70
    try:
        os.setsid()
        os.dup2(reader, 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115 (pytest and others replace the streams; a program has these)
        for number, name in ((1, "stdout"), (2, "stderr")):
            stream = open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        for number in (signal.SIGUSR1, signal.SIGXCPU):
            faulthandler.register(number, file=2, all_threads=True)
        for what, soft, hard in (
            (resource.RLIMIT_CORE, 0, 0),
            (resource.RLIMIT_CPU, limits.cpu, limits.cpu + 2),
            (resource.RLIMIT_FSIZE, limits.file, limits.file),
            (resource.RLIMIT_AS, ceiling, ceiling),
        ):
            with contextlib.suppress(ValueError, OSError):  # not every system has every limit
                resource.setrlimit(what, (soft, hard))
        code = job()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

"""What a kill leaves on the disk at every moment of a run, and what a resumed run makes of it.

A run happens once, in a forked process. Before each of its file operations inside a folder (open for writing, rename,
remove, make or remove a folder) the folder is copied as it is: unflushed buffers are not in the copy, as they are not
on the disk after a kill. Every second copy has the file that was opened last cut to half, as if the kill had come while
it was written. Then each copy is put back in its place, and the run is resumed in another forked process.

Forks start with everything imported, so that a resumption costs what it computes. The parent must not have run
anything in parallel before (one thread, no pyarrow).
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import traceback
from pathlib import Path

import pandas as pd
import torch

from fulldepth import reporting
from fulldepth.results import PAGE, Results
from fuzz.oracle import TIMED
from json_files import read_json

EVENTS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
TIMED_KEYS = {
    "created",
    "seconds",
    "elapsed",
    "timings",
    "throughput",
    "peak_memory",
    "other_load",
    "machine",
    "memory",
}


def in_fork(work, report):
    """What a piece of work gives in a forked process that ends without cleaning up.

    Raises:
        AssertionError: with its traceback, if it raises.
    """
    process = os.fork()
    if process == 0:
        try:
            outcome = (True, work())
        except BaseException:
            outcome = (False, traceback.format_exc())
        report.write_bytes(pickle.dumps(outcome))
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(process, 0)
    succeeded, value = pickle.loads(report.read_bytes())  # of our own process
    report.unlink()
    assert succeeded, value
    return value


class Camera:
    """Copies a folder before every file operation in it.

    Args:
        folder: what is copied.
        copies: where to; `0001`, `0002`, ...
    """

    def __init__(self, folder, copies):
        self.folder, self.copies = folder, copies
        self.number = 0
        self.written = None
        self.busy = False

    def start(self):
        """Watch this process until it ends."""
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        if self.busy or not arguments or not isinstance(arguments[0], str | os.PathLike):
            return
        opened = event == "open" and len(arguments) == 3 and bool((arguments[2] or 0) & WRITING)
        if not opened and event not in EVENTS:
            return
        path = Path(arguments[0])
        relative = not path.is_absolute() and isinstance(arguments[-1], int) and arguments[-1] >= 0  # beside a handle
        if not relative and not path.is_relative_to(self.folder):
            return
        self.busy = True
        try:
            self._copy()
            self.written = path if opened else self.written
        finally:
            self.busy = False

    def _copy(self):
        self.number += 1
        copy = self.copies / f"{self.number:04}"
        if not self.folder.exists():
            return
        shutil.copytree(self.folder, copy, symlinks=True)
        if self.number % 2 and self.written is not None:
            torn = copy / self.written.relative_to(self.folder)
            if torn.is_file():
                os.truncate(torn, torn.stat().st_size // 2)


def moments(folder, copies, work):
    """Run `work` once: what it leaves in `folder`, and a copy of the folder for every state that a kill can leave."""
    copies.mkdir()

    def filmed():
        Camera(folder, copies).start()
        work()
        return content(folder)

    whole = in_fork(filmed, copies.with_name("report"))
    seen, different = set(), []
    for copy in sorted(copies.iterdir()):
        state = tuple(sorted((str(path.relative_to(copy)), _bytes(path)) for path in copy.rglob("*")))
        if state not in seen:
            seen.add(state)
            different.append(copy)
    return whole, different


def resumed(folder, copy, work):
    """What `work` leaves in `folder` if it starts from a copy; the text that it returns, if it does."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(copy, folder, symlinks=True)

    def run():
        said = work()
        return said if isinstance(said, str) else content(folder)

    return in_fork(run, copy.parent.with_name("report"))


def content(folder):
    """Path -> what is in the file, without times; of a page, whether it is that of the numbers beside it."""
    return {str(path.relative_to(folder)): _plain(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _bytes(path):
    return path.read_bytes() if path.is_file() else b"folder"


def _plain(path):
    if path.suffix == ".json":
        return _timeless(read_json(path), path.name)
    if path.suffix == ".parquet":
        table = pd.read_parquet(path)
        return table[~table.measure.isin(TIMED)].to_csv(float_format=str, index=False)
    if path.name == PAGE:
        results = Results.load(path.parent)
        return path.read_text() == reporting.render(results.table, results.meta)
    if path.name == "optimizer.pt":  # equal numbers, once read again, may be stored with other references
        return _numbers(torch.load(path, weights_only=True))
    return path.read_bytes()


def _numbers(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.numpy().tobytes()
    if isinstance(value, dict):
        return {key: _numbers(inner) for key, inner in value.items()}
    return [_numbers(inner) for inner in value] if isinstance(value, list) else value


def _timeless(value, name):
    if isinstance(value, dict):
        drop = TIMED_KEYS | ({"record.parquet", "optimizer.pt"} if name == "complete.json" else set())  # sizes vary
        drop |= {"table"} if name == "results.json" else set()
        return {key: _timeless(inner, name) for key, inner in value.items() if key not in drop}
    return [_timeless(inner, name) for inner in value] if isinstance(value, list) else value


def differences(whole, again):
    """Names of the files that are not the same."""
    for name in sorted(whole.keys() | again.keys()):
        if name not in again:
            yield f"{name} is missing"
        elif name not in whole:
            yield f"{name} is left over"
        elif whole[name] != again[name]:
            yield f"{name} differs"

"""Writers of token ids: each claims a unit of the source, tokenises it, and continues with the next.

Any number of processes on any number of machines can write into one folder. A unit is claimed by a file lock, which is
released when its owner ends for any reason. `python -m fulldepth.data.cache.writers JOB` is one writer.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from fulldepth.data.cache.encoder import Encoder
from fulldepth.data.cache.token_files import Encoded, EncodedDocuments, Shards, write_shard
from fulldepth.data.units import Unit
from fulldepth.errors import FulldepthError, one_line

BATCH_DOCUMENTS, BATCH_CHARACTERS = 256, 2**20
POLL = 0.2
"""Seconds between two attempts to claim units that other processes hold."""
MESSAGE_CHARACTERS = 600
"""Longest message from a writer, which must fit into one atomic write to a pipe."""


class Progress(NamedTuple):
    """Progress of a unit."""

    unit: int
    documents: int
    characters: int
    """Characters read by this writer."""
    tokens: int


Report = Callable[[Progress], None]


@dataclass
class Job:
    """Units of a source, and the folder for their ids."""

    units: Sequence[Unit]
    encoder: Encoder
    folder: Path
    token_limit: int | None
    """Number of ids to make, from the first unit on; None = all."""
    shards: Shards = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.shards = Shards(self.folder, self.encoder.dtype)

    def missing(self) -> list[int]:
        """Incomplete units, up to the one that reaches the limit."""
        missing, tokens = [], 0
        for number in range(len(self.units)):
            if self.token_limit is not None and tokens >= self.token_limit:
                break
            shards = self.shards.of_unit(number)
            tokens += sum(shard.note.tokens for shard in shards)
            if not (shards and shards[-1].note.last):
                missing.append(number)
        return [] if missing and self._enough_until(missing[0]) else missing

    def _enough_until(self, number: int) -> bool:
        """Whether units up to and including `number` reach the limit."""
        if self.token_limit is None:
            return False
        tokens = (shard.note.tokens for unit in range(number + 1) for shard in self.shards.of_unit(unit))
        return sum(tokens) >= self.token_limit

    def write(self, report: Report, waiting: Callable[[], None]) -> None:
        """Write units until all exist; `waiting` is called once if other processes hold all missing ones."""
        waited = False
        while missing := self.missing():
            if any(self._claim(number, report) for number in missing):
                continue
            if not waited:
                waiting()
            waited = True
            time.sleep(POLL)

    def _claim(self, number: int, report: Report) -> bool:
        """Write a unit unless another process holds it; returns whether this one wrote it."""
        try:
            with FileLock(self.shards.lock(number), timeout=0):
                self._write(number, report)
        except Timeout:
            return False
        return True

    def _write(self, number: int, report: Report) -> None:
        """Continue a unit after its last complete file."""
        while True:
            shards = self.shards.of_unit(number)
            if (shards and shards[-1].note.last) or self._enough_until(number):
                return
            skip = sum(shard.note.documents for shard in shards)
            tokens = sum(shard.note.tokens for shard in shards)
            documents = EncodedDocuments(self._encoded(number, Progress(number, skip, 0, tokens), report))
            part = len(shards)
            while not (part and self.shards.find(number, part)):
                if write_shard(self.shards, number, part, documents).note.last or self._enough_until(number):
                    return
                part += 1

    def _encoded(self, number: int, progress: Progress, report: Report) -> Iterator[Encoded]:
        _, documents, characters, tokens = progress
        for texts in batches(self.units[number].read(documents)):
            batch = self.encoder(texts)
            yield batch
            documents, tokens = documents + len(texts), tokens + len(batch.ids)
            characters += sum(map(len, texts))
            report(Progress(number, documents, characters, tokens))


def batches(texts: Iterator[str]) -> Iterator[list[str]]:
    """Texts in lists short enough to be tokenised at once."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) == BATCH_DOCUMENTS or size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_in_parallel(job: Job, writers: int, report: Report) -> None:
    """Write with several single-threaded processes; the first failure ends all of them and is raised."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        packed = pickle.dumps(job)
    except (pickle.PicklingError, AttributeError, TypeError):  # a tokenizer or data set that cannot be pickled
        job.write(report, lambda: None)
        return
    with tempfile.TemporaryDirectory(prefix="fulldepth-") as private:
        order = Path(private) / "job"
        order.write_bytes(packed)
        command = [sys.executable, "-m", "fulldepth.data.cache.writers", str(order)]
        read_end, write_end = os.pipe()
        started: list[subprocess.Popen[bytes]] = []
        try:
            with os.fdopen(read_end, encoding="utf-8") as lines:
                try:
                    for _ in range(writers):
                        started.append(subprocess.Popen(command, stdout=write_end, env=environment))
                finally:
                    os.close(write_end)
                for line in lines:
                    message = json.loads(line)
                    if isinstance(message, str):
                        raise FulldepthError(message)
                    report(Progress(*message))
            if failed := [process.returncode for process in started if process.wait()]:
                raise FulldepthError(
                    f"A process that tokenises ended with {failed[0]}; a killed one may have run out of memory. The "
                    "same command goes on where it stopped; --workers sets the number of processes."
                )
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait()


def cannot_write(folder: Path, error: BaseException) -> FulldepthError:
    """The `FulldepthError` for an error of the file system."""
    reason = getattr(error, "strerror", None) or one_line(error, 200)
    return FulldepthError(
        f"Cannot write tokens to {folder}: {reason}. Choose another folder: data.cache=FOLDER, or the environment "
        "variable FULLDEPTH_CACHE."
    )


def main(order: str) -> int:
    """Run one writer. It reports on standard output, in JSON lines: a `Progress` or an error message."""

    def tell(message: Any) -> None:
        os.write(1, (json.dumps(message) + "\n").encode())

    job: Job = pickle.loads(Path(order).read_bytes())  # written by the parent process
    try:
        job.write(tell, lambda: None)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the parent process has ended
        return 1
    except FulldepthError as error:
        tell(one_line(error, MESSAGE_CHARACTERS))
    except OSError as error:
        tell(one_line(cannot_write(job.folder, error), MESSAGE_CHARACTERS))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

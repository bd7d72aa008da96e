"""Faults planted into the program on purpose: the oracle must notice each of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fuzz.cases import Fuzzer
from fuzz.server import Limits
from fuzz.world import OWNED


class Fault(NamedTuple):
    """A fault, and what the oracle is to call it."""

    kind: str
    scenario: str
    plant: Callable[[], None]
    limits: Limits = Limits()


def around(
    before: Callable[[], object] = lambda: None, after: Callable[[], object] = lambda: None
) -> Callable[[], None]:
    """Plant: do something before and after the command."""

    def plant() -> None:
        from fulldepth import cli

        main = cli.main

        def faulty() -> None:
            before()
            try:
                main()
            finally:
                after()

        cli.main = faulty

    return plant


def instead(work: Callable[[], object]) -> Callable[[], None]:
    """Plant: do something in place of the command."""

    def plant() -> None:
        from fulldepth import cli

        cli.main = work

    return plant


def broken_reader() -> None:
    """Plant: whatever the program calls raises a KeyError."""
    from fulldepth.cli import program

    def read(*_: object, **__: object) -> None:
        raise KeyError("grid")

    program.app = read


def leave(code: int, message: str = "") -> Callable[[], None]:
    def work() -> None:
        sys.stderr.write(message)
        sys.exit(code)

    return instead(work)


def write(name: str, text: str) -> Callable[[], object]:
    def work() -> int:
        Path(name).parent.mkdir(exist_ok=True)
        return Path(name).write_text(text)

    return work


def spin() -> None:
    while True:
        pass


def no_number() -> None:
    import pandas as pd

    table = Path("new/results.parquet")
    pd.read_parquet(table).assign(value=float("nan")).to_parquet(table)


def other_data() -> None:
    """Plant: the data change, and the losses of an interrupted search are taken for those of any search."""
    from fulldepth.skip.selection import loss_cache

    pairs = Path("data/pairs.jsonl")
    pairs.write_text("".join(reversed(pairs.read_text().splitlines(keepends=True))))
    loss_cache.differences = lambda before, current: ""


def fill_memory() -> None:
    len(bytearray(os.urandom(1 << 20)) * 400)


QUICK = "measure recipe"
HASTE = Limits(cpu=2, asleep=2.0, resident=200 << 20)

FAULTS: dict[str, Fault] = {
    "a reader raises KeyError": Fault("traceback", "report measure", broken_reader),
    "the command leaves with 1": Fault("exit", "report measure", leave(1, "Error: no\n")),
    "it leaves with 2 and says nothing": Fault("silent", "report measure", leave(2)),
    "it says too much": Fault("long", "report measure", leave(2, "Error: " + "word " * 300)),
    "it sleeps": Fault("hang", "report measure", instead(lambda: time.sleep(100)), HASTE),
    "it reads its standard input": Fault("hang", "report measure", instead(lambda: sys.stdin.read()), HASTE),
    "it runs for ever": Fault("hang", "report measure", instead(spin), HASTE),
    "it crashes": Fault("signal", "report measure", instead(lambda: os.kill(os.getpid(), signal.SIGSEGV))),
    "it leaves the process": Fault("exit", "report measure", instead(lambda: os._exit(0))),
    "it fills the memory": Fault("memory", "report measure", around(fill_memory), HASTE),
    "it overwrites its input": Fault("changed", "report measure", around(write("data/text.txt", "mine"))),
    "it deletes its input": Fault("changed", "report measure", around(lambda: os.unlink("data/text.txt"))),
    "it fails and changes an earlier result": Fault(
        "changed", "measure elsewhere", around(write("out-a/results.json", "{}"))
    ),
    "it succeeds and changes an earlier result": Fault(
        "changed", "report measure", around(write("out-a/results.json", "{}"), lambda: sys.exit(0))
    ),
    "it writes half a result": Fault("half", QUICK, around(after=lambda: os.unlink("new/results.parquet"))),
    "it fails, and leaves a result": Fault("half", QUICK, around(after=lambda: sys.exit(2))),
    "it gives no number": Fault("half", QUICK, around(after=no_number)),
    "it writes a checkpoint that does not load": Fault(
        "half", "train settings", around(after=write("new/checkpoint-2/model.safetensors", "no"))
    ),
    "it resumes from others' progress": Fault("stale", "search resume", around(other_data)),
    "it leaves a part": Fault("leftover", "report measure", around(write("out-a/.results.json.host-1.part", ""))),
    "it runs foreign code": Fault("foreign code", "report measure", around(write(OWNED, ""))),
}


def missed(fuzzer: Fuzzer) -> list[str]:
    """The faults that the oracle does not notice, or takes for something else."""
    result = []
    for name, fault in FAULTS.items():
        fuzzer.before, fuzzer.limits = fault.plant, fault.limits
        outcome = fuzzer.run(0, fault.scenario, plain=True)
        kinds = {failure.kind for failure in outcome.failures}
        if fault.kind not in kinds:
            result.append(f"{name}: expected {fault.kind}, got {sorted(kinds) or outcome.label}")
    fuzzer.before, fuzzer.limits = None, Limits()
    return result

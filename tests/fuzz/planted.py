"""Faults planted into the program on purpose: the oracle must notice each of them."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from fuzz.server import Limits
from fuzz.world import OWNED


def no_number():
    """Replace the values of a new result by NaN."""
    import pandas as pd

    table = Path("new/results.parquet")
    pd.read_parquet(table).assign(value=float("nan")).to_parquet(table)


def other_data():
    """Change the data of an interrupted search, and take its losses for those of any search."""
    from fulldepth.skip import loss_cache

    pairs = Path("data/pairs.jsonl")
    pairs.write_text(pairs.read_text().replace("w1", "w2"))
    loss_cache.differences = lambda before, current: ""


def raise_key_error():
    """Let whatever the program calls raise a KeyError."""
    from fulldepth.cli import program

    def read(*_, **__):
        raise KeyError("grid")

    program.app = read


FAULTS = {
    "a reader raises KeyError": ("traceback", "report measure", raise_key_error),
    "the command leaves with 1": ("exit", "report measure", lambda: instead(lambda: sys.exit("Error: no"))),
    "it leaves with 2 and says nothing": ("silent", "report measure", lambda: instead(lambda: sys.exit(2))),
    "it sleeps": ("hang", "report measure", lambda: instead(lambda: time.sleep(100))),
    "it crashes": ("signal", "report measure", lambda: os.kill(os.getpid(), signal.SIGSEGV)),
    "it leaves the process": ("exit", "report measure", lambda: os._exit(0)),
    "it fills the memory": ("memory", "report measure", lambda: len(bytearray(os.urandom(1 << 20)) * 400)),
    "it overwrites its input": ("changed", "report measure", lambda: Path("data/text.txt").write_text("mine")),
    "it deletes its input": ("changed", "report measure", lambda: os.unlink("data/text.txt")),
    "it writes half a result": ("half", "measure recipe", lambda: afterwards(lambda: os.unlink("new/results.parquet"))),
    "it fails, and leaves a result": ("half", "measure recipe", lambda: afterwards(lambda: sys.exit(2))),
    "it gives no number": ("half", "measure recipe", lambda: afterwards(no_number)),
    "it resumes from others' progress": ("stale", "search resume", other_data),
    "it leaves a part": ("leftover", "report measure", lambda: Path("out-a/.a.json.host-1.part").write_text("")),
    "it runs foreign code": ("foreign code", "report measure", lambda: Path(OWNED).write_text("")),
}
"""Name -> the kind of failure that the oracle is to find, a scenario, and what plants the fault before its command."""
HASTE = {"hang": Limits(wall=8.0), "memory": Limits(resident=200 << 20)}
"""Kind of failure -> tighter limits, under which the fault is noticed soon."""


def instead(work):
    """Do something in place of the command."""
    from fulldepth import cli

    cli.main = work


def afterwards(work):
    """Do something after the command."""
    from fulldepth import cli

    main = cli.main

    def faulty():
        try:
            main()
        finally:
            work()

    cli.main = faulty


def missed(fuzzer):
    """The faults that the oracle does not notice, or takes for something else."""
    result = []
    for name, (kind, scenario, plant) in FAULTS.items():
        fuzzer.before, fuzzer.limits = plant, HASTE.get(kind, Limits())
        outcome = fuzzer.run(0, scenario, plain=True)
        if kind not in (kinds := {failure.kind for failure in outcome.failures}):
            result.append(f"{name}: expected {kind}, got {sorted(kinds) or outcome.label}")
    fuzzer.before, fuzzer.limits = lambda: None, Limits()
    return result

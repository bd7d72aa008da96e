"""`python -m fuzz`: throw malformed input at the command line. `--seed N` replays one case."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections import Counter
from pathlib import Path

from fuzz.cases import Fuzzer
from fuzz.planted import missed


def show(outcome, lines):
    """Print one case: its command, what was changed, how it ended."""
    print(f"seed {outcome.seed}  [{outcome.name}]  {outcome.label}  exit {outcome.code}")
    for text in [
        "fulldepth " + shlex.join(outcome.argv)[:600],
        *(f"changed: {text[:300]}" for text in outcome.changes),
    ]:
        print("  " + text.encode("utf-8", "backslashreplace").decode())
    for failure in outcome.failures:
        print(f"  {failure.kind.upper()}: {failure.text[:500]}")
    for line in outcome.stderr.strip().splitlines()[-lines:]:
        print("  | " + line[:300])
    sys.stdout.flush()


def main():
    """Run the cases that the options ask for; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one case")
    parser.add_argument("--cases", type=int, default=10_000, help="how many seeds")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--only", default="", help="scenarios whose names contain this (seeds then mean other cases)")
    parser.add_argument("--planted", action="store_true", help="first check that planted faults are noticed")
    parser.add_argument("--debug", action="store_true", help="pass --debug to the program")
    parser.add_argument("--root", type=Path, help="folder to work in, kept; the world that it holds is used again")
    options = parser.parse_args()
    if options.root is not None:
        return fuzz(options, options.root.resolve())
    with tempfile.TemporaryDirectory(prefix="fulldepth-fuzz-", ignore_cleanup_errors=True) as folder:
        return fuzz(options, Path(folder))


def fuzz(options, root):
    """Run the cases in a folder."""
    fuzzer = Fuzzer(root)
    fuzzer.prepare()
    print("The world is made.", flush=True)
    overlooked = missed(fuzzer) if options.planted else []
    for text in overlooked:
        print(f"MISSED a planted fault: {text}")
    seeds = range(options.start, options.start + options.cases) if options.seed is None else [options.seed]
    labels = Counter()
    failed = 0
    for number, seed in enumerate(seeds, start=1):
        outcome = fuzzer.run(seed, options.only, extra=("--debug",) if options.debug else ())
        labels[outcome.label] += 1
        failed += bool(outcome.failures)
        if outcome.failures or options.seed is not None:
            show(outcome, lines=6 if options.seed is None else 60)
        if number % 500 == 0:
            print(f"-- {number} of {len(seeds)}, {failed} failed", flush=True)
    print(dict(labels))
    faults = f", {len(overlooked)} planted faults missed" if options.planted else ""
    print(f"\n{len(seeds)} cases, {failed} failed{faults}.")
    return 1 if failed or overlooked else 0


if __name__ == "__main__":
    sys.exit(main())

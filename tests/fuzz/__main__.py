"""`python -m fuzz`: throw malformed input at the command line. `--seed N` replays one case."""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

from fuzz.cases import Fuzzer, Outcome
from fuzz.oracle import cause_of
from fuzz.planted import missed
from fuzz.scenarios import SCENARIOS


def show(outcome: Outcome, lines: int = 6) -> None:
    """Print one case: its command, what was changed, how it ended."""
    print(f"seed {outcome.seed}  [{outcome.name}]  {outcome.label}  exit {outcome.code}  {outcome.wall:.1f} s")
    print("  fulldepth " + shlex.join(outcome.argv)[:600].encode("utf-8", "backslashreplace").decode())
    for change in outcome.changes:
        print("  changed: " + change[:300].encode("utf-8", "backslashreplace").decode())
    for failure in outcome.failures:
        print(f"  {failure.kind.upper()}: {failure.text[:500]}  {failure.cause}")
    for line in outcome.stderr.strip().splitlines()[-lines:]:
        print("  | " + line[:300])
    sys.stdout.flush()


def summarise(outcomes: list[Outcome]) -> None:
    """A table of scenario by outcome, and the failures by cause."""
    labels = sorted({o.label for o in outcomes}, key=lambda label: (label not in ("ok", "refused"), label))
    counts = Counter((o.name, o.label) for o in outcomes)
    print("\n" + " " * 22 + "".join(f"{label:>13}" for label in labels))
    for name in SCENARIOS:
        row = [counts[name, label] for label in labels]
        if any(row):
            print(f"{name:22}" + "".join(f"{count or '.':>13}" for count in row))
    causes: dict[str, list[int]] = {}
    for outcome in outcomes:
        for failure in outcome.failures[:1]:
            causes.setdefault(f"{failure.kind}: {failure.cause or failure.text[:100]}", []).append(outcome.seed)
    print()
    for cause, seeds in sorted(causes.items(), key=lambda item: -len(item[1])):
        print(f"{len(seeds):5}  {cause}  (seeds {', '.join(map(str, seeds[:5]))})")


def main() -> int:
    """Run the cases that the options ask for; 1 if any failed."""
    options = _options()
    with Fuzzer(options.root) as fuzzer:
        started = time.monotonic()
        fuzzer.prepare()
        print(f"The world is made ({time.monotonic() - started:.0f} s).", flush=True)
        overlooked = missed(fuzzer) if options.planted else []
        for text in overlooked:
            print(f"MISSED a planted fault: {text}")
        outcomes = _run(fuzzer, options)
    if len(outcomes) > 1:
        summarise(outcomes)
    failed = sum(bool(o.failures) for o in outcomes)
    faults = f", {len(overlooked)} planted faults missed" if options.planted else ""
    print(f"\n{len(outcomes)} cases, {failed} failed{faults}.")
    return 1 if failed or overlooked else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay this one case")
    parser.add_argument("--cases", type=int, default=10_000, help="how many seeds")
    parser.add_argument("--start", type=int, default=0, help="the first seed")
    parser.add_argument("--only", help="scenarios whose names contain this (another choice: seeds mean other cases)")
    parser.add_argument("--plain", action="store_true", help="every scenario once, without mutations")
    parser.add_argument("--planted", action="store_true", help="first check that planted faults are noticed")
    parser.add_argument("--debug", action="store_true", help="pass --debug to the program")
    parser.add_argument("--root", type=Path, help="folder to work in, kept; the world that it holds is used again")
    parser.add_argument("--report", type=Path, help="write every outcome to this file, a line of JSON each")
    return parser.parse_args()


def _run(fuzzer: Fuzzer, options: argparse.Namespace) -> list[Outcome]:
    """Run cases and print those that fail, with progress in between; replayed and plain cases are all printed."""
    seeds = range(options.start, options.start + options.cases) if options.seed is None else [options.seed]
    wanted: list[tuple[int, str | None]] = [(seed, options.only) for seed in seeds]
    if options.plain:
        wanted = [(0, name) for name in SCENARIOS if options.only is None or options.only in name]
    extra = ("--debug",) if options.debug else ()
    outcomes: list[Outcome] = []
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(options.report.open("w")) if options.report else None
        start = shown = time.monotonic()
        for seed, only in wanted:
            outcome = fuzzer.run(seed, only, options.plain, extra)
            if any(failure.kind == "traceback" and not failure.cause for failure in outcome.failures):
                cause = cause_of(fuzzer.run(seed, only, options.plain, ("--debug",)).stderr)
                outcome = outcome._replace(failures=[f._replace(cause=f.cause or cause) for f in outcome.failures])
            outcomes.append(outcome)
            if report is not None:
                print(json.dumps(outcome._asdict() | {"label": outcome.label}), file=report, flush=True)
            if outcome.failures or options.plain or options.seed is not None:
                show(outcome, lines=60 if options.seed is not None else 6)
            now = time.monotonic()
            if now - shown > 20:
                shown, rate = now, len(outcomes) / (now - start)
                failed = sum(bool(o.failures) for o in outcomes)
                left = (len(wanted) - len(outcomes)) / rate / 60
                words = f"{failed} failed, {rate:.1f} a second, {left:.0f} min left"
                print(f"-- {len(outcomes)} of {len(wanted)}, {words}", flush=True)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())

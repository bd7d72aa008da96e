"""One case: a scenario, a fresh copy of its files, mutations, a run, a judgement. A case is a function of its seed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
import traceback
from pathlib import Path
from typing import NamedTuple

from fuzz import arguments, mutations, oracle, server, world
from fuzz.scenarios import ALWAYS, SCENARIOS


class Outcome(NamedTuple):
    """What came of a case."""

    seed: int
    name: str
    argv: list[str]
    changes: list[str]
    code: int
    failures: list[oracle.Failure]
    stderr: str

    @property
    def label(self):
        """The outcome in a word: ok, refused, or the kind of failure."""
        if self.failures:
            return self.failures[0].kind
        return "ok" if self.code == 0 else "refused"


def program(argv):
    """Run the command line in this process, and give the exit code that the shell would see."""
    from fulldepth import cli

    sys.argv = ["fulldepth", *argv]
    try:
        cli.main()
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return leaving.code or 0
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


class Fuzzer:
    """Makes the world once, then runs cases in forks of this process.

    Args:
        root: a folder of its own. A world that is there is used again.
    """

    def __init__(self, root):
        self.root, self.case, self.world, self.logs = root, root / "case", root / "world", root / "logs"
        self.limits = server.Limits()
        self.before = lambda: None
        """Called in the child before the program; plants faults."""
        for name in ("logs", "home", "tmp"):
            server.fresh(root / name)
        server.isolate(root)

    def prepare(self):
        """Make the world by the program's own commands, and import what they have imported."""
        server.warm(["fulldepth.cli"])
        if not self.world.is_dir():
            for folder in (self.case, self.root / "help"):
                server.fresh(folder)
            self._make(lambda: world.make(self.case), "the files of the world")
            for head in {tuple(arguments.head_of(scenario.argv.split())) for scenario in SCENARIOS.values()}:
                self._make_by([*head, "--help"])
                shutil.copy(self.logs / "stdout", self.root / "help" / "-".join(head))
            for command, stop in world.STEPS.items():
                self._make_by(command.split(), stop)
            for page in self.case.rglob("report.html"):
                page.write_text("<html>stored</html>")
            self.case.rename(self.world)
        self._import_what_was_needed()

    def _make_by(self, argv, stop=None):
        """Run a command, which is killed when it renames something to a file of this name for the so-many-th time."""

        def work():
            if stop is not None:
                left = stop[1]

                def kill(event, arguments):
                    nonlocal left
                    if event == "os.rename" and os.path.basename(str(arguments[1])) == stop[0]:
                        left -= 1
                        if left == 0:
                            os._exit(KILLED)

                sys.addaudithook(kill)
            code = program(argv)
            (self.root / "modules").write_text("\n".join(sys.modules))
            if code:
                raise SystemExit(code)

        self._make(work, " ".join(argv), 0 if stop is None else KILLED)
        self._import_what_was_needed()

    def _make(self, job, name, expected=0):
        def work():
            os.chdir(self.case)
            job()
            return 0

        ending = server.run(work, self.logs, self.limits)
        if ending.code != expected:
            stderr = (self.logs / "stderr").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"Cannot make the world: {name} ended with {ending}.\n{stderr}")

    def _import_what_was_needed(self):
        with contextlib.suppress(FileNotFoundError):
            names = (self.root / "modules").read_text().split("\n")
            server.warm(name for name in names if name not in sys.modules and name.split(".")[0] != "fuzz")

    def run(self, seed, only="", *, plain=False, extra=()):
        """Run one case.

        Args:
            seed: of everything that is drawn.
            only: draw among the scenarios whose names contain this.
            plain: mutate nothing.
            extra: arguments to add in the end (`--debug`).
        """
        rng = random.Random(seed)
        names = [only] if only in SCENARIOS else [name for name in SCENARIOS if only in name]
        name = rng.choices(names, [SCENARIOS[name].weight for name in names])[0]
        scenario = SCENARIOS[name]
        for folder in (self.case, self.root / "home", self.root / "tmp", self.logs):
            server.fresh(folder)
        for part in dict.fromkeys([*ALWAYS, *scenario.inputs.split(), *scenario.argv.split()]):
            origin, copy = self.world / part, self.case / part
            if origin.exists() and not copy.exists():
                copy.parent.mkdir(parents=True, exist_ok=True)
                if origin.is_dir():
                    shutil.copytree(origin, copy, symlinks=True)
                else:
                    shutil.copy2(origin, copy)
        ending = server.run(lambda: self._play(rng, scenario, plain, extra), self.logs, self.limits)
        note = json.loads((self.logs / "case.json").read_text())
        stderr = (self.logs / "stderr").read_text(encoding="utf-8", errors="replace")
        failures = oracle.judge(scenario, note, ending, self.limits, stderr, oracle.snapshot(self.case))
        return Outcome(
            seed,
            name,
            note["argv"],
            note["changes"],
            note.get("code", ending.code),
            failures,
            note.get("stderr", stderr),
        )

    def _play(self, rng, scenario, plain, extra):
        """The child's side of a case; writes what the oracle must know to `case.json`."""
        os.chdir(self.case)
        os.mkfifo("pipe")
        os.symlink("loop", "loop")
        argv, changes = scenario.argv.split(), []
        for _ in range(0 if plain else rng.choices([1, 2, 3], [75, 18, 7])[0]):
            argv, words = self._mutate(rng, scenario, argv)
            changes.append(words)
        argv = [*argv, *extra]
        note = {"argv": argv, "changes": changes, "before": oracle.snapshot(self.case)}

        def keep(**entries):
            note.update(entries)
            (self.logs / "case.json").write_text(json.dumps(note), encoding="ascii")

        keep()
        self.before()
        code = program(argv)
        sys.stdout.flush()
        sys.stderr.flush()
        keep(code=code, stderr=(self.logs / "stderr").read_text(encoding="utf-8", errors="replace"))
        half = oracle.inspect(scenario, argv, code, note["before"])
        keep(half=half, stale=oracle.against_fresh(scenario, argv, changes, code, program))
        return code

    def _mutate(self, rng, scenario, argv):
        groups = [_files(Path(top)) for top in scenario.inputs.split()]
        if not any(groups) or rng.random() < scenario.arguments:
            help_text = (self.root / "help" / "-".join(arguments.head_of(argv))).read_text()
            argv, words = arguments.mutate(rng, argv, help_text)
            return argv, f"arguments: {words}"
        path, words = mutations.mutate_file(rng, groups)
        return argv, f"{path}: {words}"


KILLED = 9


def _files(top):
    """The files below a place, or the place itself; pages and leftovers are left out, since nothing reads them."""
    if not top.is_dir() or top.is_symlink():
        return [top]
    files = (path for path in top.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path for path in files if path.name != "report.html" and path.suffix != ".part")

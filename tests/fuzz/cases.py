"""One case: a scenario, a fresh copy of its files, mutations, a run, a judgement. A case is a function of its seed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fuzz import arguments, mutations, oracle, server, world
from fuzz.scenarios import ALWAYS, SCENARIOS, Scenario


class Outcome(NamedTuple):
    """What came of a case."""

    seed: int
    name: str
    argv: list[str]
    changes: list[str]
    code: int | None
    failures: list[oracle.Failure]
    wall: float
    cpu: float
    stderr: str

    @property
    def label(self) -> str:
        """The outcome in a word: ok, refused, or the kind of failure."""
        if self.failures:
            return self.failures[0].kind
        return "ok" if self.code == 0 else "refused"


def program(argv: list[str]) -> int:
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
        root: a folder of its own; a temporary one by default. A world that is there is used again.
        limits: of a case.
        before: called in the child before the program; tests of the oracle plant faults with it.
    """

    def __init__(
        self,
        root: Path | None = None,
        limits: server.Limits = server.Limits(),  # noqa: B008
        before: Callable[[], None] | None = None,
    ) -> None:
        self.temporary = root is None
        self.root = Path(tempfile.mkdtemp(prefix="fulldepth-fuzz-")) if root is None else root.resolve()
        self.limits, self.before = limits, before
        self.case, self.world, self.logs = self.root / "case", self.root / "world", self.root / "logs"
        for name in ("logs", "home", "tmp"):
            server.fresh(self.root / name)
        server.isolate(self.root)

    def __enter__(self) -> Fuzzer:
        return self

    def __exit__(self, *_: object) -> None:
        if self.temporary:
            server.remove(self.root)

    def prepare(self) -> None:
        """Make the world by the program's own commands, and import what they have imported."""
        server.fresh(self.case)
        server.warm(["fulldepth.cli"])
        if self.world.is_dir():
            self._import_what_was_needed()
            return
        self._step(lambda: world.make(self.case), "the files of the world")
        for head in {tuple(arguments.head_of(scenario.argv.split())) for scenario in SCENARIOS.values()}:
            self._step(lambda head=head: self._build(world.Step(" ".join([*head, "--help"]))), " ".join(head))
            shutil.copy(self.logs / "stdout", server.folder(self.root / "help") / "-".join(head))
        for step in world.STEPS:
            self._step(lambda step=step: self._build(step), step.argv, killed=step.stop is not None)
            self._import_what_was_needed()
        for page in self.case.rglob("report.html"):
            page.write_text("<html>stored</html>")
        self.case.rename(self.world)

    def _build(self, step: world.Step) -> None:
        if step.stop is not None:
            sys.addaudithook(_Killer(*step.stop))
        code = program(step.argv.split())
        (self.root / "modules").write_text("\n".join(sys.modules))
        if code:
            raise SystemExit(code)

    def _step(self, job: Callable[[], None], name: str, killed: bool = False) -> None:
        def work() -> int:
            os.chdir(self.case)
            job()
            return 0

        ending = server.run(work, self.logs, self.limits)
        if ending.code != (KILLED if killed else 0):
            said = (self.logs / "stderr").read_text(errors="replace")[-3000:]
            raise RuntimeError(f"Cannot make the world: {name} ended with {ending}.\n{said}")

    def _import_what_was_needed(self) -> None:
        with contextlib.suppress(OSError):
            names = (self.root / "modules").read_text().split("\n")
            server.warm(name for name in names if name not in sys.modules and name.split(".")[0] != "fuzz")

    def run(self, seed: int, only: str | None = None, plain: bool = False, extra: tuple[str, ...] = ()) -> Outcome:
        """Run one case.

        Args:
            seed: of everything that is drawn.
            only: draw among the scenarios whose names contain this.
            plain: mutate nothing.
            extra: arguments to add in the end (`--debug`).
        """
        rng = random.Random(seed)
        names = [only] if only in SCENARIOS else [name for name in SCENARIOS if only is None or only in name]
        name = rng.choices(names, [SCENARIOS[n].weight for n in names])[0]
        scenario = SCENARIOS[name]
        for folder in (self.case, self.root / "home", self.root / "tmp", self.logs):
            server.fresh(folder)
        _copy(self.world, self.case, [*ALWAYS, *scenario.inputs.split(), *scenario.argv.split()])
        baseline = _resident()
        ending = server.run(lambda: self._play(rng, scenario, plain, extra, baseline), self.logs, self.limits)
        note = _load(self.logs / "case.json")
        verdict = _load(self.logs / "verdict.json")
        stderr = (self.logs / "stderr").read_text(encoding="utf-8", errors="replace")
        argv = note.get("argv", scenario.argv.split())
        before, after = note.get("files", {}), oracle.snapshot(self.case)
        changes = note.get("changes", [])
        failures = oracle.judge(scenario, argv, changes, ending, stderr, (before, after), verdict)
        code = verdict.get("code", ending.code)
        said = verdict.get("stderr", stderr)
        return Outcome(seed, name, argv, changes, code, failures, ending.wall, ending.cpu, said)

    def _play(self, rng: random.Random, scenario: Scenario, plain: bool, extra: tuple[str, ...], baseline: int) -> int:
        """The child's side of a case."""
        os.chdir(self.case)
        os.mkfifo("pipe")
        os.symlink("loop", "loop")
        argv, changes = scenario.argv.split(), []
        for _ in range(0 if plain else rng.choices([1, 2, 3], [75, 18, 7])[0]):
            argv, words = self._mutate(rng, scenario, argv)
            changes.append(words)
        argv = [*argv, *extra]
        before = oracle.snapshot(self.case)
        _store(self.logs / "case.json", {"argv": argv, "changes": changes, "files": before})
        if self.before is not None:
            self.before()
        code = program(argv)
        sys.stdout.flush()
        sys.stderr.flush()
        stderr = (self.logs / "stderr").read_text(encoding="utf-8", errors="replace")
        verdict: dict[str, Any] = {
            "code": code,
            "stderr": stderr,
            "baseline": baseline,
            "resident": self.limits.resident,
        }
        _store(self.logs / "verdict.json", verdict)
        verdict["half"] = oracle.inspect(scenario, argv, code, before)
        _store(self.logs / "verdict.json", verdict)
        verdict["stale"] = oracle.against_fresh(scenario, argv, changes, code, program)
        _store(self.logs / "verdict.json", verdict)
        return code

    def _mutate(self, rng: random.Random, scenario: Scenario, argv: list[str]) -> tuple[list[str], str]:
        groups = [_files(Path(top)) for top in scenario.inputs.split()]
        if not any(groups) or rng.random() < scenario.arguments:
            help_text = (self.root / "help" / "-".join(arguments.head_of(argv))).read_text()
            argv, words = arguments.mutate(rng, argv, help_text)
            return argv, f"arguments: {words}"
        path, words = mutations.mutate_file(rng, groups)
        return argv, f"{path}: {words}"


KILLED = 9


class _Killer:
    """An audit hook that ends the process when a file of this name is made by renaming for the so-many-th time."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.left = name, count

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and os.path.basename(str(arguments[1])) == self.name:
            self.left -= 1
            if self.left == 0:
                os._exit(KILLED)


def _files(top: Path) -> list[Path]:
    """The files below a place, or the place itself; pages and leftovers are left out, since nothing reads them."""
    if not top.is_dir() or top.is_symlink():
        return [top]
    files = (path for path in top.rglob("*") if path.is_symlink() or not path.is_dir())
    return sorted(path for path in files if path.name != "report.html" and path.suffix != ".part")


def _copy(source: Path, target: Path, names: list[str]) -> None:
    for name in dict.fromkeys(names):
        origin, copy = source / name, target / name
        if copy.exists() or "=" in name or not origin.exists():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        if origin.is_dir():
            shutil.copytree(origin, copy, symlinks=True)
        else:
            shutil.copy2(origin, copy)


def _resident() -> int:
    """Resident bytes of this process."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _store(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value), encoding="ascii")


def _load(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}

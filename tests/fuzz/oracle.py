"""What counts as a failure. A case passes if it ends with 0 or 2, says why, and leaves every file whole."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from fuzz.scenarios import Scenario
from fuzz.server import GIB, Ending
from fuzz.world import OWNED

LONGEST = 1000
"""Characters of an error message."""
NOISE = 20_000
"""Characters of everything on standard error."""
LEFTOVER = re.compile(r"\.part$|\.tmp$|^tmp|\.incomplete$|^\..+\.\d+$")

BROKEN = "broken link"
"""Begins the digest of a symbolic link to nothing, which a program may take for an absent file."""

TIMED = {"throughput", "elapsed", "peak_memory", "other_load"}
"""Measures that two runs of one command do not have in common."""

Files = dict[str, str]
"""Path relative to the case -> digest of what is there."""


class Failure(NamedTuple):
    """What is wrong with an ending."""

    kind: str
    text: str
    cause: str = ""
    """For a traceback or a hang: exception type and innermost frame of the package."""


def snapshot(folder: Path) -> Files:
    """Every file of a folder with a digest; what is no regular file by its kind."""
    files: Files = {}
    for at, folders, names in os.walk(folder):
        for name in [*names, *(f for f in folders if (Path(at) / f).is_symlink())]:
            path = Path(at, name)
            mode = path.lstat().st_mode
            key = path.relative_to(folder).as_posix()
            if stat.S_ISLNK(mode):
                files[key] = f"{BROKEN if not os.path.exists(path) else 'link'} to {os.readlink(path)}"
            elif stat.S_ISREG(mode):
                files[key] = _digest(path)
            else:
                files[key] = f"mode {stat.S_IFMT(mode):o}"
    return files


def _digest(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()
    except PermissionError:
        return "not readable"


def output_of(argv: list[str]) -> str | None:
    """The folder that a command line writes to."""
    given, words = None, iter(argv)
    for word in words:
        if word in ("--output", "-o"):
            given = next(words, None)
        elif word.startswith("--output="):
            given = word.partition("=")[2]
    return argv[1] if given is None and argv[0] == "report" and len(argv) > 1 else given


def message_of(stderr: str) -> str:
    """The program's own message in what was written to standard error, on one line without a frame."""
    lines = [line for line in stderr.splitlines() if not re.match(r"^\s*(Usage:|Try )", line)]
    start = next((i for i, line in enumerate(lines) if re.search(r"\b[Ee]rror\b|bug", line)), None)
    if start is None:
        return ""
    text = " ".join(line.strip(" │╭╰╮╯─") for line in lines[start:])
    return re.sub(r"\s+", " ", text).strip()


def cause_of(stderr: str) -> str:
    """Exception type and innermost frame of the package, from the last traceback."""
    frames = re.findall(r'File "[^"]*?fulldepth/([\w/]+\.py)", line (\d+),? in (\w+)', stderr)
    if not frames:
        return ""
    dumped = "most recent call first" in stderr
    file, line, function = frames[0] if dumped else frames[-1]
    types = re.findall(
        r"^([A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|Warning|Iteration|Panic\w*)\b|\w+\.\w+)[:\n]", stderr, re.M
    )
    kind = "hang" if dumped else types[-1] if types else "exception"
    return f"{kind} at {file}:{line} {function}"


def judge(
    scenario: Scenario,
    argv: list[str],
    changes: list[str],
    ending: Ending,
    stderr: str,
    files: tuple[Files, Files],
    verdict: dict[str, Any],
) -> list[Failure]:
    """Everything that is wrong with how a case ended; nothing if it ended well.

    Args:
        scenario: what was called.
        argv: with which arguments.
        changes: what was mutated, in words.
        ending: how the process ended.
        stderr: what it wrote to standard error.
        files: the case's files before and after.
        verdict: what `inspect` found in the process itself.
    """
    failures = _judge_ending(ending, stderr, verdict)
    before, after = files
    failed = verdict.get("code") != 0
    failures += [Failure("changed", text) for text in _changes(scenario, argv, changes, before, after, failed)]
    left = [name for name in after if name not in before and _is_leftover(name)]
    if left and verdict:  # a process that was killed cannot clean up
        failures.append(Failure("leftover", f"left {', '.join(left[:3])}"))
    if OWNED in after and "--trust-remote-code" not in argv:
        failures.append(Failure("foreign code", "code that a file carries was run without consent"))
    if "Out of memory" in message_of(stderr) and not any(words.startswith("arguments") for words in changes):
        failures.append(Failure("memory", "asked for more than the limit of address space"))
    failures += [Failure(kind, text) for kind in ("half", "stale") for text in verdict.get(kind, [])]
    return failures


def _judge_ending(ending: Ending, stderr: str, verdict: dict[str, Any]) -> list[Failure]:
    if ending.hang:
        return [Failure("hang", ending.hang, cause_of(stderr))]
    if ending.signal:
        return [Failure("signal", f"ended by signal {ending.signal}", cause_of(stderr))]
    if not verdict:
        return [Failure("exit", f"the process left with {ending.code} behind the program's back", cause_of(stderr))]
    failures = _judge_words(verdict["code"], verdict["stderr"])
    if ending.peak - verdict["baseline"] > verdict["resident"]:
        failures.append(Failure("memory", f"used {ending.peak / GIB:.1f} GiB"))
    return failures


def _judge_words(code: int, stderr: str) -> list[Failure]:
    """The exit code and what was written to standard error; the first thing that is wrong."""
    message = message_of(stderr)
    if "Traceback (most recent call last)" in stderr or "this is a bug" in stderr.lower():
        return [Failure("traceback", stderr.strip().splitlines()[-1][:300], cause_of(stderr))]
    if code not in (0, 2):
        return [Failure("exit", f"exit code {code}", cause_of(stderr))]
    if code == 2 and not message:
        return [Failure("silent", f"exit code 2 without a message; standard error: {stderr[-200:]!r}")]
    if code == 2 and len(message) > LONGEST:
        return [Failure("long", f"a message of {len(message):,} characters: {message[:150]}...")]
    if len(stderr) > NOISE:
        return [Failure("noise", f"{len(stderr):,} characters on standard error")]
    return []


def _changes(
    scenario: Scenario, argv: list[str], changes: list[str], before: Files, after: Files, failed: bool
) -> list[str]:
    """Existing files that the program changed or removed without leave."""
    damaged = []
    if "--resume" in argv:  # a checkpoint that is not whole may go
        damaged = [f"{match[0]}/*" for words in changes if (match := re.match(r"run-part/checkpoint-\d+", words))]
    if argv[0] == "measure" and not failed:  # a table that is not its document's is measured again
        damaged = [f"{match[1]}.*" for words in changes if (match := re.match(r"([\w/-]+/results)\.", words))]
    absent = [
        name.removesuffix("results.json")
        for name in before
        if name.endswith("results.json") and before[name].startswith(BROKEN)
    ]
    patterns = [
        *damaged,
        *(f"{folder}{name}" for folder in absent for name in ("results.*", "report.html")),
        *scenario.grows,
        "*/lock",
        "*.lock",
        *([] if failed else scenario.replaces),
    ]
    result = []
    for name, digest in before.items():
        if (
            after.get(name) == digest
            or digest.startswith(BROKEN)
            or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
            or _is_leftover(name)
        ):
            continue
        if (
            not failed
            and "--overwrite" in argv
            and Path(name).name in ("results.json", "results.parquet", "groups.parquet", "report.html")
        ):
            continue
        outcome = "failure" if failed else "success"
        result.append(f"{'changed' if name in after else 'removed'} {name} ({outcome})")
    return result[:3]


def _is_leftover(name: str) -> bool:
    return any(LEFTOVER.search(part) for part in name.split("/"))


def inspect(scenario: Scenario, argv: list[str], code: int, before: Files) -> list[str]:
    """What is wrong with the files that a command has written; run in its own process, after it."""
    output = output_of(argv)
    asked = {"--help", "-h", "--version", "--list", "--dry-run"} & set(argv)
    if output is None or asked:
        return []
    folder = Path(output)
    problems: list[str] = []
    document, table = folder / "results.json", folder / "results.parquet"
    after = snapshot(Path())
    written = any(after.get(name) != before.get(name) for name in map(_normal, (document, table)))
    expects = scenario.writes in ("results", "plan", "run")
    if code == 0 and expects and not (document.is_file() and table.is_file()):
        problems.append(f"success without {document} and {table}")
    elif written and code != 0 and not scenario.grows:
        problems.append("results were written, though the command failed")
    if written or (code == 0 and expects):
        problems += _check_results(document, table)
    if code == 0:
        problems += _check_output(scenario, folder)
    elif (
        scenario.writes == "checkpoint"
        and folder.is_dir()
        and _normal(folder) not in {".", *(name.split("/")[0] for name in before)}
    ):
        problems.append(f"{output} is there, though the command failed")
    return problems


def against_fresh(
    scenario: Scenario, argv: list[str], changes: list[str], code: int, run: Callable[[list[str]], int]
) -> list[str]:
    """Whether a resumed run has the numbers of a fresh one; run in the process of the command, after it.

    Progress itself must be whole for that: only cases whose inputs were mutated are compared.
    """
    output = output_of(argv)
    resumes = bool(scenario.grows) and scenario.writes in ("results", "plan", "run")
    if not resumes or code or output is None or any(words.startswith(("arguments", f"{output}/")) for words in changes):
        return []
    fresh = Path("fresh")
    ended = run([str(fresh) if word == output else word for word in argv if word != "--resume"])
    try:
        if ended:
            return ["a fresh run refuses what the resumed one took"]
        return [] if _numbers(Path(output)) == _numbers(fresh) else ["resumed numbers are not those of a fresh run"]
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _numbers(folder: Path) -> str:
    import pandas as pd

    table = pd.read_parquet(folder / "results.parquet")
    return str(table[~table.measure.isin(TIMED)].to_csv(float_format=str, index=False))


def _normal(path: Path) -> str:
    """A path as `snapshot` has it."""
    return os.path.normpath(path).replace(os.sep, "/")


def _check_results(document: Path, table: Path) -> list[str]:
    import pandas as pd

    if not (document.is_file() and table.is_file()):
        return [f"one of {document} and {table} is missing"] if document.exists() != table.exists() else []
    try:
        if not isinstance(json.loads(document.read_bytes()), dict):
            return [f"{document} is no mapping"]
        values = pd.read_parquet(table)["value"]
    except Exception as error:
        return [f"{document.parent} cannot be read: {type(error).__name__}: {str(error)[:150]}"]
    if not any(isinstance(v, int | float) and math.isfinite(v) for v in values):
        return [f"no finite number in {table} ({len(values)} rows)"]
    return []


def _check_output(scenario: Scenario, folder: Path) -> list[str]:
    problems = []
    if scenario.writes in ("results", "plan", "run", "page"):
        page = folder / "report.html"
        if not page.is_file() or not page.read_bytes().rstrip().endswith(b"</html>"):
            problems.append(f"{page} is missing or not whole")
    if scenario.writes == "plan":
        try:
            json.loads((folder / "plan.json").read_bytes())
        except (OSError, ValueError) as error:
            problems.append(f"{folder / 'plan.json'} cannot be read: {error}")
    checkpoints = [folder] if scenario.writes == "checkpoint" else []
    if scenario.writes == "run":
        checkpoints = [
            path for path in sorted(folder.glob("checkpoint-*")) if re.fullmatch(r"checkpoint-\d+", path.name)
        ]
        if not checkpoints:
            problems.append(f"{folder} holds no checkpoint")
    return problems + [text for path in checkpoints[-1:] for text in _check_checkpoint(path)]


def _check_checkpoint(folder: Path) -> list[str]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        model_type = json.loads((folder / "config.json").read_bytes())["model_type"]
        stock = model_type in {"llama", "qwen2"} and AutoConfig.for_model(model_type) is not None
        if not stock:
            from safetensors.torch import load_file

            weights = load_file(folder / "model.safetensors")
            finite = all(bool(torch.isfinite(w).all()) for w in weights.values() if w.is_floating_point())
        else:
            model = AutoModelForCausalLM.from_pretrained(folder)
            finite = bool(torch.isfinite(model(torch.tensor([[1, 9, 10]])).logits).all())
        AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        return [f"{folder} does not load: {type(error).__name__}: {str(error)[:150]}"]
    return [] if finite else [f"{folder} gives numbers that are not finite"]

"""What counts as a failure. A case passes if it ends with 0 or 2, says why, and leaves every file whole."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from fuzz.server import GIB
from fuzz.world import OWNED

LONGEST = 1000
"""Characters of an error message."""
NOISE = 20_000
"""Characters of everything on standard error."""
LEFTOVER = re.compile(r"(^|/)(tmp[^/]*|[^/]*\.(part|tmp|incomplete)|\.[^/]+\.\d+)(/|$)")
BROKEN = "broken link"
"""Begins the digest of a symbolic link to nothing, which a program may take for an absent file."""
TIMED = {"throughput", "elapsed", "peak_memory", "other_load"}
"""Measures that two runs of one command do not have in common."""


class Failure(NamedTuple):
    """What is wrong with an ending."""

    kind: str
    text: str


def snapshot(folder):
    """Relative path -> digest of every file of a folder; what is no regular file by its kind."""
    files = {}
    for at, folders, names in os.walk(folder):
        for path in map(Path(at).joinpath, [*names, *folders]):
            key = path.relative_to(folder).as_posix()
            if path.is_symlink():
                files[key] = f"{'link' if os.path.exists(path) else BROKEN} to {os.readlink(path)}"
            elif path.is_file():
                try:
                    files[key] = hashlib.blake2b(path.read_bytes(), digest_size=12).hexdigest()
                except PermissionError:
                    files[key] = "not readable"
            elif not path.is_dir():
                files[key] = "a pipe"
    return files


def output_of(argv):
    """The folder that a command line writes to."""
    given, words = None, iter(argv)
    for word in words:
        if word in ("--output", "-o"):
            given = next(words, None)
        elif word.startswith("--output="):
            given = word.partition("=")[2]
    return argv[1] if given is None and argv[0] == "report" and len(argv) > 1 else given


def message_of(stderr):
    """The program's own message in what was written to standard error, on one line without a frame."""
    lines = [line.strip(" │╭╰╮╯─") for line in stderr.splitlines() if not re.match(r"^\s*(Usage:|Try )", line)]
    text = re.search(r"(\b[Ee]rror\b|bug).*", " ".join(lines))
    return text[0] if text else ""


def judge(scenario, note, ending, limits, stderr, after):
    """Everything that is wrong with how a case ended; nothing if it ended well.

    Args:
        scenario: what was called.
        note: what the process wrote down: `argv`, the `changes` in words, the files `before`, then its `code` and
            `stderr`, then what `inspect` (`half`) and `against_fresh` (`stale`) found.
        ending: how the process ended.
        limits: of the process.
        stderr: what it wrote to standard error, the checks after the command included.
        after: the case's files.
    """
    argv, changes, before = note["argv"], note["changes"], note["before"]
    failures = [Failure(kind, text) for kind in ("half", "stale") for text in note.get(kind, [])]
    if problem := _ending(note, ending, limits, stderr):
        failures.append(problem)
    may_change = _may_change(scenario, argv, changes, before, note.get("code") != 0)
    for name, digest in before.items():
        kept = after.get(name) == digest or digest.startswith(BROKEN) or LEFTOVER.search(name)
        if not kept and not any(fnmatch.fnmatch(name, pattern) for pattern in may_change):
            failures.append(Failure("changed", f"{'changed' if name in after else 'removed'} {name}"))
    left = [name for name in after if name not in before and LEFTOVER.search(name)]
    if left and "code" in note:  # a process that was killed cannot clean up
        failures.append(Failure("leftover", f"left {', '.join(left[:3])}"))
    if OWNED in after and "--trust-remote-code" not in argv:
        failures.append(Failure("foreign code", "code that a file carries was run without consent"))
    if "Out of memory" in message_of(stderr) and not any(words.startswith("arguments") for words in changes):
        failures.append(Failure("memory", "asked for more than the limit of address space"))
    return failures


def _ending(note, ending, limits, stderr):
    """The first thing that is wrong with the exit code and what was written to standard error."""
    if ending.hang:
        return Failure("hang", ending.hang)
    if ending.code < 0:
        return Failure("signal", f"ended by signal {-ending.code}")
    if "stale" not in note:
        return Failure("exit", f"the process left with {ending.code} behind the program's back")
    code, said = note["code"], note["stderr"]
    message = message_of(said)
    for kind, wrong, text in (
        ("traceback", "Traceback (most recent call last)" in said or "this is a bug" in said.lower(), said[-300:]),
        ("exit", code not in (0, 2), f"exit code {code}"),
        ("silent", code == 2 and not message, f"exit code 2 without a message; standard error: {said[-200:]!r}"),
        ("long", code == 2 and len(message) > LONGEST, f"a message of {len(message):,} characters: {message[:150]}"),
        ("noise", len(said) > NOISE, f"{len(said):,} characters on standard error"),
        ("memory", ending.peak > limits.resident, f"used {ending.peak / GIB:.1f} GiB more than the parent"),
    ):
        if wrong:
            return Failure(kind, text)
    return None


def _may_change(scenario, argv, changes, before, failed):
    """Patterns of existing files that the program may change or remove."""
    patterns = [*scenario.grows, "*/lock", "*.lock", *([] if failed else scenario.replaces)]
    if "--resume" in argv:  # a checkpoint that is not whole may go
        patterns += [f"{match[0]}/*" for words in changes if (match := re.match(r"run-part/checkpoint-\d+", words))]
    if argv[0] == "measure" and not failed:  # a table that is not its document's is measured again
        patterns += [f"{match[1]}.*" for words in changes if (match := re.match(r"([\w/-]+/results)\.", words))]
    for name, digest in before.items():  # a document that is a link to nothing counts as absent
        if name.endswith("results.json") and digest.startswith(BROKEN):
            patterns += [name.replace("results.json", other) for other in ("results.*", "report.html")]
    if not failed and "--overwrite" in argv:
        patterns += [f"*/{name}" for name in ("results.json", "results.parquet", "groups.parquet", "report.html")]
    return patterns


def inspect(scenario, argv, code, before):
    """What is wrong with the files that a command has written; run in its own process, after it."""
    output = output_of(argv)
    if output is None or {"--help", "-h", "--version", "--list", "--dry-run"} & set(argv):
        return []
    folder = Path(output).expanduser()
    document, table = folder / "results.json", folder / "results.parquet"
    after = snapshot(Path())
    written = any(after.get(name) != before.get(name) for name in map(os.path.normpath, (document, table)))
    expects = code == 0 and scenario.writes in ("results", "plan", "run")
    problems = []
    if written and code and not scenario.grows:
        problems.append("results were written, though the command failed")
    if expects or (written and (document.exists() or table.exists())):
        problems += _check_results(document, table)
    is_new = os.path.normpath(folder) not in {".", *(name.split("/")[0] for name in before)}
    if code and scenario.writes == "checkpoint" and folder.is_dir() and is_new:
        problems.append(f"{output} is there, though the command failed")
    if code:
        return problems
    page = folder / "report.html"
    if (expects or scenario.writes == "page") and not (
        page.is_file() and page.read_bytes().rstrip().endswith(b"</html>")
    ):
        problems.append(f"{page} is missing or not whole")
    if scenario.writes == "plan":
        try:
            json.loads((folder / "plan.json").read_bytes())
        except (OSError, ValueError) as error:
            problems.append(f"{folder / 'plan.json'} cannot be read: {error}")
    checkpoints = [folder] if scenario.writes == "checkpoint" else []
    if scenario.writes == "run":
        checkpoints = sorted(path for path in folder.glob("checkpoint-*") if path.name[11:].isdigit())
        problems += [] if checkpoints else [f"{folder} holds no checkpoint"]
    return problems + [text for path in checkpoints[-1:] for text in _check_checkpoint(path)]


def against_fresh(scenario, argv, changes, code, run):
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
        resumed = Path(output).expanduser()
        return [] if _numbers(resumed) == _numbers(fresh) else ["resumed numbers are not those of a fresh run"]
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _numbers(folder):
    import pandas as pd

    table = pd.read_parquet(folder / "results.parquet")
    return str(table[~table.measure.isin(TIMED)].to_csv(float_format=str, index=False))


def _check_results(document, table):
    import numpy as np
    import pandas as pd

    try:
        assert isinstance(json.loads(document.read_bytes()), dict), f"{document} is no mapping"
        assert np.isfinite(pd.read_parquet(table)["value"]).any(), f"no finite number in {table}"
    except Exception as error:
        return [f"{document.parent} cannot be read: {type(error).__name__}: {str(error)[:150]}"]
    return []


def _check_checkpoint(folder):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(folder)
        if json.loads((folder / "config.json").read_bytes())["model_type"] in ("llama", "qwen2"):
            numbers = [AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[1, 9, 10]])).logits]
        else:
            numbers = list(load_file(folder / "model.safetensors").values())
    except Exception as error:
        return [f"{folder} does not load: {type(error).__name__}: {str(error)[:150]}"]
    return (
        [] if all(bool(part.isfinite().all()) for part in numbers) else [f"{folder} gives numbers that are not finite"]
    )

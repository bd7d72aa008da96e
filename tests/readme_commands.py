"""Follows README.md as a new user would: its install line in a fresh environment, then its commands, in small sizes.

    python tests/readme_commands.py FOLDER

FOLDER gets the environment and the outputs. Ends with 1 if a command fails or its output speaks of a deprecated name.
Uses the standard library alone, because it runs before anything is installed.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = {
    "measure": ["max_sequences=4", "sequence_length=64", "lens_tokens=64"],
    "train": ["steps=4", "eval_every=4", "save_every=4", "global_batch_size=4", "data.validation_sequences=8"],
    "skip search": [
        *("max_sequences=10", "sequence_length=192", "granularity=attention", "target_speedup=1.005", "fit=false"),
        "context=32",
    ],
    "skip heal": ["max_sequences=20"],
    "exit": ["max_sequences=8", "sequence_length=64", "prompts=1", "max_new_tokens=4", "repeats=1"],
    "generate": ["max_new_tokens=8"],
    "evaluate": ["limit=4", "bootstrap_iters=10"],
}
"""Command -> settings that make it small."""
FAULTS = re.compile(r"deprecat|FutureWarning|Traceback|not tested with|This is a bug", re.IGNORECASE)
"""What no output of these commands may hold."""


def commands() -> list[str]:
    """The lines of README's shell blocks, without their comments."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return [re.sub(r"\s+# .*", "", line) for block in blocks for line in block.splitlines() if line]


def small(command: str) -> str:
    """The command with settings that make it small, in place of those that it states."""
    words = shlex.split(command)
    verb = " ".join(words[1:3]) if " ".join(words[1:3]) in SMALL else words[1]
    if words[0] != "fulldepth" or "export" in words:
        return command
    for setting in SMALL.get(verb, []):
        option = "--" + setting.partition("=")[0].replace("_", "-")
        if option in words:
            place = words.index(option)
            del words[place : place + 2]
    return shlex.join([*words, *(part for setting in SMALL.get(verb, []) for part in ("--set", setting))])


def run(command: str, folder: Path, environment: dict[str, str]) -> bool:
    """Run a command, print its time, and its output if something is wrong; whether all is right."""
    started = time.monotonic()
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, check=False, text=True, stderr=subprocess.STDOUT,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    fault = FAULTS.search(done.stdout)
    right = done.returncode == 0 and (command.startswith("pip") or fault is None)
    print(f"{'ok' if right else 'FAILED'}, {time.monotonic() - started:.0f} s: {command}", flush=True)
    if not right:
        print(f"exit status {done.returncode}{f', {fault[0]!r}' if fault else ''}\n{done.stdout[-4000:]}", flush=True)
    return right


def main(target: str) -> int:
    """Run everything; 0 if all commands are right."""
    home = Path(target).absolute()
    venv.create(home / "environment", with_pip=True, clear=True)
    work = home / "work"
    work.mkdir(exist_ok=True)
    path = f"{home / 'environment' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"PATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    first, *others = commands()
    fulldepth = [small(command) for command in others]
    installs = [first, "pip install '.[evaluate]'"]  # README names the extra beside its last command
    for command in [*installs, *fulldepth]:
        folder = ROOT if command.startswith("pip") else work
        if not run(command, folder, environment):
            return 1
    print(f"{len(installs) + len(fulldepth)} passed, 0 failed")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

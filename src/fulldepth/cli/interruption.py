"""The advice after Ctrl-C or a signal: the command that goes on, or that starts again."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fulldepth import launch

Resumes = bool | Callable[[Mapping[str, Any]], bool]
"""Whether a command goes on where it stopped, or the function that decides from its arguments."""
OPTION = "--resume"
_running: dict[str, bool] = {}
"""Of the running command: whether it has the option, and whether it goes on where it stopped. Empty before a call."""


def note(values: Mapping[str, Any], resumes: Resumes) -> None:
    """Note how the command that is called now can be resumed.

    Args:
        values: its arguments; one that has the argument `resume` is resumed with `--resume`.
        resumes: for other commands, whether it goes on if it is called again.
    """
    has_option = "resume" in values
    goes_on = has_option or (resumes(values) if callable(resumes) else resumes)
    _running.update(has_option=has_option, goes_on=goes_on)


def forget() -> None:
    """Forget an earlier command of this process."""
    _running.clear()


def advice(argv: Sequence[str]) -> str:
    """A sentence with the command that goes on after an interruption.

    Args:
        argv: the program and its arguments.
    """
    goes_on = _running.get("goes_on", False)
    more = [OPTION] if _running.get("has_option") and OPTION not in argv else []
    if launch.world() > 1:
        same = f"The same torchrun command{f' with {OPTION}' if more else ''}"
        return f"{same} {'goes on where it stopped' if goes_on else 'starts again'}."
    program = ["python", "-m", "fulldepth"] if Path(argv[0]).name == "__main__.py" else [Path(argv[0]).name]
    command = shlex.join([*program, *argv[1:], *more])
    return f"{'Go on' if goes_on else 'Start again'} with: {command}"

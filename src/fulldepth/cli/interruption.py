"""The advice after Ctrl-C or a signal: the command that goes on, that starts again, or that only makes the page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fulldepth import launch

Resumes = bool | Callable[[Mapping[str, Any]], bool]
"""Whether a command goes on where it stopped, or the function that decides from its arguments."""
OPTION = "--resume"
_running: dict[str, Any] = {}
"""Of the running command: whether it has the option, whether it goes on where it stopped, and the folder in which
results would be its own. Empty before a call."""


def note(values: Mapping[str, Any], resumes: Resumes) -> None:
    """Note how the command that is called now can be resumed.

    Args:
        values: its arguments; one that has the argument `resume` is resumed with `--resume`.
        resumes: for other commands, whether it goes on if it is called again.
    """
    has_option = "resume" in values
    goes_on = has_option or (resumes(values) if callable(resumes) else resumes)
    extends = goes_on and not has_option  # results of an earlier run may be in the folder
    folder = None if extends or values.get("overwrite") else values.get("output")
    _running.update(has_option=has_option, goes_on=goes_on, folder=folder)


def forget() -> None:
    """Forget an earlier command of this process."""
    _running.clear()


def advice(argv: Sequence[str]) -> str:
    """A sentence with the command that goes on after an interruption; after the results were saved, only their page
    may be missing.

    Args:
        argv: the program and its arguments.
    """
    program = ["python", "-m", "fulldepth"] if Path(argv[0]).name == "__main__.py" else [Path(argv[0]).name]
    if (folder := _running.get("folder")) is not None:
        with suppress(OSError, ValueError):  # the document is written last, but by a training run again and again
            document = json.loads((Path(folder) / "results.json").read_text(encoding="utf-8"))
            if isinstance(document, dict) and document.get("complete") is not False:
                page = shlex.join([*program, "report", str(folder)])
                return f"The results are complete. Make their page with: {page}"
    goes_on = _running.get("goes_on", False)
    more = [OPTION] if _running.get("has_option") and OPTION not in argv else []
    if launch.world() > 1:
        same = f"The same torchrun command{f' with {OPTION}' if more else ''}"
        return f"{same} {'goes on where it stopped' if goes_on else 'starts again'}."
    command = shlex.join([*program, *argv[1:], *more])
    return f"{'Go on' if goes_on else 'Start again'} with: {command}"

"""The program, run in the test's own process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fulldepth import cli


@pytest.fixture
def main(monkeypatch, capsys):
    """The program in this process: (exit code, stdout, stderr)."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["fulldepth", *map(str, arguments)])
        monkeypatch.setitem(cli.DEBUG, "on", False)
        monkeypatch.setenv("COLUMNS", "600")
        monkeypatch.delenv("FORCE_COLOR", raising=False)
        monkeypatch.setattr("typer.rich_utils.FORCE_TERMINAL", None)  # read from the environment when it is imported
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return (code, *capsys.readouterr())

    return run


def shell(*arguments, **options):
    """The program, or Python, as another process."""
    given = {"capture_output": True, "text": True, "check": False, "timeout": 120, "stdin": subprocess.DEVNULL}
    return subprocess.run([*map(str, arguments)], **given, **options)

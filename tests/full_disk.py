"""A disk that is full for what is appended to files: the error comes from the system, for `/dev/full`."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def appending(monkeypatch, after=0):
    """Inside `with` files are opened to append to `after` times; what is written after that has no space."""
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    opened, original = [], Path.open

    def open_file(path, mode="r", *arguments, **options):
        if mode == "a":
            opened.append(path)
            path = Path("/dev/full") if len(opened) > after else path
        return original(path, mode, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", open_file)
        yield

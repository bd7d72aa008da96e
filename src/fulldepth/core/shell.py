"""Words of the commands that the program prints, so that a shell passes them on unchanged."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from typing import Any

SAME_MODEL = ("revision", "tokenizer")
"""Settings of loading without which the next command would load something else, or nothing."""


def path(name: object) -> str:
    """A path or a name that no command takes for an option: with `./` before a dash at its beginning."""
    text = str(name)
    return f"./{text}" if text.startswith("-") else text


def word(name: object) -> str:
    """A path or a name as an argument: as `path`, in quotes where a shell needs them."""
    return shlex.quote(path(name))


def arguments(names: Iterable[object]) -> str:
    """Paths or names as arguments, with spaces between them."""
    return " ".join(map(word, names))


def same_model(settings: Mapping[str, Any]) -> str:
    """The options, each after a space, by which another command loads the model and tokenizer of these settings.

    `--trust-remote-code` is never among them: who runs the command decides on that.
    """
    named = ((name, settings.get(name)) for name in SAME_MODEL)
    return "".join(f" --{name} {word(value)}" for name, value in named if value)


def same_text(settings: Mapping[str, Any]) -> str:
    """The option, after a space, by which another command writes pairs as these settings do; mostly none."""
    return " --no-chat" if settings.get("chat") is False else ""

"""`FulldepthError` for errors that users can correct, and helpers for its texts."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice
from os.path import commonprefix
from typing import Any

MOST_NAMES = 100
"""Largest number of names that an error lists."""
MOST_CHARACTERS = 600
"""Maximum length of a list of names in an error, in characters."""

FULL_DISK = ("No space left", "Disk quota exceeded", "iostream error", "unexpected pos", "PytorchStreamWriter failed")
"""Parts of messages of libraries when a disk is full; `torch.save` (the last three) does not state the reason."""
MORE = 40
"""Characters reserved for the note on omitted lines."""


MOST_DIFFERENCES = 4
"""Largest number of entries that a list of differences names."""
MOST_OF_A_VALUE = 70
"""Maximum length of a value in a list of differences, in characters."""
BEFORE = 15
"""Characters before the first difference of two long values that are shown."""


class FulldepthError(ValueError):
    """An error that the user can correct. Its message states the value, what was expected, and the choices.

    The command line prints the message and exits with status 2.
    """


class StoppedError(FulldepthError):
    """SIGTERM ended a run after it saved its state. The command line exits with the status of that signal."""


@contextmanager
def needing(package: str, extra: str, purpose: str) -> Iterator[None]:
    """Turn a failed import inside `with` into advice to install an optional package.

    Args:
        package: name of the package.
        extra: the extra of fulldepth that installs it.
        purpose: what needs the package, as the subject of a sentence.

    Raises:
        FulldepthError: if the package is absent.
    """
    try:
        yield
    except ImportError as error:
        raise FulldepthError(f"{purpose} needs {package}: pip install 'fulldepth[{extra}]'.") from error


def unknown(kind: str, name: str, known: Iterable[str]) -> FulldepthError:
    """The error for a name that is not in a registry; suggests the closest names.

    Args:
        kind: the registry, in the singular ("measure", "option").
        name: the unknown name.
        known: all names in the registry.
    """
    choices = sorted(known)
    name = one_line(name, 100)
    near = get_close_matches(name, choices, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    listed = f"Available: {', '.join(choices)}." if len(choices) <= MOST_NAMES else f"There are {len(choices):,}."
    listed = one_line(listed, MOST_CHARACTERS)
    return FulldepthError(f"Unknown {kind} {name!r}.{hint} {listed}")


def names_of(names: Iterable[object]) -> str:
    """Names from a file, quoted, in at most 400 characters; `…` marks an omission."""
    return one_line(", ".join(repr(one_line(name, 60)) for name in islice(names, MOST_NAMES)), 400) or "none"


def first_reason(reasons: Mapping[str, Any]) -> str | None:
    """Return the first key whose value is true: of reasons, the first that holds; None if none does."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def enumerated(texts: Sequence[str]) -> str:
    """Texts as a list in a sentence: `a, b and c`; empty for none."""
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def one_line(text: object, most: int = 400) -> str:
    """`text` on one line of at most `most` printable characters; `…` marks an omission."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)[: 16 * most]).split())
    return shortened(line, most)


def differences(before: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """`seed was 0, is 1` for the first entries in which plain values differ from a stored document, else empty.

    Of two long values, such as paths in one folder, the common beginning is left out.
    """
    current = json.loads(json.dumps(dict(current)))
    names = sorted(name for name in {*before, *current} if before.get(name) != current.get(name))
    sentences = []
    for name in names[:MOST_DIFFERENCES]:
        values = [repr(before.get(name)), repr(current.get(name))]
        if max(map(len, values)) > MOST_OF_A_VALUE:
            common = len(commonprefix(values))  # noqa: RUF071
            values = [f"…{value[common - BEFORE :]}" if common > 2 * BEFORE else value for value in values]
        was, is_now = (one_line(value, MOST_OF_A_VALUE) for value in values)
        sentences.append(f"{one_line(name, 60)} was {was}, is {is_now}")
    return "; ".join(sentences) + ("; ..." if len(names) > MOST_DIFFERENCES else "")


def shortened(text: str, most: int) -> str:
    """`text` in at most `most` characters; `…` marks an omission."""
    return text if len(text) <= most else text[: most - 1] + "…"


def brief(message: str, most: int = 950) -> str:
    """A message of several lines in at most `most` characters, with the number of omitted lines."""
    lines = [one_line(line, most) for line in message[: 100 * most].splitlines()]
    printed: list[str] = []
    for line in lines:
        room = most - sum(len(shown_line) + 1 for shown_line in printed) - MORE
        if printed and len(line) > room:
            return "\n".join([*printed, f"... and {len(lines) - len(printed):,} lines more."])
        printed.append(line)
    return "\n".join(printed)


def is_disk_full(error: BaseException) -> bool:
    """Return True if an error of the system, or of a library that wraps it, means that the disk or a quota is full."""
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return is_full or any(phrase in str(error) for phrase in FULL_DISK)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error means that CPU or accelerator memory ran out (torch has no single class for it)."""
    names = {base.__name__ for base in type(error).__mro__}
    phrases = ("not enough memory", "can't allocate memory", "out of memory")
    return bool({"MemoryError", "OutOfMemoryError"} & names) or any(phrase in str(error) for phrase in phrases)

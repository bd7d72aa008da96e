"""Mistakes that the person at the keyboard can mend, said so that they can."""

from __future__ import annotations

import errno
from collections.abc import Iterable
from difflib import get_close_matches

MOST_NAMES = 100
"""So many names an error lists; more would hide what it says."""
MOST_CHARACTERS = 600
"""Longest list of names in an error."""

MORE = 40
"""Characters for the words that lines are left out."""


class FulldepthError(ValueError):
    """What was got, what was expected, and what exists. The command line prints it and exits with 2."""


def unknown(kind: str, name: str, known: Iterable[str]) -> FulldepthError:
    """The error for a name that is not in a registry, with the nearest names that are.

    Args:
        kind: what the name should have been, in the singular ("measure", "option").
        name: what was got.
        known: every name that exists.
    """
    choices = sorted(known)
    name = one_line(name, 100)
    near = get_close_matches(name, choices, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(n) for n in near)}?" if near else ""
    listed = f"Available: {', '.join(choices)}." if len(choices) <= MOST_NAMES else f"There are {len(choices):,}."
    listed = one_line(listed, MOST_CHARACTERS)
    return FulldepthError(f"Unknown {kind} {name!r}.{hint} {listed}")


def names_of(names: Iterable[object], most: int = 400) -> str:
    """Names that stand in a file, quoted, in at most `most` characters; what is cut is marked by `…`."""
    shown, length = [], 0
    for name in names:
        shown.append(repr(one_line(name, 60)))
        length += len(shown[-1]) + 2
        if length > most:
            break
    return one_line(", ".join(shown), most) or "none"


def one_line(text: object, most: int = 400) -> str:
    """`text` on one line of at most `most` printable characters; what is cut is marked by `…`."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)[: 16 * most]).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def brief(message: str, most: int = 950) -> str:
    """A message of several lines in at most `most` characters; says how many lines it leaves out."""
    lines = [one_line(line, most) for line in message[: 100 * most].splitlines()]
    kept: list[str] = []
    for line in lines:
        room = most - sum(len(one) + 1 for one in kept) - MORE
        if kept and len(line) > room:
            return "\n".join([*kept, f"... and {len(lines) - len(kept):,} lines more."])
        kept.append(line)
    return "\n".join(kept)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, of the system or of a library that wraps it, says that the disk is full."""
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a CPU or an accelerator (torch has no one class for that)."""
    names = {base.__name__ for base in type(error).__mro__}
    said = ("not enough memory", "can't allocate memory", "out of memory")
    return bool({"MemoryError", "OutOfMemoryError"} & names) or any(words in str(error) for words in said)

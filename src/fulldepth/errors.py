"""Mistakes that the person at the keyboard can mend, said so that they can."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MOST_NAMES = 100
"""So many names an error lists; more would hide what it says."""
MOST_CHARACTERS = 600
"""Longest list of names in an error."""


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


def one_line(text: object, most: int = 400) -> str:
    """`text` on one line of at most `most` printable characters; what is cut is marked by `…`."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)[: 16 * most]).split())
    return line if len(line) <= most else line[: most - 1] + "…"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on a CPU or an accelerator (torch has no one class for that)."""
    names = {base.__name__ for base in type(error).__mro__}
    said = ("not enough memory", "can't allocate memory", "out of memory")
    return bool({"MemoryError", "OutOfMemoryError"} & names) or any(words in str(error) for words in said)

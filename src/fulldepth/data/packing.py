"""Documents into full windows: nothing padded, nothing dropped but the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple


class Packed(NamedTuple):
    """`windows` of one length, and how many tokens at the end of the text did not fill another (0 if text is left)."""

    windows: list[list[int]]
    left_over: int


def pack(
    texts: Iterable[str],
    tokenise: Callable[[str, int], Sequence[int]],
    *,
    window: int,
    most: int,
    separator: int | None = None,
) -> Packed:
    """Cut the stream of documents, joined by `separator`, into windows.

    Args:
        texts: documents, read only as far as the windows need.
        tokenise: (text, needed) -> its first `needed` or more token ids, or all of them.
        window: tokens of a window.
        most: at most this many windows.
        separator: token id between two documents, unless the first already ends with it.

    Returns:
        Full windows; one short window if the whole text is shorter than one.
    """
    needed = window * most
    stream: list[int] = []
    for text in texts:
        if len(stream) >= needed:
            break
        ids = tokenise(text, needed - len(stream))
        if ids and stream and separator is not None and stream[-1] != separator:
            stream.append(separator)
        stream.extend(ids)
    del stream[needed:]
    if len(stream) < window:
        return Packed([stream] if stream else [], 0)
    full = len(stream) // window * window
    return Packed([stream[start : start + window] for start in range(0, full, window)], len(stream) - full)

r"""Uniform samples of passages of text: pieces of documents, weighted by their length, without replacement.

A document of `c` characters is cut into `max(1, c // P)` pieces of equal length, with `P = 8 W` characters for windows
of `W` tokens. A piece has the key `E / w`, with a standard exponential `E` from the hash of its document and number,
and its characters `w`; the pieces with the smallest keys are the sample, and each gives one window. Every character is
equally likely to be in a window, up to the ends of pieces. A document too short for a window is drawn with the weight
of a window (`4 W` characters), as it gives all of its tokens.

Source: Efraimidis and Spirakis, "Weighted random sampling with a reservoir" (2006).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from fulldepth.core.errors import FulldepthError
from fulldepth.core.uncertainty import FEWEST_EFFECTIVE, distinct, effective, identity, ranks, sample
from fulldepth.data.opening import Order
from fulldepth.data.tokens import Frame, leading_ids

CHARACTERS = 8
"""Characters of a piece for each token of a window; text has 3 to 6 characters a token."""
BLOCK = 4096
"""Tokens of a block of a document, at least."""
FEWEST_DOCUMENTS = 3
FEWEST_BLOCKS = 8
"""Fewest clusters of either kind from which an error is stated."""
NOTHING = Frame()
"""No special tokens."""


class Window(NamedTuple):
    """Token ids that were drawn or cut."""

    ids: list[int]
    document: int
    """Index of the document, or of the first of several short ones."""
    block: int
    """Number of the block of at least `BLOCK` tokens in its document."""
    following: tuple[int, ...] = ()
    """Indices of the further documents that the window has tokens of."""


class DrawnWindows(NamedTuple):
    """Windows, in the order of their documents."""

    windows: list[Window]
    left_over: int
    """Tokens at the ends of documents that fill no window; 0 where not all text is tokenised."""

    @property
    def documents(self) -> set[int]:
        """Indices of all documents that a window has tokens of."""
        return {document for window in self.windows for document in (window.document, *window.following)}


Tokenise = Callable[[str, bool, bool], Sequence[int]]
"""(text or piece of it, whether it starts there, whether it ends there) -> token ids."""
Join = Callable[[list[int], Sequence[int]], list[int]]
"""(ids, ids of the next document) -> both."""


def cut_windows(
    documents: Sequence[tuple[int, str]],
    tokenizer: Any,
    *,
    window: int,
    count: int,
    seed: int = 0,
    order: Order = "random",
    around: Frame = NOTHING,
    document: Frame = NOTHING,
    joined: bool = False,
    least: int = 1,
) -> DrawnWindows:
    """Cut plain text into windows of token ids: a uniform sample of them, or the first ones.

    Args:
        documents: (identity, text) of each.
        tokenizer: the model's.
        window: tokens of a window, those of `around` included.
        count: most windows.
        seed: of the sample.
        order: `first` takes the first windows, which cross the ends of documents if those are `joined`.
        around: special tokens around every window.
        document: special tokens around every document. Between joined documents the end-of-text token stands too,
            unless the first of them ends with it, and the first document of a window has no token before it.
        joined: join short documents until they fill a window; else they, and the ends of longer ones, are short
            windows.
        least: tokens of a short window, at least.

    Raises:
        FulldepthError: if a window has no room beside the tokens around it.
    """
    inside = window - room_taken(around, window)
    separator = tokenizer.eos_token_id
    framed = Frame((), document.suffix) if joined else document

    def tokenise(text: str, starts: bool, ends: bool) -> list[int]:
        return framed.ids(tokenizer, text, starts, ends) if text.strip() else []

    def leading(text: str, needed: int) -> list[int]:
        ids = leading_ids(tokenizer, text, needed)
        return framed.wrap(ids) if ids else []

    def join(ids: list[int], following: Sequence[int]) -> list[int]:
        between = [separator] if separator is not None and ids[-1] != separator else []
        return [*ids, *between, *document.prefix, *following]

    joining = join if joined else None
    if order == "first":
        texts = (text for _, text in documents)
        drawn = first_windows(texts, leading, window=inside, count=count, join=joining)
    else:
        drawn = draw_windows(documents, tokenise, window=inside, count=count, seed=seed, join=joining, least=least)
    return drawn._replace(windows=[cut._replace(ids=around.wrap(cut.ids)) for cut in drawn.windows])


def room_taken(frame: Frame, length: int) -> int:
    """Special tokens of a sequence of `length` tokens.

    Raises:
        FulldepthError: if they leave no room for others.
    """
    special = len(frame.wrap([]))
    if length <= special:
        raise FulldepthError(
            f"A sequence_length of {length} leaves no room beside the tokenizer's {special} special tokens."
        )
    return special


def draw_windows(
    documents: Sequence[tuple[int, str]],
    tokenise: Tokenise,
    *,
    window: int,
    count: int,
    seed: int,
    join: Join | None = None,
    least: int = 1,
) -> DrawnWindows:
    """A uniform sample of windows, each within one document; without replacement.

    If the text is much longer than the sample, only the drawn pieces are tokenised, and each gives one window at a
    hashed offset. Otherwise all is tokenised and cut, and the sample is of all full windows. Documents that are shorter
    than a window are joined in the order in which they are drawn until they fill one, which belongs to the first of
    them; what is left of the last is not used, so that no document is in two such windows.

    Args:
        documents: (identity, text) of each.
        tokenise: token ids of a text.
        window: tokens of a window.
        count: most windows.
        seed: of the sample.
        join: (ids, ids of the next document) -> both; None = short documents and the ends of others are short windows
            of their own.
        least: tokens of a short window, at least.
    """
    characters_of_window = CHARACTERS * window
    sizes = np.array([len(text) for _, text in documents], dtype=np.int64)
    totals = np.maximum(1, sizes // characters_of_window)  # [documents] numbers of their pieces
    owner = np.repeat(np.arange(len(sizes)), totals)  # [pieces] index of their document
    place = np.arange(len(owner)) - np.repeat(np.cumsum(totals) - totals, totals)  # [pieces] number in its document
    hashes = ranks(distinct([name for name, _ in documents])[owner] ^ (ranks(place, 2) * (place > 0)), seed)
    characters = sizes[owner] / totals[owner]
    keys = -np.log((hashes.astype(np.float64) + 1) * 2.0**-64) / np.maximum(characters, characters_of_window / 2)
    is_sample = np.minimum(1.0, characters / characters_of_window).sum() >= count - 1e-9  # else all windows are needed
    short = _Short(window, join, least)
    drawn = list[tuple[int, int, Window]]()
    for index in keys.argsort(kind="stable").tolist() if is_sample else ():
        document = int(owner[index])
        number = int(place[index])
        total = int(totals[document])
        name, text = documents[document]
        start, stop = (_cut(text, part * len(text) // total) for part in (number, number + 1))
        ids = list(tokenise(text[start:stop], start == 0, stop == len(text)))
        if len(ids) >= window:
            offset = identity(name, number, seed) % (len(ids) - window + 1)
            block = start // (CHARACTERS * BLOCK)
            drawn.append((document, number, Window(ids[offset : offset + window], document, block)))
        elif ids and (filled := short.add(ids, document)) is not None:
            drawn.append((filled.document, number, filled))
        if len(drawn) == count:
            return DrawnWindows([window_drawn for *_, window_drawn in sorted(drawn)], 0)
    short = _Short(window, join, least)
    candidates = list[Window]()
    names = list[int]()
    left_over = 0
    for document, (name, text) in enumerate(documents):
        ids = list(tokenise(text, True, True))
        full = len(ids) // window * window
        for start in range(0, len(ids) if join is None else full, window):
            if min(window, len(ids) - start) >= least:
                candidates.append(Window(ids[start : start + window], document, start // BLOCK))
                names.append(identity(name, start))
        if join is not None and full:
            left_over += len(ids) - full
        elif join is not None and ids and (filled := short.add(ids, document)) is not None:
            candidates.append(filled)
            names.append(identity(documents[filled.document][0], 0))
    if not candidates and short.ids:
        return DrawnWindows([Window(short.ids, short.documents[0], 0, tuple(short.documents[1:]))], 0)
    windows = [candidates[index] for index in sample(names, count, seed)]
    left_over += short.dropped + len(short.ids)
    windows.sort(key=lambda window_drawn: window_drawn.document)  # the order within documents is kept
    return DrawnWindows(windows, left_over)


@dataclass
class _Short:
    """Joins short documents until they fill a window; arguments as for `draw_windows`."""

    window: int
    join: Join | None
    least: int
    ids: list[int] = field(default_factory=list)
    """Of the documents that do not fill a window yet."""
    documents: list[int] = field(default_factory=list)
    """Indices of those documents."""
    dropped: int = 0

    def add(self, ids: list[int], document: int) -> Window | None:
        """The window that a further document fills, if it does."""
        if self.join is None:
            return Window(ids, document, 0) if len(ids) >= self.least else None
        self.documents = [*self.documents, document] if self.ids else [document]
        self.ids = self.join(self.ids, ids) if self.ids else ids
        if len(self.ids) < self.window:
            return None
        full = self.ids[: self.window]
        rest = len(self.ids) - self.window
        self.ids = []
        self.dropped = self.dropped + rest
        return Window(full, self.documents[0], 0, tuple(self.documents[1:]))


def _cut(text: str, place: int) -> int:
    """The place behind the next space, within 64 characters, so that no word is cut; else the place itself."""
    if place in (0, len(text)):
        return place
    return next((index for index in range(place, min(place + 64, len(text))) if text[index].isspace()), place)


def first_windows(
    documents: Iterable[str],
    tokenise: Callable[[str, int], Sequence[int]],
    *,
    window: int,
    count: int,
    join: Join | None,
) -> DrawnWindows:
    """The first windows of the documents, joined in order; windows cross the ends of documents.

    Args:
        documents: texts, read lazily.
        tokenise: (text, needed) -> its first `needed` or more token ids, or all of them.
        window: tokens of a window.
        count: most windows.
        join: (ids, ids of the next document) -> both; None = the end of each document is a short window.

    Returns:
        Full windows, or one short window if the whole text is shorter.
    """
    tokens_needed = window * count
    windows = list[Window]()
    stream = list[int]()
    starts = list[int]()
    for document, text in enumerate(documents):
        needed = tokens_needed - window * len(windows) - len(stream)
        if needed <= 0:
            break
        ids = tokenise(text, needed)
        if join is None:
            places = range(0, len(ids), window)
            windows += [Window(list(ids[start : start + window]), document, start // BLOCK) for start in places]
        else:
            stream = join(stream, ids) if ids and stream else [*stream, *ids]
            starts.append(len(stream) - len(ids))
    if join is None:
        return DrawnWindows(windows[:count], 0)
    del stream[tokens_needed:]
    full = len(stream) // window * window if len(stream) >= window else window
    for place in range(0, min(full, len(stream)), window):
        document, last = (
            max(0, int(np.searchsorted(starts, token, side="right")) - 1) for token in (place, place + window - 1)
        )
        block = max(0, place - starts[document]) // BLOCK
        windows.append(Window(stream[place : place + window], document, block, tuple(range(document + 1, last + 1))))
    return DrawnWindows(windows, max(0, len(stream) - full))


def block_clusters(windows: Sequence[Window], identities: Sequence[int]) -> tuple[list[int], str, str | None]:
    """Cluster of each window, what a cluster is, and why no error can be stated, if none can.

    The document is the cluster where windows come from at least 3 documents, and these are worth at least 2 of equal
    length (`uncertainty.effective`): short documents beside a long one do not say how long ones differ. Else the
    clusters are blocks of at least `BLOCK` tokens of a document, of which at least 8 must hold windows.
    """
    clusters = [identities[window.document] for window in windows]
    dominant = dominance(clusters, [len(window.ids) for window in windows], "document")
    documents = len(set(clusters))
    if documents >= FEWEST_DOCUMENTS and dominant is None:
        return clusters, "document", None
    blocks = [identity(identities[window.document], window.block) for window in windows]
    if len(set(blocks)) >= FEWEST_BLOCKS:
        return blocks, f"block of {BLOCK:,} tokens", None
    passages = len(set(blocks))
    reason = (
        f"the text is {documents} document{'s' * (documents > 1)} with windows in {passages} "
        f"block{'s' * (passages > 1)} of {BLOCK:,} tokens{f', and {dominant}' if dominant else ''}; an error needs "
        f"{FEWEST_DOCUMENTS} documents or {FEWEST_BLOCKS} blocks"
    )
    return [identities[windows[0].document]] * len(windows), f"block of {BLOCK:,} tokens", reason


def dominance(clusters: Sequence[int], weights: Sequence[int], unit: str, noun: str = "tokens") -> str | None:
    """The clause on a cluster with so many of the tokens that no error can be stated; None if there is none, or there
    are too few clusters anyway.

    Args:
        clusters: of each sequence.
        weights: tokens of each sequence that count.
        unit: what a cluster is.
        noun: what these tokens are.
    """
    _, number = np.unique(np.array(clusters, np.uint64), return_inverse=True)
    tokens = np.bincount(number, weights)
    if len(tokens) < FEWEST_DOCUMENTS or effective(tokens) >= FEWEST_EFFECTIVE:
        return None
    return f"one {unit} of {len(tokens)} holds {100 * tokens.max() / tokens.sum():.0f} % of the {noun}"

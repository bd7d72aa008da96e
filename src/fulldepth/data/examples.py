"""`read_examples`: pairs, chats or text as token ids with labels, for fitting scalars and scoring blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from fulldepth.core.errors import FulldepthError, names_of
from fulldepth.core.files import Fingerprint
from fulldepth.core.uncertainty import identity, plural
from fulldepth.data.batches import Example, id_bytes
from fulldepth.data.columns import CONVERSATIONS, choose_columns
from fulldepth.data.conversations import read_conversations, response_examples
from fulldepth.data.corpus import CORPUS
from fulldepth.data.drawing import cut_windows
from fulldepth.data.files import TABLES
from fulldepth.data.mixture import Mixture
from fulldepth.data.opening import PIECES, is_cut, open_data, sampled_texts
from fulldepth.data.tokens import Frame, check_positions, check_vocabulary

HELDOUT_SHARE = 5
"""One in so many documents or pairs is held out if there is no held-out file."""
SEEDED_FIFTH = "a seeded fifth of "
"""Beginning of the name of held-out rows that are drawn from the data."""
DEFAULT_LENGTH = 256
MOST_WINDOWS = 1 << 40
"""Windows without a limit."""
PAIRS = "pairs"
TEXT = "text"
MIXED = "mixed"
EXPECTED = "prompt + response, messages, or text"


@dataclass(frozen=True)
class Examples:
    """Training and held-out data of a search."""

    train: list[Example]
    """Examples for fitting scalars."""
    heldout: list[Example]
    """Examples for scoring blocks."""
    meta: dict[str, Any] = field(default_factory=dict)
    """`hash` of both parts, names, kinds, counts, `warnings`: plain values for a plan's `data`."""


def units(data: Mapping[str, Any]) -> str:
    """Return the name of the independent units of held-out data, in the plural: `rows`, `documents`, `pieces of text`.

    Args:
        data: `Examples.meta`, or a plan's `data`.
    """
    heldout = data.get("heldout")
    return plural((heldout.get("unit") if isinstance(heldout, Mapping) else None) or "document")


class _Part(NamedTuple):
    """Examples of one source."""

    name: str
    kind: str
    """`pairs` (chats too), `text`, or `mixed` for sources of both kinds."""
    unit: str
    """What an independent unit is: a `row`, a `document`, or a `piece of text`."""
    examples: list[Example]
    warnings: tuple[str, ...] = ()
    sources: Sequence[int] = ()
    """Number of the document of each unit; empty = not yet counted, each unit is a document."""

    def counts(self) -> dict[str, Any]:
        """Entries of a plan's `data`; `clusters` is the number of units."""
        clusters = {example.document for example in self.examples}
        return {
            "unit": self.unit,
            "examples": len(self.examples),
            "clusters": len(clusters),
            "documents": len({self.sources[cluster] for cluster in clusters} if self.sources else clusters),
            "tokens": sum(map(len, self.examples)),
            "predicted": sum(example.predicted for example in self.examples),
        }


def read_examples(
    data: Any,
    tokenizer: Any,
    max_positions: int | None,
    *,
    heldout: Any = None,
    seed: int = 0,
    sequence_length: int | None = None,
    limit: int | None = None,
    vocab_size: int | None = None,
    chat: bool = True,
) -> Examples:
    """Examples with the loss on response tokens (pairs, chats) or on every token but a window's first (text).

    Nothing is deduplicated and no pair is truncated. A chat gives an example for each response, with all messages
    before it as the prompt, rendered by the tokenizer's template as for generation. Text is cut into windows within
    documents.

    Args:
        data: rows with a prompt and a response or with messages (as `fulldepth.data.conversations` reads), rows with
            `text` or `sentence`, `.txt` files, `corpus:builtin` (its held-out part) or `corpus:builtin/train`, a list
            of texts or of mappings. Long plain text is several documents (`fulldepth.data.opening.text_pieces`).
            Several sources, with shares of the rows: `a.jsonl=0.7,b.txt=0.3` or a `Mixture`. None = held-out data only.
        tokenizer: the model's, with its chat template if it has one.
        max_positions: most tokens that the model can read; None = any length.
        heldout: data for scoring, of the same kinds; None = a seeded fifth of the rows or documents of each source.
        seed: seed of that fifth.
        sequence_length: tokens of a window of text, None = 256 or the model's positions if fewer; if given, also the
            most tokens of a pair.
        limit: most rows (of several sources: of all together), a uniform sample; of text, most windows, a uniform
            sample of all text, each within one document. None = all.
        vocab_size: rows of the model's embedding; None = not checked.
        chat: put pairs of texts into the chat template, if there is one; else they are plain text. Chats always are.

    Returns:
        Examples to train on and examples to score, with the hash and name of the data.

    Raises:
        FulldepthError: if there is nothing to read or to hold out, a row lacks prompt or response, pairs are too long
            (the message names them), tokens are not in the vocabulary, or there is no tokenizer.
    """
    for name, number, least in (("limit", limit, 1), ("sequence_length", sequence_length, 2)):
        if number is not None and number < least:
            raise FulldepthError(f"{name} must be at least {least}, got {number}.")
    check_positions(sequence_length or 0, max_positions)
    if tokenizer is None:
        raise FulldepthError("The data are text, and the model has no tokenizer. Give one.")
    longest = sequence_length or max_positions
    window = sequence_length or min(DEFAULT_LENGTH, max_positions or DEFAULT_LENGTH)
    read = partial(_read, tokenizer=tokenizer, longest=longest, window=window, seed=seed, chat=chat)
    scored = None if heldout is None else _read_all(heldout, limit, read)
    parts = [] if data is None else _read_all(data, limit, read)
    if scored is None:
        split = [
            _held_out(part, seed, source_limit)
            for part, source_limit in zip(parts, Mixture.of(data).limits(limit), strict=True)
        ]
        parts, scored = ([pair[place] for pair in split] for place in (0, 1))
        second = _joined(scored)
        second = second._replace(name=f"{SEEDED_FIFTH}{second.name}", warnings=())
    else:
        second = _joined(scored)
    first = _joined(parts) if parts else second._replace(examples=[])
    highest = max(int(example.input_ids.max()) for example in (*first.examples, *second.examples))
    warnings = list(dict.fromkeys([*first.warnings, *second.warnings]))
    warnings += check_vocabulary(highest, tokenizer, vocab_size)
    fitted_rows, scored_rows = (
        [id_bytes(scored_example.input_ids) + id_bytes(scored_example.labels) for scored_example in part.examples]
        for part in (first, second)
    )
    known = set(fitted_rows)
    if shared := sum(content in known for content in scored_rows):
        warnings.append(f"{shared} of the {len(scored_rows)} held-out examples are also among those to fit on.")
    fingerprint = Fingerprint("fulldepth examples 1")  # over ids and labels of both parts, in order
    for part in (fitted_rows, scored_rows):
        for content in (str(len(part)).encode(), *part):
            fingerprint.add(content)
    meta = {
        "hash": str(fingerprint),
        "name": first.name,
        "kind": first.kind,
        "train": first.counts(),
        "heldout": {"name": second.name, "kind": second.kind, **second.counts()},
        "sequence_length": window if {first.kind, second.kind} != {PAIRS} else sequence_length,
        "limit": limit,
        "seed": seed,
        "warnings": warnings,
    }
    return Examples(first.examples, second.examples, meta)


def is_seeded_fifth(meta: Mapping[str, Any]) -> bool:
    """Return True if the held-out rows that `meta` of examples, or `data` of a plan, states are a seeded fifth of the
    data; also if it does not state what they are.
    """
    name = str((meta.get("heldout") or {}).get("name") or SEEDED_FIFTH)
    return name.startswith(SEEDED_FIFTH)


def _read_all(data: Any, limit: int | None, read: Callable[..., _Part]) -> list[_Part]:
    """Read each source of a mixture; one that has fewer rows than its share gets a warning."""
    mixture = Mixture.of(data)
    parts = []
    for source, source_limit in zip(mixture.sources, mixture.limits(limit), strict=True):
        part = read(source, limit=source_limit)
        if len(mixture.sources) > 1 and source_limit is not None and (have := len(part.examples)) < source_limit:
            short = f"{part.name} has {have} of the {source_limit} rows that its share of the data asks for."
            part = part._replace(warnings=(*part.warnings, short))
        units_of_part = range(1 + max((example.document for example in part.examples), default=-1))
        parts.append(part._replace(sources=part.sources or units_of_part))
    return parts


def _held_out(part: _Part, seed: int, most: int | None) -> tuple[_Part, _Part]:
    """A source, of which at most so many rows or windows were read, without a seeded fifth of its units; that fifth."""
    documents = list(dict.fromkeys(example.document for example in part.examples))
    if len(documents) < 2 and most is not None and len(part.examples) >= most:
        raise FulldepthError(
            f"{most:,} {'row was' if most == 1 else 'rows were'} read of {part.name}, which is all that the limit "
            f"(--max-sequences, of several sources each its share) lets it have, and they are of one {part.unit}: none "
            "can be held out to score with. Raise the limit, or give a held-out file."
        )
    if len(documents) < 2:
        raise FulldepthError(
            f"{part.name} holds one {part.unit}, so none can be held out to score with. Give more, or a held-out file."
        )
    order = np.random.default_rng(seed).permutation(documents).tolist()
    held_documents = set(order[: max(1, round(len(documents) / HELDOUT_SHARE))])
    remaining, held_out = (
        [e for e in part.examples if (e.document in held_documents) == held] for held in (False, True)
    )
    return part._replace(examples=remaining), part._replace(examples=held_out)


def _joined(parts: Sequence[_Part]) -> _Part:
    """The examples of several sources as one, with units that are numbered through."""
    if len(parts) == 1:
        return parts[0]
    examples: list[Example] = []
    documents: list[int] = []
    for part in parts:
        before = len(documents)
        first_document = 1 + max(documents, default=-1)
        examples += [replace(example, document=before + example.document) for example in part.examples]
        documents += [first_document + number for number in part.sources]
    kinds, unit_names = ({getattr(part, name) for part in parts} for name in ("kind", "unit"))
    return _Part(
        " and ".join(f"{part.name} ({len(part.examples)} rows)" for part in parts),
        kinds.pop() if len(kinds) == 1 else MIXED,
        unit_names.pop() if len(unit_names) == 1 else "document",
        examples,
        tuple(warning for part in parts for warning in part.warnings),
        documents,
    )


def _read(
    data: Any, *, tokenizer: Any, longest: int | None, window: int, limit: int | None, seed: int, chat: bool
) -> _Part:
    """Read one source, or a sample of it, as examples."""
    if isinstance(data, str) and data == CORPUS:
        data = f"{CORPUS}/heldout"  # as for `measure`: unseen by models trained on the corpus
    opened = open_data(data, streaming=limit is not None)
    warnings: tuple[str, ...] = ()
    if not opened.is_plain:
        tables = open_data(data, suffixes=TABLES) if opened.path else opened
        where, row = next(tables.rows(), ("", {}))
        if not row:
            raise FulldepthError(f"{opened.name} is empty. Expected rows with {EXPECTED}.")
        columns = choose_columns(row, where)
        if columns.kind in CONVERSATIONS:
            rows = tables.rows() if limit is None else tables.sampled(list(row), limit, seed=seed)
            numbered = enumerate(read_conversations(rows, tokenizer, chat=chat))
            examples, _ = response_examples(
                ((document, where, conversation) for document, (where, conversation) in numbered),
                tokenizer,
                name=opened.name,
                longest=longest,
                advice="Pairs to search with are never cut: leave them out, or shorten them.",
            )
            return _Part(opened.name, PAIRS, "row", examples)
        if columns.kind == "images":
            raise FulldepthError(
                f"{where} holds an image ({columns.first!r}), and `skip` reads text alone, also of models that read "
                f"images. Give rows without that column, with {EXPECTED}."
            )
        if columns.kind != "text" or columns.second is not None:
            raise FulldepthError(
                f"{where} has none of the columns to search with. Got: {names_of(row)}. Expected: {EXPECTED}."
            )
        if columns.label is not None:
            warnings = (f"The labels of {opened.name} are not used: every token of the text is predicted.",)
    sampled = sampled_texts(opened, window, limit, seed)
    sources = [number for number, _ in sampled]
    unit = PIECES if is_cut(opened) or len(set(sources)) < len(sources) else "document"
    documents = [(identity(text), text) for _, text in sampled]
    frame = Frame.of(tokenizer, (text for _, text in documents if text.strip()))
    drawn = cut_windows(
        documents, tokenizer, window=window, count=limit or MOST_WINDOWS, seed=seed, document=frame, least=2
    )  # the end of a document is a shorter window, dropped if it is a single token
    if not drawn.windows:
        raise FulldepthError(f"{opened.name} has nothing to predict: each of its documents is blank or a single token.")
    examples = [
        Example.of(cut.ids, 1, len(cut.ids), document=cut.document, cut_from=documents[cut.document][0])
        for cut in drawn.windows
    ]
    return _Part(opened.name, TEXT, unit, examples, warnings, sources)

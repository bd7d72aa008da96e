"""`with_own_text`: text that the unmodified model writes itself, as data of a search or of a healing.

`own` among the data stands for it. `own:chat` lets the model write the user's turn of its chat template, and answer it;
`own:text` lets it write documents behind the token that starts one; `own` is `own:chat` for a model with a chat
template, else `own:text`. Rows are samples of the whole softmax (temperature 1).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import JsonValue, NonNegativeInt

from fulldepth.core.errors import FulldepthError, differences, one_line
from fulldepth.core.files import append_text, read_document, reading, sha256_of, write_text
from fulldepth.core.progress import Watcher
from fulldepth.data.columns import CUT_OFF, END
from fulldepth.data.conversations import document_start, encode_pair, encode_prompt, user_turn
from fulldepth.data.mixture import Mixture
from fulldepth.data.tokens import check_positions, plain_ids
from fulldepth.hf import end_tokens
from fulldepth.settings import Settings
from fulldepth.settings.search import HeldoutSettings
from fulldepth.skip.problem import read_data
from fulldepth.skip.sampling import answered_pair, check_writes, continuations, split_end, written_text
from fulldepth.subject import Subject

Kind = Literal["chat", "text"]
NAMES: dict[str, Kind | None] = {"own": None, "own:chat": "chat", "own:text": "text"}
"""Name among the data -> kind of text; None = by the model's tokenizer."""
FILE = "own.jsonl"
NOTES = "own.json"
"""File that describes how the text beside it was written."""
ROWS = 256
"""Rows, where `max_sequences` is not given."""
LENGTH = 256
"""Most tokens of a row, where `sequence_length` is not given and the model has as many positions."""
LEAST_TOKENS = 8
"""Shorter documents are left out."""
TRIES = 3
"""Most rows that are written for each row that is asked for."""
DOCUMENT, QUESTION, ANSWER = range(3)
"""Parts of a row; each has noise of its own."""


class OwnTextNotes(Settings):
    """The entries of `own.json`."""

    asked: dict[str, JsonValue]
    """Model and settings that determine the text."""
    rows: NonNegativeInt = 0
    """Rows written so far."""
    next: NonNegativeInt = 0
    """Number of the next row; rows that were left out have numbers, too."""
    sha256: str = sha256_of("")
    """Digest of the lines of these rows."""


def names_own(data: Any) -> bool:
    """Return True if a source of the data is the model's own text."""
    return any(isinstance(source, str) and source in NAMES for source in Mixture.of(data).sources)


def with_own_text(
    data: Any, subject: Subject, settings: HeldoutSettings, folder: Path | None, watcher: Watcher, heldout: Any = None
) -> Any:
    """The data with a file in place of `own`, after the model has written it, or the rest of it.

    All other data are read before, so that what is wrong with them does not come up after the model has written.

    Args:
        data: as for `read_examples`.
        subject: the unmodified model.
        settings: `max_sequences` rows (default 256; in a mixture its share) of at most `sequence_length` tokens
            (default 256) with this `seed`, in batches of `batch_size`.
        folder: for `own.jsonl` and `own.json`; rows that are there are kept, so that an interrupted call goes on.
        watcher: receives the cost at the start, the speed after the first batch, and progress.
        heldout: as for `read_examples`.

    Returns:
        `data` itself if no `own` is among them, else a `Mixture`.

    Raises:
        FulldepthError: for a model that writes no text or has no token to start with, no folder, and a file in it that
            is damaged, or was written by another model or with other settings; as `read_examples`.
    """
    mixture = Mixture.of(data)
    places = [number for number, source in enumerate(mixture.sources) if isinstance(source, str) and source in NAMES]
    if not places:
        return data
    if len(places) > 1:
        raise FulldepthError("Give one of own, own:chat and own:text.")
    if folder is None:
        raise FulldepthError("The model's own text is stored: name an output folder, or the own.jsonl of another one.")
    check_writes(subject.model, "write text of its own")
    limits = mixture.limits(settings.max_sequences)  # refuses shares of an unknown number of rows
    name = mixture.sources[places[0]]
    rows = mixture.limits(settings.max_sequences or ROWS)[places[0]]
    assert rows is not None, "the number of rows is given"
    writer = OwnText.of(subject, NAMES[name], settings, rows)
    other_sources = [
        pair for number, pair in enumerate(zip(mixture.sources, limits, strict=True)) if number != places[0]
    ]
    if heldout is not None and not other_sources:
        other_sources = [(None, settings.max_sequences)]
    for source, limit in other_sources:
        read_data(subject, source, settings.model_copy(update={"max_sequences": limit}), heldout=heldout)
    return mixture.with_source(places[0], str(writer.write(folder, watcher)))


@dataclass(frozen=True)
class OwnText:
    """Text that a model writes."""

    subject: Subject
    kind: Kind
    rows: int
    length: int
    """Most tokens of a row."""
    seed: int
    batch_size: int
    ends: frozenset[int]
    """Tokens that end a text or a turn."""

    @classmethod
    def of(cls, subject: Subject, kind: Kind | None, settings: HeldoutSettings, rows: int) -> OwnText:
        """The text of a kind (None = by the tokenizer).

        Raises:
            FulldepthError: if the tokenizer has no chat template, or no token that starts a document.
        """
        tokenizer = subject.tokenizer
        if tokenizer is None:
            raise FulldepthError("The model has no tokenizer, so that it cannot write text. Give one.")
        if kind == "chat" and not tokenizer.chat_template:
            raise FulldepthError("The tokenizer has no chat template; use own:text.")
        kind = kind or ("chat" if tokenizer.chat_template else "text")
        if kind == "text" and document_start(tokenizer) is None:
            raise FulldepthError("The tokenizer has no token that starts a document, so the model cannot begin a text.")
        length = settings.sequence_length or min(LENGTH, subject.anatomy.max_positions or LENGTH)
        check_positions(length, subject.anatomy.max_positions)
        if kind == "text" and length <= LEAST_TOKENS:
            raise FulldepthError(
                f"A row of {length} tokens is too short for a text that the model writes, of at least {LEAST_TOKENS}. "
                "Set a larger --sequence-length."
            )
        ends = set(end_tokens(subject.model, tokenizer))
        if kind == "chat":  # the user's turn may end with another token than the answer
            special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
            ends |= {*[token for token in plain_ids(tokenizer, user_turn(tokenizer).closing) if token in special][:1]}
        return cls(subject, kind, rows, length, settings.seed, settings.batch_size, frozenset(ends))

    def write(self, folder: Path, watcher: Watcher) -> Path:
        """Write `own.jsonl`, or the rows that it lacks.

        Raises:
            FulldepthError: see `with_own_text`; if too many rows are empty.
        """
        asked: dict[str, JsonValue] = {
            **self.subject.identity,
            "kind": self.kind,
            "rows": self.rows,
            "length": self.length,
            "seed": self.seed,
        }
        path = folder / FILE
        folder.mkdir(parents=True, exist_ok=True)
        notes, lines = _read_so_far(folder, asked)
        if notes.rows == self.rows:
            return path
        missing = self.rows - notes.rows
        what = "prompts and its answers to them" if self.kind == "chat" else "documents"
        watcher.say(
            f"The model writes {missing} {what} itself, of up to {self.length} tokens each: at most "
            f"{missing * self.length:,} tokens, in batches of {self.batch_size}."
        )
        watcher.begin("Own text", missing)
        _write_notes(folder, notes)  # before the first row: rows without notes are not known to be this model's
        write_text(path, "".join(lines))
        first = True
        while notes.rows < self.rows:
            if notes.next >= TRIES * self.rows:
                raise FulldepthError(
                    f"Only {notes.rows} of {notes.next} texts that the model began are not empty. Use other data."
                )
            begun = time.perf_counter()
            numbers = range(notes.next, notes.next + min(self.batch_size, self.rows - notes.rows))
            written, tokens = self._rows_of(numbers)
            new = [json.dumps(row, ensure_ascii=False) + "\n" for row in written]
            append_text(path, "".join(new))
            lines += new
            digest = sha256_of("".join(lines))
            notes = OwnTextNotes(asked=asked, rows=len(lines), next=numbers.stop, sha256=digest)
            _write_notes(folder, notes)
            watcher.advance(len(new))
            if first:
                first = False
                watcher.say(f"It writes {tokens / (time.perf_counter() - begun):,.0f} tokens a second.")
        return path

    def _rows_of(self, numbers: Sequence[int]) -> tuple[list[dict[str, Any]], int]:
        """The rows of these numbers that are not empty, and the number of tokens that were written."""
        return self._conversations(numbers) if self.kind == "chat" else self._documents(numbers)

    def _documents(self, numbers: Sequence[int]) -> tuple[list[dict[str, Any]], int]:
        start = document_start(self.subject.tokenizer)
        assert start is not None, "`of` has checked it"
        written = self._continued([[start]] * len(numbers), [self.length - 1] * len(numbers), numbers, DOCUMENT)
        rows: list[dict[str, Any]] = []
        for number, ids in zip(numbers, written, strict=True):
            body, _ = split_end(ids, self.ends)
            text = written_text(self.subject.tokenizer, body)
            if len(body) >= LEAST_TOKENS and text.strip():
                rows.append({"number": number, "text": text})
        return rows, sum(map(len, written))

    def _conversations(self, numbers: Sequence[int]) -> tuple[list[dict[str, Any]], int]:
        tokenizer = self.subject.tokenizer
        opening, closing = user_turn(tokenizer)
        start = plain_ids(tokenizer, opening)
        if not start and (token := document_start(tokenizer)) is not None:
            start = [token]  # the template writes nothing before the user's text
        if not start:
            raise FulldepthError("The chat template writes nothing before the user's text, so the model cannot begin.")
        room = self.length - len(start) - len(plain_ids(tokenizer, closing))
        if room < 2 * LEAST_TOKENS:
            raise FulldepthError(
                f"A row of {self.length} tokens has no room for a conversation: the chat template alone takes "
                f"{self.length - room}. Set a larger --sequence-length, or use own:text."
            )
        questions = self._continued([start] * len(numbers), [room // 2] * len(numbers), numbers, QUESTION)
        mark = closing.strip().partition("\n")[0]
        prompts: dict[int, str] = {}
        for number, ids in zip(numbers, questions, strict=True):
            body, _ = split_end(ids, self.ends)
            text = written_text(tokenizer, body, skip_special_tokens=True)
            text = (text.partition(mark)[0] if mark else text).strip()
            if text:
                prompts[number] = text
        messages = {number: [{"role": "user", "content": text}] for number, text in prompts.items()}
        starts = {number: encode_prompt(tokenizer, prompt) for number, prompt in messages.items()}
        limits = {number: self.length - len(ids) for number, ids in starts.items()}
        with_room = [number for number in prompts if limits[number] >= 1]
        answers = self._continued([starts[n] for n in with_room], [limits[n] for n in with_room], with_room, ANSWER)
        rows: list[dict[str, Any]] = []
        for number, ids in zip(with_room, answers, strict=True):
            body, end = split_end(ids, self.ends)
            row = answered_pair(tokenizer, messages[number], body, end)
            while row is not None and (excess := self._size(row) - self.length) > 0:
                body = body[:-excess]
                row = answered_pair(tokenizer, messages[number], body, [])
            if row is not None:
                rows.append({"number": number, **row})
        return rows, sum(map(len, [*questions, *answers]))

    def _size(self, row: Mapping[str, Any]) -> int:
        """Tokens of a conversation when it is read: text can have more tokens than those it was written with."""
        (message,) = row["response"]
        options = {"cut_off": row[CUT_OFF], "end": row.get(END)}
        return sum(map(len, encode_pair(self.subject.tokenizer, row["prompt"], message, **options)))

    def _continued(
        self, starts: Sequence[Sequence[int]], limits: Sequence[int], numbers: Sequence[int], part: int
    ) -> list[list[int]]:
        """Continue the starts of the rows with these numbers."""
        return continuations(
            self.subject.model,
            starts,
            limits,
            ends=set(self.ends),
            temperature=1.0,
            seeds=[(self.seed, number, part) for number in numbers],
            batch_size=self.batch_size,
            watcher=Watcher(),
        )


def _write_notes(folder: Path, notes: OwnTextNotes) -> None:
    write_text(folder / NOTES, json.dumps(notes.model_dump(), indent=2))


def _read_so_far(folder: Path, asked: dict[str, JsonValue]) -> tuple[OwnTextNotes, list[str]]:
    """The notes of an earlier call, and the lines that they speak of; nothing if there was none.

    Raises:
        FulldepthError: if the files are damaged, or were written by another model or with other settings.
    """
    path = folder / FILE
    file = folder / NOTES
    again = f"Remove {file} and {path} to let the model write again, or choose another output folder."
    if not path.exists() and not file.exists():
        return OwnTextNotes(asked=asked), []
    if not file.exists():
        raise FulldepthError(f"{path} is not a file of this model's own text: {NOTES} is missing beside it. {again}")
    try:
        notes = read_document(file, OwnTextNotes)
    except FulldepthError as error:
        raise FulldepthError(f"{one_line(error)} {again}") from error
    if notes.next == 0:  # the earlier call ended in its first batch
        return OwnTextNotes(asked=asked), []
    if wrong := differences(notes.asked, asked):
        raise FulldepthError(f"{folder} holds other text of a model's own: {wrong}. {again}")
    lines: list[bytes] = []
    if path.exists():
        with reading(path), path.open("rb") as opened:
            stored_lines = opened.readlines()
        lines = stored_lines[: notes.rows]  # a killed call may have left more, and half of a character
        if notes.rows == asked["rows"] and len(stored_lines) > notes.rows:
            raise FulldepthError(f"{path} has rows that were added since it was written. {again}")
    if len(lines) < notes.rows or sha256_of(b"".join(lines)) != notes.sha256:
        state = "has changed since it was written" if path.exists() else "is missing"
        raise FulldepthError(f"{path} {state}. {again}")
    return notes, [line.decode() for line in lines]

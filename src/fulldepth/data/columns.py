"""Column names, selection of the columns of a row, and validation of text cells.

A row without the column, or a cell of another kind, is a `FulldepthError` that names its location.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fulldepth.core.errors import FulldepthError, names_of, unknown

Rows = Iterable[tuple[str, Mapping[str, Any]]]
"""Pairs of location (`a.jsonl line 3`, for messages) and row."""

Choice = Callable[[Iterable[str], str], Sequence[str]]
"""(names of the columns, location for messages) -> the columns to read."""

IMAGE_COLUMNS = ("image", "img")
TEXT_COLUMNS = ("text", "sentence")
CAPTION_COLUMNS = ("text", "caption")
TEXT_PAIR_COLUMNS = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("#1 String", "#2 String"),
)
PROMPT_COLUMNS = (
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("instruction", "output"),
    ("context", "target"),
    ("input", "target"),
    ("source", "target"),
)
CHAT_COLUMNS = ("messages", "conversations")
CUT_OFF = "cut_off"
"""Column of responses that a model generated, which are scored as they are: true where a limit of the length ended the
response, so that its end is no end; false where the model ended it."""
END = "end"
"""Column with the text of the token by which a model ended its response; earlier files lack it."""
CHOICES: dict[str, Sequence[tuple[str, str | None]]] = {
    "chats": [(column, None) for column in CHAT_COLUMNS],
    "images": [(image, text) for image in IMAGE_COLUMNS for text in (*CAPTION_COLUMNS, None)],
    "text": [*TEXT_PAIR_COLUMNS, *((text, None) for text in TEXT_COLUMNS)],
    "pairs": PROMPT_COLUMNS,
}
"""Kind of data -> the columns that it is read from, in order of preference."""
TOOLS = "tools"
"""Column with the functions that the chat template of a chat is given, a list or its JSON text, as TRL reads it."""
TEMPLATE_ARGUMENTS = "chat_template_kwargs"
"""TRL's column of further arguments of the chat template, which are not read."""
RESPONSE_COLUMNS = (CUT_OFF, END, TOOLS, TEMPLATE_ARGUMENTS, "input")
"""Further columns by which a prompt (Alpaca's `input`), a chat or a generated response is encoded, in rows that have
them."""
CONVERSATIONS = ("pairs", "chats")
"""Kinds of data whose responses are answers to prompts."""
LABEL_COLUMNS = ("label", "labels", "fine_label", "Quality")
EXPECTED = (
    "text (or sentence, or sentence1 + sentence2) or image (and text or caption), with or without label; prompt + "
    "response; or messages"
)
SURROGATES = re.compile("[\ud800-\udfff]")


class Columns(NamedTuple):
    """The columns to read; `kind` is `text`, `pairs`, `chats` or `images`."""

    kind: str
    first: str
    second: str | None
    label: str | None
    others: tuple[str, ...] = ()
    """Those of `RESPONSE_COLUMNS` that the data have."""

    @property
    def required(self) -> list[str]:
        """The columns that every row must have."""
        return [name for name in (self.first, self.second, self.label) if name is not None]

    @property
    def names(self) -> list[str]:
        """Names of all columns to read."""
        return [*self.required, *self.others]


def choose_columns(names: Iterable[str], where: str) -> Columns:
    """Choose the columns to read from `names`."""
    have = list(names)
    label = next((name for name in LABEL_COLUMNS if name in have), None)
    for kind, pairs in CHOICES.items():
        for first, second in pairs:
            if first in have and second in (None, *have):
                if kind not in CONVERSATIONS:
                    return Columns(kind, first, second, label)
                further_responses = tuple(name for name in RESPONSE_COLUMNS if name in have and name != first)
                return Columns(kind, first, second, None, further_responses)
    raise FulldepthError(
        f"{where} has none of the columns that fulldepth reads. Got: {names_of(have)}. Expected: {EXPECTED}."
    )


def text_column(names: Iterable[str], column: str | None, where: str) -> str:
    """Name of the text column: `column`, or if None `text` or `sentence`."""
    have = list(names)
    if column is not None:
        if column not in have:
            raise unknown(f"column of {where}", column, have)
        return column
    for name in TEXT_COLUMNS:
        if name in have:
            return name
    raise FulldepthError(
        f"{where} has no column {' or '.join(TEXT_COLUMNS)}. Got: {names_of(have)}. Say which holds the text."
    )


def column_texts(rows: Rows, column: str | None = None) -> Iterator[str]:
    """The text of each row; without `column`, `text_column` chooses it from the first row."""
    for where, row in rows:
        column = text_column(row, None, where) if column is None else column
        require_columns(row, [column], where)
        yield text_value(row[column], f"{where}, {column!r}")


def prompt_text(row: Mapping[str, Any], columns: tuple[str, str | None], where: str) -> str:
    """The text of a row's prompt; of an instruction with an input (Alpaca), both, with an empty line between them."""
    prompt = text_value(row[columns[0]], f"{where}, {columns[0]!r}")
    if columns == ("instruction", "output") and row.get("input"):
        prompt += "\n\n" + text_value(row["input"], f"{where}, 'input'")
    return prompt


def require_columns(row: Mapping[str, Any], columns: Iterable[str | None], where: str) -> None:
    """Refuse a row that lacks one of the columns."""
    for column in columns:
        if column is not None and column not in row:
            raise FulldepthError(f"{where} has no {column!r}. It has: {names_of(row)}.")


def text_value(value: Any, where: str) -> str:
    """The cleaned text of a cell; `where` is its location, for messages."""
    if not isinstance(value, str):
        raise FulldepthError(f"{where} is {type_of_cell(value)}, expected text.")
    return clean_text(value)


def clean_text(text: str) -> str:
    """`text` with lone surrogates (possible in JSON, but not in UTF-8 and tokenizers) replaced by U+FFFD."""
    return SURROGATES.sub("\ufffd", text)


def list_of_texts(given: Any, name: str) -> list[str]:
    """One text or several as a list.

    Args:
        given: the argument of a caller.
        name: what it is, for the message.

    Raises:
        FulldepthError: if it is neither a text nor a list of texts.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable):
        raise FulldepthError(f"{name} is {type_of_cell(given)}. Expected a text or a list of texts.")
    texts = list(given)
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str):
            raise FulldepthError(f"{name} {number} is {type_of_cell(text)}, expected text.")
    return texts


def type_of_cell(value: Any) -> str:
    """Kind of a cell's value, for a message."""
    return "empty (null)" if value is None else f"of type {type(value).__name__}"

"""`conversations`: prompts with responses, and chats, as data sets for TRL's `SFTTrainer`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import datasets

from fulldepth.data.columns import PROMPT_COLUMNS, Rows, require_columns, text_value
from fulldepth.data.files import TABLES
from fulldepth.data.opening import open_data
from fulldepth.errors import FulldepthError, names_of, unknown
from fulldepth.progress import Watcher

CHAT_COLUMNS = ("messages", "conversations")
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
"""Role in the data -> role in chat templates."""
EXPECTED = " or ".join([*CHAT_COLUMNS, *(" + ".join(pair) for pair in PROMPT_COLUMNS)])
CUT_OFF = "cut_off"
"""Column that is true where a response was generated and stopped by a limit of its length: its end is no end."""
CHUNK = 1000
"""Rows held as Python objects before they are converted to Arrow."""

Message: TypeAlias = dict[str, str]
Prompt: TypeAlias = str | list[Message]
"""Plain text, or the messages before the response."""


class _RowShape(NamedTuple):
    """How rows are read and written, determined by the first row and the tokenizer."""

    chat: str | None
    """Column of messages; None if rows are pairs."""
    pair: tuple[str, str]
    context: str | None
    """Column of further text of the prompt (Alpaca's `input`)."""
    template: bool
    """Whether pairs become messages for the tokenizer's chat template."""


def conversations(
    data: Any,
    tokenizer: Any = None,
    *,
    config: str | None = None,
    split: str | None = None,
    watcher: Watcher | None = None,
) -> datasets.Dataset:
    """Chats, or prompts with responses, for fine-tuning on the responses only.

    Args:
        data: as for `open_data`, without plain text. Rows hold `messages` (a list of `role` and `content`; ShareGPT's
            `conversations` with `from` and `value` also), or a prompt and a response in one of the pairs of columns
            that `fulldepth measure` reads (`prompt` + `response`, ...).
        tokenizer: with a chat template, which chats need, a pair becomes two messages. None = not known yet: pairs
            stay plain text.
        config: configuration of a Hub data set.
        split: split of a Hub data set, None = `train`.
        watcher: receives the numbers of rows that are left out: without a response, or with one that is `cut_off`, as
            TRL would train an end that the model did not choose.

    Returns:
        Columns `messages`, or `prompt` and `completion` (TRL then computes the loss on the completion alone): both
        texts, or both lists of messages. White space separates plain texts, a line end if there is none, so that the
        prompt's tokens are the same with and without the response.

    Raises:
        FulldepthError: if there is nothing to read, rows are of another kind, a role is unknown, no row has a response,
            or the data are chats and the tokenizer has no chat template.
    """
    opened = open_data(data, config=config, split=split, suffixes=TABLES)
    chunks: list[datasets.Dataset] = []
    waiting: list[dict[str, Any]] = []
    left_out = cut = 0
    for _, examples in read_conversations(opened.rows(), tokenizer):
        left_out += not examples
        whole = [example for example in examples if not example.get(CUT_OFF)]
        cut += len(examples) - len(whole)
        waiting.extend(whole)
        if len(waiting) >= CHUNK:
            chunks.append(_table(waiting))
            waiting = []
    if waiting:
        chunks.append(_table(waiting))
    if not chunks:
        raise FulldepthError(f"{opened.name} has no row with a response. Expected rows with the columns {EXPECTED}.")
    for number, what in ((left_out, "no response"), (cut, "a response that was cut off")):
        if number:
            (watcher or Watcher()).say(f"{number} of the rows of {opened.name} have {what} and are left out.")
    return datasets.concatenate_datasets(chunks)


def read_conversations(rows: Rows, tokenizer: Any = None) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Location of each row, and the examples that `conversations` makes of it, before it leaves out those with
    `CUT_OFF`; none if the row has no response.

    The first row determines how all rows are read. Arguments and errors are those of `conversations`.
    """
    shape = None
    for where, row in rows:
        shape = shape or _shape(row, where, tokenizer)
        examples = _examples(row, where, shape)
        if row.get(CUT_OFF) is True and shape.chat is None:
            examples = [{**example, CUT_OFF: True} for example in examples]
        yield where, examples


def is_conversation(row: Mapping[str, Any]) -> bool:
    """Whether a row has the columns of a chat, or of a prompt with its response."""
    return any(column in row for column in CHAT_COLUMNS) or any(set(pair) <= set(row) for pair in PROMPT_COLUMNS)


def conversation_prompts(rows: Rows, tokenizer: Any) -> Iterator[tuple[str, Prompt]]:
    """Location and prompt of each row: messages for a chat template, else text that ends in white space.

    The first row determines how all rows are read. Responses are not read and may be missing; the prompt of a chat ends
    before a final response. Errors are those of `conversations`.
    """
    shape = None
    for where, row in rows:
        shape = shape or _shape(row, where, tokenizer, answered=False)
        if shape.chat is not None:
            messages = _messages(row, where, shape.chat)
            yield where, messages[:-1] if messages and messages[-1]["role"] == "assistant" else messages
        else:
            prompt = _prompt(row, where, shape)
            yield where, _separated(prompt) if isinstance(prompt, str) else prompt


def _shape(row: Mapping[str, Any], where: str, tokenizer: Any, *, answered: bool = True) -> _RowShape:
    """How to read rows like this one; if `answered`, it must have a column of responses."""
    template = tokenizer is not None and bool(tokenizer.chat_template)
    chat = next((column for column in CHAT_COLUMNS if column in row), None)
    pair = next((pair for pair in PROMPT_COLUMNS if pair[0] in row and (not answered or pair[1] in row)), None)
    if chat is None and pair is None:
        lacking = "columns of conversations" if answered else "column of prompts"
        raise FulldepthError(f"{where} has no {lacking}. Got: {names_of(row)}. Expected: {EXPECTED}.")
    is_chat = chat is not None or isinstance(row[pair[0]], list)  # type: ignore[index]
    if is_chat and tokenizer is not None and not template:
        raise FulldepthError(
            f"{where} holds a chat, but the tokenizer has no chat template. Use the tokenizer of a chat model, set its "
            "chat_template, or give prompts and responses as plain text."
        )
    context = "input" if pair == ("instruction", "output") and "input" in row else None
    return _RowShape(chat, pair or ("", ""), context, template or (chat is None and is_chat))


def _examples(row: Mapping[str, Any], where: str, shape: _RowShape) -> list[dict[str, Any]]:
    """The examples of a row: one, or none."""
    if shape.chat is not None:
        messages = _messages(row, where, shape.chat)
        return [{"messages": messages}] if _answered(messages[1:]) else []
    column = shape.pair[1]
    require_columns(row, shape.pair, where)
    prompt = _prompt(row, where, shape)
    if isinstance(row[shape.pair[0]], list):
        completion = _messages(row, where, column)
        return [{"prompt": prompt, "completion": completion}] if prompt and _answered(completion) else []
    response = text_value(row[column], f"{where}, {column!r}")
    if not response.strip():
        return []
    if isinstance(prompt, list):
        return [{"prompt": prompt, "completion": [{"role": "assistant", "content": response}]}]
    return [{"prompt": prompt if response[0].isspace() else _separated(prompt), "completion": response}]


def _answered(messages: list[Message]) -> bool:
    return any(message["role"] == "assistant" and message["content"].strip() for message in messages)


def _prompt(row: Mapping[str, Any], where: str, shape: _RowShape) -> Prompt:
    column = shape.pair[0]
    require_columns(row, [column], where)
    if isinstance(row[column], list):
        return _messages(row, where, column)
    prompt = text_value(row[column], f"{where}, {column!r}")
    if shape.context is not None and row.get(shape.context):
        prompt += "\n\n" + text_value(row[shape.context], f"{where}, {shape.context!r}")
    return [{"role": "user", "content": prompt}] if shape.template else prompt


def _separated(prompt: str) -> str:
    """The prompt with white space at its end, so that its tokens are the same with and without a response."""
    return prompt if not prompt or prompt[-1].isspace() else prompt + "\n"


def _messages(row: Mapping[str, Any], where: str, column: str) -> list[Message]:
    """The messages in a column of a row."""
    require_columns(row, [column], where)
    value, messages = row[column], []
    if not isinstance(value, list) or not all(isinstance(message, Mapping) for message in value):
        raise FulldepthError(
            f"{where}, {column!r} is of type {type(value).__name__}, expected a list of role and content."
        )
    for number, message in enumerate(value, start=1):
        place = f"{where}, {column!r}, message {number}"
        keys = ("from", "value") if "from" in message and "value" in message else ("role", "content")
        require_columns(message, keys, place)
        role, content = (text_value(message[key], f"{place}, {key!r}") for key in keys)
        if role not in ROLES:
            raise unknown(f"role of {place}", role, ROLES)
        messages.append({"role": ROLES[role], "content": content})
    return messages


def _table(examples: list[dict[str, Any]]) -> datasets.Dataset:
    text = datasets.Value("string")
    messages = [{"role": text, "content": text}]
    features = {name: text if isinstance(value, str) else messages for name, value in examples[0].items()}
    return datasets.Dataset.from_list(examples, features=datasets.Features(features))

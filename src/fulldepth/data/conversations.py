"""Prompts with responses, and chats: as data sets for TRL's `SFTTrainer`, and as token ids, through the tokenizer's
chat template or as plain text.

`encode_pair` makes the ids of a prompt and of its response. `response_examples` makes an `Example` of each response,
whose labels are the response's ids, or with `score=all` all ids but the first, and `IGNORE` elsewhere. Training labels
all responses of a chat in one sequence, or in several where the template rewrites earlier turns
(`training.text.chat_examples`).
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict

import datasets
from jinja2 import TemplateError

from fulldepth.core.errors import FulldepthError, names_of, one_line, unknown
from fulldepth.core.files import reading
from fulldepth.core.progress import Watcher
from fulldepth.data.batches import Example
from fulldepth.data.columns import (
    CHAT_COLUMNS,
    CUT_OFF,
    END,
    PROMPT_COLUMNS,
    TEMPLATE_ARGUMENTS,
    TOOLS,
    Rows,
    prompt_text,
    require_columns,
    text_value,
    type_of_cell,
)
from fulldepth.data.files import TABLES
from fulldepth.data.opening import open_data
from fulldepth.data.tokens import Frame, plain_ids

ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool")} | {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
"""Role in the data -> role in chat templates."""
UNREAD = ("tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")
"""Entries of a message that chat templates write beside its content."""
EXPECTED = " or ".join([*CHAT_COLUMNS, *(" + ".join(pair) for pair in PROMPT_COLUMNS)])
PROBE = "fulldepth-response"
"""A response that no chat template rewrites."""
MARKS = 2
"""Occurrences in a conversation of three turns from which on a token marks turns."""
CLOSED = re.compile(r"(</|\[/)[^<>\[\]]*[>\]]\Z|<[^<>|]+\|>\Z")
"""The end of a mark that closes what it opens: `<think></think>`, `</think>`, `<|channel>thought<channel|>`."""
CHUNK = 1000
"""Rows held as Python objects before they are converted to Arrow."""
NAMED = 3
"""Too long sequences that a message names."""

Message: TypeAlias = dict[str, str]


class PromptWithTools(TypedDict):
    """The messages before the response, of a chat with functions."""

    prompt: list[Message]
    tools: str
    """The functions that the chat template is given: a JSON list."""


Prompt: TypeAlias = str | list[Message] | PromptWithTools
"""Plain text, or the messages before the response."""
Score = Literal["responses", "all"]
"""Tokens of a conversation that are predicted: those of the responses, or all but the first of each sequence."""


def conversations(
    data: Any,
    tokenizer: Any = None,
    *,
    config: str | None = None,
    split: str | None = None,
    held_out: bool = False,
    watcher: Watcher | None = None,
) -> datasets.Dataset:
    """Chats, or prompts with responses, for fine-tuning on the responses only.

    Args:
        data: as for `open_data`, without plain text. Rows hold `messages` (a list of `role` and `content`; ShareGPT's
            `conversations` with `from` and `value` also), or a prompt and a response in one of the pairs of columns
            that `fulldepth measure` reads (`prompt` + `response`, ...). The template of chats is given the functions
            in the column `tools`, a list or its JSON text.
        tokenizer: with a chat template, which chats need, a pair becomes two messages. None = not known yet: pairs
            stay plain text.
        config: configuration of a Hub data set.
        split: split of a Hub data set; None: see `held_out`.
        held_out: without `split`, take the part to validate on, as `open_data` does, in place of the training part.
        watcher: receives the numbers of rows that are left out: without a response, or with one that is `cut_off`, as
            TRL would train an end that the model did not choose.

    Returns:
        Columns `messages`, or `prompt` and `completion` (TRL then computes the loss on the completion alone): both
        texts, or both lists of messages; of chats with functions also `tools`, as JSON; with generated responses also
        `cut_off` and `end`. White space separates plain texts, a line end if there is none, so that the prompt's tokens
        are the same with and without the response.

    Raises:
        FulldepthError: if there is nothing to read, rows are of another kind, a role is unknown, functions are no list
            of JSON objects, no row has a response, or the data are chats and the tokenizer has no chat template.
    """
    opened = open_data(data, config=config, split=split, held_out=held_out, suffixes=TABLES)
    left_out: Counter[str] = Counter()

    def whole() -> Iterator[dict[str, Any]]:
        for _, example in read_conversations(opened.rows(), tokenizer):
            left_out["no response"] += not example
            left_out["a response that was cut off"] += example.get(CUT_OFF) is True
            if example and not example.get(CUT_OFF):
                yield example

    examples = whole()
    chunks = []
    text = datasets.Value("string")
    messages = [{"role": text, "content": text}]
    for chunk in iter(lambda: list(islice(examples, CHUNK)), []):
        features = {key: text if isinstance(value, str) else messages for key, value in chunk[0].items()}
        for name, kind in ((CUT_OFF, datasets.Value("bool")), (END, text), (TOOLS, text)):
            if any(name in example for example in chunk):
                features[name] = kind
                chunk = [{**example, name: example.get(name)} for example in chunk]
        with reading(opened.name):  # rows of different kinds
            chunks.append(datasets.Dataset.from_list(chunk, features=datasets.Features(features)))
    if not chunks:
        raise FulldepthError(f"{opened.name} has no row with a response. Expected rows with the columns {EXPECTED}.")
    for what, number in left_out.items():
        if number:
            (watcher or Watcher()).say(f"{number} of the rows of {opened.name} have {what} and are left out.")
    return datasets.concatenate_datasets(chunks)


def read_conversations(rows: Rows, tokenizer: Any = None, *, chat: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
    """Location of each row, and the example that `conversations` makes of it, before it leaves out those with
    `CUT_OFF`; empty if the row has no response.

    The first row determines the columns. Without `chat`, pairs of texts stay plain text although the tokenizer has a
    chat template. The other arguments, and errors, are those of `conversations`.
    """
    columns = None
    for where, row in rows:
        columns = columns or _columns(row, where)
        prompt = _prompt(row, where, columns, tokenizer, chat)
        response = columns[1]
        is_chat = response is None or isinstance(row[columns[0]], list)
        functions = _tools(row, where) if is_chat else None
        tools = {} if functions is None else {TOOLS: functions}
        if response is None:
            yield where, {"messages": prompt, **tools} if _answered(prompt[1:]) else {}
            continue
        if is_chat:
            completion: Any = _messages(row, where, response)
            answered = prompt and _answered(completion)
        else:
            require_columns(row, columns, where)
            completion = text_value(row[response], f"{where}, {response!r}")
            answered = completion.strip()
            if isinstance(prompt, list):
                completion = [{"role": "assistant", "content": completion}]
            elif not completion[:1].isspace():
                prompt = _separated(prompt)
        ending = {key: row[key] for key, kind in ((CUT_OFF, bool), (END, str)) if isinstance(row.get(key), kind)}
        ending = ending if CUT_OFF in ending else {}  # `end` may be a column of other data
        yield where, {"prompt": prompt, "completion": completion, **ending, **tools} if answered else {}


def conversation_prompts(rows: Rows, tokenizer: Any, *, chat: bool = True) -> Iterator[tuple[str, Prompt]]:
    """Location and prompt of each row: messages for a chat template, else (texts without `chat` too) text that ends in
    white space.

    The first row determines how all rows are read. Responses are not read and may be missing; the prompt of a chat ends
    before a final response. Errors are those of `conversations`.
    """
    columns = None
    for where, row in rows:
        columns = columns or _columns(row, where, answered=False)
        prompt = _prompt(row, where, columns, tokenizer, chat)
        if isinstance(prompt, str):
            yield where, _separated(prompt)
            continue
        if columns[1] is None and prompt and prompt[-1]["role"] == "assistant":
            prompt = prompt[:-1]
        is_chat = isinstance(row[columns[0]], list)
        yield where, with_tools(prompt, _tools(row, where) if is_chat else None)


def _columns(row: Mapping[str, Any], where: str, *, answered: bool = True) -> tuple[str, str | None]:
    """Columns of prompts and, if `answered`, of responses; of whole chats, and None."""
    kinds: list[tuple[str, str | None]] = [*((column, None) for column in CHAT_COLUMNS), *PROMPT_COLUMNS]
    columns = next((c for c in kinds if c[0] in row and (not answered or c[1] is None or c[1] in row)), None)
    if columns is None:
        lacking = "columns of conversations" if answered else "column of prompts"
        raise FulldepthError(f"{where} has no {lacking}. Got: {names_of(row)}. Expected: {EXPECTED}.")
    return columns


def _tools(row: Mapping[str, Any], where: str) -> str | None:
    """The functions that the template of a chat is given, as JSON; None if the row has none."""
    if row.get(TEMPLATE_ARGUMENTS):
        raise FulldepthError(
            f"{where} has {TEMPLATE_ARGUMENTS!r}, which are not read, so the chat template would write another text. "
            "Leave the row out, or set them in the template itself."
        )
    tools = row.get(TOOLS)
    place = f"{where}, {TOOLS!r}"
    try:
        functions = json.loads(tools) if isinstance(tools, str) else tools
        written = json.dumps(functions)
    except (TypeError, ValueError, RecursionError) as error:
        raise FulldepthError(f"{place} is no JSON: {one_line(str(error), 200)}.") from error
    if functions is None:
        return None
    if not isinstance(functions, list):
        raise FulldepthError(f"{place} is {type_of_cell(functions)}, expected a list of functions as JSON objects.")
    for number, function in enumerate(functions, start=1):
        if not isinstance(function, Mapping):
            raise FulldepthError(f"{place}, function {number} is {type_of_cell(function)}, expected a JSON object.")
    return written


def with_tools(messages: list[Message], tools: str | None) -> Prompt:
    """Messages, with functions if the chat has them."""
    return messages if tools is None else {"prompt": messages, "tools": tools}


def messages_and_tools(prompt: list[Message] | PromptWithTools) -> tuple[list[Message], str | None]:
    """The parts of a prompt that `with_tools` joined."""
    return (prompt, None) if isinstance(prompt, list) else (prompt["prompt"], prompt["tools"])


def _answered(messages: Any) -> bool:
    return any(message["role"] == "assistant" and message["content"].strip() for message in messages)


def _prompt(
    row: Mapping[str, Any], where: str, columns: tuple[str, str | None], tokenizer: Any, chat: bool
) -> str | list[Message]:
    """The prompt of a row, or its whole chat."""
    column, response = columns
    require_columns(row, [column], where)
    if response is None or isinstance(row[column], list):
        if tokenizer is not None and not tokenizer.chat_template:
            raise FulldepthError(
                f"{where} holds a chat, but the tokenizer has no chat template. Use the tokenizer of a chat model, set "
                "its chat_template, or give prompts and responses as plain text."
            )
        return _messages(row, where, column)
    prompt = prompt_text(row, columns, where)
    templated = chat and tokenizer is not None and tokenizer.chat_template
    return [{"role": "user", "content": prompt}] if templated else prompt


def _separated(prompt: str) -> str:
    """The prompt with white space at its end, so that its tokens are the same with and without a response."""
    return prompt if not prompt or prompt[-1].isspace() else prompt + "\n"


def _messages(row: Mapping[str, Any], where: str, column: str) -> list[Message]:
    """The messages in a column of a row."""
    require_columns(row, [column], where)
    value = row[column]
    messages = []
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
        if unread := [key for key in UNREAD if message.get(key)]:
            raise FulldepthError(
                f"{place} has {unread[0]!r}, but only role and content are read, so it would be missing. Write it into "
                "the content as the model's template does, or leave the row out."
            )
        messages.append({"role": ROLES[role], "content": content})
    return messages


def as_prompt(tokenizer: Any, prompt: Prompt) -> Prompt:
    """A prompt in the form of `conversation_prompts`; `FulldepthError` for messages without a chat template."""
    if tokenizer.chat_template:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(prompt, str):
        raise FulldepthError(
            "The prompt is a list of messages, and the tokenizer has no chat template. Give text, or the tokenizer of "
            "a chat model."
        )
    return _separated(prompt)


def encode_prompt(tokenizer: Any, prompt: Prompt, where: str = "The prompt") -> list[int]:
    """Token ids after which a response follows; `FulldepthError` if the chat template refuses the messages."""
    if isinstance(prompt, str):
        return [*Frame.of(tokenizer, [prompt]).prefix, *plain_ids(tokenizer, prompt)]
    messages, tools = messages_and_tools(prompt)
    return plain_ids(tokenizer, _render(tokenizer, messages, where, answer=True, tools=tools))


def encode_turns(tokenizer: Any, example: Mapping[str, Any], where: str) -> Iterator[EncodedTurn]:
    """Encode each response of an example of `read_conversations` behind all that precedes it.

    Raises:
        FulldepthError: as `encode_pair`; for an empty prompt or response.
    """
    for prompt, response in _turns(example, where):
        before, answer, after = encode_pair(
            tokenizer, prompt, response, where, cut_off=example.get(CUT_OFF), end=example.get(END)
        )
        yield EncodedTurn(before, answer, after)


def response_examples(
    rows: Iterable[tuple[int, str, Mapping[str, Any]]],
    tokenizer: Any,
    *,
    name: str,
    longest: int | None = None,
    score: Score = "responses",
    skip_empty: bool = False,
    truncate: bool = False,
    advice: str,
) -> tuple[list[Example], list[str]]:
    """A sequence for each response, behind all that precedes it, to be measured or searched with.

    Args:
        rows: document, location, and the example of `read_conversations`, of each row.
        tokenizer: the model's.
        name: of the data, for messages.
        longest: most tokens of a sequence; None = any number.
        score: tokens that are predicted.
        skip_empty: leave out rows without a response, and responses without a token, and count them; else refuse them.
        truncate: cut longer sequences; else refuse them.
        advice: what a user can do about sequences that are too long.

    Returns:
        The sequences, and warnings on those that are left out or cut.

    Raises:
        FulldepthError: as `encode_turns`; for sequences that are too long, and empty rows or responses.
    """
    examples: list[Example] = []
    too_long: list[tuple[int, str]] = []
    empty = 0
    for document, where, conversation in rows:
        if skip_empty and not conversation:
            empty += 1
            continue
        for turn in encode_turns(tokenizer, conversation, where):
            size = len(turn.ids)
            start, stop = (1, size) if score == "all" else turn.scored
            if start >= stop and skip_empty:
                empty += 1
                continue
            if start >= stop:
                raise FulldepthError(f"The response of {where} has no token that can be predicted.")
            if longest is not None and size > longest:
                parts = f"{len(turn.before)} in the prompt, {len(turn.response)} in the response"
                too_long.append((size, f"{where} has {size} ({parts})"))
            examples.append(Example.of(turn.ids[:longest], start, stop, document=document))
    warnings = empty_warning(empty, "response")
    if too_long:
        message = f"{len(too_long)} of {len(examples)} prompts with their responses are longer than {longest} tokens"
        if not truncate:
            named = "; ".join(text for _, text in too_long[:NAMED])
            more = "; ..." if len(too_long) > NAMED else ""
            raise FulldepthError(f"{message}; the longest has {max(too_long)[0]}. In {name}: {named}{more}. {advice}")
        warnings.append(f"{message} and cut there.")
    return examples, warnings


def empty_warning(count: int, noun: str = "text") -> list[str]:
    """A warning on texts or responses that give no token; none if there are none."""
    what, verb = (f"1 {noun} gives", "is") if count == 1 else (f"{count} {noun}s give", "are")
    return [f"{what} no token with this tokenizer and {verb} left out."] if count else []


class EncodedTurn(NamedTuple):
    """Token ids of a response and what surrounds it."""

    before: list[int]
    """All that precedes the response."""
    response: list[int]
    after: list[int]
    """Special tokens after it, which are no part of it."""

    @property
    def ids(self) -> list[int]:
        """The whole sequence."""
        return [*self.before, *self.response, *self.after]

    @property
    def scored(self) -> tuple[int, int]:
        """First token of the response that has a context, and the position after its last one."""
        return max(1, len(self.before)), len(self.before) + len(self.response)


def _turns(example: Mapping[str, Any], where: str) -> Iterator[tuple[Any, Any]]:
    """(prompt, response) of each response: two texts, or messages and a message."""
    if not example:
        raise FulldepthError(f"{where} has no response. Leave the row out, or give it one.")
    prompt = example.get("prompt", [])
    if isinstance(prompt, str):
        if not prompt.strip():
            raise FulldepthError(f"{where} has an empty prompt. Leave the row out, or give it one.")
        yield prompt, example["completion"]
        return
    messages = example.get("messages") or [*prompt, *example["completion"]]
    for index in range(max(1, len(prompt)), len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        if not messages[index]["content"].strip():
            raise FulldepthError(f"{where} has an empty response, message {index + 1}. Leave it out.")
        if not any(message["content"].strip() for message in messages[:index]):
            raise FulldepthError(f"{where} has an empty prompt. Leave the row out, or give it one.")
        yield with_tools(messages[:index], example.get(TOOLS)), messages[index]


def encode_pair(
    tokenizer: Any,
    prompt: Prompt,
    response: str | Message,
    where: str = "The pair",
    *,
    cut_off: bool | None = None,
    end: str | None = None,
) -> tuple[list[int], list[int], list[int]]:
    """Token ids of the prompt, the response, and the special tokens after it, which are no part of it.

    The prompt is that of `encode_prompt`, and the response has the tokens that follow it in the text of both, as
    lm-eval scores an answer; where the prompt has other tokens there, it is tokenised separately. Under a template the
    response includes the end-of-turn token, without white space after it, unless it was cut off: then the model did
    not end it there. The response is as the template writes it; a generated one (`cut_off` is not None), and one of
    which the template would leave a part out (reasoning), is as it is given. A generated one ends with `end`, the text
    of the token by which the model ended it; None = as the template ends it.

    Raises:
        FulldepthError: if the chat template refuses the messages, renders the prompt differently with a response, or
            opens each answer with a mark, such as `<think>`, that the response neither repeats nor closes.
    """
    if isinstance(prompt, str):
        assert isinstance(response, str)
        after = list(Frame.of(tokenizer, [prompt]).suffix)
        return encode_prompt(tokenizer, prompt), _ids_behind(tokenizer, prompt, response), after
    assert not isinstance(response, str)
    messages, tools = messages_and_tools(prompt)
    render = partial(_render, tokenizer, where=where, tools=tools)
    opening = render(messages, answer=True)
    content = response["content"]
    if cut_off:
        text = content
    elif cut_off is False:
        text = content + (end or _end_of_turn(render, messages, response, where))
    else:
        text = _answer(render, messages, response, opening, where)
    answer = _ids_behind(tokenizer, opening, text)
    if not cut_off:
        answer = _without_white_space(tokenizer, answer)
    return plain_ids(tokenizer, opening), answer, []


def _ids_behind(tokenizer: Any, before: str, text: str) -> list[int]:
    """Token ids of a text behind another one; alone, some tokenizers (SentencePiece) put a space before it."""
    head = plain_ids(tokenizer, before)
    whole = plain_ids(tokenizer, before + text)
    return whole[len(head) :] if len(whole) > len(head) and whole[: len(head)] == head else plain_ids(tokenizer, text)


def _without_white_space(tokenizer: Any, answer: list[int]) -> list[int]:
    """A response without white space behind its last special token, where generation stops."""
    marks = {tokenizer.eos_token_id}  # an end of turn need not be the tokenizer's end of text
    marks |= {number for number, token in getattr(tokenizer, "added_tokens_decoder", {}).items() if token.special}
    last = len(answer)
    while last and not tokenizer.decode(answer[last - 1 : last]).strip():
        last -= 1
    return answer[:last] if last and answer[last - 1] in marks else answer


def _answer(render: Callable[..., str], prompt: list[Message], response: Message, opening: str, where: str) -> str:
    """The text after `opening`, the generation prompt, of a response that was not generated; as `encode_pair`."""
    full = render([*prompt, response], answer=False)
    start = _common(opening, full)
    content = response["content"].strip()
    if start == len(opening):
        written, before, text = ("".join(part.split()) for part in (full, opening, content))
        if written.rfind(text) + len(text) > len(before):  # all of the response, white space aside
            return full[start:]
    elif start < len(render(prompt, answer=False).rstrip()):
        raise FulldepthError(
            f"{where}: the tokenizer's chat template writes the prompt differently once a response follows, so it "
            "is not known where the response begins. Use another chat template, or prompt and response as text."
        )
    mark = opening[_common(opening, _probed(render, prompt, response)) :].strip()  # such as <think>
    close = mark[:1] + "/" + mark[1:]
    if CLOSED.search(mark):  # the answer follows reasoning that is switched off
        content = response["content"]
    elif mark and content.startswith(mark):
        content = content[len(mark) :].lstrip() if opening[-1].isspace() else content[len(mark) :]
    elif mark and close not in content:
        raise FulldepthError(
            f"{where}: the tokenizer's chat template opens each answer with {one_line(repr(mark), 60)}. Expected a "
            f"response with reasoning, which begins with this mark or has {one_line(repr(close), 60)} behind it. Add "
            "it, let the model write the responses (--generate-responses), or use another chat template."
        )
    return content + _end_of_turn(render, prompt, response, where)


def _end_of_turn(render: Callable[..., str], prompt: list[Message], response: Message, where: str) -> str:
    """Return the text that the chat template writes after a response."""
    full = _probed(render, prompt, response)
    if PROBE not in full:
        raise FulldepthError(f"{where}: the chat template rewrites the response, so its end is not known.")
    return full[full.rfind(PROBE) + len(PROBE) :]


def _probed(render: Callable[..., str], prompt: list[Message], response: Message) -> str:
    """The rendered messages with `PROBE` as the response."""
    return render([*prompt, {**response, "content": PROBE}], answer=False)


def _common(first: str, second: str) -> int:
    """The number of characters with which both texts begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


class UserTurn(NamedTuple):
    """The parts of a chat template around the text of the first user's turn."""

    opening: str
    """All before it, such as a system prompt and the mark of a turn."""
    closing: str
    """All behind it, up to where the answer begins."""


def user_turn(tokenizer: Any) -> UserTurn:
    """The user's turn of a chat template.

    Raises:
        FulldepthError: if the template refuses a single user's turn, or changes its text.
    """
    rendered = _render(tokenizer, [{"role": "user", "content": PROBE}], "A user's turn", answer=True)
    opening, probe, closing = rendered.partition(PROBE)
    if not probe or PROBE in closing:
        raise FulldepthError("The tokenizer's chat template rewrites the user's turn, so its beginning is not known.")
    return UserTurn(opening, closing)


def document_start(tokenizer: Any) -> int | None:
    """The special token with which a document begins; None if the tokenizer has none.

    It is the first of the tokenizer's BOS, EOS, padding and unknown tokens that does not mark the turns of its chat
    template: models are trained with one token between documents, and it is often both BOS and EOS.
    """
    rendered = ""
    turns = [{"role": role, "content": PROBE} for role in ("user", "assistant", "user")]
    for conversation in (turns[:1], turns) if tokenizer.chat_template else ():
        with suppress(FulldepthError):  # some templates refuse the answer, or everything
            rendered = _render(tokenizer, conversation, "A conversation", answer=True)
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = [token for name in names if isinstance(token := getattr(tokenizer, name, None), str) and token]
    unmarked = (token for token in tokens if rendered.count(token) < MARKS)
    return next((int(tokenizer.convert_tokens_to_ids(token)) for token in unmarked), None)


def reasoning_mark(tokenizer: Any) -> str:
    """The mark, such as `<think>`, with which the chat template begins each answer; empty for other templates."""
    opening = _render(tokenizer, [{"role": "user", "content": "?"}], "A question", answer=True)
    mark = re.search(r"[<\[][^\w/]?\w*think\w*\W?[>\]]\s*\Z", opening, re.IGNORECASE)
    return mark.group().strip() if mark else ""


def _render(tokenizer: Any, messages: list[Message], where: str, *, answer: bool, tools: str | None = None) -> str:
    functions = {} if tools is None else {TOOLS: json.loads(tools)}
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer, **functions)
        return text
    except TemplateError as error:
        reason = one_line(str(error), 300)
        raise FulldepthError(f"{where}: the tokenizer's chat template refuses the messages: {reason}.") from error
    except Exception as error:  # a template is code of the checkpoint, run in jinja2's sandbox: it may fail in any way
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        raise FulldepthError(f"{where}: the tokenizer's chat template fails: {reason}.") from error

"""Prompts and responses as token ids: as plain text, or through the tokenizer's chat template."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError

from fulldepth.data.conversations import Message, Prompt
from fulldepth.data.tokens import Frame, plain_ids
from fulldepth.errors import FulldepthError, one_line


def as_prompt(tokenizer: Any, prompt: Prompt) -> Prompt:
    """A prompt in the form of `conversation_prompts`; `FulldepthError` for messages without a chat template."""
    if tokenizer.chat_template:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not isinstance(prompt, str):
        raise FulldepthError("A prompt of messages needs a chat template, which the tokenizer does not have.")
    return prompt if prompt[-1:].isspace() else prompt + "\n"


def encode_prompt(tokenizer: Any, prompt: Prompt, where: str = "The prompt") -> list[int]:
    """Token ids after which a response follows; `FulldepthError` if the chat template refuses the messages."""
    if isinstance(prompt, str):
        return [*Frame.of(tokenizer, [prompt]).prefix, *plain_ids(tokenizer, prompt)]
    return plain_ids(tokenizer, _render(tokenizer, prompt, where, answer=True))


def encode_pair(
    tokenizer: Any, prompt: Prompt, response: str | Message, where: str = "The pair", *, cut_off: bool = False
) -> tuple[list[int], list[int], list[int]]:
    """Token ids of the prompt, the response, and the special tokens after it, which have no loss.

    Prompt and response are tokenised separately, so that the prompt is the same as for generation. Under a chat
    template the response includes the end-of-turn token, without white space after it, unless it was `cut_off`: then
    the model did not end it there.

    Raises:
        FulldepthError: if the chat template refuses the messages, or renders the prompt differently with a response.
    """
    before = encode_prompt(tokenizer, prompt, where)
    if isinstance(prompt, str):
        assert isinstance(response, str)
        return before, plain_ids(tokenizer, response), list(Frame.of(tokenizer, [prompt]).suffix)
    assert not isinstance(response, str)
    opening = _render(tokenizer, prompt, where, answer=True)
    full = _render(tokenizer, [*prompt, response], where, answer=False)
    pairs = enumerate(zip(opening, full, strict=False))
    start = next((i for i, (a, b) in pairs if a != b), min(len(opening), len(full)))
    if start < len(opening):  # the generation prompt differs from the rendered answer
        if start < len(_render(tokenizer, prompt, where, answer=False).rstrip()):
            raise FulldepthError(
                f"{where}: the tokenizer's chat template writes the prompt differently once a response follows, so it "
                "is not known where the response begins. Use another chat template, or prompt and response as text."
            )
        content = full.rfind(response["content"].strip())
        start = min(start, content) if content >= 0 else start
        before = plain_ids(tokenizer, full[:start])
    if cut_off:
        text = response["content"].strip()
        if text not in full[start:]:
            raise FulldepthError(f"{where}: the chat template rewrites the response, so its cut end is not known.")
        return before, plain_ids(tokenizer, full[start : full.rfind(text) + len(text)]), []
    return before, _to_end_of_turn(tokenizer, plain_ids(tokenizer, full[start:])), []


def _render(tokenizer: Any, messages: list[Message], where: str, *, answer: bool) -> str:
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
        return text
    except TemplateError as error:
        reason = one_line(str(error), 300)
        raise FulldepthError(f"{where}: the tokenizer's chat template refuses the messages: {reason}.") from error
    except Exception as error:  # a template is code of the checkpoint, run in jinja2's sandbox: it may fail in any way
        reason = one_line(f"{type(error).__name__}: {error}", 300)
        raise FulldepthError(f"{where}: the tokenizer's chat template fails: {reason}.") from error


def _to_end_of_turn(tokenizer: Any, ids: list[int]) -> list[int]:
    """`ids` without white space after the end-of-turn token, where generation stops."""
    if tokenizer.eos_token_id not in ids:
        return ids
    last = len(ids) - ids[::-1].index(tokenizer.eos_token_id)
    return ids if tokenizer.decode(ids[last:]).strip() else ids[:last]

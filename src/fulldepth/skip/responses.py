"""`generate_responses`: the unmodified model's responses to prompts, used as data of a search."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import JsonValue
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError, differences
from fulldepth.core.files import read_document, sha256_of, sha256_of_file, write_text
from fulldepth.core.progress import Watcher
from fulldepth.data.conversations import Prompt, as_prompt, conversation_prompts, encode_prompt, messages_and_tools
from fulldepth.data.files import TABLES
from fulldepth.data.opening import open_data
from fulldepth.hf import end_tokens, unused_positions
from fulldepth.settings import Settings
from fulldepth.settings.keywords import takes_settings
from fulldepth.settings.layers import SET, Applies
from fulldepth.settings.loading import Amount, Length, Seed
from fulldepth.skip.sampling import answered_pair, check_writes, continuations, split_end
from fulldepth.subject import Subject

FILE = "responses.jsonl"
NOTES = "responses.json"
"""File that describes how the responses beside it were generated."""


class Sampling(Settings):
    """Settings of a generation."""

    options: ClassVar = {"Data": ("temperature", "max_new_tokens")}
    applies: ClassVar = (Applies(("temperature", "max_new_tokens"), {"generate_responses": SET}),)

    temperature: Amount = 0.0
    """0 = greedy."""
    seed: Seed = 0
    """Seed of the noise."""
    max_new_tokens: Length = 256
    """Most tokens of a response; longer ones are cut off."""
    batch_size: Length = 8
    """Prompts in a batch; prompts are sorted by length."""


class ResponseNotes(Settings):
    """The entries of `responses.json`, which is written before the responses."""

    asked: dict[str, JsonValue]
    """Model, prompts and settings that determine the responses."""
    made: dict[str, JsonValue]
    """`Responses.settings`."""
    sha256: str
    """Digest of `responses.jsonl`."""


class Responses(NamedTuple):
    """Prompts with the model's responses, and the settings of their generation."""

    pairs: list[dict[str, Any]]
    """`prompt` and `response`, for `read_examples`: both texts, or both lists of messages, special tokens included;
    `tools` of prompts with functions. `cut_off` is true where the limit of tokens ended the response, so that no loss
    is put on an end that the model did not choose. `end` is the text of the token by which the model ended the
    others."""
    settings: dict[str, Any]
    """Settings of the generation, and counts of responses; plain values for a plan's `data`."""


def read_prompts(
    data: Any, tokenizer: Any, limit: int | None = None, seed: int = 0, *, chat: bool = True
) -> list[Prompt]:
    """The prompts of rows, those of chats with the functions in the column `tools`; responses, if any, are ignored.

    Args:
        data: pairs as for `read_examples`; a row may also hold only a prompt. The prompt of a chat is everything
            before its last response.
        tokenizer: with a chat template, prompts become messages.
        limit: most rows, a uniform sample in the order of the data (of a stream the first ones); None = all.
        seed: of the sample.
        chat: False leaves prompts plain text although there is a template; those of chats are messages.

    Returns:
        A text, a list of messages, or a mapping with these and `tools` for each row, in the data's order.

    Raises:
        FulldepthError: if a row has no prompt, or there are no rows.
    """
    opened = open_data(data, streaming=limit is not None, suffixes=TABLES)
    rows = opened.rows()
    _, first = next(opened.rows(), ("", {}))
    if limit is not None:
        rows = opened.sampled(list(first), limit, seed=seed)
    prompts: list[Prompt] = []
    for where, prompt in conversation_prompts(rows, tokenizer, chat=chat):
        if not _has_text(prompt):
            raise FulldepthError(f"{where} has an empty prompt. Leave the row out, or give it one.")
        prompts.append(prompt)
    if not prompts:
        raise FulldepthError(f"There are no prompts in {opened.name}.")
    return prompts


@takes_settings(Sampling)
def generate_responses(
    model: PreTrainedModel, tokenizer: Any, prompts: Sequence[Prompt], *, settings: Sampling, watcher: Watcher
) -> Responses:
    """The model's responses to prompts, generated in batches with left padding and a cache.

    They are those of `fulldepth.skip.sampling.continuations`, whose noise is seeded by (`seed`, number of the prompt).
    Of the checkpoint's `generation_config` only the end tokens are used. Empty responses are left out and reported.

    Args:
        model: a causal language model; runs in evaluation mode, which is restored on leaving.
        tokenizer: the model's, with its chat template if it has one.
        prompts: texts, lists of messages, or mappings with these as `prompt` and with `tools` (see `read_prompts`).
        settings: fields of `Sampling` as keywords, or an instance.
        watcher: receives progress, and messages on empty and unfinished responses.

    Returns:
        Pairs in the order of the prompts, and the settings.

    Raises:
        FulldepthError: for settings out of range, a model that cannot generate, prompts that are empty or leave
            no room for a response, or if no response is left.

    Source: Hopscotch (arXiv 2506.03303), its data generation.
    """
    max_new_tokens = settings.max_new_tokens
    if not prompts:
        raise FulldepthError("There are no prompts to respond to.")
    check_writes(model, "respond to prompts")
    rendered = [as_prompt(tokenizer, prompt) for prompt in prompts]
    encoded = [encode_prompt(tokenizer, prompt, f"Prompt {i}") for i, prompt in enumerate(rendered, start=1)]
    longest = max(map(len, encoded))
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None:
        positions -= unused_positions(model)
    for number, (prompt, ids) in enumerate(zip(rendered, encoded, strict=True), start=1):
        if not _has_text(prompt) or not ids:
            raise FulldepthError(f"Prompt {number} is empty. Leave it out, or give it text.")
        if positions is not None and len(ids) + max_new_tokens > positions:
            raise FulldepthError(
                f"Prompt {number} with {max_new_tokens} new tokens would be longer than the model's {positions} "
                f"positions; the longest prompt has {longest} tokens. Lower max_new_tokens, or leave it out."
            )
    ends = set(end_tokens(model, tokenizer))
    count = len(prompts)
    watcher.begin("Responses", count)
    answers = continuations(
        model,
        encoded,
        [max_new_tokens] * count,
        ends=ends,
        temperature=settings.temperature,
        seeds=[(settings.seed, number) for number in range(count)],
        batch_size=settings.batch_size,
        watcher=watcher,
    )
    facts = {"prompts": count, **settings.model_dump(), "chat_template": bool(tokenizer.chat_template)}
    written = prompts if tokenizer.chat_template else rendered  # a template gives the same messages when a pair is read
    return _responses(tokenizer, written, answers, ends, facts, watcher)


def _responses(
    tokenizer: Any,
    prompts: Sequence[Prompt],
    answers: Sequence[list[int]],
    ends: set[int],
    settings: dict[str, Any],
    watcher: Watcher,
) -> Responses:
    """Pairs in order, without the empty ones, which are reported."""
    pairs: list[dict[str, Any]] = []
    empty = []
    unfinished = 0
    tokens = 0
    for number, (prompt, ids) in enumerate(zip(prompts, answers, strict=False), start=1):
        body, end = split_end(ids, ends)
        pair = answered_pair(tokenizer, prompt, body, end)
        if pair is None:
            empty.append(number)
            continue
        unfinished += not end
        tokens += len(body)
        pairs.append(pair)
    settings |= {"empty": empty, "unfinished": unfinished, "response_tokens": tokens}
    if not pairs:
        raise FulldepthError(f"The model gave an empty response to each of the {len(answers)} prompts.")
    if empty:
        watcher.say(f"{len(empty)} of {len(answers)} responses are empty and left out, the first to prompt {empty[0]}.")
    if unfinished:
        watcher.say(
            f"{unfinished} of {len(answers)} responses were cut off after {settings['max_new_tokens']} tokens; no "
            "loss is put on their ends."
        )
    return Responses(pairs, settings)


def respond(
    subject: Subject, data: Any, count: int, folder: Path, sampling: Sampling, watcher: Watcher, *, chat: bool = True
) -> dict[str, Any]:
    """Write responses to prompts of `data` into `folder`, or reuse those of an earlier start with the same settings.

    Args:
        subject: a causal language model.
        data: as for `read_prompts`.
        count: number of prompts.
        folder: for `responses.jsonl` and `responses.json`.
        sampling: as for `generate_responses`.
        watcher: as for `generate_responses`.
        chat: as for `read_prompts`.

    Returns:
        `Responses.settings`, as stored.

    Raises:
        FulldepthError: as `generate_responses`; if the folder holds other responses, incomplete files of these names,
            or the data.
    """
    notes = folder / NOTES
    responses = folder / FILE
    if isinstance(data, str | Path) and Path(data).resolve() == responses.resolve():
        raise FulldepthError(
            f"The prompts are in {data}, which the generated responses would replace. Choose another output folder."
        )
    tokenizer = subject.tokenizer
    prompts = read_prompts(data, tokenizer, count, sampling.seed, chat=chat)
    if isinstance(prompts[0], str) and tokenizer.chat_template:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = None
    digest = sha256_of(json.dumps(prompts))
    asked = {**subject.identity, "prompts": f"sha256:{digest}", "count": count}
    asked |= sampling.model_dump(exclude={"batch_size"})
    if notes.exists() or responses.exists():
        try:
            stored = read_document(notes, ResponseNotes)
            wrong = differences(stored.asked, asked)
            if responses.exists() and sha256_of_file(responses) != stored.sha256:
                wrong = f"{responses} has changed since it was generated"
        except FulldepthError as error:
            wrong = str(error)
        if wrong:
            raise FulldepthError(
                f"{folder} holds other responses: {wrong.rstrip('.')}. Remove {notes} and {responses} to generate "
                "them again, or choose another output folder."
            )
        if responses.exists():  # else killed between the two files
            return dict(stored.made)
    generated = generate_responses(subject.model, tokenizer, prompts, settings=sampling, watcher=watcher)
    text = "".join(json.dumps(pair) + "\n" for pair in generated.pairs)
    document = {"asked": asked, "made": generated.settings, "sha256": sha256_of(text)}
    write_text(notes, json.dumps(document, indent=2))
    write_text(responses, text)
    return generated.settings


def _has_text(prompt: Prompt) -> bool:
    parts = [prompt] if isinstance(prompt, str) else [message["content"] for message in messages_and_tools(prompt)[0]]
    return any(part.strip() for part in parts)

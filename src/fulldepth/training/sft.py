"""Supervised fine-tuning on conversations, through TRL: chat templates, loss on the responses only."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fulldepth.data import conversations
from fulldepth.data.conversations import encode_pair
from fulldepth.errors import FulldepthError
from fulldepth.losses import ObjectiveMixin
from fulldepth.progress import Watcher
from fulldepth.settings.train import TrainSettings
from fulldepth.targets import IGNORE
from fulldepth.training.arguments import trl_module
from fulldepth.training.folder import TOKENIZER
from fulldepth.training.text import language_model, run_tokenizer
from fulldepth.training.trainer import RunData, RunMixin

TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'].capitalize() + ':\n' + message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:\n' }}{% endif %}"
)
"""For tokenizers without a chat template. The prompt ends in a line end, which tokenizers do not merge with a word."""
READ = {"input_ids", "labels", "attention_mask", "position_ids", "seq_lengths"}
"""Columns of a tokenised data set that determine batches and loss."""


def sft_data(settings: TrainSettings, tokenizer: Any) -> tuple[list[Any], dict[str, Any], list[str]]:
    """Conversations as token ids with labels on the responses, a seeded share of them held out (`held_out_rows`).

    Prompt and response are tokenised apart (`encode_pair`), so that every label is a token that the model can produce
    after that prompt. A tokenizer without a chat template gets `TEMPLATE`.

    Returns:
        Data sets of training and validation with the columns `input_ids` and `labels`; the fact `documents`
        (conversations of both); and warnings (what was cut or left out).

    Raises:
        FulldepthError: if the data hold fewer than two different conversations, no response begins within a sequence,
            or the chat template fails.
    """
    data, length, warnings = settings.data, settings.sequence_length, list[str]()
    if not tokenizer.chat_template:
        tokenizer.chat_template = TEMPLATE
    heard = Watcher(say=warnings.append)
    rows = conversations(data.name, tokenizer, config=data.config, split=data.split, watcher=heard)
    encoded = rows.map(
        partial(_encoded, tokenizer=tokenizer, length=length, name=data.name),
        batched=True,
        with_indices=True,
        remove_columns=rows.column_names,
    )
    row, size, answered = (np.array(encoded[name]) for name in ("row", "size", "answered"))
    left = np.unique(row[answered])
    if cut := len(np.unique(row[size > length])):
        warnings.append(
            f"{cut} of {len(rows)} conversations are longer than {length} tokens and are cut there (the longest has "
            f"{size.max()}); {len(rows) - len(left)} of them are left out, because no response begins before the cut."
        )
    if len(left) < 2:
        raise FulldepthError(
            f"{data.name} holds {len(rows)} conversations, {len(left)} of them with a response that begins within "
            f"sequence_length={length} tokens; training and validation need two."
        )
    most = min(max(1, round(len(left) * data.validation_share)), settings.most_validation)
    held_out = held_out_rows(rows.select(left), most, settings.seed)
    if held_out is None:
        raise FulldepthError(f"The {len(left)} conversations of {data.name} are one; training and validation need two.")
    validates = np.isin(row, left[held_out])
    columns = encoded.select_columns(["input_ids", "labels"])
    parts = [columns.select(np.flatnonzero(answered & chosen)) for chosen in (~validates, validates)]
    return parts, {"documents": len(left)}, warnings


def _encoded(
    rows: dict[str, list[Any]], numbers: list[int], *, tokenizer: Any, length: int, name: str
) -> dict[str, list[Any]]:
    """Examples of some conversations: ids and labels cut to `length`, the conversation's number, the size before the
    cut, and whether a label is left.
    """
    examples: dict[str, list[Any]] = {key: [] for key in ("input_ids", "labels", "row", "size", "answered")}
    for place, number in enumerate(numbers):
        chat = "messages" in rows
        messages = rows["messages"][place] if chat else [*rows["prompt"][place], *rows["completion"][place]]
        first = 1 if chat else len(rows["prompt"][place])
        for ids, labels in chat_examples(tokenizer, messages, f"{name} conversation {number + 1}", first):
            answered = any(label != IGNORE for label in labels[:length])
            for key, value in zip(examples, (ids[:length], labels[:length], number, len(ids), answered), strict=True):
                examples[key].append(value)
    return examples


def chat_examples(
    tokenizer: Any, messages: list[dict[str, str]], where: str, first: int = 1
) -> list[tuple[list[int], list[int]]]:
    """Token ids and labels of a chat: one example as long as each prompt begins with the ids of the previous prompt and
    its response, a further one where the template writes earlier turns differently.

    Args:
        tokenizer: with a chat template.
        messages: of the chat.
        where: name of the chat, for errors.
        first: index of the first message that may be a response with labels.
    """
    examples: list[tuple[list[int], list[int]]] = []
    for place in range(first, len(messages)):
        if messages[place]["role"] != "assistant" or not messages[place]["content"].strip():
            continue
        prompt, answer, _ = encode_pair(tokenizer, messages[:place], messages[place], where)
        ids, labels = [*prompt, *answer], [*[IGNORE] * len(prompt), *answer]
        if examples and prompt[: len(examples[-1][0])] == examples[-1][0]:
            earlier = examples.pop()[1]
            labels[: len(earlier)] = earlier
        examples.append((ids, labels))
    return examples


def held_out_rows(rows: Any, most: int, seed: int) -> np.ndarray | None:
    """[rows] bool: the rows held out for validation, at most `most` of them if that is possible.

    Rows are held out by content: conversations that begin with the same messages, up to the first answer, are in the
    same part, so no row is in both, however often it is repeated, and neither are two responses of one chat. If all
    begin alike, only whole conversations are compared. The choice depends on content and seed, not on the rows' order.

    Args:
        rows: from `conversations`.
        most: rows to hold out; the smallest group of equal beginnings is held out if it has more.
        seed: of the choice.

    Returns:
        None if all rows are the same conversation.
    """
    for whole in (False, True):
        keys = np.array([_key(row, seed, whole) for row in rows], np.uint64)
        groups, group, sizes = np.unique(keys, return_inverse=True, return_counts=True)  # in the order of their hashes
        if len(groups) < 2:
            continue
        chosen = np.zeros(len(groups), bool)
        room = most
        for number, size in enumerate(sizes.tolist()):
            if size <= room:
                chosen[number], room = True, room - size
            if not room:
                break
        if not chosen.any():
            chosen[sizes.argmin()] = True
        elif chosen.all():
            chosen[sizes.argmax()] = False
        held_out: np.ndarray = chosen[group]
        return held_out
    return None


def _key(row: dict[str, Any], seed: int, whole: bool) -> int:
    """A hash of a conversation, or of its messages up to the first answer."""
    content = row["messages"] if "messages" in row else [row["prompt"], row["completion"]]
    if not whole and "messages" not in row and isinstance(row["prompt"], list):
        content = row["prompt"] + row["completion"]
    if not whole and isinstance(content[0], dict):
        answers = [place for place, message in enumerate(content) if message["role"] == "assistant"]
        content = content[: answers[0] + 1] if answers else content
    described = json.dumps([seed, content], sort_keys=True)
    return int.from_bytes(hashlib.sha256(described.encode()).digest()[:8])


def conversation_data(settings: TrainSettings, folder: Path, arguments: Any, watcher: Watcher) -> RunData:
    """Conversations for TRL's trainer; arguments as for `packed_data`."""

    class ConversationTrainer(RunMixin, ObjectiveMixin, trl_module().SFTTrainer):  # type: ignore[misc]
        """TRL's SFTTrainer with an objective."""

    with arguments.main_process_first(desc="tokenizer"):
        tokenizer = run_tokenizer(settings, folder / TOKENIZER, watcher)
    config = language_model(settings, tokenizer)
    (train, validation), facts, warnings = sft_data(settings, tokenizer)
    facts |= {"hash": rows_hash(train, validation), "train_sequences": len(train)}
    return RunData(config, tokenizer, train, validation, facts, warnings=warnings, trainer=ConversationTrainer)


def rows_hash(*parts: Any) -> str:
    """`sha256:...` over the examples of TRL's trainer: token ids and masks, row by row, of each part.

    Args:
        parts: tokenised data sets of the trainer.
    """
    digest = hashlib.sha256()
    for part in parts:
        names = sorted(set(part.column_names) & READ) or sorted(part.column_names)
        digest.update(f"{len(part)} {names}\n".encode())
        for rows in part.select_columns(names).with_format(None).iter(1000):
            for name in names:
                digest.update(json.dumps(rows[name], separators=(",", ":")).encode())
    return f"sha256:{digest.hexdigest()}"

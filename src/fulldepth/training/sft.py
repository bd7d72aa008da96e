"""Supervised fine-tuning on conversations, through TRL: chat templates, loss on the responses only."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedModel

from fulldepth.data import conversations
from fulldepth.data.rendering import encode_prompt
from fulldepth.errors import FulldepthError, one_line
from fulldepth.losses import Objective, ObjectiveMixin
from fulldepth.training.arguments import training_arguments
from fulldepth.training.loading import LoadingMixin
from fulldepth.training.optimiser import GroupsMixin
from fulldepth.training.resume import ResumeMixin
from fulldepth.training.settings import TrainSettings
from fulldepth.training.sharding import ShardsMixin

TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'].capitalize() + ': ' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""For tokenizers without a chat template; marks the assistant's turns."""
READ = {"input_ids", "labels", "attention_mask", "assistant_masks", "completion_mask", "position_ids", "seq_lengths"}
"""Columns of a tokenised data set that determine batches and loss."""


def sft_data(settings: TrainSettings, tokenizer: Any) -> Any:
    """`{"train": ..., "validation": ...}`: conversations, a seeded share of them held out, see `held_out_rows`.

    A tokenizer without a chat template gets `TEMPLATE`. If the template does not mark the assistant's turns, each
    response becomes an example of its own, so that the loss can be restricted to it.

    Raises:
        FulldepthError: if the data hold fewer than two different conversations, or the chat template fails.
    """
    data = settings.data
    if not tokenizer.chat_template:
        tokenizer.chat_template = TEMPLATE
    marked = "generation %}" in tokenizer.chat_template or "generation -%}" in tokenizer.chat_template
    rows = conversations(data.name, tokenizer, config=data.config, split=data.split, per_response=not marked)
    if len(rows) < 2:
        raise FulldepthError(f"{data.name} holds {len(rows)} conversations; training and validation need two.")
    encode_prompt(tokenizer, rows[0].get("messages") or rows[0]["prompt"], f"{data.name} row 1")  # the template works
    most = min(max(1, round(len(rows) * data.validation_share)), settings.most_validation)
    held_out = held_out_rows(rows, most, settings.seed)
    if held_out is None:
        raise FulldepthError(f"The {len(rows)} conversations of {data.name} are one; training and validation need two.")
    return {"train": rows.select(np.flatnonzero(~held_out)), "validation": rows.select(np.flatnonzero(held_out))}


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


def sft_arguments(settings: TrainSettings, folder: Path, data: Any) -> Any:
    """TRL's arguments for a run: the loss on the responses only.

    Raises:
        FulldepthError: if trl is not installed.
    """
    chats = "messages" in data["train"].column_names
    return training_arguments(
        settings,
        folder,
        _trl().SFTConfig,
        max_length=settings.sequence_length,
        packing=False,
        assistant_only_loss=chats,
        completion_only_loss=None if chats else True,
    )


def sft_trainer(
    model: PreTrainedModel, arguments: Any, data: Any, tokenizer: Any, settings: TrainSettings, objective: Objective
) -> Any:
    """TRL's trainer with the objective and the optimiser of the settings."""
    trainer: Any = _trl().SFTTrainer

    class ConversationTrainer(ResumeMixin, ShardsMixin, LoadingMixin, GroupsMixin, ObjectiveMixin, trainer):
        """TRL's SFTTrainer with an objective."""

    try:
        return ConversationTrainer(
            model,
            arguments,
            objective=objective,
            settings=settings,
            train_dataset=data["train"],
            eval_dataset=data["validation"],
            processing_class=tokenizer,
        )
    except TemplateError as error:
        raise FulldepthError(
            f"The tokenizer's chat template refuses a conversation: {one_line(str(error), 300)}."
        ) from error


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


def _trl() -> Any:
    try:
        import trl  # noqa: PLC0415
    except ImportError as error:
        raise FulldepthError("Fine-tuning on conversations needs trl: pip install 'fulldepth[sft]'.") from error
    return trl

"""Supervised fine-tuning on conversations, through TRL: chat templates, loss on the responses only."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

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
    """`{"train": ..., "validation": ...}`: conversations, a seeded share of them held out.

    A tokenizer without a chat template gets `TEMPLATE`. If the template does not mark the assistant's turns, each
    response becomes an example of its own, so that the loss can be restricted to it.

    Raises:
        FulldepthError: if the data hold fewer than two conversations, or the chat template fails.
    """
    data = settings.data
    if not tokenizer.chat_template:
        tokenizer.chat_template = TEMPLATE
    marked = "generation %}" in tokenizer.chat_template or "generation -%}" in tokenizer.chat_template
    rows = conversations(data.name, tokenizer, config=data.config, split=data.split, per_response=not marked)
    if len(rows) < 2:
        raise FulldepthError(f"{data.name} holds {len(rows)} conversations; training and validation need two.")
    encode_prompt(tokenizer, rows[0].get("messages") or rows[0]["prompt"], f"{data.name} row 1")  # the template works
    held_out = min(max(1, round(len(rows) * data.validation_share)), data.validation_sequences)
    parts = rows.train_test_split(test_size=held_out, seed=settings.seed)
    return {"train": parts["train"], "validation": parts["test"]}


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

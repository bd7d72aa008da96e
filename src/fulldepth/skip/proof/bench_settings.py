"""What can be set for `fulldepth skip bench`; defaults < recipe < command line."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveInt

from fulldepth.recipes import Settings


class BenchSettings(Settings):
    """Everything that decides what is timed."""

    batches: list[PositiveInt] = Field(default=[1, 4], min_length=1)
    """Sequences run at once."""
    contexts: list[PositiveInt] = Field(default=[128, 512], min_length=1)
    """Tokens of the prompt; every one is timed with every batch size."""
    new_tokens: PositiveInt = 16
    """Tokens decoded after the prompt, one at a time, while the cache grows."""
    repeats: PositiveInt = 5
    """Rounds; every model is timed once in each."""
    warmup: NonNegativeInt = 1
    """Runs of every model before the first round, not counted."""
    tasks: list[str] | None = None
    """Tasks of lm-eval, by name or as YAML files, that every model is scored on; needs the extra `evaluate`."""
    task_limit: PositiveInt | None = None
    """The first so many examples of each task only."""
    seed: NonNegativeInt = 0
    """Of the tokens, of the order of models and of few-shot examples."""
    device: str | None = None
    """Device; None = the first accelerator, else the CPU."""
    dtype: str = "auto"
    """Precision to load the models in; auto = each checkpoint's own."""
    revision: str | None = None
    """Branch, tag or commit of a Hub model."""
    trust_remote_code: bool = False
    """Run modelling code that a checkpoint carries; exports of this package need none."""

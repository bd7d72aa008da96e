"""What a checkpoint keeps of its run, and the refusal to resume from it with other data or another configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import pydantic
from pydantic import Field, FiniteFloat, NonNegativeInt
from transformers import PreTrainedConfig, TrainingArguments

from fulldepth.data import ORDER
from fulldepth.distributed import current
from fulldepth.errors import FulldepthError, one_line
from fulldepth.fingerprint import Fingerprint
from fulldepth.hf import notes_of
from fulldepth.losses import per_batch_terms
from fulldepth.settings import Settings
from fulldepth.settings.train import TrainSettings

RECORD = "record.parquet"
"""File in a checkpoint: the rows of the run's results up to its step."""
NO_NUMBERS = {"transformers_version", "_name_or_path", "use_cache", "architectures", "auto_map", "dtype"}
NO_NUMBERS |= {"pad_token_id", "bos_token_id", "eos_token_id"}
"""Entries of `config.json` without effect on training, or that the Trainer sets from the tokenizer."""


class RunNotes(Settings):
    """State of a run that is stored in the seal of a checkpoint."""

    elapsed: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds of training so far."""
    tally: dict[str, Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]] = Field(default_factory=dict)
    """Part of the loss -> sum and count since the last evaluation."""
    evaluated: NonNegativeInt = 0
    """Step of the last evaluation."""
    origin: dict[str, str] = Field(default_factory=dict)
    """What determines a run's numbers besides its settings, see `origin_of`."""


def origin_of(
    settings: TrainSettings, data: str, config: PreTrainedConfig, arguments: TrainingArguments
) -> dict[str, str]:
    """What determines a run's numbers besides its settings: hashes of data and configuration, the order of the items,
    and the size of the batches if a penalty is a function of it.

    Args:
        settings: the run's settings.
        data: hash of the training data.
        config: the model's configuration.
        arguments: the Trainer's arguments.
    """
    entries = json.loads(config.to_json_string(use_diff=True)).items()
    counted = {name: value for name, value in entries if name not in NO_NUMBERS}
    origin = {
        "training data": data,
        "order of the data": f"{ORDER} {settings.seed}",
        "model configuration": str(Fingerprint(json.dumps(counted, sort_keys=True))),
    }
    for name in per_batch_terms(settings.objective.terms):
        sizes = f"{arguments.world_size} x {arguments.per_device_train_batch_size} sequences"
        origin[f"batch of {name}"] = sizes
    return origin


def check_origin(now: dict[str, str], before: dict[str, str] | None, checkpoint: Path | None) -> None:
    """Refuse to resume where numbers would differ; every process must call this.

    Args:
        now: origin of this process.
        before: origin in the checkpoint; None at the start.
        checkpoint: the checkpoint to resume from; None at the start.

    Raises:
        FulldepthError: in every process, if the data or the configuration are not those of the checkpoint or of another
            process.
    """
    references = [("in process 0", current().agree(now))]
    if before is not None:
        references.append((f"in {checkpoint}", before))
    differences = [
        f"The {name} differs: {one_line(was.get(name), 60)} {where}, {one_line(here, 60)} here. A run needs the same "
        "data, tokenizer and model from beginning to end, in every process."
        for where, was in references
        for name, here in now.items()
        if was.get(name) != here
    ]
    if everywhere := [difference for part in current().gather(differences) for difference in part]:
        raise FulldepthError(everywhere[0])


def step_of(checkpoint: Path) -> int:
    """N of `checkpoint-N`."""
    return int(checkpoint.name.partition("-")[2])


def resume_notes(checkpoint: Path) -> RunNotes:
    """The notes of a sealed checkpoint.

    Raises:
        FulldepthError: if they cannot be read, or a file of the checkpoint has changed since it was written.
    """
    try:
        return RunNotes.model_validate(notes_of(checkpoint), strict=True)
    except (FulldepthError, pydantic.ValidationError) as error:
        reason = f"Cannot read the seal of {checkpoint}: {one_line(error, 200)}."
        reason = str(error) if isinstance(error, FulldepthError) else reason
        raise FulldepthError(f"{reason} Remove {checkpoint} to go on from the checkpoint before.") from error

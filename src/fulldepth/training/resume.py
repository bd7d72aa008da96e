"""Reading a checkpoint on resuming: each file is validated before use, and nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import pandas as pd
import pydantic
from pydantic import Field, FiniteFloat, JsonValue, NonNegativeInt
from transformers import PreTrainedConfig, TrainerState, TrainingArguments

from fulldepth.data import ORDER
from fulldepth.distributed import current
from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import read_document, reading
from fulldepth.fingerprint import Fingerprint
from fulldepth.hf import notes_of
from fulldepth.losses import per_batch_terms
from fulldepth.results import COLUMNS
from fulldepth.settings import Settings
from fulldepth.settings.train import TrainSettings

RECORD = "record.parquet"
"""File in a checkpoint: the rows of the run's results up to its step."""
STATE = "trainer_state.json"
NEEDED = ("*.safetensors", "optimizer.pt", "scheduler.pt", "rng_state*.pth", STATE)
"""Files without which the Trainer would silently continue with fresh states."""
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


class TrainerStateFile(pydantic.BaseModel):
    """Schema of the entries of `trainer_state.json` that the Trainer computes with; others are not validated."""

    model_config = pydantic.ConfigDict(extra="allow")

    global_step: NonNegativeInt
    epoch: FiniteFloat | None
    total_flos: FiniteFloat
    num_input_tokens_seen: NonNegativeInt
    train_batch_size: NonNegativeInt
    log_history: list[dict[str, JsonValue]]
    best_model_checkpoint: str | None
    stateful_callbacks: dict[str, JsonValue]


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
    """The notes of a sealed checkpoint, after checking the files that resuming needs.

    Raises:
        FulldepthError: if a file is missing, or a JSON file does not fit its schema.
    """
    with advising(checkpoint):
        for pattern in NEEDED:
            if not any(checkpoint.glob(pattern)):
                raise FulldepthError(f"Cannot read {checkpoint}: it has no {pattern}.")
        state = read_document(checkpoint / STATE, TrainerStateFile)
        if state.global_step != step_of(checkpoint):
            raise FulldepthError(
                f"Cannot read {checkpoint / STATE}: global_step is {one_line(state.global_step, 30)}, expected "
                f"{step_of(checkpoint)}."
            )
        if unknown := sorted((state.model_extra or {}).keys() - {field.name for field in fields(TrainerState)}):
            raise FulldepthError(f"Cannot read {checkpoint / STATE}: {one_line(unknown[0], 60)} is no entry of it.")
        notes = notes_of(checkpoint)
        try:
            run_notes = RunNotes.model_validate(notes, strict=True)
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False)[0]
            where = one_line(".".join(map(str, problem["loc"])), 100)
            raise FulldepthError(f"Cannot read the seal of {checkpoint}: notes.{where}: {problem['msg']}.") from error
        if run_notes.evaluated > state.global_step:
            raise FulldepthError(f"Cannot read the seal of {checkpoint}: it was evaluated after its own step.")
    return run_notes


def read_rows(checkpoint: Path) -> pd.DataFrame:
    """The rows of the run's results in a checkpoint.

    Raises:
        FulldepthError: if they cannot be read.
    """
    path = checkpoint / RECORD
    with advising(checkpoint), reading(path):
        table = pd.read_parquet(path)
        missing = [name for name in [*COLUMNS, "step"] if name not in table.columns]
        numeric = all(pd.api.types.is_numeric_dtype(table[name]) for name in ("value", "step") if name in table)
        if missing or not numeric:
            raise ValueError("no " + ", ".join(missing) if missing else "text for numbers")
    return table


@contextmanager
def advising(checkpoint: str | Path | None) -> Iterator[None]:
    """Add to an error of reading a checkpoint what the user can do."""
    try:
        yield
    except FulldepthError as error:
        if checkpoint is None or not str(error).startswith("Cannot read"):
            raise
        raise FulldepthError(f"{error} Remove {checkpoint} to go on from the checkpoint before.") from error

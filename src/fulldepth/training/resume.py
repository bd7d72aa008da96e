"""Reading a checkpoint on resuming: each file is validated before use, and nothing is unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import pydantic
from pydantic import Field, FiniteFloat, JsonValue, NonNegativeInt
from transformers import TrainerState

from fulldepth.errors import FulldepthError, one_line
from fulldepth.files import read_document, reading
from fulldepth.hf import OPTIMIZER_SHARDS, WEIGHT_SHARDS, notes_of
from fulldepth.losses.trainer import AnyTrainer
from fulldepth.results import COLUMNS
from fulldepth.settings import Settings

RECORD = "record.parquet"
"""File in a checkpoint: the rows of the run's results up to its step."""
STATE = "trainer_state.json"
NEEDED = ("*.safetensors", "optimizer.pt", "scheduler.pt", "rng_state*.pth", STATE)
"""Files without which the Trainer would silently continue with fresh states."""
IN_SHARDS = {"*.safetensors": f"{WEIGHT_SHARDS}/*.safetensors", "optimizer.pt": f"{OPTIMIZER_SHARDS}/*.safetensors"}
"""The corresponding files of a sharded run, whose weights may have been merged since."""


class Origin(Settings):
    """What determines a run's numbers besides its settings."""

    data: str
    """Hash of the training data."""
    order: str
    """Order of the sequences: its name and seed."""
    processes: NonNegativeInt
    micro_batch: NonNegativeInt
    """Sequences in a forward pass."""
    device: str
    versions: dict[str, str]
    """Package -> version."""


class RunNotes(Settings):
    """State of a run that is stored in the seal of a checkpoint."""

    elapsed: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds of training so far."""
    tally: dict[str, Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]] = Field(default_factory=dict)
    """Part of the loss -> sum and count since the last evaluation."""
    evaluated: NonNegativeInt = 0
    """Step of the last evaluation."""
    origin: Origin | None = None
    """None in checkpoints of earlier versions."""


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


def step_of(checkpoint: Path) -> int:
    """N of `checkpoint-N`."""
    return int(checkpoint.name.partition("-")[2])


def resume_notes(checkpoint: Path) -> RunNotes:
    """The notes of a sealed checkpoint, after checking the files that resuming needs.

    Raises:
        FulldepthError: if a file is missing, or a JSON file does not fit its schema.
    """
    with _advising(checkpoint):
        for pattern in NEEDED:
            if not any(any(checkpoint.glob(name)) for name in (pattern, IN_SHARDS.get(pattern, pattern))):
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


def read_rows(checkpoint: Path) -> pd.DataFrame | None:
    """The rows of the run's results in a checkpoint; None if it has none.

    Raises:
        FulldepthError: if they cannot be read.
    """
    path = checkpoint / RECORD
    if not path.exists():
        return None
    with _advising(checkpoint), reading(path):
        table = pd.read_parquet(path)
        missing = [name for name in [*COLUMNS, "step"] if name not in table.columns]
        numeric = all(pd.api.types.is_numeric_dtype(table[name]) for name in ("value", "step") if name in table)
        if missing or not numeric:
            raise ValueError("no " + ", ".join(missing) if missing else "text for numbers")
    return table


@contextmanager
def _advising(checkpoint: str | Path | None) -> Iterator[None]:
    """Add to an error of reading a checkpoint what the user can do."""
    try:
        yield
    except FulldepthError as error:
        if checkpoint is None or not str(error).startswith("Cannot read"):
            raise
        raise FulldepthError(f"{error} Remove {checkpoint} to go on from the checkpoint before.") from error


class ResumeMixin(AnyTrainer):
    """Converts errors of a Trainer that reads a checkpoint into `Cannot read CHECKPOINT: reason`.

    Also checks shapes and options of the optimiser states, which the Trainer would load without an error.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        with _advising(resume_from_checkpoint), reading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with _advising(checkpoint), reading(f"the random states in {checkpoint}"):
            super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        before = None if checkpoint is None else _options(self)
        with _advising(checkpoint), reading(f"the optimiser's states in {checkpoint}"):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                _check_states(self.optimizer)
                if _options(self) != before:
                    raise ValueError("their options are not those of the settings")


def _options(trainer: Any) -> list[Any]:
    """Options of optimiser and schedule that the settings determine, without the current learning rate."""
    groups = trainer.optimizer.param_groups
    options = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in groups]
    return [options, [len(group["params"]) for group in groups], list(trainer.lr_scheduler.base_lrs)]


def _check_states(optimizer: Any) -> None:
    """Refuse moments whose shape differs from their weight's; weights without a gradient so far have none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name in ("exp_avg", "exp_avg_sq") if state else ():
                if name not in state or state[name].shape != parameter.shape:
                    raise ValueError(f"{name} does not fit its weight")

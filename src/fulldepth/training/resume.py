"""What a resumed run reads back from its checkpoint: each file checked before it is used, nothing unpickled."""

from __future__ import annotations

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
"""In a checkpoint: the rows of the run's results up to its step."""
STATE = "trainer_state.json"
NEEDED = ("*.safetensors", "optimizer.pt", "scheduler.pt", "rng_state*.pth", STATE)
"""Files without which the Trainer would go on with fresh states and say nothing."""
IN_SHARDS = {"*.safetensors": f"{WEIGHT_SHARDS}/*.safetensors", "optimizer.pt": f"{OPTIMIZER_SHARDS}/*.safetensors"}
"""The same files of a sharded run; its weights may have been put together since."""


class Origin(Settings):
    """What decides a run's numbers beside its settings."""

    data: str
    """Hash over what the trainer reads."""
    order: str
    """Of the sequences: its name and seed."""
    processes: NonNegativeInt
    micro_batch: NonNegativeInt
    """Sequences in a forward pass."""
    device: str
    versions: dict[str, str]
    """Package -> version."""


class RunNotes(Settings):
    """What a run notes in the seal of a checkpoint."""

    elapsed: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds of training so far."""
    tally: dict[str, Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]] = Field(default_factory=dict)
    """Part of the loss -> sum and count since the last evaluation."""
    evaluated: NonNegativeInt = 0
    """Step of the last evaluation."""
    origin: Origin | None = None
    """None in checkpoints of earlier versions, which noted none."""


class TrainerStateFile(pydantic.BaseModel):
    """The entries of `trainer_state.json` that the Trainer computes with; it takes others as they are."""

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
    """The notes of a sealed checkpoint, after a look at the files that resuming needs.

    Raises:
        FulldepthError: if a file is missing, or one of the JSON files does not fit its schema.
    """
    for pattern in NEEDED:
        if not any(any(checkpoint.glob(name)) for name in (pattern, IN_SHARDS.get(pattern, pattern))):
            raise FulldepthError(f"Cannot read {checkpoint}: it has no {pattern}. {_advice(checkpoint)}")
    try:
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
    except FulldepthError as error:
        raise FulldepthError(f"{error} {_advice(checkpoint)}") from error
    return run_notes


def read_rows(checkpoint: Path) -> pd.DataFrame | None:
    """The rows that a checkpoint keeps of its run's results; None if it keeps none.

    Raises:
        FulldepthError: if they cannot be read.
    """
    path = checkpoint / RECORD
    if not path.exists():
        return None
    with reading(path):
        table = pd.read_parquet(path)
        missing = [name for name in [*COLUMNS, "step"] if name not in table.columns]
        numeric = all(pd.api.types.is_numeric_dtype(table[name]) for name in ("value", "step") if name in table)
    if missing or not numeric:
        raise FulldepthError(f"Cannot read {path}: {'no ' + ', '.join(missing) if missing else 'text for numbers'}.")
    return table


def _advice(checkpoint: Path) -> str:
    return f"Remove {checkpoint} to go on from the checkpoint before."


class ResumeMixin(AnyTrainer):
    """Turns what goes wrong while a Trainer reads a checkpoint into `Cannot read CHECKPOINT: reason`.

    The states must fit the run: an optimiser state of another shape, or other options than the settings give, would be
    taken without a word.
    """

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        with reading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        with reading(f"the random states in {checkpoint}"):
            super()._load_rng_state(checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        before = None if checkpoint is None else _options(self)
        with reading(f"the optimiser's states in {checkpoint}"):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                _check_states(self.optimizer)
        if checkpoint is not None and _options(self) != before:
            raise FulldepthError(
                f"Cannot read the optimiser's states in {checkpoint}: their options are not those of the settings. "
                f"{_advice(Path(checkpoint))}"
            )


def _options(trainer: Any) -> list[Any]:
    """Everything that the settings decide of optimiser and schedule; the rate changes from step to step."""
    groups = trainer.optimizer.param_groups
    options = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in groups]
    return [options, [len(group["params"]) for group in groups], list(trainer.lr_scheduler.base_lrs)]


def _check_states(optimizer: Any) -> None:
    """Refuse moments of another shape than their weight's; a weight that never had a gradient has none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name in ("exp_avg", "exp_avg_sq") if state else ():
                if name not in state or state[name].shape != parameter.shape:
                    raise ValueError(f"{name} does not fit its weight")

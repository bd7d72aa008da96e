"""The run folder: lock, saved settings, the checkpoint to resume from with its notes, and export."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field, FiniteFloat, NonNegativeInt
from transformers import PreTrainedModel, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from fulldepth.core.distributed import current
from fulldepth.core.errors import FulldepthError, StoppedError, differences, is_disk_full, one_line
from fulldepth.core.files import Fingerprint, atomic, locked, read_json, reading, validated
from fulldepth.core.number_format import bytes_in_words
from fulldepth.core.progress import Watcher
from fulldepth.data import ORDER
from fulldepth.execution import find_anatomy
from fulldepth.execution.readers import prove_export
from fulldepth.hf import (
    UNFINISHED,
    drop_checkpoints,
    evaluating,
    find_exit_heads,
    find_tokenizer,
    incomplete_checkpoints,
    is_sealed,
    load_processor,
    load_tokenizer,
    notes_of,
    open_model,
    sample_inputs,
    save_exit_heads,
    sealed_checkpoints,
    settle_checkpoints,
    silent,
    trained_steps,
)
from fulldepth.hf.checkpoint_folder import (
    check_disk_space,
    check_output_path,
    folder_to_be,
    publish_older_names,
    strip_foreign_code,
)
from fulldepth.hf.model_hash import configuration_hash, model_hash
from fulldepth.hf.rounding import TOLERANCE
from fulldepth.hf.run_checkpoints import SEAL
from fulldepth.hf.stock import as_stock
from fulldepth.losses import per_batch_terms
from fulldepth.results import DOCUMENT, PAGE, TABLE, Results
from fulldepth.settings import Settings, layer, read
from fulldepth.settings.keywords import with_progress
from fulldepth.settings.layers import flattened
from fulldepth.settings.loading import Amount
from fulldepth.settings.strict_yaml import as_yaml
from fulldepth.settings.train import MAY_DIFFER, SETTINGS, TrainSettings
from fulldepth.training.frozen import REMOVED
from fulldepth.training.lora import ADAPTERS

TOKENIZER = "tokenizer"
KIND = "training"
"""`kind` in the metadata of a run's results."""
OF_OTHERS = (
    "plan.json",
    "progress.json",
    "responses.json*",
    "config.json",
    "*.safetensors",
    "steps",
    "fulldepth_skip.json",
)
"""Patterns of files from other commands."""
OF_RUNS = (DOCUMENT, TABLE, PAGE, "checkpoint-*", TOKENIZER)
"""Patterns of files of a run. Without the run's settings beside them, they belong to something else."""
READ_BY_A_RUN = ("data.name", "data.validation", "data.tokens", "model.checkpoint", "objective.distillation.teacher")
"""Settings that name what a run reads. A resumed run may name it by another path: `check_origin` compares contents."""
RECORD = "record.parquet"
"""File in a checkpoint: the rows of the run's results up to its step."""
NOT_THE_MODEL = (
    SEAL,
    UNFINISHED,
    RECORD,
    ADAPTERS,
    "scheduler.pt",
    "optimizer.pt",
    "training_args.bin",
    "rng_state*",
    ".*",
)
"""Patterns of files of a checkpoint that are needed only to resume."""
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
"""Patterns of files with a model's weights."""


class RunNotes(Settings):
    """State of a run that is stored in the seal of a checkpoint."""

    elapsed: Amount = 0.0
    """Seconds of training so far."""
    tally: dict[str, Annotated[list[FiniteFloat], Field(min_length=2, max_length=2)]] = Field(default_factory=dict)
    """Part of the loss -> sum and count since the last evaluation."""
    evaluated: NonNegativeInt = 0
    """Step of the last evaluation."""
    origin: dict[str, str] = Field(default_factory=dict)
    """Hashes and names that determine a run's numbers besides its settings, see `check_origin`."""


def open_run(folder: Path, settings: TrainSettings, resume: bool) -> None:
    """Check that a run may write into a folder; nothing is written.

    The folder of a run that ended before its first step counts as empty.

    Raises:
        FulldepthError: if the folder holds a run and `resume` is False, a run with other settings, or any other file
            that a run would overwrite.
    """
    if not (folder / SETTINGS).exists():
        if foreign := [path.name for pattern in (*OF_RUNS, *OF_OTHERS) for path in sorted(folder.glob(pattern))]:
            raise FulldepthError(
                f"{folder} holds {foreign[0]}, which does not belong to a training run; choose another --output."
            )
    elif not _took_no_step(folder):
        if not resume:
            raise FulldepthError(f"{folder} already holds a run. Resume it (--resume), or choose another --output.")
        saved = flattened(saved_settings(folder).model_dump(mode="json"))
        requested = flattened(settings.model_dump(mode="json"))
        free = {
            key
            for key in saved.keys() | requested.keys()
            if key in MAY_DIFFER or _may_have_moved(key, saved.get(key), requested.get(key))
        }
        fixed = ({key: value for key, value in flat.items() if key not in free} for flat in (saved, requested))
        if different := differences(*fixed):
            raise FulldepthError(
                f"{folder} holds a run with other settings: {different}. Resume it with its own settings, or choose "
                "another --output."
            )
        document: Any = None
        with suppress(FulldepthError):  # absent or unreadable results are written anew
            document = read_json(folder / DOCUMENT)
        kind = document.get("kind") if isinstance(document, dict) else None
        if document is not None and kind != KIND:
            raise FulldepthError(
                f"{folder / DOCUMENT} holds results of the kind {one_line(repr(kind), 60)}, expected {KIND!r}. Move it "
                "elsewhere."
            )


@contextmanager
def holding(folder: Path, settings: TrainSettings, resume: bool) -> Iterator[tuple[Path | None, RunNotes, list[Path]]]:
    """Lock a run folder, write the settings, and remove or rename incomplete checkpoints, in the first process.

    A run that is refused before its first row leaves none of its files, so that another command can use the folder.

    Args:
        folder: the run folder.
        settings: settings to write into it.
        resume: whether the folder may already hold the run.

    Yields:
        The checkpoint to resume from, or None to start at the beginning; its notes; and checkpoints that were renamed
        because they are incomplete.

    Raises:
        FulldepthError: in every process, if the folder is in use, holds something else, cannot be written, or not all
            processes see it.
    """

    def claim() -> tuple[Path | None, RunNotes, list[Path]]:
        stack.enter_context(locked(folder))
        open_run(folder, settings, resume)
        try:
            if (folder / SETTINGS).exists() and _took_no_step(folder) and saved_settings(folder) != settings:
                shutil.rmtree(folder / TOKENIZER, ignore_errors=True)  # its size or its training text may differ
            with atomic(folder / SETTINGS) as part:
                part.write_text(dump(settings), encoding="utf-8")
            renamed = settle_checkpoints(folder)
            if settings.keep_checkpoints:  # the run may have been killed before it removed an old checkpoint
                drop_checkpoints(folder, settings.keep_checkpoints)
        except OSError as error:
            raise FulldepthError(f"Cannot write into {folder}: {error.strerror or error}.") from error
        last = last_checkpoint(folder)
        return last, resume_notes(last) if last else RunNotes(), renamed

    with ExitStack() as stack:
        claimed = current().first(claim)
        if not all(current().gather((folder / SETTINGS).exists())):
            raise FulldepthError(f"Not all processes see {folder}; choose a folder on a disk shared by all machines.")
        try:
            yield claimed
        except StoppedError:
            raise
        except Exception:
            if current().is_main and not (folder / DOCUMENT).exists() and _took_no_step(folder):
                (folder / SETTINGS).unlink()
                shutil.rmtree(folder / TOKENIZER, ignore_errors=True)
            raise


def _took_no_step(folder: Path) -> bool:
    """Return True if the folder holds only the settings of a run, with no row beyond step 0 and no checkpoint.

    A settings file that `dump` would write differently may be a user's recipe, and is never overwritten.
    """
    started = any(not (path / UNFINISHED).exists() for path in folder.glob("checkpoint-*"))
    if started or any(any(folder.glob(pattern)) for pattern in OF_OTHERS):
        return False
    try:
        if (folder / SETTINGS).read_text(encoding="utf-8") != dump(saved_settings(folder)):
            return False
        if not (folder / DOCUMENT).exists():
            return not (folder / TABLE).exists()
        results = Results.load(folder)
    except (FulldepthError, OSError, UnicodeDecodeError):
        return False
    return results.meta.get("kind") == KIND and bool((results.table.step == 0).all())


def dump(settings: TrainSettings) -> str:
    """Return settings as YAML from which `saved_settings` restores them."""
    return as_yaml(settings.model_dump(mode="json"))


def saved_settings(folder: Path) -> TrainSettings:
    """Read the settings of the run in a folder, without those that have no effect (earlier versions took them).

    Raises:
        FulldepthError: if the file cannot be read or holds no such settings; the message names the file.
    """
    path = folder / SETTINGS
    try:
        with reading(path):
            return layer(TrainSettings, read(path, "train"), left_out=[])
    except FulldepthError as error:
        words = "\n".join(one_line(line, 200) for line in str(error).splitlines()[:4])
        if str(path) not in words:
            words = f"{path} does not hold the settings of a run. {words}"
        raise FulldepthError(words) from error


def _may_have_moved(key: str, saved: Any, requested: Any) -> bool:
    """Return True for two names of what a run reads of which the second is a local path."""
    is_named_twice = isinstance(saved, str) and isinstance(requested, str)
    return is_named_twice and key in READ_BY_A_RUN and Path(requested).expanduser().exists()


def check_origin(
    settings: TrainSettings,
    data: str,
    model: PreTrainedModel,
    arguments: TrainingArguments,
    before: dict[str, str],
    checkpoint: Path | None,
    teacher: PreTrainedModel | None = None,
) -> dict[str, str]:
    """Return a run's origin, and refuse to resume if it differs from that of the checkpoint.

    The origin determines a run's numbers besides its settings: hashes of data and configuration, the order of the
    items, the model that adapters are added to, the teacher, and the size of the batches if a penalty is a function of
    it. Every process must call this.

    Args:
        settings: the run's settings.
        data: hash of the training data.
        model: the model, before training.
        arguments: the Trainer's arguments.
        before: origin in the checkpoint.
        checkpoint: the checkpoint to resume from; None at the start.
        teacher: the model whose predictions are learned, if there is one.

    Raises:
        FulldepthError: in every process, if the origin differs from that of the checkpoint or of the first process.
    """
    origin = {
        "training data": data,
        "order of the data": f"{ORDER} {settings.seed}",
        "model configuration": configuration_hash(model, REMOVED),
    }
    if settings.model.checkpoint is not None:  # which may have moved; with adapters, no checkpoint of the run holds it
        origin["model to start from"] = model_hash(model)
        if not settings.lora.rank:  # earlier versions do not state it
            before = {"model to start from": origin["model to start from"], **before}
    if teacher is not None:
        origin["teacher"] = str(Fingerprint(f"{configuration_hash(teacher, REMOVED)} {model_hash(teacher)}"))
        before = {"teacher": origin["teacher"], **before}  # earlier versions do not state it
    for name in per_batch_terms(settings.objective.terms):
        origin[f"batch of {name}"] = f"{arguments.world_size} x {arguments.per_device_train_batch_size} sequences"
    references = [("in process 0", current().agree(origin))]
    if checkpoint is not None:
        references.append((f"in {checkpoint}", before))
    mismatches = [
        f"The {name} differs: {one_line(reference.get(name), 60)} {where}, {one_line(value, 60)} here. A run needs the "
        "same data, tokenizer and model from beginning to end, in every process."
        for where, reference in references
        for name, value in origin.items()
        if reference.get(name) != value
    ]
    if in_any_process := [difference for part in current().gather(mismatches) for difference in part]:
        raise FulldepthError(in_any_process[0])
    return origin


def check_disk(model: PreTrainedModel, settings: TrainSettings, folder: Path, checkpoint: Path | None) -> None:
    """Refuse a run whose checkpoints will not fit on the disk.

    Args:
        model: the model, with the weights that are trained.
        settings: the run's settings.
        folder: the run folder.
        checkpoint: the checkpoint to resume from; None at the start.

    Raises:
        FulldepthError: with the number and size of the checkpoints, and the free bytes.
    """
    done = 0 if checkpoint is None else step_of(checkpoint)
    keep = settings.keep_checkpoints
    count = math.ceil(settings.steps / settings.save_every) - done // settings.save_every
    if done >= settings.steps:
        return
    if keep is not None:  # a new checkpoint is complete before an old one is removed
        count = min(count, max(1, keep + 1 - len(sealed_checkpoints(folder))))
    size = sum(p.numel() * p.itemsize * (1 + 2 * p.requires_grad) for p in model.parameters())
    check_disk_space(
        folder,
        count * size,
        f"Checkpoints with weights and optimiser: {count} x {bytes_in_words(size)}. Keep fewer (keep_checkpoints=1, "
        "save_every=N), choose another place, or free some space.",
    )


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last complete checkpoint of a run; None if there is none."""
    return next((path for _, path in reversed(sealed_checkpoints(folder))), None)


def step_of(checkpoint: Path) -> int:
    """Return N of a folder `checkpoint-N`."""
    return int(checkpoint.name.partition("-")[2])


def resume_notes(checkpoint: Path) -> RunNotes:
    """Read the notes of a sealed checkpoint.

    Raises:
        FulldepthError: if they cannot be read, a file of the checkpoint has changed since it was written, or the seal
            does not cover what a run needs to go on. Without the optimiser's state the Trainer would begin a new one.
    """
    try:
        notes = validated(checkpoint / SEAL, notes_of(checkpoint), RunNotes)
        for name in (OPTIMIZER_NAME, SCHEDULER_NAME):
            if not (checkpoint / name).is_file():
                raise FulldepthError(f"{checkpoint} lacks {name}.")
        if trained_steps(checkpoint) != (step := step_of(checkpoint)):
            raise FulldepthError(f"{checkpoint / TRAINER_STATE_NAME} does not state the step {step}.")
        return notes
    except FulldepthError as error:
        raise FulldepthError(f"{error} Remove {checkpoint} to go on from the checkpoint before it.") from error


@with_progress
def export_run(
    run: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    stock: bool = False,
    watcher: Watcher,
) -> Path:
    """Write the model of a run's checkpoint (configuration, tokenizer, safetensors) into a folder of its own.

    Args:
        run: the folder of a training run, or of one of its checkpoints.
        output: the new folder, which must not exist.
        step: step of the checkpoint; None = the last complete one.
        dtype: `float32`, `bfloat16` or `float16`; None = that of the checkpoint.
        stock: write a `depth_llama` as the class of transformers that computes the same: a model without a tree, a
            memory or Hyper-Connections. LayerNorm scaling becomes a part of the norms' gains. A fresh process with
            transformers alone loads the folder, and its logits are compared before the folder is renamed.
        watcher: receives progress messages.

    Returns:
        The new folder.

    Raises:
        FulldepthError: if there is no such run or checkpoint, `output` exists, the disk is full, a file is damaged, or
            no class of transformers computes the model (`stock`).
    """
    if is_sealed(run) and step is None:  # the folder of a checkpoint instead of its run
        step = step_of(Path(run).absolute())
        run = Path(run).absolute().parent
    checkpoints = dict(sealed_checkpoints(run))
    target = Path(output)
    if not checkpoints:
        raise FulldepthError(
            f"{run} holds no complete checkpoint; expected the folder of a training run or of one of its checkpoints."
        )
    if step is not None and step not in checkpoints:
        steps = ", ".join(map(str, list(checkpoints)[-8:]))
        raise FulldepthError(f"{run} has no complete checkpoint-{step}; the last ones are of steps {steps}.")
    check_output_path(target)
    checkpoint = checkpoints[max(checkpoints) if step is None else step]
    try:
        notes_of(checkpoint)
    except FulldepthError as error:
        raise FulldepthError(f"{error} Restore the file, or export another checkpoint (--step).") from error
    if tokenizer := find_tokenizer(checkpoint):
        load_tokenizer(tokenizer)  # refuses damaged files, which would be copied
    if (checkpoint / "preprocessor_config.json").exists():
        load_processor(checkpoint, None)
    if step is None and (remark := incomplete_checkpoints(run)) is not None:
        watcher.say(remark)
    watcher.say(f"Exporting {checkpoint}")
    with folder_to_be(target) as part, silent():
        weights_anew = WEIGHT_FILES if dtype is not None or stock else ()
        left_out = shutil.ignore_patterns(*NOT_THE_MODEL, *weights_anew, *(("*.py",) if stock else ()))
        shutil.copytree(checkpoint, part, ignore=left_out, dirs_exist_ok=True)
        if stock:
            _write_stock(checkpoint, part, dtype)
        elif dtype is not None:
            model = open_model(checkpoint, exit_heads=True, dtype=dtype, device="cpu").model
            model.save_pretrained(part)
            save_exit_heads(model, part)
    return target


def _write_stock(checkpoint: Path, folder: Path, dtype: str | None) -> None:
    """Write a checkpoint's model as one of a stock class, and compare the logits that a fresh process computes."""
    model = open_model(checkpoint, dtype=dtype or "auto", device="cpu").model
    if find_exit_heads(checkpoint) is not None:
        raise FulldepthError(f"{checkpoint} has exit heads, which no stock class reads. Export it without --stock.")
    anatomy = find_anatomy(model)
    inputs = sample_inputs(anatomy)
    with torch.no_grad(), evaluating(model):
        expected = model(**inputs, use_cache=False).logits
    as_stock(model).save_pretrained(folder)
    publish_older_names(folder)
    strip_foreign_code(folder, carries_code=False)
    prove_export(folder, inputs, expected, TOLERANCE[expected.dtype], "stock")


@contextmanager
def explaining_full_disk(sentence: Callable[[], str]) -> Iterator[None]:
    """Convert a disk-full error to a `FulldepthError` that ends with `sentence()`."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error) or isinstance(error, FulldepthError):
            raise
        raise FulldepthError(f"The disk is full. {sentence()}") from error

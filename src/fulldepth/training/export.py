"""`fulldepth train export`: converts the checkpoints of a run, sharded or not, to ordinary ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from fulldepth.errors import FulldepthError, is_disk_full
from fulldepth.files import atomic_folder, locked, read_json, reading, remove_leftovers, temporary_name
from fulldepth.hf import (
    WEIGHT_SHARDS,
    add_stored_exit_heads,
    check_publishing,
    is_sealed,
    is_sharded,
    load_config,
    load_processor,
    load_tokenizer,
    notes_of,
    open_model,
    pick_dtype,
    publish,
    save_exit_heads,
    seal,
    sealed_checkpoints,
    stored_shapes,
)
from fulldepth.progress import Watcher
from fulldepth.training.heads import auto_of
from fulldepth.training.resume import step_of
from fulldepth.training.sharding import take_weights

NOT_THE_MODEL = {
    *("complete.json", "unfinished", "record.parquet", "scheduler.pt", "optimizer.pt", "optimizer.json"),
    *("training_args.bin", "weights", "optimizer"),
}
"""Files of a checkpoint that only resuming needs."""


def export_run(
    run: str | Path,
    output: str | Path | None = None,
    *,
    step: int | None = None,
    dtype: str | None = None,
    every: bool = False,
    push_to_hub: str | None = None,
    watcher: Watcher | None = None,
) -> list[Path]:
    """Convert checkpoints of a run, sharded or not, to ordinary ones (configuration, tokenizer, safetensors).

    With `output`, the model of one checkpoint is written there. Without, shards are merged in place: the checkpoint
    then holds `model.safetensors` instead of them and can still be resumed from. If the process is killed, the
    checkpoint stays as it was. One copy of the weights must fit into CPU memory.

    Args:
        run: a training run's folder.
        output: the new folder, which must not exist; None = in place.
        step: step of the checkpoint; None = the last complete one.
        dtype: `float32`, `bfloat16` or `float16`, with `output` only; None = that of the checkpoint.
        every: merge all sharded checkpoints in place.
        push_to_hub: name (`user/model`) to upload the new folder to; with `output` only.
        watcher: receives progress messages.

    Returns:
        The folders that now hold a model.

    Raises:
        FulldepthError: if there is no such run or checkpoint, `output` exists, the arguments are inconsistent, the disk
            is full, a file is damaged, or the upload fails.
    """
    if is_sealed(run) and step is None and not every:  # the folder of a checkpoint instead of its run
        run, step = Path(run).absolute().parent, step_of(Path(run).absolute())
    watcher, checkpoints = watcher or Watcher(), dict(sealed_checkpoints(run))
    if not checkpoints:
        raise FulldepthError(f"{run} holds no whole checkpoint of a training run; expected the folder of one.")
    _check_options(output, step, dtype, every, push_to_hub)
    if step is not None and step not in checkpoints:
        raise FulldepthError(
            f"{run} has no whole checkpoint-{step}; it has those of steps {_listed(list(checkpoints))}."
        )
    chosen = checkpoints if every else {n: checkpoints[n] for n in [max(checkpoints) if step is None else step]}
    with explaining_full_disk(lambda: "Nothing was exported, and the checkpoint is as it was."):
        if output is None:
            for checkpoint in chosen.values():
                with locked(run):
                    put_together(checkpoint, watcher)
            return list(chosen.values())
        target = Path(output)
        if target.exists() or target.is_symlink():
            raise FulldepthError(f"{target} already exists; choose another --output.")
        (checkpoint,) = chosen.values()
        watcher.say(f"Exporting {checkpoint}")
        with atomic_folder(target) as part:
            _write_model(checkpoint, part, dtype)
        if address := publish(target, push_to_hub):
            watcher.say(f"Published: {address}")
        return [target]


def _check_options(output: Any, step: int | None, dtype: str | None, every: bool, push_to_hub: str | None) -> None:
    if every and (output is not None or step is not None):
        raise FulldepthError("--all puts every checkpoint together in place; it goes with neither --output nor --step.")
    if dtype is not None and output is None:
        raise FulldepthError("--dtype needs --output: in place, the run's own weights keep their precision.")
    if push_to_hub is not None and output is None:
        raise FulldepthError("--push-to-hub needs --output: a checkpoint of a run also holds its optimiser.")
    check_publishing(push_to_hub)


def put_together(checkpoint: Path, watcher: Watcher | None = None) -> None:
    """Replace a checkpoint's shards of weights by ordinary safetensors, if there are any.

    The shards stay valid until the new seal, which does not name them, is written; then the safetensors are.

    Raises:
        FulldepthError: if a shard is damaged.
    """
    remove_leftovers(checkpoint)
    if not is_sharded(checkpoint):
        return
    (watcher or Watcher()).say(f"Putting the shards of {checkpoint} together")
    part, shards = temporary_name(checkpoint / "model"), checkpoint / WEIGHT_SHARDS
    notes = notes_of(checkpoint)
    part.mkdir()
    try:
        model = _sharded_model(checkpoint)
        model.save_pretrained(part)
        save_exit_heads(model, part)
        for path in sorted(part.iterdir()):
            if path.suffix == ".safetensors" or not (checkpoint / path.name).exists():
                with path.open("r+b") as file:  # Windows flushes only what is open for writing
                    os.fsync(file.fileno())
                path.replace(checkpoint / path.name)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    seal(checkpoint, notes, without=WEIGHT_SHARDS)
    shutil.rmtree(shards.rename(temporary_name(shards)))


def _write_model(checkpoint: Path, folder: Path, dtype: str | None) -> None:
    """Write the model of a checkpoint and its other files, except training state.

    Raises:
        FulldepthError: if the tokenizer or the image processor, which are copied, do not load.
    """
    if any((checkpoint / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        load_tokenizer(checkpoint)
    if (checkpoint / "preprocessor_config.json").exists():
        load_processor(checkpoint, None)
    for path in checkpoint.iterdir():
        training = path.name in NOT_THE_MODEL or path.name.startswith(("rng_state", "."))
        if not training and not (path.suffix == ".safetensors" and (dtype or is_sharded(checkpoint))):
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, folder / path.name)
    if is_sharded(checkpoint):
        model = _sharded_model(checkpoint)
        if dtype is not None:
            model.to(dtype=pick_dtype(dtype))  # type: ignore[call-arg]
        model.save_pretrained(folder)
        save_exit_heads(model, folder)
    elif dtype is not None:
        for index in folder.glob("*.safetensors.index.json"):
            index.unlink()
        loaded = open_model(checkpoint, exit_heads=True, dtype=dtype, device="cpu").model
        loaded.save_pretrained(folder)
        save_exit_heads(loaded, folder)


def _sharded_model(checkpoint: Path) -> PreTrainedModel:
    """The model of a sharded checkpoint, on the CPU.

    Raises:
        FulldepthError: if the shards do not fit the configuration, or are damaged.
    """
    config = load_config(checkpoint)
    with reading(checkpoint):
        dtype = config.dtype if isinstance(config.dtype, torch.dtype) else getattr(torch, config.dtype or "float32")
        with torch.device("meta"):
            model: PreTrainedModel = auto_of(config).from_config(config, dtype=dtype, trust_remote_code=False)
            add_stored_exit_heads(model, stored_shapes(checkpoint / WEIGHT_SHARDS))
        model.to_empty(device="cpu")
        model.tie_weights()
        if (checkpoint / GENERATION_CONFIG_NAME).is_file():
            model.generation_config = GenerationConfig.from_dict(read_json(checkpoint / GENERATION_CONFIG_NAME))
    take_weights(model, checkpoint)
    return model


@contextmanager
def explaining_full_disk(sentence: Callable[[], str]) -> Iterator[None]:
    """Convert a disk-full error to a `FulldepthError` that ends with `sentence()`."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error) or isinstance(error, FulldepthError):
            raise
        raise FulldepthError(f"The disk is full. {sentence()}") from error


def _listed(steps: list[int]) -> str:
    shown = ", ".join(map(str, steps[:8]))
    return f"{shown}, ... {steps[-1]}" if len(steps) > 8 else shown

"""`fulldepth train export`: copies the model of a run's checkpoint, without what only resuming needs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fulldepth.errors import FulldepthError, is_disk_full
from fulldepth.files import atomic_folder
from fulldepth.hf import (
    check_publishing,
    is_sealed,
    load_processor,
    load_tokenizer,
    open_model,
    publish,
    save_exit_heads,
    sealed_checkpoints,
)
from fulldepth.progress import Watcher
from fulldepth.settings.keywords import with_progress
from fulldepth.training.resume import step_of

NOT_THE_MODEL = ("complete.json", "unfinished", "record.parquet", "scheduler.pt", "optimizer.pt", "training_args.bin")
"""Files of a checkpoint that only resuming needs, beside the random states."""


@with_progress
def export_run(
    run: str | Path,
    output: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    push_to_hub: str | None = None,
    watcher: Watcher,
) -> Path:
    """Write the model of a run's checkpoint (configuration, tokenizer, safetensors) into a folder of its own.

    Args:
        run: a training run's folder, or that of one of its checkpoints.
        output: the new folder, which must not exist.
        step: step of the checkpoint; None = the last complete one.
        dtype: `float32`, `bfloat16` or `float16`; None = that of the checkpoint.
        push_to_hub: name (`user/model`) to upload the new folder to.
        watcher: receives progress messages.

    Returns:
        The new folder.

    Raises:
        FulldepthError: if there is no such run or checkpoint, `output` exists, the disk is full, a file is damaged, or
            the upload fails.
    """
    if is_sealed(run) and step is None:  # the folder of a checkpoint instead of its run
        run, step = Path(run).absolute().parent, step_of(Path(run).absolute())
    checkpoints, target = dict(sealed_checkpoints(run)), Path(output)
    if not checkpoints:
        raise FulldepthError(f"{run} holds no whole checkpoint of a training run; expected the folder of one.")
    check_publishing(push_to_hub)
    if step is not None and step not in checkpoints:
        steps = ", ".join(map(str, list(checkpoints)[-8:]))
        raise FulldepthError(f"{run} has no whole checkpoint-{step}; the last ones are of steps {steps}.")
    if target.exists() or target.is_symlink():
        raise FulldepthError(f"{target} already exists; choose another --output.")
    checkpoint = checkpoints[max(checkpoints) if step is None else step]
    if any((checkpoint / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        load_tokenizer(checkpoint)  # it is copied, and damaged files are refused
    if (checkpoint / "preprocessor_config.json").exists():
        load_processor(checkpoint, None)
    watcher.say(f"Exporting {checkpoint}")
    with explaining_full_disk(lambda: "Nothing was exported."), atomic_folder(target) as part:
        for path in checkpoint.iterdir():
            if path.name in NOT_THE_MODEL or path.name.startswith(("rng_state", ".")):
                continue
            if dtype is None or not path.name.endswith((".safetensors", ".safetensors.index.json")):
                (shutil.copytree if path.is_dir() else shutil.copy2)(path, part / path.name)
        if dtype is not None:
            model = open_model(checkpoint, exit_heads=True, dtype=dtype, device="cpu").model
            model.save_pretrained(part)
            save_exit_heads(model, part)
    if address := publish(target, push_to_hub):
        watcher.say(f"Published: {address}")
    return target


@contextmanager
def explaining_full_disk(sentence: Callable[[], str]) -> Iterator[None]:
    """Convert a disk-full error to a `FulldepthError` that ends with `sentence()`."""
    try:
        yield
    except Exception as error:
        if not is_disk_full(error) or isinstance(error, FulldepthError):
            raise
        raise FulldepthError(f"The disk is full. {sentence()}") from error

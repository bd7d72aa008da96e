"""What is searched: a decoder proven to be understood, its tokenizer and its data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

import fulldepth.architectures  # noqa: F401  # tells transformers of this package's own models
from fulldepth.distributed import Processes
from fulldepth.errors import FulldepthError
from fulldepth.execution import verify
from fulldepth.hf import (
    Anatomy,
    Checkpoint,
    Classifier,
    anatomy_candidates,
    device_of,
    load_checkpoint,
    load_tokenizer,
)
from fulldepth.settings.search import ReadingSettings, SearchSettings
from fulldepth.skip.selection.score import Batch


def prove(model: PreTrainedModel | Anatomy, batch: Batch) -> tuple[Anatomy, Classifier]:
    """The anatomy of a language model, proven on a batch, and its head.

    Args:
        model: in evaluation mode.
        batch: a small one.

    Raises:
        FulldepthError: for what is no causal language model, or an anatomy that cannot be proven.
    """
    candidates = [model] if isinstance(model, Anatomy) else anatomy_candidates(model)
    owner = check_task(candidates[0]).model
    inputs = {name: tensor[:2].to(device_of(owner)) for name, tensor in batch.inputs.items()}
    verified = verify(candidates, inputs)
    if verified.classifier is None:
        raise FulldepthError(f"{type(owner).__name__} has no prediction head.")
    return verified.anatomy, verified.classifier


def check_task(anatomy: Anatomy) -> Anatomy:
    """The anatomy of a causal language model.

    Raises:
        FulldepthError: for anything else.
    """
    if anatomy.task != "causal-lm":
        raise FulldepthError(
            f"{type(anatomy.model).__name__} is no causal language model (a decoder that predicts the next token), by "
            "whose loss blocks are scored."
        )
    return anatomy


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No weight asks for a gradient; afterwards each asks again that did before."""
    asked = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in asked:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asked:
            parameter.requires_grad_(True)


def open_model(model: str | Path | PreTrainedModel, **options: Any) -> Checkpoint:
    """The model as passed in, or loaded.

    Args:
        model: a loaded model, a checkpoint folder or a Hub name.
        **options: of `load_checkpoint`.
    """
    if isinstance(model, PreTrainedModel):
        return Checkpoint(model, model.name_or_path or type(model).__name__)
    return load_checkpoint(model, **options)


def open_for(model: str | Path | PreTrainedModel, settings: SearchSettings, me: Processes) -> Checkpoint:
    """The model as passed in, or loaded as the settings of a search say.

    Raises:
        FulldepthError: as `load_checkpoint`; for a device and a device map at once.
    """
    if settings.device is not None and settings.device_map is not None:
        raise FulldepthError("Set a device or a device map, not both.")
    return open_model(
        model,
        dtype=settings.dtype,
        device=me.device(settings.device),
        device_map=settings.device_map,
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
    )


def tokenizer_for(checkpoint: Checkpoint, settings: ReadingSettings, tokenizer: Any = None) -> Any:
    """The tokenizer as passed in, the one that is named (a folder or Hub name), or the checkpoint's own.

    Args:
        checkpoint: the model.
        settings: may name a tokenizer; say which revision of a Hub model, and whether its code may run.
        tokenizer: takes precedence over the settings'; None = as they say.

    Raises:
        FulldepthError: if there is none.
    """
    named = settings.tokenizer if tokenizer is None else tokenizer
    if isinstance(named, str | Path):
        return load_tokenizer(named, trust_remote_code=settings.trust_remote_code)
    if named is not None:
        return named
    return open_tokenizer(checkpoint, trust_remote_code=settings.trust_remote_code, revision=settings.revision)


def open_tokenizer(checkpoint: Checkpoint, *, trust_remote_code: bool = False, revision: str | None = None) -> Any:
    """The tokenizer saved with a checkpoint or beside it.

    Raises:
        FulldepthError: if there is none, or the model was passed in without having been loaded from anywhere.
    """
    name = checkpoint.name
    folder = Path(name)
    if folder.is_dir():
        place = tokenizer_folder(folder)
        if place is None:
            raise FulldepthError(f"{folder} holds no tokenizer, nor does its parent; name one with --tokenizer.")
        name = str(place)
    elif not checkpoint.model.name_or_path:
        raise FulldepthError("A model that is passed in needs its tokenizer: search(model, data, tokenizer=...).")
    return load_tokenizer(name, revision=revision, trust_remote_code=trust_remote_code)


def tokenizer_folder(folder: Path) -> Path | None:
    """Where the tokenizer of a checkpoint's folder is: in it, beside it, or in `tokenizer` beside it."""
    for file in ("tokenizer.json", "tokenizer_config.json"):
        for place in (folder, folder.parent, folder.parent / "tokenizer"):
            if (place / file).is_file():
                return place
    return None

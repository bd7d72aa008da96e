"""The files beside a checkpoint's weights: tokenizer, image processor, generation settings."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers import logging as transformers_logging

from fulldepth.errors import FulldepthError
from fulldepth.hf.gguf import find_gguf
from fulldepth.hf.load import load_tokenizer
from fulldepth.hf.older_names import copy_tokenizer, stored_file
from fulldepth.hf.opening import find_tokenizer

PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that transformers reads image processors from."""


@contextmanager
def generation_settings(model: PreTrainedModel, folder: Path) -> Iterator[None]:
    """Write the generation settings unchanged: transformers loads some that it refuses to save with a model."""
    settings = getattr(model, "generation_config", None)  # only models that generate have them
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        if settings is None:
            del model.generation_config
        else:
            model.generation_config = settings
    if settings is not None:
        settings.to_json_file(folder / "generation_config.json")


def save_tokenizer(
    tokenizer: Any, places: Iterable[Any], folder: Path, *, revision: str | None, trust_remote_code: bool
) -> list[str]:
    """Save the tokenizer, or copy the files of the first place that has one; returns notes.

    Raises:
        FulldepthError: if `tokenizer` is a name under which there is none.
    """
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        tokenizer.save_pretrained(folder)
        return []
    for source in (tokenizer,) if tokenizer is not None else places:
        name = find_tokenizer(source) or str(source) if isinstance(source, str | Path) and str(source) else ""
        if name and find_gguf(name) is not None:
            with suppress(FulldepthError):  # the GGUF file may hold none
                load_tokenizer(name).save_pretrained(folder)
                return []
        elif name and copy_tokenizer(name, folder, revision):
            return []
    if tokenizer is not None:
        load_tokenizer(tokenizer, revision=revision, trust_remote_code=trust_remote_code).save_pretrained(folder)
        return []
    return ["No tokenizer was given, and none was found with the checkpoint."]


def copy_processor(source: str, folder: Path, revision: str | None = None) -> bool:
    """Copy a checkpoint's image processor unchanged; returns whether it has one.

    Args:
        source: the checkpoint: a folder, or a Hub name whose files are in the local cache.
        folder: destination.
        revision: branch, tag or commit, for a Hub name.
    """
    paths = [path for name in PROCESSOR_FILES if (path := stored_file(source, name, revision)) is not None]
    for path in paths:
        shutil.copyfile(path, folder / path.name)
    return bool(paths)


@contextmanager
def without_bars() -> Iterator[None]:
    """Silence transformers' progress bars."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()

"""Opens models and tokenizers that users name or pass in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from fulldepth.errors import FulldepthError
from fulldepth.hf.exit_head_files import EXIT_HEADS, find_exit_heads, load_exit_heads
from fulldepth.hf.gguf import find_gguf, packaged
from fulldepth.hf.load import Checkpoint, check_float64, check_is_name, load_checkpoint, load_tokenizer
from fulldepth.hf.offloading import device_of
from fulldepth.hf.run_checkpoints import checkpoint_of


def open_model(model: str | Path | PreTrainedModel, *, exit_heads: bool = False, **options: Any) -> Checkpoint:
    """The model as passed in, or loaded.

    Args:
        model: a loaded model, a checkpoint folder or a Hub name. Of the folder of a training run the last complete
            checkpoint is loaded, and a warning says which.
        exit_heads: also load the heads of a multi-exit checkpoint, by which each layer is read; else a warning says
            that they are not read.
        **options: of `load_checkpoint`.

    Raises:
        FulldepthError: as `load_checkpoint`; if a model is passed in on MPS.
    """
    if isinstance(model, PreTrainedModel):
        check_float64(device_of(model))
        return Checkpoint(model, model.name_or_path or type(model).__name__)
    check_is_name(model)
    last = checkpoint_of(model)
    checkpoint = load_checkpoint(last, **options)
    if last != str(model):
        note = f"{model} is the folder of a training run; its last checkpoint, {Path(last).name}, is read."
        checkpoint = replace(checkpoint, warnings=(*checkpoint.warnings, note))
    path = find_exit_heads(packaged(last), options.get("revision"))
    if path is None:
        return checkpoint
    if exit_heads:
        load_exit_heads(checkpoint.model, path)
        return checkpoint
    ignored = f"The heads of single layers ({EXIT_HEADS}) are not used here: the model is read by its own head alone."
    return replace(checkpoint, warnings=(*checkpoint.warnings, ignored))


def open_tokenizer(
    checkpoint: Checkpoint, tokenizer: Any = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """The tokenizer as passed in, the one that is named, or the one saved with a checkpoint or beside it.

    Args:
        checkpoint: the model.
        tokenizer: a tokenizer, its folder or Hub name; None = the checkpoint's own.
        revision: of a model on the Hub.
        trust_remote_code: whether code of the checkpoint may run.

    Raises:
        FulldepthError: if there is none, or the model was passed in without having been loaded from anywhere.
    """
    if isinstance(tokenizer, str | Path):
        return load_tokenizer(tokenizer, trust_remote_code=trust_remote_code)
    if tokenizer is not None:
        return tokenizer
    source = find_tokenizer(checkpoint.name)
    if source is None:
        raise FulldepthError(f"{checkpoint.name} holds no tokenizer, nor does its parent; name one with --tokenizer.")
    origin = checkpoint.model.name_or_path
    if source == checkpoint.name and not (isinstance(origin, str) and origin):
        raise FulldepthError("A model that is passed in needs its tokenizer: pass tokenizer=... too.")
    return load_tokenizer(source, revision=revision, trust_remote_code=trust_remote_code)


def find_tokenizer(name: str | Path) -> str | None:
    """Where the tokenizer of a checkpoint is: in it, one folder above, or in `tokenizer` beside it.

    A Hub name is returned unchanged; None = a folder without a tokenizer.
    """
    where = packaged(str(name))
    folder = Path(where)
    if not folder.is_dir() or find_gguf(folder) is not None:
        return where
    for file in ("tokenizer.json", "tokenizer_config.json"):
        for candidate in (folder, folder.parent, folder.parent / "tokenizer"):
            if (candidate / file).is_file():
                return str(candidate)
    return None

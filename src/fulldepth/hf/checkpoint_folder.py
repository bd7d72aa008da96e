"""Files of an export besides its weights: the folder, which appears when it is complete; tokenizer; older names.

transformers 5 writes rotary positions as `rope_parameters` alone. Earlier versions, which many servers still run, read
`rope_theta`, `rope_scaling` and similar entries; where these are missing they use defaults without a message, and
compute another model.
"""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import GenerationConfig, PreTrainedModel

from fulldepth.architectures.skipped import older_rope
from fulldepth.core.errors import FulldepthError
from fulldepth.core.files import atomic, atomic_folder, read_json, remove_leftovers
from fulldepth.core.number_format import bytes_in_words
from fulldepth.hf.file_checks import (
    TOKENIZER_FILES,
    TOKENIZER_TEXTS,
    check_model_files,
    check_tokenizer_files,
    stored_file,
)
from fulldepth.hf.gguf import find_gguf, packaged, read_header
from fulldepth.hf.load import find_tokenizer, load_tokenizer
from fulldepth.hf.run_checkpoints import checkpoint_of

COPIED = (*TOKENIZER_FILES, *TOKENIZER_TEXTS, "spiece.model", "sentencepiece.bpe.model", "chat_template.json")
"""Files that transformers reads tokenizers from."""
RENAMED = {"qwen3_moe": {"num_local_experts": "num_experts"}}
"""`model_type` -> entries of its configuration and their older names."""
LARGE = 10**9
"""Bytes of weights from which an export is tried with few layers first; smaller ones are written in seconds."""
TOKENIZER_CLASSES = {"TokenizersBackend": "PreTrainedTokenizerFast"}
"""Class of transformers 5 -> its earlier name, which transformers 5 also accepts."""


def check_output_path(target: Path, suffix: str | None = None) -> None:
    """Refuse an existing file or folder, and a name without the ending of a format that is one file.

    Raises:
        FulldepthError: if `target` exists, or ends otherwise.
    """
    if suffix is not None and target.suffix != suffix:
        raise FulldepthError(f"This export is one file, whose name must end with {suffix}; got {target}.")
    if target.exists() or target.is_symlink():
        raise FulldepthError(f"{target} exists already; an export is never written over anything. Choose another name.")


def check_disk_space(target: Path, size: float, advice: str = "Choose another place, or free some space.") -> None:
    """Refuse to start work whose files will not fit on the disk.

    Args:
        target: the file or folder to create or to fill.
        size: bytes that it needs at least.
        advice: the end of the message.

    Raises:
        FulldepthError: with the bytes needed and free.
    """
    existing = next(place for place in (target.absolute(), *target.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free
    if free < size:
        needed, left = bytes_in_words(size), bytes_in_words(free)
        if needed == left:  # the difference is below the last decimal
            needed, left = f"{math.ceil(size):,} bytes", f"{free:,} bytes"
        raise FulldepthError(f"{target} needs at least {needed}, and {left} are free in {existing}. {advice}")


def size_of(model: PreTrainedModel | str | Path, revision: str | None = None, itemsize: int | None = None) -> int:
    """Return the bytes of a model's weights: in memory, in a checkpoint's files, or of a GGUF file in half precision.

    With `itemsize`, every weight counts as this many bytes.
    """
    if isinstance(model, PreTrainedModel):
        return sum(parameter.numel() * (itemsize or parameter.itemsize) for parameter in model.parameters())
    where = packaged(str(checkpoint_of(model)))
    gguf = find_gguf(where)
    if gguf is not None:
        return (itemsize or 2) * read_header(gguf).weights.elements
    stored = check_model_files(where, revision)
    return stored.size if itemsize is None else itemsize * stored.elements


@contextmanager
def folder_to_be(target: Path, *, file: bool = False) -> Iterator[Path]:
    """Yield a folder (or the name of a file) beside `target`, renamed to `target` at the end and removed on an error.

    Raises:
        FulldepthError: if it cannot be written (disk full, no permission).
    """
    new = [parent for parent in target.absolute().parents if not parent.exists()]
    try:
        remove_leftovers(target.absolute().parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        with (atomic if file else atomic_folder)(target) as part:
            yield part
            check_output_path(target)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FulldepthError(f"Cannot write the export to {target}: {reason}.") from error
    finally:
        with suppress(OSError):  # ends at the first folder that is not empty
            for parent in new:
                parent.rmdir()


class _TriedError(Exception):
    """Raised at the end of a trial, so that `folder_to_be` removes the folder."""


@contextmanager
def trial(target: Path) -> Iterator[Path]:
    """Yield a path in a temporary folder beside `target`, where an export with a few layers is tried before any work.

    Raises:
        FulldepthError: as `folder_to_be`. An error that is raised inside names `target`, and says that it was a trial.
    """
    with suppress(_TriedError), folder_to_be(target) as folder:
        place = folder / target.name
        try:
            yield place
        except FulldepthError as error:
            words = str(error).replace(str(place), str(target))
            raise FulldepthError(f"{words} (This was a trial with a few layers, before the work.)") from error
        raise _TriedError


def strip_foreign_code(folder: Path, *, carries_code: bool) -> None:
    """Remove `auto_map` from every configuration: it names code of the original model, which the export lacks.

    Args:
        folder: the export.
        carries_code: whether `config.json` names this package's own code, which stays.
    """
    for path in folder.glob("*.json"):
        if path.name == "tokenizer.json" or (path.name == "config.json" and carries_code):
            continue
        text = path.read_text(encoding="utf-8")
        if "auto_map" in text:
            path.write_text(json.dumps(_without_code(json.loads(text)), indent=2, ensure_ascii=False) + "\n", "utf-8")


def _without_code(value: Any) -> Any:
    """Return JSON values without any key `auto_map`."""
    if isinstance(value, dict):
        return {key: _without_code(inner) for key, inner in value.items() if key != "auto_map"}
    return [_without_code(inner) for inner in value] if isinstance(value, list) else value


def count_parameters(folder: Path) -> int:
    """Return the number of elements in the weights on disk."""
    count = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            count += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
    return count


@contextmanager
def generation_settings(model: PreTrainedModel, folder: Path) -> Iterator[None]:
    """Write the generation settings unchanged, except for multi-token prediction.

    Inside `with` the model has default settings, because transformers refuses to save some that it loads.
    """
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
        if getattr(settings, "use_mtp", None):  # needs layers that no export holds
            settings = copy.copy(settings)
            settings.use_mtp = None
        settings.to_json_file(folder / "generation_config.json")


def save_tokenizer(
    tokenizer: Any, places: Iterable[tuple[Any, str | None]], folder: Path, *, trust_remote_code: bool
) -> list[str]:
    """Save the tokenizer, or copy the files of the first place that has one. Return notes for the user.

    Args:
        tokenizer: an object, or a name, which is read at its newest revision; None = from one of the places.
        places: names of models or tokenizers, and their revisions.
        folder: where it is saved.
        trust_remote_code: run code that comes with the tokenizer.

    Raises:
        FulldepthError: if `tokenizer` is a name under which there is none, or its files are damaged.
    """
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        tokenizer.save_pretrained(folder)
        return []
    for source, revision in places if tokenizer is None else ((tokenizer, None),):
        name = find_tokenizer(source) or str(source) if isinstance(source, str | Path) and str(source) else ""
        if name and find_gguf(name) is not None:
            with suppress(FulldepthError):  # the GGUF file may hold none
                load_tokenizer(name).save_pretrained(folder)
                return []
        elif name:
            check_tokenizer_files(name, revision)  # damaged files are refused, not copied
            if copy_files(COPIED, name, folder, revision):
                return []
    if tokenizer is not None:
        load_tokenizer(tokenizer, trust_remote_code=trust_remote_code).save_pretrained(folder)
        return []
    return ["No tokenizer was given, and none was found with the checkpoint."]


def publish_older_names(folder: Path) -> None:
    """Add entries under the names before transformers 5 to a checkpoint's `config.json`: rotary positions, the type of
    the weights, the number of experts. transformers 5 reads the same from both.
    """
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    for config in (values, *(part for part in values.values() if isinstance(part, dict))):
        kind = str(config.get("model_type")).removeprefix("fulldepth_skipped_")
        renamed = {"dtype": "torch_dtype"} if isinstance(config.get("dtype"), str) else {}
        if config.get("model_type") == "gpt2":
            renamed["n_positions"] = "n_ctx"  # read by mlx-lm and llama.cpp's converter
        renamed |= RENAMED.get(kind, {})
        names = {older: config[name] for name, older in renamed.items() if name in config}
        config |= names | older_rope(kind, config)
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def copy_files(names: Iterable[str], source: str, folder: Path, revision: str | None = None) -> bool:
    """Copy files of a checkpoint unchanged. Return True if it has any of them.

    Args:
        names: the files' names: `COPIED`, or `PROCESSOR_FILES` of an image processor.
        source: the checkpoint: a folder, or a Hub name whose files are in the local cache.
        folder: destination.
        revision: branch, tag or commit, for a Hub name.
    """
    paths = {name: path for name in names if (path := stored_file(source, name, revision)) is not None}
    for name, path in paths.items():
        shutil.copyfile(path, folder / name)
    return bool(paths)


def publish_older_tokenizer(folder: Path) -> None:
    """Store the tokenizer's class and additional special tokens under names that all versions of transformers read."""
    path = folder / "tokenizer_config.json"
    values = read_json(path) if path.is_file() else None
    if not isinstance(values, dict):
        return
    changed = dict(values)
    if (kind := changed.get("tokenizer_class")) in TOKENIZER_CLASSES:
        changed["tokenizer_class"] = TOKENIZER_CLASSES[kind]
    if isinstance(changed.get("extra_special_tokens"), list):
        changed["additional_special_tokens"] = changed.pop("extra_special_tokens")
    if changed != values:
        path.write_text(json.dumps(changed, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")

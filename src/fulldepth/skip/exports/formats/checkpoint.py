"""What every format writes with: the model as a stock class, and a checkpoint out of a class and its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers import logging as transformers_logging

from fulldepth.architectures import DepthLlamaConfig
from fulldepth.errors import FulldepthError
from fulldepth.hf import Anatomy
from fulldepth.skip.exports.fold import Folding
from fulldepth.skip.plan import Plan

IDENTITY = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path")
"""Entries of a configuration that say whose it is."""


@dataclass(frozen=True)
class Draft:
    """What a format is to write: the model with the plan's scalars in its weights."""

    anatomy: Anatomy
    plan: Plan
    folding: Folding
    folder: Path

    @property
    def model(self) -> PreTrainedModel:
        """A stock class, whose skipped branches still exist, as zeros."""
        return self.anatomy.model

    @property
    def blocks_name(self) -> str:
        """Path of the list of blocks from the model, as in the names of weights."""
        return next(name for name, module in self.model.named_modules() if module is self.anatomy.block_list)


def as_stock(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself, or for this package's Llama without its switches a `LlamaForCausalLM` that shares its weights.

    Raises:
        FulldepthError: for one with switches, which no stock class computes.
    """
    config = model.config
    if not isinstance(config, DepthLlamaConfig):
        return model
    if (config.residual, config.memory) != ("serial", "none"):
        raise FulldepthError(
            f"A depth_llama with residual {config.residual!r} and memory {config.memory!r} is no stock decoder; only "
            "'serial' with 'none' is a Llama."
        )
    own = {field.name for field in fields(DepthLlamaConfig)} - {field.name for field in fields(LlamaConfig)}
    values = {k: v for k, v in config.to_dict().items() if k not in own and k not in IDENTITY}
    with torch.random.fork_rng(devices=[]):
        stock = LlamaForCausalLM(LlamaConfig(**values | {"attn_implementation": config._attn_implementation}))
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


def save(draft: Draft, kind: Any, config: PreTrainedConfig, weights: Mapping[str, Tensor]) -> None:
    """Write a checkpoint of another class or shape; nothing is computed or copied.

    Args:
        draft: where to, and the generation settings.
        kind: class of the model.
        config: its configuration.
        weights: every one that it has, by name.

    Raises:
        FulldepthError: if a weight is missing, left over or of another shape.
    """
    config.dtype = draft.model.dtype
    with torch.device("meta"):
        model = kind(config)
    try:
        model.load_state_dict(dict(weights), strict=True, assign=True)
    except RuntimeError as error:
        message = " ".join(str(error).split())[:400]
        raise FulldepthError(f"The weights do not make a {kind.__name__}: {message}") from error
    model.tie_weights()
    model.generation_config = draft.model.generation_config
    model.save_pretrained(draft.folder)

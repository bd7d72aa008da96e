"""Shared by all formats: writing a checkpoint from a class and its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from fulldepth.core.errors import FulldepthError
from fulldepth.hf import Anatomy, loaded_weight
from fulldepth.hf.asked_outputs import make_plain
from fulldepth.hf.promises import withdraw_promises
from fulldepth.hf.tying import state_untied, stated_ties, weights_apart
from fulldepth.skip.exports.fold import Folding
from fulldepth.skip.plan import Plan

IDENTITY = ("model_type", "architectures", "auto_map", "transformers_version", "_name_or_path")
"""Entries of a configuration that identify its class and origin."""


@dataclass(frozen=True)
class Weight:
    """A weight of a checkpoint, read or computed when its file is written."""

    like: Tensor
    """On the device `meta`: its shape and type."""
    read: Callable[[], Tensor]

    def map(self, change: Callable[[Tensor], Tensor]) -> Weight:
        """The result of a function of this weight, computed when it is read."""
        return Weight(change(self.like), lambda: change(self.read()))


@dataclass(frozen=True)
class Draft:
    """Input of `Format.write`: the model, the plan and its folding, and the folder."""

    anatomy: Anatomy
    plan: Plan
    folding: Folding
    folder: Path
    shard_size: int
    """Largest weight file in bytes; also the most that is in memory while weights are written."""
    gguf_type: str | None = None
    """Type of changed tensors of a GGUF file."""
    notes: list[str] = field(default_factory=list)
    """What `save` changed in the configuration."""
    stored: dict[str, Tensor] = field(default_factory=dict)
    """Weights that `Format.write` rounded, by name, as the file holds them."""

    @property
    def model(self) -> PreTrainedModel:
        """A model of a stock class, or of one that carries its code, with all branches and without scalars."""
        return self.anatomy.model

    def weights(self) -> dict[str, Weight]:
        """Name -> weight after folding; skipped branches have output weights of zero."""
        return {
            name: Weight(torch.empty_like(tensor, device="meta"), partial(self._read, name, tensor))
            for name, tensor in self.model.state_dict().items()
        }

    def _read(self, name: str, tensor: Tensor) -> Tensor:
        return self.folding.weight(name, loaded_weight(self.model, name, tensor))

    @property
    def state_scale(self) -> list[float]:
        """c_0..c_L of the folded model's states."""
        return self.folding.state_scale(self.anatomy)


def carries_code(model: PreTrainedModel) -> bool:
    """Return True if a model has active switches, which no stock class computes, so that checkpoints carry its code."""
    is_switched = getattr(model, "stock_class", None) is not None and bool(model.config.switches)
    return is_switched and type(model)._auto_class is not None


def as_text(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself; of a model that also reads images, its language model, which shares its modules."""
    config = model.config.get_text_config(decoder=True)
    if config is model.config:
        return model
    with torch.device("meta"):
        implementation = {"attn_implementation": config._attn_implementation}
        text: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **implementation)
    setattr(text, text.base_model_prefix, model.get_decoder())
    embeddings = model.get_input_embeddings()
    head = model.get_output_embeddings()
    text.set_output_embeddings(head)
    text.config.tie_word_embeddings = head.weight is embeddings.weight  # as in the whole model, whatever its part says
    text.all_tied_weights_keys = stated_ties(text)
    text.generation_config = model.generation_config
    return text.train(model.training)


def plain_values(config: PreTrainedConfig) -> dict[str, Any]:
    """A configuration's entries without `IDENTITY`."""
    return {name: value for name, value in config.to_dict().items() if name not in IDENTITY}


def save(
    draft: Draft, kind: Any, config: PreTrainedConfig, weights: Mapping[str, Weight], *, conversions: Any = None
) -> None:
    """Write a checkpoint of a class, file by file.

    Weights are read or computed when their file is written: at most one file of them is in memory (or one weight,
    if that is larger).

    Args:
        draft: the folder, and the model whose generation settings are written.
        kind: class of the model.
        config: its configuration.
        weights: all of its weights, by name.
        conversions: transformers' conversions from names in files to names in the model, which are reverted; None =
            those of the class.

    Raises:
        FulldepthError: if a weight is missing, left over or of another shape.
    """
    config.dtype = draft.model.dtype
    make_plain(config)
    draft.notes.extend(withdraw_promises(config, weights))
    if weights_apart(draft.model):
        state_untied(config)
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
    left_out = {
        target
        for target, source in model.all_tied_weights_keys.items()
        if model.get_parameter_or_buffer(target) is model.get_parameter_or_buffer(source)
    }.union(model._keys_to_ignore_on_save or ())
    _write_weights(draft, model, {name: weights[name] for name in model.state_dict() if name not in left_out})


def _write_weights(draft: Draft, model: PreTrainedModel, weights: Mapping[str, Weight]) -> None:
    """Write weights in files of bounded size, under transformers' names for files; layers are converted as a whole."""

    def size(names: Sequence[str]) -> int:
        return sum(weights[name].like.nbytes for name in names)

    groups: dict[str, list[str]] = {}
    for name in weights:
        layer = re.match(r".*?\.\d+\.", name)
        groups.setdefault(layer[0] if layer else name.rpartition(".")[0], []).append(name)
    parts: dict[str, list[str]] = {}
    """Name of the first -> all weights that are converted together: those of a layer if they fit into a file."""
    for names in groups.values():
        parts |= {names[0]: names} if size(names) <= draft.shard_size else {name: [name] for name in names}
    pattern = "model{suffix}.safetensors"
    files = split_state_dict_into_shards_factory(
        parts, get_storage_size=size, filename_pattern=pattern, max_shard_size=draft.shard_size
    ).filename_to_tensors
    index: dict[str, str] = {}
    total = 0
    for file, firsts in files.items():
        held: dict[str, Tensor] = {}
        for names in (parts[first] for first in firsts):
            for name, weight in revert_weight_conversion(model, {name: weights[name].read() for name in names}).items():
                held[name] = weight.detach().contiguous().cpu()
        save_file(held, draft.folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(held, file)
        total += sum(weight.nbytes for weight in held.values())
    if len(files) > 1:
        metadata = {"total_parameters": model.num_parameters(), "total_size": total}
        text = json.dumps({"metadata": metadata, "weight_map": index}, indent=2, sort_keys=True) + "\n"
        (draft.folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

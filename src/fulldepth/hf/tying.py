"""Makes `tie_word_embeddings` state what the weights show: embeddings and output layer are one weight or two."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from fulldepth.hf.file_checks import check_model_files, locate
from fulldepth.hf.gguf import find_gguf, packaged
from fulldepth.hf.run_checkpoints import checkpoint_of

FLAG = "tie_word_embeddings"
UNTIED = f"The configuration ties embeddings and output layer ({FLAG}), but these weights differ. The weights are used."


def stated_ties(model: PreTrainedModel) -> dict[str, str]:
    """Name of each weight that the configuration ties -> the weight that it is tied to."""
    return dict(model.get_expanded_tied_weights_keys(all_submodels=True))


def weights_apart(model: PreTrainedModel) -> list[str]:
    """Return the names of weights that the configuration ties and that the model holds as separate weights."""
    held: dict[str, nn.Parameter] = dict(model.named_parameters(remove_duplicate=False))
    tied = model.all_tied_weights_keys
    return [
        target
        for target, source in stated_ties(model).items()
        if target not in tied
        # only transformers can tell offloaded weights apart
        or not (held.get(target) is held.get(source) or held[target].is_meta)
    ]


def state_ties(model: PreTrainedModel) -> str | None:
    """Make the configuration of a model state whether its weights are tied, in place.

    If only some of the weights that it ties are separate (an encoder-decoder with one table for three uses), it is
    unchanged: transformers compares the stored weights and ties those that are equal.

    Returns:
        A warning if the configuration ties weights that are separate, else None.
    """
    if not (apart := weights_apart(model)):
        return None
    if len(apart) == len(stated_ties(model)):
        state_untied(model.config)
    model.all_tied_weights_keys = {
        target: source for target, source in model.all_tied_weights_keys.items() if target not in apart
    }
    return UNTIED


@contextmanager
def keeping_ties(model: PreTrainedModel) -> Iterator[None]:
    """Let `tie_weights` do nothing inside `with`: where the configuration is wrong it would drop an output layer."""
    vars(model)["tie_weights"] = lambda *_, **__: None
    try:
        yield
    finally:
        vars(model).pop("tie_weights")


def state_untied(config: PreTrainedConfig) -> None:
    """Set `tie_word_embeddings` of a configuration and of its text model's to False, in place."""
    for part in (config, config.get_text_config(decoder=True)):
        if getattr(part, FLAG, False):
            setattr(part, FLAG, False)


def stores_apart(checkpoint: str, model: PreTrainedModel) -> bool:
    """Return True if a checkpoint holds different values for weights that the configuration of a model ties.

    Args:
        checkpoint: folder, Hub name, package or run folder.
        model: a model of the checkpoint's configuration, possibly on the device `meta`.
    """
    where = packaged(str(checkpoint_of(checkpoint)))
    if not (ties := stated_ties(model)) or find_gguf(where) is not None:  # a GGUF file states what it holds
        return False
    stored = check_model_files(where).files
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    expected = model.state_dict()  # GPT-NeoX stores its `lm_head.weight` as `embed_out.weight`
    keys = {rename_source_key(key, renamings, [], model.base_model_prefix, expected)[0]: key for key in stored}

    def read(name: str) -> Any:
        path = locate(where, stored[keys[name]]) if name in keys else None
        if path is None:
            return None
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(keys[name])

    for target, source in ties.items():
        target_value = read(target)
        source_value = read(source)
        if target_value is None or source_value is None:
            continue
        if not torch.equal(target_value.double(), source_value.double()):
            return True
    return False

"""Proposes the lists of blocks of a model that is not in the table of families.

The numerical checks at load accept or refuse a proposal (`fulldepth.execution.verify`).
"""

from __future__ import annotations

from contextlib import suppress
from inspect import signature
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError, one_line
from fulldepth.hf.families import SKIPPED, Family, rows_of

WRAPPERS = {"DistributedDataParallel": "module", "OptimizedModule": "_orig_mod"}
"""Class of a wrapper -> its attribute that holds the model."""
STACKS = ("encoder", "decoder")
"""Stacks of an encoder-decoder."""
MOST_LISTS = 24
"""Most lists of modules that are tried as blocks."""


def find_families(model: PreTrainedModel, tower: str | None = None) -> list[Family]:
    """Proposals for a model's anatomy, likeliest first.

    Every `ModuleList` is a candidate for the list of blocks, the longest first. Attention and MLP are found by the sums
    that blocks compute (`fulldepth.execution.branches`), final norm and head by following the tensors of a pass
    (`fulldepth.execution.stream`).

    Args:
        model: a model of a family that is not in the table.
        tower: `text` or `vision`, to search only the model's `text_model` or `vision_model`.

    Raises:
        FulldepthError: if there is no list of blocks or no such tower, or the model is an encoder-decoder or reads
            neither text nor images.
    """
    name = type(model).__name__
    fields: dict[str, Any] = {"sparse": str(model.config.model_type).startswith(SKIPPED)}
    if hasattr(model.config, "residual_multiplier"):
        fields["branch_scale"] = "residual_multiplier"
    if tower is None:
        refuse_unread(model)
        refuse_without_tower(model)
        body: nn.Module = body_of(model)
        fields["modality"] = "images" if model.main_input_name == "pixel_values" else "text"
    else:
        parts = [*towers(model), *stacks(model)]
        if tower not in parts:
            advice = f"choose {' or '.join(parts)}" if parts else "it has a single stack, so leave tower out"
            raise FulldepthError(f"{name} has no tower {tower}; {advice}.")
        body = _stack(model, tower) if tower in STACKS else model.get_submodule(f"{tower}_model")
        path = next(path for path, module in model.named_modules() if module is body)
        fields |= {"body": path, "tower": tower, "heads": None if tower == "decoder" else {}}
        fields["modality"] = "images" if tower == "vision" else "text"
    lists = [
        (path, module) for path, module in body.named_modules() if isinstance(module, nn.ModuleList) and len(module)
    ]
    if not lists:
        children = ", ".join(f"{n} ({type(m).__name__})" for n, m in body.named_children()) or "no modules"
        raise FulldepthError(
            f"No list of blocks was found in {name}: it holds no ModuleList, only {one_line(children)}. "
            "Name the list in the settings: anatomy.blocks=PATH."
        )
    lists.sort(key=lambda item: (-len(item[1]), item[0].count(".")))
    return [
        Family(f"found ({model.config.model_type})", blocks=path, attention=None, mlp=None, is_proposed=True, **fields)
        for path, _ in lists[:MOST_LISTS]
    ]


def unwrapped(model: Any) -> PreTrainedModel:
    """Return the transformers model inside PEFT adapters that change its layers (as LoRA), `torch.compile` and DDP.

    Raises:
        FulldepthError: for adapters that put prompts before the sequence, and objects without a transformers model.
    """
    while (attribute := WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, attribute)
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict) and not isinstance(model, PreTrainedModel):
        prompts = sorted(str(config.peft_type) for config in adapters.values() if config.is_prompt_learning)
        if prompts:
            raise FulldepthError(
                f"The adapter {', '.join(prompts).removeprefix('PeftType.')} adds positions before the sequence that "
                "no mask and no label covers; use an adapter that changes the layers, such as LoRA."
            )
        model = model.base_model.model  # PeftModel and PeftMixedModel
    if not isinstance(model, PreTrainedModel):
        raise FulldepthError(
            f"{type(model).__name__} is not a transformers model; pass the model itself, before wrapping it. For other "
            "modules fulldepth.metrics and fulldepth.losses have the measures and penalties as functions of states."
        )
    return model


def towers(model: PreTrainedModel) -> list[str]:
    """Return `text` and `vision` for a model that has a text model and a vision model; empty for others."""
    names = ["text", "vision"]
    return names if all(isinstance(getattr(model, f"{name}_model", None), nn.Module) for name in names) else []


def stacks(model: PreTrainedModel) -> list[str]:
    """Return `encoder` and `decoder` for a model of text whose decoder reads its encoder; empty for others."""
    if not getattr(model.config, "is_encoder_decoder", False) or model.main_input_name != "input_ids":
        return []
    rows = rows_of(model.config.model_type)
    if rows is not None and not any(row.tower in STACKS for row in rows):
        return []
    encoder, decoder = (_stack(model, name) for name in STACKS)
    inside = [module for module in model.modules() if module is not model]
    return list(STACKS) if encoder is not decoder and encoder in inside and decoder in inside else []


def _stack(model: PreTrainedModel, name: str) -> Any:
    """Return the module that a model's `get_encoder` or `get_decoder` returns; None if it has none."""
    with suppress(AttributeError, NotImplementedError, TypeError):
        return getattr(model, f"get_{name}")()
    return None


def refuse_choices(model: PreTrainedModel) -> None:
    """Refuse models that read several texts at a time and choose one."""
    if (name := type(model).__name__).endswith("ForMultipleChoice"):
        raise FulldepthError(
            f"{name} reads several texts at a time and chooses one of them; fulldepth gives a model one text at a "
            f"time. Its body reads single texts: fulldepth.measure(model.{model.base_model_prefix}, data, "
            "tokenizer=...) in Python."
        )


def refuse_unread(model: PreTrainedModel) -> None:
    """Refuse models that no command reads as a whole: `refuse_choices`, models of inputs other than text and images,
    and encoder-decoders that classify or read images. Types of the table of families are read, as detectors are.
    """
    refuse_choices(model)
    name = type(model).__name__
    reads = model.main_input_name
    is_joined = getattr(model.config, "is_encoder_decoder", False)
    if is_joined and name.endswith("ForSequenceClassification"):
        raise FulldepthError(
            f"{name} is an encoder-decoder that classifies: its head reads the decoder's last state, so neither stack "
            "is the classifier. `fulldepth measure --set tower=encoder` reads that stack alone; other commands refuse "
            "it."
        )
    if rows_of(model.config.model_type) is not None or reads == "input_ids":
        return
    if is_joined:
        raise FulldepthError(
            f"{name} is an encoder-decoder that reads {reads}; of encoder-decoders, only those of text can be read."
        )
    if reads != "pixel_values":
        raise FulldepthError(f"{name} reads {reads}; fulldepth feeds text (input_ids) and images only.")


def refuse_without_tower(model: PreTrainedModel) -> None:
    """Refuse an encoder-decoder of which no stack was chosen."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise FulldepthError(
            f"{type(model).__name__} is an encoder-decoder. Choose a stack (tower: encoder or decoder) for fulldepth "
            "measure and Objective.attach; measure also reads both on rows with input and target. Other commands "
            "refuse it."
        )


def body_of(model: PreTrainedModel) -> nn.Module:
    """Return the model without its head, by transformers' convention; the model itself if it has no such part."""
    names = [model.base_model_prefix, "model"] if "For" in type(model).__name__ else [model.base_model_prefix]
    for part in (getattr(model, name, None) for name in names if name):
        if isinstance(part, nn.Module):  # some classes give their encoder the name of the body
            parameters = signature(part.forward).parameters
            if model.main_input_name in parameters or "hidden_states" not in parameters:
                return part
    return model

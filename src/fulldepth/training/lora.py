"""Low-rank adapters (LoRA): added to a model, saved merged and separately, and restored when a run resumes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fulldepth.core.errors import FulldepthError, needing
from fulldepth.hf.tying import state_untied
from fulldepth.settings.train import LoraSettings

ADAPTERS = "lora.safetensors"
"""File with the adapters, beside the merged weights of a checkpoint, from which a run resumes."""
NAME = "default"
"""Name of the adapters in PEFT."""


def add_adapters(model: PreTrainedModel, settings: LoraSettings) -> None:
    r"""Freeze a model and add adapters to its linear layers, in place: `W x + s B (A x)` with `s = alpha / rank`.

    A is drawn from torch's global generator and B is zero. Frozen matrices (the output weights of removed branches)
    get no adapter. Nothing happens without a rank.

    Raises:
        FulldepthError: if peft is not installed, no linear layer has one of the names in `target_modules`, or another
            layer has one of them, such as the embeddings.

    Source: LoRA (arXiv 2106.09685), Eq. 3.
    """
    if settings.rank is None:
        return
    with needing("peft", "lora", "Training with lora.rank"):
        import peft  # noqa: PLC0415
    frozen = [name.removesuffix(".weight") for name, weight in model.named_parameters() if not weight.requires_grad]
    config = peft.LoraConfig(
        r=settings.rank,
        lora_alpha=2 * settings.rank if settings.alpha is None else settings.alpha,  # type: ignore[arg-type]
        target_modules=settings.target_modules or "all-linear",
        exclude_modules=frozen or None,
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # peft warns about the transposed matrices of GPT-2
            peft.inject_adapter_in_model(config, model, NAME)
    except ValueError as error:
        raise FulldepthError(
            f"lora.target_modules={settings.target_modules} match no linear layer of the model: {error}"
        ) from error
    adapted = {n: m for n, m in model.named_modules() if isinstance(m, peft.tuners.tuners_utils.BaseTunerLayer)}
    for name, layer in adapted.items():
        kind = layer.get_base_layer()
        if not isinstance(kind, nn.Linear | Conv1D):
            raise FulldepthError(
                f"lora.target_modules={settings.target_modules} match {name}, which is of the class "
                f"{type(kind).__name__}; adapters are for linear layers alone. Name others."
            )
    if model.get_output_embeddings() in adapted.values():  # what is merged into it is not in the embeddings
        state_untied(model.config)


def save_adapters(model: torch.nn.Module, weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Write the adapters into a checkpoint's folder.

    Args:
        model: the model with adapters.
        weights: its state dict, with unsharded tensors.
        folder: the checkpoint's folder.

    Returns:
        The state dict of the model without adapters: `W + s B A` in place of W, in W's precision.
    """
    adapters = {name: weight.cpu().contiguous() for name, weight in weights.items() if ".lora_" in name}
    save_file(adapters, folder / ADAPTERS, metadata={"format": "pt"})
    merged = {name.replace(".base_layer.", "."): weight for name, weight in weights.items() if name not in adapters}
    for name, layer in model.named_modules():
        if f"{name}.lora_A.{NAME}.weight" in adapters:
            a, b = (weights[f"{name}.lora_{part}.{NAME}.weight"].float() for part in "AB")
            change: Any = layer.scaling[NAME] * (b @ a)
            weight = merged[f"{name}.weight"]
            merged[f"{name}.weight"] = (weight + (change.T if layer.fan_in_fan_out else change)).to(weight.dtype)
    return merged


def load_adapters(model: torch.nn.Module, folder: str | Path) -> None:
    """Restore the adapters of a checkpoint in a model with the same adapters."""
    model.load_state_dict(load_file(Path(folder) / ADAPTERS), strict=False)

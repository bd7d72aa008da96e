"""Inputs of a model on the device and in the precision in which it expects them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model expects its inputs: the device of its first weights that are loaded."""
    placed = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(placed, torch.device("cpu"))


def model_inputs(
    inputs: Mapping[str, torch.Tensor], device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """A batch's inputs on the model's device, pictures in its precision."""
    return {name: value.to(device, dtype if value.is_floating_point() else None) for name, value in inputs.items()}

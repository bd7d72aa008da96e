"""A small artificial batch for checks of a model."""

from __future__ import annotations

import torch
from torch import Tensor

from fulldepth.hf.anatomy import Anatomy


def sample_inputs(anatomy: Anatomy) -> dict[str, Tensor]:
    """Two short sequences of tokens, or two images of noise, on the device of the model's first weights."""
    placed = (weight.device for weight in anatomy.model.parameters() if weight.device.type != "meta")
    device = next(placed, torch.device("cpu"))
    if anatomy.family.modality == "text":
        tokens = torch.arange(16, device=device).view(2, 8) % (anatomy.vocab_size or 2)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    size = getattr(anatomy.config, "image_size", 224)
    height, width = (size, size) if isinstance(size, int) else size
    channels = getattr(anatomy.config, "num_channels", 3)
    noise = torch.linspace(-1, 1, 2 * channels * height * width, device=device, dtype=anatomy.model.dtype)
    return {"pixel_values": noise.sin().view(2, channels, height, width)}

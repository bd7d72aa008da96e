"""`as_stock`: a model of one of our classes as one of transformers, where both compute the same."""

from __future__ import annotations

from typing import Any

import torch
from accelerate import init_empty_weights
from transformers import PreTrainedModel

from fulldepth.core.errors import FulldepthError
from fulldepth.hf.modes import is_offloaded
from fulldepth.hf.tying import state_untied, weights_apart


def as_stock(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself; a class with a `stock_class` and no active switch becomes that class, with the same weights.

    Raises:
        FulldepthError: for a model with active switches, which no stock class computes, or with offloaded weights.
    """
    config = model.config
    stock_class = getattr(model, "stock_class", None)
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
    stock_weights: Any = getattr(model, "stock_weights", model.state_dict)
    stock.load_state_dict(stock_weights(), assign=True)
    if weights_apart(model):
        state_untied(stock.config)
    stock.tie_weights()
    stock.generation_config = model.generation_config
    return stock.train(model.training)

"""Context managers: evaluation mode, frozen weights, and a silent library."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import logging


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside `with`; on leaving, the mode of every module is restored."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter requires a gradient inside `with`; on leaving, `requires_grad` is restored."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def silent(level: int = logging.CRITICAL) -> Iterator[None]:
    """Messages of transformers below `level`, and its progress bars, are not shown inside `with`."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(level)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()

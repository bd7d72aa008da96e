"""Initialisation schemes of papers and their code that differ from that of transformers.

Initialisation belongs to training, not to an architecture: the rules apply to every causal model, and a checkpoint does
not record them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fulldepth.core.errors import FulldepthError
from fulldepth.settings.train import InitializerSettings

CUT = 3.0
"""Bound of the truncated normal in standard deviations (Meta Lingua)."""
OUTPUTS = ("o_proj", "down_proj", "c_proj")
"""Names of the matrices that write into the residual stream, two in each layer."""


def draw_weights(model: PreTrainedModel, settings: InitializerSettings) -> None:
    """Draw a new model's weights again by the rules of the settings, in place, from torch's global generator.

    - `distribution: truncated-normal`: a matrix with k inputs has N(0, 1/k) cut at 3 standard deviations, an embedding
      of D channels N(0, 1/D) cut likewise; the cut makes the standard deviation 0.98658 of the nominal one. Biases and
      the embedding of the padding token are zero. Norms and the weights of the model's switches (`added_parameters`)
      keep their initialisation.
    - `distribution: glorot`: linear layers are uniform with variance 2 / (inputs + outputs), embeddings N(0, 1), as in
      DETR's own code; convolutions keep their initialisation. transformers draws a DETR's queries with a standard
      deviation of 0.02, so that they are hard to tell apart.
    - `output_scale`: factor of the matrices that write into the residual stream.
    - `memory`: the weights that the model lists for this rule (`memory_bounds`) are drawn from U(-b, b), with b
      from the same list.

    Args:
        model: the model as its class initialises it.
        settings: the rules; the defaults change nothing and draw no random number.

    Raises:
        FulldepthError: as `check_initializer`.

    Source: Meta Lingua, `lingua/transformer.py` (`reset_parameters`); DETR, `models/transformer.py`.
    """
    check_initializer(model, settings)
    with torch.no_grad():
        for module in _matrices(model) if settings.distribution != "model" else ():
            weight = module.weight
            embeds = isinstance(module, nn.Embedding)
            drawn = torch.empty(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32))  # not bfloat16
            if settings.distribution == "glorot":
                weight.copy_(drawn.normal_() if embeds else nn.init.xavier_uniform_(drawn))
            else:
                std = 1 / math.sqrt(weight.shape[0 if isinstance(module, Conv1D) else 1])
                weight.copy_(nn.init.trunc_normal_(drawn, std=std, a=-CUT * std, b=CUT * std))
                if embeds and module.padding_idx is not None:
                    weight[module.padding_idx].zero_()
            if getattr(module, "bias", None) is not None:
                module.bias.zero_()
        if settings.output_scale != 1.0:
            for module in _outputs(model):
                module.weight.mul_(settings.output_scale)
        for name, bound in _memory_bounds(model, settings).items():
            model.get_parameter(name).uniform_(-bound, bound)


def check_initializer(model: PreTrainedModel, settings: InitializerSettings) -> None:
    """Check that the settings apply to a model, from names and shapes only.

    Raises:
        FulldepthError: for `memory` if the model has no such memory, for `distribution` if it has matrices outside of
            linear layers, and for `output_scale` if its output matrices do not have the known names.
    """
    _memory_bounds(model, settings)
    if settings.output_scale != 1.0 and len(_outputs(model)) != 2 * model.config.num_hidden_layers:
        raise FulldepthError(
            f"initializer.output_scale needs two matrices in each layer named {', '.join(OUTPUTS)}; a "
            f"{model.config.model_type} has {len(_outputs(model))} in {model.config.num_hidden_layers} layers."
        )
    if settings.distribution == "truncated-normal":
        matrices = {module.weight for module in _matrices(model)}
        added: set[str] = getattr(model, "added_parameters", set)()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and parameter not in matrices and name not in added:
                raise FulldepthError(
                    f"initializer.distribution={settings.distribution} is for linear layers and embeddings, and {name} "
                    f"of this {model.config.model_type} is neither."
                )


def _matrices(model: nn.Module) -> list[Any]:
    """Return the linear layers and embeddings of the stock model; the first of those that share a weight."""
    added: set[str] = getattr(model, "added_parameters", set)()
    by_weight = dict[Any, Any]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D) and f"{name}.weight" not in added:
            by_weight.setdefault(module.weight, module)
    return list(by_weight.values())


def _outputs(model: nn.Module) -> list[Any]:
    """Return the modules that write into the residual stream, found by name."""
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in OUTPUTS]


def _memory_bounds(model: PreTrainedModel, settings: InitializerSettings) -> dict[str, float]:
    """Name of each weight that `memory` draws -> bound of its uniform distribution."""
    if settings.memory == "model":
        return {}
    try:
        bounds: dict[str, float] = getattr(model, "memory_bounds", lambda _: {})(settings.memory)
    except ValueError as error:
        raise FulldepthError(f"initializer.memory={settings.memory}: {error}.") from error
    if not bounds:
        raise FulldepthError(
            f"initializer.memory={settings.memory} needs attention that reads a memory of earlier layers "
            f"(model.memory); this {model.config.model_type} has none."
        )
    return bounds

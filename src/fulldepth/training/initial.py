"""Weights at the start of a run, where a paper or its framework draws them otherwise than transformers does.

It is a matter of training, not of an architecture: the rules hold for every causal model, and a checkpoint does not
record them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fulldepth.architectures.depth_llama.attention_depth_llama import DepthLlamaAttention
from fulldepth.architectures.depth_llama.hyper_depth_llama import HyperConnection
from fulldepth.architectures.depth_llama.modeling_depth_llama import ROUTERS
from fulldepth.errors import FulldepthError
from fulldepth.training.settings import InitializerSettings

CUT = 3.0
"""Standard deviations at which a truncated normal ends (Meta Lingua)."""
OUTPUTS = ("o_proj", "down_proj", "c_proj")
"""Names of the matrices that write into the residual stream, two in each layer."""
OWN_START = (*ROUTERS, HyperConnection)
"""Modules whose weights keep the start that their papers give them."""


def draw_weights(model: PreTrainedModel, settings: InitializerSettings) -> None:
    """Draw a new model's weights again by the rules of the settings, from torch's global generator. In place.

    - `distribution: truncated-normal`: a matrix with k inputs has N(0, 1/k) cut at 3 standard deviations, an embedding
      of D channels N(0, 1/D) cut likewise; the cut makes the deviation 0.98658 of the nominal one. A padding token's
      embedding and biases are zero. Norms, routers and Hyper-Connections keep their own start.
    - `output_scale`: factor of the matrices that write into the residual stream.
    - `memory`: the key and value projections that read a memory have `kaiming_uniform_(a=sqrt(5))`, that is
      U(-b, b) with b = 1/sqrt(k). `fan-in`: k = D, the inputs. `pseudocode`: k = H_kv D d_h, for torch counts every
      dimension but the first of LIME's tensor `[1, H, D, d_h]` as inputs.

    Args:
        model: as its class has initialised it.
        settings: what to draw; the defaults change nothing and draw no number.

    Raises:
        FulldepthError: as `check_initializer`.

    Source: Meta Lingua, `lingua/transformer.py` (`reset_parameters`); "LIME", App. E.
    """
    check_initializer(model, settings)
    with torch.no_grad():
        if settings.distribution == "truncated-normal":
            for module in _matrices(model):
                _fill_truncated(module)
        if settings.output_scale != 1.0:
            for module in _outputs(model):
                module.weight.mul_(settings.output_scale)
        if settings.memory != "model":
            for attention in _readers(model):
                for projection in (attention.k_proj, attention.v_proj):
                    inputs = projection.in_features
                    inputs *= projection.out_features if settings.memory == "pseudocode" else 1
                    projection.weight.uniform_(-(inputs**-0.5), inputs**-0.5)


def check_initializer(model: PreTrainedModel, settings: InitializerSettings) -> None:
    """Refuse what has no meaning for a model; reads names and shapes only.

    Raises:
        FulldepthError: for `memory` without a memory that is read so, and for a model with matrices that are no
            linear layers (`distribution`) or without the known names of output matrices (`output_scale`).
    """
    kind, memory = model.config.model_type, getattr(model.config, "memory", "none")
    if settings.memory != "model" and not list(_readers(model)):
        raise FulldepthError(
            f"initializer.memory={settings.memory} needs a depth_llama with model.memory; this {kind} has none."
        )
    if settings.memory == "pseudocode" and memory == "kv":
        raise FulldepthError(
            "initializer.memory=pseudocode is the start of LIME's projections, model.memory=static or dynamic; for kv "
            "there is fan-in."
        )
    if settings.output_scale != 1.0 and len(_outputs(model)) != 2 * model.config.num_hidden_layers:
        raise FulldepthError(
            f"initializer.output_scale needs two matrices a layer called {', '.join(OUTPUTS)}; a {kind} names its own "
            "otherwise."
        )
    if settings.distribution != "model":
        known = {id(module.weight) for module in _matrices(model)}
        known |= {id(p) for module in model.modules() if isinstance(module, OWN_START) for p in module.parameters()}
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and id(parameter) not in known:
                raise FulldepthError(
                    f"initializer.distribution={settings.distribution} is for linear layers and embeddings, and {name} "
                    f"of this {kind} is neither."
                )


def _matrices(model: nn.Module) -> Iterator[Any]:
    """Every linear layer and embedding, of tied ones the first."""
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D) and id(module.weight) not in seen:
            seen.add(id(module.weight))
            yield module


def _outputs(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.rpartition(".")[2] in OUTPUTS]


def _readers(model: nn.Module) -> Iterator[DepthLlamaAttention]:
    """Attentions whose keys and values read a memory, or are one (`kv`)."""
    for module in model.modules():
        if isinstance(module, DepthLlamaAttention) and (module.memory_norm is not None or module.config.memory == "kv"):
            yield module


def _fill_truncated(module: Any) -> None:
    weight = module.weight
    std = 1 / math.sqrt(weight.shape[0 if isinstance(module, Conv1D) else 1])
    drawn = torch.empty(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32))  # bfloat16 is too coarse
    weight.copy_(nn.init.trunc_normal_(drawn, std=std, a=-CUT * std, b=CUT * std))
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        weight[module.padding_idx].zero_()
    if getattr(module, "bias", None) is not None:
        module.bias.zero_()

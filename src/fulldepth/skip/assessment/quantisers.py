"""Quantised copies of a model with packed weights."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, TorchAoConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.quantizer_torchao import TorchAoHfQuantizer

from fulldepth.errors import FulldepthError, unknown
from fulldepth.hf import Anatomy

PACKAGES = {"int8": ("torchao",), "gptq": ("gptqmodel", "optimum"), "awq": ("gptqmodel",)}
"""Method -> the packages that it needs."""
EXTRAS = {"int8": "quantise", "gptq": "gptq", "awq": "awq"}
"""Method -> the extra of this package that installs them."""
METHODS = tuple(PACKAGES)


def check_method(method: str) -> None:
    """Refuse an unknown method, and one whose packages are not installed.

    Raises:
        FulldepthError: with the missing packages.
    """
    if method not in PACKAGES:
        raise unknown("quantisation", str(method), METHODS)
    if missing := [name for name in PACKAGES[method] if find_spec(name) is None]:
        raise FulldepthError(
            f"Quantisation {method} needs {' and '.join(missing)}, not installed here: pip install "
            f"'fulldepth[{EXTRAS[method]}]'."
        )


def int8(anatomy: Anatomy) -> Anatomy:
    r"""A copy with the linear layers of all blocks in int8, weight-only, by torchao.

    A row of a matrix is stored as integers `q` in [-128, 127] and one factor `s` in the model's precision:
    `w ~ s q`, `q = round(w / s)`, symmetric about 0. Activations are not quantised; products use `q` in the model's
    precision. Embeddings, norms and the head are not quantised either, as with transformers' `TorchAoConfig`: a head
    that is tied to the embeddings would be stored twice.

    Args:
        anatomy: the verified model; not changed.

    Returns:
        The copy, on the same device, in evaluation mode.

    Raises:
        FulldepthError: if torchao cannot be imported, a layer of the model does not run with packed weights, or the
            matrices of experts are stored as one parameter.
    """
    quantize, config = _torchao()
    _check_experts(anatomy)
    quantised = replace(anatomy, model=copy.deepcopy(anatomy.model).eval())
    targets = set()
    for block in quantised.blocks:
        _unfold_transposed(block)
        targets |= {module for module in block.modules() if isinstance(module, nn.Linear)}
    with _quiet():
        quantize(quantised.model, config, filter_fn=lambda module, name: module in targets)
    for module in targets:
        _check_runs(module)
    return quantised


def _check_experts(anatomy: Anatomy) -> None:
    """Refuse a model whose experts would stay as they are: most of its weights."""
    stacked = sum(weight.numel() for _, _, weight in anatomy.expert_projections() if weight is not None)
    if stacked:
        share = stacked / sum(weight.numel() for block in anatomy.block_list for weight in block.parameters())
        raise FulldepthError(
            f"int8 cannot quantise this {type(anatomy.model).__name__}: torchao packs linear layers, and {share:.0%} "
            "of the weights of its blocks are experts that are stored as one parameter for all."
        )


@torch.no_grad()
def _check_runs(module: nn.Linear) -> None:
    """Refuse a linear layer of a custom class, such as Falcon's, that does not run with packed weights."""
    if type(module).forward is nn.Linear.forward:
        return
    try:
        module(torch.zeros(1, module.in_features, device=module.weight.device, dtype=module.weight.dtype))
    except NotImplementedError as error:
        raise FulldepthError(
            f"int8 cannot quantise this model: torchao packs linear layers, and its {type(module).__name__} multiplies "
            "in a way that packed weights do not know."
        ) from error


@contextmanager
def packed_as_torchao(model: PreTrainedModel) -> Iterator[None]:
    """Mark a result of `int8` as transformers' quantised model inside `with`, so that it can be saved and loaded.

    Raises:
        FulldepthError: if torchao cannot be imported.
    """
    config = TorchAoConfig(_torchao()[1])
    module: Any = model
    module.config.quantization_config = config
    module.hf_quantizer = TorchAoHfQuantizer(config, pre_quantized=True)
    try:
        yield
    finally:
        del module.config.quantization_config, module.hf_quantizer


def _torchao() -> tuple[Any, Any]:
    """The function of torchao and its configuration of int8 weights."""
    check_method("int8")
    try:
        with _quiet():
            from torchao.quantization import Int8WeightOnlyConfig, quantize_  # noqa: PLC0415
    except (ImportError, RuntimeError, OSError) as error:
        raise FulldepthError(f"torchao cannot be used with torch {torch.__version__}: {error}") from error
    return quantize_, Int8WeightOnlyConfig()


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torchao's messages on kernels for other machines."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _unfold_transposed(block: nn.Module) -> None:
    """Replace `Conv1D` (GPT-2's transposed matrices), which torchao does not know, by linear layers."""
    for name, module in list(block.named_modules()):
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            linear = nn.Linear(inputs, outputs, device=module.weight.device, dtype=module.weight.dtype)
            linear.weight = nn.Parameter(module.weight.detach().T.contiguous())
            linear.bias = nn.Parameter(module.bias.detach())
            block.set_submodule(name, linear)

"""`truncated`: the first layers of a model, its final norm and its head, as an ordinary model of the same class.

Its logits are those of stopping at layer E: final norm and head applied to `h_E`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth.errors import FulldepthError, one_line
from fulldepth.hf.anatomy import Anatomy, anatomy_candidates
from fulldepth.hf.detections import DetectionHeads
from fulldepth.hf.exit_heads import cut_exit_heads
from fulldepth.hf.fewer_layers import cut_to_first
from fulldepth.hf.fsdp import uses_fsdp
from fulldepth.hf.heads import Classifier
from fulldepth.hf.modes import evaluating
from fulldepth.hf.offloading import is_offloaded
from fulldepth.hf.sample import sample_inputs

ALLOWED = {torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest accepted difference from the whole model's states and logits, relative to the largest; 1e-4 for others."""


class _Reached(Exception):  # noqa: N818
    """Ends a pass after the layer of interest."""

    def __init__(self, state: Tensor) -> None:
        super().__init__()
        self.state = state


def truncated(model: Anatomy | PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the same class with the first E layers, the final norm and the head; of a detector, decoder layers.

    It has a configuration of its own, in which every list with one entry per layer is cut; parameters and buffers are
    the same tensors as the original's. Hooks are not carried over. Before it is returned, its states and logits are
    compared with those of the original on a small artificial batch, and so are a detector's boxes. A multi-exit model's
    head of layer E becomes the model's own.

    Args:
        model: a model, or its anatomy (`execution.find_anatomy`), which families outside of the table need for the
            comparison of logits.
        layers: E, from 1 to L.

    Returns:
        The model, in the mode (training or evaluation) of the original.

    Raises:
        FulldepthError: for E out of range, encoder-decoders (other than detectors), offloaded or sharded weights,
            layers that share modules in an order that E layers cannot have, and models whose first layers compute
            something else on their own.
    """
    anatomy = model if isinstance(model, Anatomy) else anatomy_candidates(model)[0]
    kind = type(anatomy.model).__name__
    if not 1 <= layers <= anatomy.num_layers:
        raise FulldepthError(f"{kind} has {anatomy.num_layers} layers; it cannot be cut to its first {layers}.")
    reason = _obstacle(anatomy)
    if reason:
        raise FulldepthError(f"{kind} cannot be cut to its first layers: {reason}.")
    config = first_layers_config(anatomy, layers)
    try:
        with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
            cut: PreTrainedModel = type(anatomy.model)(config)
    except Exception as error:
        raise FulldepthError(
            f"{kind} cannot be cut to its first {layers} layers: its class does not accept such a configuration "
            f"({one_line(str(error), 200)})."
        ) from error
    shorter = replace(anatomy, model=cut)
    if shorter.num_layers != layers:
        raise FulldepthError(
            f"{kind} cannot be cut to its first {layers} layers: its configuration states their number under no "
            "known name."
        )
    _share(anatomy.model, cut)
    cut_exit_heads(anatomy, shorter)
    if hasattr(anatomy.model, "generation_config"):
        cut.generation_config = anatomy.model.generation_config
    cut.train(anatomy.model.training)
    _prove(anatomy, shorter, layers)
    return cut


def first_layers_config(anatomy: Anatomy, layers: int) -> PreTrainedConfig:
    """The configuration of a model, cut to its first layers; the original does not change.

    Raises:
        FulldepthError: if the configuration of the layers is not a part of the model's, or shared layers cannot be cut.
    """
    memo: dict[int, Any] = {}
    config = copy.deepcopy(anatomy.model.config, memo)
    inner = memo.get(id(anatomy.config))
    if inner is None:
        parts = [part for part in vars(config).values() if isinstance(part, PreTrainedConfig)]
        inner = next((part for part in (config, *parts) if part.to_dict() == anatomy.config.to_dict()), None)
    if inner is None:
        raise FulldepthError(
            f"{type(anatomy.model).__name__} cannot be cut to its first layers: the configuration of its layers is no "
            "part of the model's."
        )
    if anatomy.family.calls and len(anatomy.block_list) > 1:
        _cut_groups(anatomy, inner, layers)
    try:
        if anatomy.family.layers_entry is not None:
            setattr(inner, anatomy.family.layers_entry, layers)
        else:
            cut_to_first(inner, layers, anatomy.num_layers)
    except Exception as error:  # configurations check their entries when they are set
        reason = one_line(str(error), 200)
        raise FulldepthError(f"The configuration of {type(anatomy.model).__name__} cannot be cut: {reason}") from error
    return config


def _cut_groups(anatomy: Anatomy, config: Any, layers: int) -> None:
    """Cut the groups of layers that share weights (ALBERT); call i of L runs group `i * groups // L`."""
    groups, calls = len(anatomy.block_list), anatomy.num_layers
    wanted = [call * groups // calls for call in range(layers)]
    left = wanted[-1] + 1
    if wanted != [call * left // layers for call in range(layers)]:
        raise FulldepthError(
            f"{type(anatomy.model).__name__} cannot be cut to its first {layers} layers: its {calls} layers share "
            f"{groups} groups of weights; use {calls // groups} or a multiple of it."
        )
    config.num_hidden_groups = left


def _obstacle(anatomy: Anatomy) -> str | None:
    """Why a model cannot be cut, whatever the number of layers."""
    model, order = anatomy.model, anatomy.order
    reasons = {
        "it is an encoder-decoder": bool(getattr(model.config, "is_encoder_decoder", False))
        and anatomy.family.layers_entry is None,
        f"its final norm also stands between layers ({anatomy.family.norm_between}), and a shorter model of its class "
        "applies it twice where early exit reads the layer with it once": anatomy.norm_between,
        "its layers share modules": bool(order) and order != tuple(range(len(anatomy.block_list))),
        "some of its weights are offloaded; load it without a device map": is_offloaded(model),
        "its weights are sharded": uses_fsdp(model),
        "functions of its modules are replaced (switches in use); restore them first": any(
            "forward" in vars(module) for module in model.modules()
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _share(model: PreTrainedModel, cut: PreTrainedModel) -> None:
    """Put the original's parameters and buffers in place of the cut model's, by name.

    Raises:
        FulldepthError: if the original lacks one, or has it in another shape.
    """
    parameters, buffers = (
        dict(model.named_parameters(remove_duplicate=False)),
        dict(model.named_buffers(remove_duplicate=False)),
    )
    for name, parameter in list(cut.named_parameters(remove_duplicate=False)):
        own = parameters.get(name)
        if own is None or own.shape != parameter.shape:
            state = "lacks it" if own is None else f"has it in the shape {tuple(own.shape)}"
            raise FulldepthError(
                f"{type(model).__name__} cannot be cut to its first layers: its class then needs the weight {name} of "
                f"the shape {tuple(parameter.shape)}, and the model {state} (adapters have to be merged first)."
            )
        _owner(cut, name)._parameters[name.rpartition(".")[2]] = own
    device = next(iter(parameters.values())).device
    for name, buffer in list(cut.named_buffers(remove_duplicate=False)):
        shared = buffers.get(name)
        same = shared is not None and shared.shape == buffer.shape
        _owner(cut, name)._buffers[name.rpartition(".")[2]] = shared if same else buffer.to(device)


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


@torch.no_grad()
def _prove(anatomy: Anatomy, cut: Anatomy, layers: int) -> None:
    """Compare the cut model with the original on a small batch: states after layer E, logits and boxes where known."""
    with evaluating(anatomy.model), evaluating(cut.model):
        inputs = sample_inputs(anatomy)
        expected, got = _state_at(anatomy, layers, inputs), _state_at(cut, layers, inputs)
        pairs = {"states": (expected, got)}
        classifier = None if anatomy.head is None else Classifier(anatomy).at(layers)
        output = {} if classifier is None else cut.model(**_without_cache(cut, inputs))
        logits = _logits(output)
        if classifier is not None and anatomy.task == "detection":
            pairs["boxes"] = DetectionHeads(Classifier(anatomy)).boxes(expected, layers), output["pred_boxes"]
        if classifier is not None and logits is not None:
            mask = inputs.get("attention_mask", torch.ones(expected.shape[:2], device=expected.device))
            if classifier.per_token:
                pairs["logits"] = (classifier.tokens(expected.flatten(0, 1)), logits.flatten(0, -2))
            else:
                pairs["logits"] = (classifier.sequences(expected, mask), logits)
    for name, (one, other) in pairs.items():
        allowed = ALLOWED.get(one.dtype, 1e-4) * float(one.abs().max())
        if one.shape != other.shape or not float((one.double() - other.double()).abs().max()) <= allowed:
            raise FulldepthError(
                f"{type(anatomy.model).__name__} cannot be cut to its first {layers} layers: by themselves they give "
                f"other {name} than within the model."
            )


def _state_at(anatomy: Anatomy, layer: int, inputs: Mapping[str, Any]) -> Tensor:
    """[B, T, D] `h_l` of a pass that ends there."""
    calls = 0

    def count(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == layer:
            raise _Reached(output[0] if isinstance(output, tuple | list) else output)

    hooks = [block.register_forward_hook(count) for block in set(anatomy.blocks)]
    try:
        anatomy.body(**_without_cache(anatomy, inputs))
    except _Reached as reached:
        return anatomy.stream(reached.state)
    finally:
        for hook in hooks:
            hook.remove()
    raise FulldepthError(f"{type(anatomy.model).__name__} ran {calls} layers, not {layer}.")


def _without_cache(anatomy: Anatomy, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs, for decoders without a cache: some cannot make one for their first layers alone."""
    decodes = anatomy.task == "causal-lm" or getattr(anatomy.config, "use_cache", None) is True
    return {**inputs, "use_cache": False} if decodes and anatomy.family.modality == "text" else dict(inputs)


def _logits(output: Any) -> Tensor | None:
    """The logits in a model's output; None if there are none."""
    for name in ("logits", "prediction_logits"):
        with suppress(KeyError, AttributeError, TypeError):
            found: Any = output[name]
            if isinstance(found, Tensor):
                return found
    return None


__all__ = ["truncated"]

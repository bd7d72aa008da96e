"""`truncated`: the first layers of a model, its final norm and its head, as an ordinary model of the same class.

Its logits are those of stopping at layer E: final norm and head applied to `h_E`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth.errors import FulldepthError, one_line
from fulldepth.hf.anatomy import Anatomy, anatomy_candidates, body_inputs, logits_of, sample_inputs
from fulldepth.hf.exit_heads import cut_exit_heads
from fulldepth.hf.heads import Classifier, uses_fsdp
from fulldepth.hf.modes import evaluating, is_offloaded
from fulldepth.hf.tying import state_ties

ALLOWED = {torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest accepted difference from the whole model's states and logits, relative to the largest; 1e-4 for others."""

NOT_PER_LAYER = ("token_id", "token_ids", "architectures", "labels", "section")
"""Endings of names of lists that never have one entry per layer, even if their length is L."""
LISTS_OF_LAYERS = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices")
"""Lists of layer numbers, from 0."""


def truncated(model: Anatomy | PreTrainedModel, layers: int) -> PreTrainedModel:
    """A model of the same class with the first E layers, the final norm and the head.

    It has a configuration of its own, in which every list with one entry per layer is cut; parameters and buffers are
    the same tensors as the original's. Hooks are not carried over. Before it is returned, its states and logits are
    compared with those of the original on a small artificial batch. A multi-exit model's head of layer E becomes the
    model's own.

    Args:
        model: a model, or its anatomy (`execution.find_anatomy`), which families outside of the table need for the
            comparison of logits.
        layers: E, from 1 to L.

    Returns:
        The model, in the mode (training or evaluation) of the original.

    Raises:
        FulldepthError: for E out of range, encoder-decoders, offloaded or sharded weights, layers that share modules in
            an order that E layers cannot have, and models whose first layers compute something else on their own.
    """
    anatomy = model if isinstance(model, Anatomy) else anatomy_candidates(model)[0]
    if not 1 <= layers <= anatomy.num_layers:
        raise _refusal(anatomy, layers, f"it has {anatomy.num_layers} layers")
    whole, order = anatomy.model, anatomy.order
    obstacles = {
        "it is an encoder-decoder": bool(getattr(whole.config, "is_encoder_decoder", False)),
        "its layers share modules": bool(order) and order != tuple(range(len(anatomy.block_list))),
        "some of its weights are offloaded; load it without a device map": is_offloaded(whole),
        "its weights are sharded": uses_fsdp(whole),
        "functions of its modules are replaced (switches in use); restore them first": any(
            "forward" in vars(module) for module in whole.modules()
        ),
    }
    for reason, holds in obstacles.items():
        if holds:
            raise _refusal(anatomy, layers, reason)
    config = _first_layers_config(anatomy, layers)
    try:
        with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
            cut: PreTrainedModel = type(anatomy.model)(config)
    except Exception as error:
        raise _refusal(anatomy, layers, f"its class does not accept such a configuration ({error})") from error
    shorter = replace(anatomy, model=cut)
    if shorter.num_layers != layers:
        raise _refusal(anatomy, layers, "its configuration states their number under no known name")
    _share(anatomy, cut, layers)
    cut_exit_heads(anatomy, shorter)
    state_ties(cut)
    if hasattr(anatomy.model, "generation_config"):
        cut.generation_config = anatomy.model.generation_config
    cut.train(anatomy.model.training)
    _prove(anatomy, shorter, layers)
    return cut


def _refusal(anatomy: Anatomy, layers: int, reason: str) -> FulldepthError:
    kind = type(anatomy.model).__name__
    return FulldepthError(f"{kind} cannot be cut to its first {layers} layers: {one_line(reason, 300)}.")


def _first_layers_config(anatomy: Anatomy, layers: int) -> PreTrainedConfig:
    """The configuration of a model, cut to its first layers; the original does not change."""
    memo: dict[int, Any] = {}
    config = copy.deepcopy(anatomy.model.config, memo)
    parts = (config, *(part for part in vars(config).values() if isinstance(part, PreTrainedConfig)))
    inner = memo.get(id(anatomy.config)) or next((p for p in parts if p.to_dict() == anatomy.config.to_dict()), None)
    if inner is None:
        raise _refusal(anatomy, layers, "the configuration of its layers is no part of the model's")
    groups, calls = len(anatomy.block_list), anatomy.num_layers
    if anatomy.family.calls and groups > 1:  # of layers that share weights (ALBERT); call i runs i * groups // calls
        left = (layers - 1) * groups // calls + 1
        if any(call * groups // calls != call * left // layers for call in range(layers)):
            reason = f"its {calls} layers share {groups} groups of weights; use {calls // groups} or a multiple of it"
            raise _refusal(anatomy, layers, reason)
        inner.num_hidden_groups = left
    try:
        remaining = list(range(1, layers + 1))
        renumbered: dict[str, Any] = {}
        for name in ("skipped_attention", "skipped_mlp"):  # numbers from 1
            if isinstance(numbers := getattr(inner, name, None), list):
                renumbered[name] = [layer for layer in numbers if layer <= layers]
        for name, first in {"tree": 0, "scalars": 1}.items():  # entries by the number, which starts at `first`
            if isinstance(entries := getattr(inner, name, None), dict):
                renumbered[name] = {key: entry for key, entry in entries.items() if int(key) - first < layers}
        if getattr(inner, "decoder_layers", None) == calls:  # BART and its kin call the encoder's num_hidden_layers
            renumbered["decoder_layers"] = layers
        if isinstance(scale := getattr(inner, "stream_scale", None), list):
            renumbered["stream_scale"] = scale[: 2 * layers + 1]
        if isinstance(shared := getattr(inner, "num_kv_shared_layers", None), int):  # counted from the last layer
            renumbered["num_kv_shared_layers"] = max(0, shared - (calls - layers))
        kinds = getattr(inner, "attention_layers", None)
        if isinstance(kinds, list | tuple) and hasattr(inner, "attention_types"):  # GPT-Neo
            renumbered["attention_types"] = [[[kind], 1] for kind in kinds[:layers]]
        slice_lists(inner, remaining, calls)
        renumber_layers(inner, remaining, calls)
        for name, value in renumbered.items():
            setattr(inner, name, value)
    except Exception as error:  # configurations check their entries when they are set
        raise _refusal(anatomy, layers, f"its configuration does not accept it: {error}") from error
    return config


def _share(anatomy: Anatomy, cut: PreTrainedModel, layers: int) -> None:
    """Put the original's parameters and buffers in place of the cut model's, by name."""
    parameters = dict(anatomy.model.named_parameters(remove_duplicate=False))
    own = parameters | dict(anatomy.model.named_buffers(remove_duplicate=False))
    device = next(iter(parameters.values())).device
    named = [*cut.named_parameters(remove_duplicate=False), *cut.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        path, _, attribute = name.rpartition(".")
        owner, shared = cut.get_submodule(path), own.get(name)
        same = shared is not None and shared.shape == tensor.shape
        if attribute in owner._buffers:
            owner._buffers[attribute] = shared if same else tensor.to(device)
        elif same:
            owner._parameters[attribute] = shared  # type: ignore[assignment]
        else:
            reason = f"its class then needs the weight {name} of the shape {tuple(tensor.shape)}, which the model lacks"
            raise _refusal(anatomy, layers, f"{reason} (adapters have to be merged first)")


@torch.no_grad()
def _prove(anatomy: Anatomy, cut: Anatomy, layers: int) -> None:
    """Compare the cut model with the original on a small batch: states after layer E, and logits where known."""
    with evaluating(anatomy.model), evaluating(cut.model):
        inputs = sample_inputs(anatomy)
        expected, got = (_state_at(each, layers, inputs) for each in (anatomy, cut))
        pairs = {"states": (expected, got)}
        if anatomy.head is not None:
            classifier = Classifier(anatomy)
            if (logits := logits_of(cut.model(**body_inputs(cut, inputs)))) is not None:
                own = classifier.at(layers)
                mask = inputs.get("attention_mask", torch.ones(expected.shape[:2], device=expected.device))
                read = own.tokens(expected) if own.per_token else own.sequences(expected, mask)
                pairs["logits"] = read, logits
    for name, (one, other) in pairs.items():
        allowed = ALLOWED.get(one.dtype, 1e-4) * float(one.abs().max())
        if one.shape != other.shape or not float((one.double() - other.double()).abs().max()) <= allowed:
            raise _refusal(anatomy, layers, f"by themselves they give other {name} than within the model")


def _state_at(anatomy: Anatomy, layer: int, inputs: Mapping[str, Any]) -> Tensor:
    """[B, T, D] `h_l`."""
    states: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple | list) else output).clone())

    with ExitStack() as hooks:
        for block in set(anatomy.blocks):
            hooks.callback(block.register_forward_hook(keep).remove)
        anatomy.body(**body_inputs(anatomy, inputs))
    return anatomy.stream(states[layer - 1])


def slice_lists(config: PreTrainedConfig, remaining: list[int], num_layers: int) -> list[str]:
    """Cut a configuration to the remaining layers, in place.

    Args:
        config: of a model of `num_layers` layers.
        remaining: 1-based layers.
        num_layers: L.

    Returns:
        The names of the lists that had one entry per layer.
    """
    values = {
        name: type(value)(value[layer - 1] for layer in remaining)
        for name, value in vars(config).items()
        if isinstance(value, list | tuple)
        and len(value) == num_layers
        and not name.endswith(NOT_PER_LAYER)
        and name not in LISTS_OF_LAYERS
    }
    for name, value in {"num_hidden_layers": len(remaining), **values}.items():
        setattr(config, name, value)
    return sorted(values)


def renumber_layers(config: PreTrainedConfig, remaining: list[int], num_layers: int) -> list[str]:
    """Renumber the remaining layers in a configuration's lists of layer numbers, in place.

    `mlp_only_layers` and `decoder_sparse_step` (Qwen's mixtures of experts) become a list alone,
    `first_k_dense_replace` (DeepSeek) counts the remaining dense layers, the other lists keep the remaining layers.
    Other rules are left unchanged; weights that do not fit them are refused when the checkpoint is written.

    Args:
        config: of a model of `num_layers` layers.
        remaining: 1-based layers.
        num_layers: L.

    Returns:
        The names of the entries that changed.
    """
    before = {name: getattr(config, name) for name in LISTS_OF_LAYERS if isinstance(getattr(config, name, None), list)}
    after: dict[str, Any] = {
        name: [new for new, layer in enumerate(remaining) if layer - 1 in numbers] for name, numbers in before.items()
    }
    if (step := getattr(config, "decoder_sparse_step", None)) is not None and "mlp_only_layers" in before:
        dense = {index for index in range(num_layers) if index in before["mlp_only_layers"] or (index + 1) % step}
        before["decoder_sparse_step"], after["decoder_sparse_step"] = step, 1
        after["mlp_only_layers"] = [new for new, layer in enumerate(remaining) if layer - 1 in dense]
    if (first := getattr(config, "first_k_dense_replace", None)) is not None:
        before["first_k_dense_replace"] = first
        after["first_k_dense_replace"] = sum(layer <= first for layer in remaining)
    for name, value in after.items():
        setattr(config, name, value)
    return [name for name, value in after.items() if value != before[name]]

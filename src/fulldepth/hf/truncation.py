"""`truncated`: the first layers of a model, its final norm and its head, as an ordinary model of the same class.

Its logits are those of stopping at layer E: final norm and head applied to `h_E`.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any, NamedTuple

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth.core.errors import FulldepthError, is_out_of_memory, one_line
from fulldepth.hf.anatomy import Anatomy, anatomy_candidates, body_inputs, config_parts, logits_of, sample_inputs
from fulldepth.hf.exit_heads import cut_exit_heads
from fulldepth.hf.heads import Classifier, uses_fsdp
from fulldepth.hf.modes import evaluating, hooked, is_offloaded, state_in
from fulldepth.hf.rounding import is_close
from fulldepth.hf.stream_scale import cut_stream_scale
from fulldepth.hf.surgery import skipping
from fulldepth.hf.tying import state_ties

NOT_PER_LAYER = ("token_id", "token_ids", "architectures", "labels", "section", "multipliers", "limit", "mask")
"""Endings of names of lists that never have one entry per layer, even if their length is L."""
LISTS_OF_LAYERS = (
    "mlp_only_layers",
    "moe_layers",
    "full_attn_idxs",
    "attn_layer_indices",
    "cross_attention_layers",
    "hybrid_layer_ids",
)
"""Lists of layer numbers, from 0."""
SHARED = "num_kv_shared_layers"
"""Number of the last layers that read the keys and values of earlier ones."""
BY_NUMBER = {"per_layer_config": 0, "tree": 0, "scalars": 1}
"""Mappings whose keys are layer numbers -> the number of the first layer."""
FIRST = ("first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index")
"""Numbers of layers from the first one."""
DEPTHS = ("decoder_layers", "num_decoder_layers", "num_blocks", "num_layers_per_stack")
"""Further names of the number of layers. In BART and related models `num_hidden_layers` is the encoder's."""
PERIODS = (
    "attn_layer_period",
    "expert_layer_period",
    "full_attention_interval",
    "interleave_moe_layer_step",
    "layer_group_size",
    "moe_layer_freq",
    "moe_layer_interval",
    "rescale_every",
    "scale_attn_by_inverse_layer_idx",
)
"""Entries that make a layer depend on its number. They are right for the first layers, and for no other choice."""


def truncated(model: Anatomy | PreTrainedModel, layers: int) -> PreTrainedModel:
    """Return a model of the same class with the first E layers, the final norm and the head.

    It has a configuration of its own, in which every list with one entry per layer is cut; parameters and buffers are
    the original's tensors. Hooks are not carried over. Before it is returned, its states and logits are compared with
    those of the original on a small artificial batch. In a multi-exit model, the exit head of layer E becomes the
    model's head.

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
    cut = first_layers(anatomy, layers)
    _prove(anatomy, replace(anatomy, model=cut), layers)
    return cut


def first_layers(anatomy: Anatomy, layers: int) -> PreTrainedModel:
    """Return the model of `truncated` without comparing it with the whole model: nothing is computed.

    Raises:
        FulldepthError: if the class does not accept such a configuration.
    """
    remaining = [*range(1, layers + 1)]
    if not 1 <= layers <= anatomy.num_layers:
        raise _refusal(anatomy, remaining, f"it has {anatomy.num_layers} layers")
    check_depth(anatomy)
    whole = anatomy.model
    order = anatomy.order
    first = [*anatomy.block_list][:layers]
    obstacles = {
        "it is an encoder-decoder": bool(getattr(whole.config, "is_encoder_decoder", False)),
        "its layers share modules": (bool(order) and order != tuple(range(len(anatomy.block_list))))
        or len({*first}) < len(first),  # a checkpoint holds no module twice
        "some of its weights are offloaded; load it without a device map": is_offloaded(whole),
        "its weights are sharded": uses_fsdp(whole),
        "functions of its modules are replaced (switches in use); restore them first": any(
            "forward" in vars(module) for module in whole.modules()
        ),
    }
    for reason, holds in obstacles.items():
        if holds:
            raise _refusal(anatomy, remaining, reason)
    cut = _sharing(anatomy, cut_config(anatomy, remaining).config, remaining)
    cut_exit_heads(anatomy, replace(anatomy, model=cut))
    state_ties(cut)
    if hasattr(anatomy.model, "generation_config"):
        cut.generation_config = anatomy.model.generation_config
    return cut.train(anatomy.model.training)


def few_layers(anatomy: Anatomy) -> int:
    """Return the fewest first layers that include every kind of layer (by names of weights); at least three, or all."""
    kinds = [frozenset(name for name, _ in block.named_parameters()) for block in anatomy.blocks]
    return min(len(kinds), max(3, *(kinds.index(kind) + 1 for kind in set(kinds))))


def without_layers(anatomy: Anatomy, remaining: Sequence[int]) -> PreTrainedModel:
    """Return a model of the same class with some of the layers, renumbered, whose weights are the same tensors.

    Before it is returned, its logits are compared with those of the original that skips the other layers, on a small
    artificial batch.

    Args:
        anatomy: the model.
        remaining: 1-based layers, sorted.

    Raises:
        FulldepthError: if the class does not accept such a configuration, or computes something else with it.
    """
    config = cut_config(anatomy, remaining).config
    cut = _sharing(anatomy, config, remaining).train(anatomy.model.training)
    inputs = sample_inputs(anatomy)
    removed = set(anatomy.layers) - set(remaining)
    arguments = body_inputs(anatomy, inputs)
    with torch.no_grad(), evaluating(anatomy.model), evaluating(cut):
        _check_with_cache(anatomy, cut, arguments, remaining)
        actual = logits_of(cut(**arguments))
        with skipping(anatomy, removed, "layer"):
            expected = logits_of(anatomy.model(**arguments))
    if expected is None or actual is None or not is_close(actual, expected):
        raise _refusal(anatomy, remaining, "by themselves they give other logits than within the model")
    return cut


def _check_with_cache(
    anatomy: Anatomy, cut: PreTrainedModel, arguments: Mapping[str, Any], remaining: Sequence[int]
) -> None:
    """Run a cut model with its class's own use of a cache.

    Raises:
        FulldepthError: if its class fails with these layers alone, as some do without a layer that attends.
    """
    with_cache = {name: value for name, value in arguments.items() if name != "use_cache"}
    try:
        cut(**with_cache)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        try:
            anatomy.model(**with_cache)
        except Exception:
            return  # the class fails with all layers, too
        raise _refusal(anatomy, remaining, f"its class fails with them alone ({error})") from error


def _refusal(anatomy: Anatomy, remaining: Sequence[int], reason: str) -> FulldepthError:
    """Return the error for a model that cannot be cut, with the entries that explain it."""
    kind = type(anatomy.model).__name__
    inner = anatomy.config
    shared = getattr(inner, SHARED, 0)
    rules = [name for name in PERIODS if getattr(inner, name, None)]
    if [*remaining] == [*range(1, len(remaining) + 1)]:
        what = f"its first {len(remaining)} layers"
    else:
        what = f"layers {', '.join(map(str, remaining))}"
        if rules:
            reason += f"; what a layer computes follows from its number ({', '.join(rules)})"
    if shared:
        reason += f"; its last {shared} layers read the keys and values of earlier ones ({SHARED})"
    return FulldepthError(f"{kind} cannot be cut to {what}: {one_line(reason, 400)}.")


class CutConfig(NamedTuple):
    """The configuration of some of a model's layers."""

    config: PreTrainedConfig
    changed: list[str]
    """Entries besides the number of layers that changed."""
    by_list: list[str]
    """Names of lists with one entry per layer that differ from the beginning of the original's."""


def cut_config(anatomy: Anatomy, remaining: Sequence[int]) -> CutConfig:
    """Return the configuration of a model, cut to some of its layers, as if it had been saved and loaded.

    Raises:
        FulldepthError: if the class of the configuration does not accept it.
    """
    whole = anatomy.model.config
    parts = config_parts(whole)
    names = [name for name, part in parts.items() if part is anatomy.config]
    names = names or [name for name, part in parts.items() if part.to_dict() == anatomy.config.to_dict()]
    if not names:
        raise _refusal(anatomy, remaining, "the configuration of its layers is not a part of the model's")
    entries = whole.to_dict()
    inner: dict[str, Any] = entries[names[0]] if names[0] else entries
    changes = _changes(anatomy, inner, remaining)
    depth_names = _depth_names(anatomy.config)
    changed = sorted(name for name, value in changes.items() if inner[name] != value and name not in depth_names)
    by_list = []
    for name, value in changes.items():
        is_list = isinstance(value, list) and isinstance(inner.get(name), list)
        by_layer = is_list and len(inner[name]) == anatomy.num_layers and name not in LISTS_OF_LAYERS
        if by_layer and value != inner[name][: len(value)]:
            by_list.append(name)
    inner |= changes
    try:
        config = type(whole).from_dict(json.loads(json.dumps(entries)))
    except Exception as error:  # configurations check their entries
        raise _refusal(anatomy, remaining, f"its configuration does not accept it: {error}") from error
    for new, old in zip(_configs(config), _configs(whole), strict=True):
        for name in ("_attn_implementation_internal", "_experts_implementation_internal"):
            if name in vars(old):
                setattr(new, name, vars(old)[name])
    return CutConfig(config, changed, by_list)


def check_depth(anatomy: Anatomy) -> None:
    """Refuse a model whose number of layers is not the one that its class builds from its configuration.

    Raises:
        FulldepthError: with both numbers.
    """
    model = anatomy.model
    blocks = anatomy.block_list
    path = anatomy.blocks_path
    expected = len(blocks)
    with torch.random.fork_rng(devices=[]), init_empty_weights(), suppress(Exception):  # a class may refuse anything
        expected = len(type(model)(copy.deepcopy(model.config)).get_submodule(path))  # type: ignore[arg-type]
    if expected != len(blocks):
        raise FulldepthError(
            f"This {type(model).__name__} has {len(blocks)} layers in {path}, and its configuration makes {expected}: "
            "some were removed or added by hand. Set num_hidden_layers and the per-layer entries of model.config to "
            "match the layers, save the model, and load it again."
        )


def _configs(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a configuration and its parts, in the order of their names."""
    parts = config_parts(config)
    names = sorted(filter(None, parts))
    return [config, *(inner for name in names for inner in _configs(parts[name]))]


def _depth_names(config: PreTrainedConfig) -> set[str]:
    """Return the names under which a configuration may state its number of layers."""
    return {"num_hidden_layers", config.attribute_map.get("num_hidden_layers", "num_hidden_layers"), *DEPTHS}


def _changes(anatomy: Anatomy, entries: Mapping[str, Any], remaining: Sequence[int]) -> dict[str, Any]:
    """Return the entries of a configuration that change when only some layers remain, with their new values.

    Lists with one entry per layer are cut, lists and mappings of layer numbers are renumbered, and numbers of layers
    from the first one or to the last one (`num_kv_shared_layers`) are counted again.
    """
    calls = anatomy.num_layers
    left = len(remaining)
    changes: dict[str, Any] = {name: left for name in _depth_names(anatomy.config) if entries.get(name) == calls}
    for name, value in entries.items():
        if name in LISTS_OF_LAYERS and isinstance(value, list):
            changes[name] = [new for new, layer in enumerate(remaining) if layer - 1 in value]
        elif isinstance(value, list) and len(value) == calls and not name.endswith(NOT_PER_LAYER):
            changes[name] = [value[layer - 1] for layer in remaining]
        elif name in BY_NUMBER and isinstance(value, dict):
            first = BY_NUMBER[name]
            by_number = {int(key): entry for key, entry in value.items()}
            numbers = {layer - 1 + first: new + first for new, layer in enumerate(remaining)}
            changes[name] = {str(numbers[number]): entry for number, entry in by_number.items() if number in numbers}
        elif name in FIRST and isinstance(value, int):
            changes[name] = sum(layer <= value for layer in remaining)
    for name in ("skipped_attention", "skipped_mlp"):  # numbers from 1
        if isinstance(skipped := entries.get(name), list):
            changes[name] = [new for new, layer in enumerate(remaining, start=1) if layer in skipped]
    changes |= cut_stream_scale(entries, remaining)
    if len(stages := entries.get("stage_names") or ()) == calls + 1 and "out_indices" in entries:  # of backbones
        indices = [new for new, layer in enumerate(remaining, start=1) if layer in entries["out_indices"]] or [left]
        names = stages[: left + 1]
        changes |= {"stage_names": names, "out_indices": indices, "out_features": [names[index] for index in indices]}
    if isinstance(shared := entries.get(SHARED), int):
        changes[SHARED] = sum(layer > calls - shared for layer in remaining)
    if isinstance(last := entries.get("moe_layer_end_index"), int):
        changes["moe_layer_end_index"] = sum(layer - 1 <= last for layer in remaining) - 1
    if isinstance(kinds := entries.get("attention_layers"), list) and "attention_types" in entries:  # GPT-Neo
        changes["attention_types"] = [[[kinds[layer - 1]], 1] for layer in remaining]
    if (step := entries.get("decoder_sparse_step")) is not None and "mlp_only_layers" in changes:
        dense = {index for index in range(calls) if index in entries["mlp_only_layers"] or (index + 1) % step}
        changes["decoder_sparse_step"] = 1
        changes["mlp_only_layers"] = [new for new, layer in enumerate(remaining) if layer - 1 in dense]
    if anatomy.family.calls and len(anatomy.block_list) > 1:
        changes["num_hidden_groups"] = _groups_left(anatomy, remaining)
    return changes


def _groups_left(anatomy: Anatomy, remaining: Sequence[int]) -> int:
    """Return how many groups of weights the remaining layers of ALBERT use; call i runs group i * groups // calls."""
    groups = len(anatomy.block_list)
    calls = anatomy.num_layers
    left = len(remaining)
    used = (left - 1) * groups // calls + 1
    if any(call * groups // calls != call * used // left for call in range(left)):
        reason = f"its {calls} layers share {groups} groups of weights; keep {calls // groups} or a multiple of it"
        raise _refusal(anatomy, remaining, reason)
    return used


def _sharing(anatomy: Anatomy, config: PreTrainedConfig, remaining: Sequence[int]) -> PreTrainedModel:
    """Return a model of the same class with this configuration, whose parameters and buffers are the original's."""
    try:
        with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
            cut: PreTrainedModel = type(anatomy.model)(config)
    except Exception as error:
        raise _refusal(anatomy, remaining, f"its class does not accept such a configuration ({error})") from error
    if replace(anatomy, model=cut).num_layers != len(remaining):
        raise _refusal(anatomy, remaining, "its configuration states their number under no known name")
    prefix = anatomy.blocks_path
    numbered = re.compile(rf"{re.escape(prefix)}\.(\d+)\.")
    parameters = dict(anatomy.model.named_parameters(remove_duplicate=False))
    tensors = parameters | dict(anatomy.model.named_buffers(remove_duplicate=False))
    device = next(iter(parameters.values())).device
    named = [*cut.named_parameters(remove_duplicate=False), *cut.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        path, _, attribute = name.rpartition(".")
        source = numbered.sub(lambda match: f"{prefix}.{remaining[int(match[1])] - 1}.", name, count=1)
        owner = cut.get_submodule(path)
        shared = tensors.get(source)
        same = shared is not None and shared.shape == tensor.shape
        if attribute in owner._buffers:
            owner._buffers[attribute] = shared if same else tensor.to(device)
        elif same:
            owner._parameters[attribute] = shared  # type: ignore[assignment]
        else:
            shape = tuple(tensor.shape)
            if shared is None:
                reason = f"its class then needs the weight {name} of the shape {shape}, which the model lacks"
                if any(".base_layer." in of_model for of_model in tensors):
                    reason += " (adapters have to be merged first)"
            else:
                reason = f"its weight {source} has the shape {tuple(shared.shape)}, and {shape} with fewer layers"
            raise _refusal(anatomy, remaining, reason)
    state_ties(cut)
    return cut


@torch.no_grad()
def _prove(anatomy: Anatomy, cut: Anatomy, layers: int) -> None:
    """Compare the cut model with the original on a small batch: states after layer E, and logits where known."""
    with evaluating(anatomy.model), evaluating(cut.model):
        inputs = sample_inputs(anatomy)
        states = state_at(anatomy, layers, inputs)
        arguments = body_inputs(cut, inputs)
        _check_with_cache(anatomy, cut.model, arguments, range(1, layers + 1))
        output = cut.model(**arguments)
        pairs = {"states": (states, state_at(cut, layers, inputs))}
        if anatomy.head is not None:
            classifier = Classifier(anatomy).at(layers)
            if (logits := logits_of(output)) is not None:
                mask = inputs.get("attention_mask", torch.ones(states.shape[:2], device=states.device))
                expected = classifier.tokens(states) if classifier.per_token else classifier.sequences(states, mask)
                pairs["logits"] = expected, logits
    for name, (expected, actual) in pairs.items():
        if not is_close(actual, expected):
            raise _refusal(anatomy, range(1, layers + 1), f"by themselves they give other {name} than within the model")


def state_at(anatomy: Anatomy, layer: int, inputs: Mapping[str, Any]) -> Tensor:
    """Return `h_l: [B, T, D]` after a 1-based layer, by a forward pass of the model's body."""
    states: list[Tensor] = []
    calls = count(1)

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        if next(calls) == layer:
            states.append(state_in(output).clone())

    with hooked(block.register_forward_hook(keep) for block in set(anatomy.blocks)):
        anatomy.run_body(inputs)
    return anatomy.stream(states[0])

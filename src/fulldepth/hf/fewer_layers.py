"""Cuts the configuration of a model to some of its layers."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

NOT_PER_LAYER = ("token_id", "token_ids", "architectures", "labels", "section")
"""Endings of names of lists that never have one entry per layer, even if their length is L."""
LISTS_OF_LAYERS = ("mlp_only_layers", "moe_layers", "full_attn_idxs", "attn_layer_indices")
"""Lists of layer numbers, from 0."""
ENTRIES_BY_LAYER = ("tree", "scalars")
"""Mappings from the number of a layer: from 0 (`tree`) or from 1 (`scalars`)."""
LAYERS_FROM_ONE = ("skipped_attention", "skipped_mlp")
"""Lists of layer numbers, from 1."""


def slice_lists(config: PreTrainedConfig, remaining: list[int], num_layers: int) -> list[str]:
    """Cut a configuration to the remaining layers, in place.

    Args:
        config: of a model of `num_layers` layers.
        remaining: 1-based layers.
        num_layers: L.

    Returns:
        The names of the lists that had one entry per layer.
    """

    def cut(values: Any) -> Any:
        return type(values)(values[layer - 1] for layer in remaining)

    names = [
        name
        for name, value in vars(config).items()
        if isinstance(value, list | tuple)
        and len(value) == num_layers
        and not name.endswith(NOT_PER_LAYER)
        and name not in LISTS_OF_LAYERS
    ]
    values = {name: cut(getattr(config, name)) for name in names}
    config.num_hidden_layers = len(remaining)
    for name, value in values.items():
        setattr(config, name, value)
    return sorted(names)


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


def cut_to_first(config: PreTrainedConfig, layers: int, num_layers: int) -> None:
    """Cut a configuration to the first layers, in place.

    In addition to `slice_lists` and `renumber_layers`: layers that share keys and values are counted from the last
    layer (`num_kv_shared_layers`), and entries of this package's classes and of GPT-Neo refer to layers in other ways.

    Args:
        config: of a model of `num_layers` layers.
        layers: number of layers that remain, E.
        num_layers: L.
    """
    remaining = list(range(1, layers + 1))
    renumbered: dict[str, Any] = {
        name: [layer for layer in value if layer <= layers]
        for name in LAYERS_FROM_ONE
        if isinstance(value := getattr(config, name, None), list)
    }
    for first, name in enumerate(ENTRIES_BY_LAYER):
        if isinstance(entries := getattr(config, name, None), dict):
            renumbered[name] = {key: entry for key, entry in entries.items() if int(key) - first < layers}
    if getattr(config, "decoder_layers", None) == num_layers:  # BART and its kin call the encoder's num_hidden_layers
        renumbered["decoder_layers"] = layers
    if isinstance(scale := getattr(config, "stream_scale", None), list):
        renumbered["stream_scale"] = scale[: 2 * layers + 1]
    if isinstance(shared := getattr(config, "num_kv_shared_layers", None), int):
        renumbered["num_kv_shared_layers"] = max(0, shared - (num_layers - layers))
    if isinstance(kinds := getattr(config, "attention_layers", None), list | tuple) and hasattr(
        config, "attention_types"
    ):
        renumbered["attention_types"] = [[[kind], 1] for kind in kinds[:layers]]
    slice_lists(config, remaining, num_layers)
    renumber_layers(config, remaining, num_layers)
    for name, value in renumbered.items():
        setattr(config, name, value)

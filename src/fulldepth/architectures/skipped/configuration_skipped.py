"""Configurations of `fulldepth_skipped_*`: decoders without the skipped attention blocks and MLPs.

There is one class for each stock configuration, created on first access: `SkippedLlamaConfig` for `LlamaConfig`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import transformers

NO_ATTENTION = "fulldepth_no_attention"
NO_MLP = "fulldepth_no_mlp:"
"""Entry of a saved `layer_types` for a layer without attention, and prefix of the entry for a layer without MLP. Stock
configurations refuse both, so that `LlamaForCausalLM.from_pretrained` cannot load such a checkpoint with random weights
in place of the missing ones."""
OLDER_ROPE = {"gpt_neox": {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}}
"""`model_type` -> usual name of an entry -> its name in the family's configuration before transformers 5."""
ROPE_BY_LAYER = ("gemma3_text", "gemma3n_text")
"""Families with two kinds of rotary positions, by type of layer."""
FIELDS: dict[str, Any] = {
    "skipped_attention": list[int] | None,
    "skipped_mlp": list[int] | None,
    "stream_scale": list[float] | None,
    "scalars": dict[str, dict[str, float]] | None,
}
"""Fields that are added to a stock configuration, with their types."""


class SkippedConfig:
    """Base class of the configurations below, with fields besides the stock ones. Layers are numbered 1..L.

    Args:
        skipped_attention: layers without attention, without the norm before it and without an entry in the cache.
        skipped_mlp: layers without an MLP.
        stream_scale: divisor of the residual stream where norms read it: before attention and before the MLP of every
            layer, then before the final norm. The norms' eps is scaled as well, so that their outputs do not change.
            None: 1 everywhere.
        scalars: factors outside of the weights: number of a layer -> `b_att`, `s_att`, `b_mlp`, `s_mlp`, as far as the
            layer has them; `x' = b_att A + s_att x`, `y = b_mlp M + s_mlp x'`.

    Raises:
        ValueError: for a layer that does not exist, scales that are not positive or not 2 L + 1, or a GPT-2 with
            cross-attention.
    """

    model_type: ClassVar[str]
    num_hidden_layers: int
    layer_types: Any
    skipped_attention: list[int] | None
    skipped_mlp: list[int] | None
    stream_scale: list[float] | None
    scalars: dict[str, dict[str, float]] | None

    def __init__(
        self,
        skipped_attention: list[int] | None = None,
        skipped_mlp: list[int] | None = None,
        stream_scale: list[float] | None = None,
        scalars: dict[str, dict[str, float]] | None = None,
        layer_types: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        """Initialise under transformers 4. In transformers 5 configurations are dataclasses with `__post_init__`."""
        self.skipped_attention = list(skipped_attention or ())
        self.skipped_mlp = list(skipped_mlp or ())
        self.stream_scale = stream_scale
        self.scalars = scalars
        if layer_types is not None and "layer_types" in inspect.signature(super().__init__).parameters:
            kwargs["layer_types"] = self._plain(layer_types)
        # A model that transformers 5 saved has only the newer entry.
        rope = older_rope(type(self).model_type.removeprefix("fulldepth_skipped_"), kwargs)
        super().__init__(**{"auto_map": _auto_map(type(self).__name__)} | rope | kwargs)
        self._check()

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs = {"auto_map": _auto_map(type(self).__name__)} | kwargs
        if getattr(self, "layer_types", None) is not None:
            self.layer_types = self._plain(self.layer_types)
        else:
            kwargs.pop("layer_types", None)  # holds only marks, because the stock configuration has no such field
        super().__post_init__(**kwargs)  # type: ignore[misc]
        self._check()

    def _check(self) -> None:
        """Sort the layers, and refuse values that do not fit the model."""
        self.skipped_attention = _layers("skipped_attention", self.skipped_attention, self.num_hidden_layers)
        self.skipped_mlp = _layers("skipped_mlp", self.skipped_mlp, self.num_hidden_layers)
        if getattr(self, "layer_types", None) is not None:  # possibly set by the stock class
            self.layer_types = self._plain(self.layer_types)
        expected = 2 * self.num_hidden_layers + 1
        if self.stream_scale is not None and not (len(self.stream_scale) == expected and min(self.stream_scale) > 0):
            raise ValueError(f"stream_scale must be {expected} numbers above 0, got {self.stream_scale}")
        if getattr(self, "add_cross_attention", False):
            raise ValueError("layers without attention are not supported for a decoder with cross-attention")

    def _plain(self, types: list[str]) -> list[str]:
        """Return layer types without marks; a layer without attention gets the type of another layer."""
        removed = set(self.skipped_attention or ())
        types = [kind.removeprefix(NO_MLP) for kind in types]
        remaining = [kind for layer, kind in enumerate(types, start=1) if layer not in removed]
        substitute = remaining[0] if remaining else "full_attention"
        return [substitute if layer in removed else kind for layer, kind in enumerate(types, start=1)]

    def to_dict(self) -> dict[str, Any]:
        """Return the stock entries, with layers that lack a part marked in `layer_types`."""
        values: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        no_attention = set(self.skipped_attention or ())
        no_mlp = set(self.skipped_mlp or ())
        if no_attention or no_mlp:
            types = getattr(self, "layer_types", None) or ["full_attention"] * self.num_hidden_layers
            types = [NO_ATTENTION if layer in no_attention else kind for layer, kind in enumerate(types, start=1)]
            marked = [NO_MLP + kind if layer in no_mlp else kind for layer, kind in enumerate(types, start=1)]
            values["layer_types"] = marked
        return values


def older_rope(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return rotary positions by their names before transformers 5, from the entry `rope_parameters`; empty without.

    Earlier versions ignore that entry and use their defaults without a message.

    Args:
        kind: `model_type` of the stock family.
        values: entries of a configuration.
    """
    rope = values.get("rope_parameters")
    names = {}
    if not isinstance(rope, Mapping):
        return {}
    if kind in ROPE_BY_LAYER and isinstance(rope.get("full_attention"), Mapping):
        local = rope.get("sliding_attention") or {}
        if "rope_theta" in local:
            names["rope_local_base_freq"] = local["rope_theta"]
        rope = rope["full_attention"]
    if "rope_theta" not in rope:
        return names
    aliases = OLDER_ROPE.get(kind, {})
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            names[aliases.get(name, name)] = rope[name]
    scaled = rope.get("rope_type", "default") != "default"
    scaling = {name: value for name, value in rope.items() if name not in ("rope_theta", "partial_rotary_factor")}
    return names | {"rope_scaling": scaling if scaled else None}


def _auto_map(config: str) -> dict[str, str]:
    """Auto class -> class in the modelling files of a checkpoint."""
    base = config.removesuffix("Config")
    return {
        "AutoConfig": f"configuration_skipped.{config}",
        "AutoModel": f"modeling_skipped.{base}Model",
        "AutoModelForCausalLM": f"modeling_skipped.{base}ForCausalLM",
    }


def _layers(name: str, layers: Iterable[int] | None, num_layers: int) -> list[int]:
    """Return the layers sorted and without duplicates; refuse layers that do not exist."""
    numbers = sorted(set(layers or ()))
    wrong = [layer for layer in numbers if not (isinstance(layer, int) and 1 <= layer <= num_layers)]
    if wrong:
        raise ValueError(f"{name} names layer {wrong[0]}, but layers are numbered 1 to {num_layers}")
    return numbers


def config_class(name: str) -> Any:
    """Return the class with all fields of a stock configuration and those of `SkippedConfig`.

    Args:
        name: name of the stock class, such as `LlamaConfig`.
    """
    class_name = f"Skipped{name}"
    if class_name not in globals():
        stock = getattr(transformers, name)
        values = {
            **dict.fromkeys(FIELDS),
            "__annotations__": dict(FIELDS),
            "__doc__": f"All fields of `{name}` and those of `SkippedConfig`.",
            "__module__": __name__,
            "model_type": f"fulldepth_skipped_{stock.model_type}",
        }
        globals()[class_name] = type(class_name, (SkippedConfig, stock), values)
    return globals()[class_name]


def __getattr__(name: str) -> Any:
    """Return `SkippedXConfig` for transformers' `XConfig`."""
    if name.startswith("Skipped") and name.endswith("Config"):
        return config_class(name.removeprefix("Skipped"))
    raise AttributeError(f"module {__name__} has no attribute {name}")


__all__ = ["SkippedConfig", "config_class"]

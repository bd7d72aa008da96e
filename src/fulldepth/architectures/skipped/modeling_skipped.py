"""`fulldepth_skipped_*`: stock decoders without the skipped attention blocks and MLPs.

A layer without attention is `y = x + M(Norm(x))`: it has no attention weights, no norm before them and no entry in the
key/value cache. The cache has entries only for layers with attention, so that its length, which transformers reads
from the first entry, is correct for every set of skipped layers.

There is one class for each stock class, created on first access: `SkippedLlamaForCausalLM` for `LlamaForCausalLM`. Its
blocks are the stock ones, with placeholders that add zeros for the skipped parts.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import torch
import transformers
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

from .configuration_skipped import config_class

BEFORE_5 = transformers.__version__.startswith("4.")
TESTED_TRANSFORMERS = ("4.57.6", "5.23.0", "5.24.0")
"""Versions of transformers that this code was tested with."""
CACHE_NAMES = ("cache", "past_key_values")
"""Names of the argument with the cache: since transformers 5.24, and before."""
HANDED_ON = (
    "return_dict",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "num_items_in_batch",
    "is_causal",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "shift_labels",
    "ignore_index",
)
"""Arguments beyond a signature that stock classes, `Trainer` and attention implementations hand on."""
conversions: Any = None if BEFORE_5 else import_module("transformers.conversion_mapping")


@dataclass(frozen=True)
class Layout:
    """Module names in a stock decoder: `layers` and `final_norm` from the body, the others from a block.

    The first norm of a tuple that the block has is used.
    """

    attention: str = "self_attn"
    attention_norms: tuple[str, ...] = ("input_layernorm",)
    """Norm before attention."""
    after_attention: str | None = None
    """Norm after attention."""
    mlp: tuple[str, ...] = ("mlp",)
    """The MLP, or its first and its last module."""
    mlp_norms: tuple[str, ...] = ("post_attention_layernorm",)
    """Norm before the MLP; if attention also reads it, it remains when one of the two is skipped."""
    after_mlp: str | None = None
    """Norm after the MLP."""
    mlp_outputs: int = 0
    """Length of the tuple that the MLP returns; 0 for a tensor. Attention always returns two elements."""
    layers: str = "layers"
    final_norm: str = "norm"

    @property
    def keeps_scalars(self) -> bool:
        """True if scalars stay outside the weights, because attention and MLP read the stream without a norm."""
        return not self.attention_norms and not self.mlp_norms


LLAMA = Layout()
GEMMA = Layout(
    after_attention="post_attention_layernorm",
    mlp_norms=("pre_feedforward_layernorm",),
    after_mlp="post_feedforward_layernorm",
)
PARALLEL = Layout(mlp_norms=("input_layernorm",))
LAYOUTS = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "olmo", "phi3", "smollm3"), LLAMA),
    **dict.fromkeys(("deepseek_v3", "qwen3_moe", "starcoder2"), LLAMA),
    "gpt_oss": Layout(mlp_outputs=2),
    "mixtral": Layout(mlp=("block_sparse_moe",), mlp_outputs=2) if BEFORE_5 else LLAMA,
    **dict.fromkeys(("gemma2", "gemma3_text"), GEMMA),
    "olmo2": replace(GEMMA, attention_norms=(), mlp_norms=()),
    "cohere": PARALLEL,
    "phi": replace(PARALLEL, final_norm="final_layernorm"),
    "falcon": Layout(
        attention="self_attention",
        attention_norms=("ln_attn", "input_layernorm"),
        mlp_norms=("ln_mlp", "post_attention_layernorm", "input_layernorm"),
        layers="h",
        final_norm="ln_f",
    ),
    "gpt2": Layout(attention="attn", attention_norms=("ln_1",), mlp_norms=("ln_2",), layers="h", final_norm="ln_f"),
    "gpt_neox": Layout(attention="attention", final_norm="final_layer_norm"),
    "opt": Layout(
        attention_norms=("self_attn_layer_norm",),
        mlp=("fc1", "fc2"),
        mlp_norms=("final_layer_norm",),
        layers="decoder.layers",
        final_norm="decoder.final_layer_norm",
    ),
}
"""`model_type` of a stock decoder -> its layout."""
BASE_MODEL_PREFIX = {"gemma3_text": "model"}
"""`model_type` -> prefix, where the stock one is wrong: before transformers 5, `Gemma3ForCausalLM` has the prefix of
the class with images."""


class NoAttention:
    """Placeholder for skipped attention, which adds 0. It is not a module, so that the block has none of that name."""

    is_sliding = False  # read by Gemma 3's block before transformers 5, to choose the position embeddings

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """Return zeros `[B, T, D]`, and None for the attention weights."""
        return torch.zeros_like(hidden_states), None


class NoMLP(nn.Module):
    """Placeholder for a skipped MLP, which adds 0.

    Args:
        outputs: length of the tuple that the MLP returned; 0 for a tensor.
    """

    def __init__(self, outputs: int = 0) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, hidden_states: Tensor) -> Any:
        """Return zeros `[B, T, D]`, alone or first in a tuple."""
        zeros = torch.zeros_like(hidden_states)
        return (zeros, *[None] * (self.outputs - 1)) if self.outputs else zeros


def _identity(hidden_states: Tensor) -> Tensor:
    """Placeholder for a norm of skipped attention."""
    return hidden_states


def _rescale(norm: Any, scale: float) -> None:
    """Change a norm's eps so that its output for `x / scale` is that for x."""
    if not isinstance(norm, nn.Module) or scale == 1.0:
        return
    for name in ("eps", "variance_epsilon"):
        if hasattr(norm, name):
            setattr(norm, name, getattr(norm, name) / scale**2)
            return
    norm.forward = partial(_of_scaled, scale, norm.forward)  # OLMo's eps is not an attribute


def _of_scaled(scale: float, forward: Any, hidden_states: Tensor) -> Tensor:
    """Run in place of the `forward` of a norm, on its input times `scale`."""
    return forward(scale * hidden_states)


class _Factors:
    """Applies the factors of one branch: its output becomes `b A + (s - 1) x`, to which the block adds x.

    It is for blocks whose attention and MLP read the stream itself and end in norms.
    """

    def __init__(self, b: float, s: float) -> None:
        self.b = b
        self.s = s
        self.stream: Tensor | None = None

    def note(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the input of the module that reads the stream."""
        self.stream = args[0] if args else kwargs["hidden_states"]
        return forward(*args, **kwargs)

    def mix(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the scaled output of the branch, computed in float32 at least, in the dtype of the sum."""
        branch = forward(*args, **kwargs)
        stream = self.stream
        assert stream is not None  # recorded by `note`
        self.stream = None
        dtype = torch.promote_types(branch.dtype, stream.dtype)
        wide = torch.promote_types(dtype, torch.float32)
        return (self.b * branch.to(wide) + (self.s - 1) * stream.to(wide)).to(dtype)


class TokenCounter(CacheLayerMixin):
    """The only entry of a cache when no layer has attention: the number of tokens."""

    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.is_initialized = True
        self.cumulative_length = 0

    def lazy_initialization(self, key_states: Tensor, *args: Any) -> None:
        """Do nothing, because nothing is stored."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raise an error, because a model without attention has no keys and values to store.

        Raises:
            TypeError: always.
        """
        raise TypeError("this model has no attention, so its cache holds no keys and values")

    def get_seq_length(self) -> int:
        """Return the number of tokens."""
        return self.cumulative_length

    def get_mask_sizes(self, query_length: int | Tensor) -> tuple[int, int]:
        """Return length and offset of a mask, which no layer reads; transformers 4 passes the query's positions."""
        length = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.cumulative_length + length, 0

    def get_max_length(self) -> int:
        """Return -1 for no limit."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1 for no limit; called by this name before transformers 5."""
        return -1

    def reset(self) -> None:
        """Set the number of tokens to 0."""
        self.cumulative_length = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens (a negative number, as in transformers)."""
        self.cumulative_length = max(0, self.cumulative_length - abs(tokens_to_remove))

    def offload(self) -> None:
        """Do nothing, because there is nothing to move."""

    def prefetch(self) -> None:
        """Do nothing, because there is nothing to move."""

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Do nothing, because every sequence has the same length."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Do nothing, because every sequence has the same length."""

    def batch_select_indices(self, indices: Tensor) -> None:
        """Do nothing, because every sequence has the same length."""


def _compact(cache: Cache, skipped: set[int], num_layers: int) -> None:
    """Remove the entries of layers without attention from an empty cache with entries for all layers, in place.

    Args:
        cache: a cache; one that was compacted before, or adds entries by itself, does not change.
        skipped: layers without attention, 1..L.
        num_layers: L.

    Raises:
        ValueError: if the cache already holds tokens for all layers, and so was filled by another model.
    """
    if skipped and len(cache.layers) == num_layers:
        if cache.get_seq_length() > 0:
            raise ValueError(
                f"this cache was filled by another model: it has entries for all {num_layers} layers, and "
                f"{len(skipped)} of this model's have no attention"
            )
        cache.layers = [entry for layer, entry in enumerate(cache.layers, start=1) if layer not in skipped]
    if not cache.layers and len(skipped) >= num_layers:
        cache.layers.append(TokenCounter())


def _argument_names(model: Any) -> list[str]:
    """Return the names of the arguments of a stock forward pass, in its order.

    Raises:
        ValueError: if none of them is a cache by a name that this code knows.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    if not set(CACHE_NAMES).intersection(names):
        raise ValueError(
            f"transformers {transformers.__version__} passes the cache of {type(model).__name__} by a name that this "
            f"code does not know; it was tested with transformers {', '.join(TESTED_TRANSFORMERS)}"
        )
    return names


def _check_arguments(names: list[str], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: pass the cache by the stock class's name, and refuse arguments that the class would not read.

    Raises:
        TypeError: with the names of unknown arguments, and of those that are given twice; for too many arguments.
        ValueError: for two caches.
    """
    if len(args) > len(names):
        raise TypeError(f"{type(model).__name__}.forward() takes {len(names)} arguments by position, got {len(args)}")
    if twice := [name for name in names[: len(args)] if name in kwargs]:
        raise TypeError(f"{type(model).__name__}.forward() got {', '.join(map(repr, twice))} twice")
    named = kwargs | dict(zip(names, args, strict=False))
    if unknown := sorted(named.keys() - {*names, *CACHE_NAMES, *HANDED_ON}):
        raise TypeError(f"{type(model).__name__}.forward() takes no argument {', '.join(map(repr, unknown))}")
    caches = [named.pop(name) for name in CACHE_NAMES if name in named]
    given = [cache for cache in caches if cache is not None]
    if len(given) > 1:
        raise ValueError("cache and past_key_values are two names of one argument; pass one of them")
    stock_name = next(name for name in CACHE_NAMES if name in names)
    return (), named | {stock_name: given[0] if given else None}


def _before_pass(names: list[str], stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook: pass a cache with entries only for layers with attention; `names` are the arguments' names.

    Raises:
        ValueError: for a cache that another model filled.
    """
    cache_name = next(name for name in CACHE_NAMES if name in names)
    cache = kwargs[cache_name]
    config = stack.config
    wanted = kwargs.get("use_cache")
    wanted = config.use_cache if wanted is None else wanted
    if cache is None and wanted and not (stack.gradient_checkpointing and stack.training):  # as the stock class does
        cache = DynamicCache(config=config)
    kwargs[cache_name] = cache
    if isinstance(cache, Cache):
        # Not L: early exit in `generate` lowers the configuration's number temporarily.
        num_layers = config.num_hidden_layers
        _compact(cache, {layer for layer in config.skipped_attention if layer <= num_layers}, num_layers)
    return args, kwargs


def _after_pass(stack: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
    """Forward hook: count the tokens of a cache without keys and values."""
    cache = next(kwargs[name] for name in CACHE_NAMES if name in kwargs)
    if isinstance(cache, Cache) and cache.layers and isinstance(cache.layers[0], TokenCounter):
        inputs = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
        cache.layers[0].cumulative_length += inputs.shape[1]  # type: ignore[union-attr]


class SkippedModel:
    """Mixin before a stock decoder without head: the decoder without the skipped parts."""

    layout: ClassVar[Layout]

    def __init__(self, config: Any) -> None:
        if BEFORE_5 and getattr(config, "scale_attn_by_inverse_layer_idx", False):
            raise ValueError(f"scale_attn_by_inverse_layer_idx needs transformers 5, got {transformers.__version__}")
        super().__init__(config)  # type: ignore[call-arg]
        layout = self.layout
        body = self
        layers: Any = body.get_submodule(layout.layers)  # type: ignore[attr-defined]
        entry = 0
        for layer, block in enumerate(layers, start=1):
            # None if a part reads the stream itself.
            norm = next((name for name in layout.attention_norms if hasattr(block, name)), None)
            mlp_norm = next((name for name in layout.mlp_norms if hasattr(block, name)), None)
            if config.stream_scale is not None:
                scales = dict(zip((norm, mlp_norm), config.stream_scale[2 * layer - 2 : 2 * layer], strict=True))
                for name, scale in scales.items():
                    _rescale(getattr(block, str(name), None), scale)
            separate_norms = norm != mlp_norm
            replaced: dict[str | None, Any] = {}
            if layer in config.skipped_attention:
                replaced = {norm if separate_norms else None: _identity, layout.after_attention: _identity}
                replaced[layout.attention] = NoAttention()
            else:
                getattr(block, layout.attention).layer_idx = entry
                entry += 1
            if layer in config.skipped_mlp:
                for name in (mlp_norm if separate_norms else None, *layout.mlp[:-1], layout.after_mlp):
                    replaced[name] = nn.Identity()
                replaced[layout.mlp[-1]] = NoMLP(layout.mlp_outputs)
            for name, part in replaced.items():
                if name is not None:
                    delattr(block, name)
                    setattr(block, name, part)
            scalars = {} if config.scalars is None else config.scalars.get(str(layer), {})
            parts = {"att": (layout.attention, layout.after_attention), "mlp": (layout.mlp[0], layout.after_mlp)}
            for role, (reader, end) in parts.items():
                if f"b_{role}" in scalars:
                    factors = _Factors(scalars[f"b_{role}"], scalars[f"s_{role}"])
                    first = getattr(block, reader)
                    last = getattr(block, str(end))
                    first.forward = partial(factors.note, first.forward)
                    last.forward = partial(factors.mix, last.forward)
        if config.stream_scale is not None:
            _rescale(body.get_submodule(layout.final_norm), config.stream_scale[-1])  # type: ignore[attr-defined]
        stack = body.get_submodule(layout.layers.rpartition(".")[0])  # type: ignore[attr-defined]
        names = _argument_names(stack)
        stack.register_forward_pre_hook(partial(_check_arguments, names), with_kwargs=True)
        stack.register_forward_pre_hook(partial(_before_pass, names), with_kwargs=True)
        stack.register_forward_hook(_after_pass, with_kwargs=True)


class SkippedForCausalLM:
    """Mixin before a stock decoder with a language-model head, around a `SkippedModel`."""

    model_class: ClassVar[type]

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        setattr(self, self.base_model_prefix, self.model_class(config))  # type: ignore[attr-defined]
        self.register_forward_pre_hook(  # type: ignore[attr-defined]
            partial(_check_arguments, _argument_names(self)), with_kwargs=True
        )
        self.post_init()  # type: ignore[attr-defined]


def _make(model_type: str, base: str) -> None:
    """Create the classes of a family; `base` is the name of its configuration class without `Config`."""
    stock: list[str] = [MODEL_MAPPING_NAMES[model_type], MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]  # type: ignore[list-item]
    body, causal_lm = (getattr(transformers, name) for name in stock)
    shared = {"__module__": __name__, "config_class": config_class(f"{base}Config")}
    values = shared | {"__doc__": f"`{stock[0]}` without skipped parts.", "layout": LAYOUTS[model_type]}
    model_class = type(f"Skipped{base}Model", (SkippedModel, body), values)
    values = shared | {"__doc__": f"`{stock[1]}` without skipped parts.", "model_class": model_class}
    if model_type in BASE_MODEL_PREFIX:
        values["base_model_prefix"] = BASE_MODEL_PREFIX[model_type]
    head_class = type(f"Skipped{base}ForCausalLM", (SkippedForCausalLM, causal_lm), values)
    globals().update({model_class.__name__: model_class, head_class.__name__: head_class})
    if conversions is not None:  # transformers 5 stores weights of some families by other names than their modules'
        names = (model_class.__name__, head_class.__name__, f"fulldepth_skipped_{model_type}")
        for name, stock_name in zip(names, (*stock, model_type), strict=True):
            if (mapping := conversions.get_checkpoint_conversion_mapping(stock_name)) is not None:
                conversions.register_checkpoint_conversion_mapping(name, mapping, overwrite=True)


def causal_lm_class(model_type: str) -> Any:
    """Return the class without skipped parts of a family of `LAYOUTS`; its `model_class` is the decoder alone."""
    name = f"Skipped{CONFIG_MAPPING_NAMES[model_type].removesuffix('Config')}ForCausalLM"
    return globals().get(name) or __getattr__(name)


def __getattr__(name: str) -> Any:
    """Return `SkippedXModel` or `SkippedXForCausalLM` for the stock decoder whose configuration is `XConfig`."""
    for model_type in LAYOUTS:
        base = CONFIG_MAPPING_NAMES.get(model_type, "").removesuffix("Config")
        if base and name in (f"Skipped{base}Model", f"Skipped{base}ForCausalLM"):
            _make(model_type, base)
            return globals()[name]
    raise AttributeError(f"module {__name__} has no attribute {name}")


__all__ = ["LAYOUTS", "Layout", "SkippedForCausalLM", "SkippedModel", "causal_lm_class"]

"""`depth_llama`: Llama with a choice of residual path (serial, tree, Hyper-Connections) and attention memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import CandidateGenerator, GenerationConfig, GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaMLP
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .arguments_depth_llama import CACHE, HANDED_ON, LOSS_ARGUMENTS, refuse_unknown, single_cache
from .attention_depth_llama import DepthLlamaAttention, DepthLlamaRMSNorm, DepthLlamaRotaryEmbedding
from .configuration_depth_llama import EMBEDDING, DepthLlamaConfig
from .hyper_depth_llama import HyperConnection, collapse, expand
from .memory_depth_llama import DynamicRouter, KeyValueRouter, StaticRouter, normalise

ROUTERS = (StaticRouter, DynamicRouter, KeyValueRouter)
Decay = Literal["matrices", "all", "routers"]
MemoryStart = Literal["fan-in", "pseudocode"]


class DepthLlamaDecoderLayer(GradientCheckpointingLayer):
    """A Llama layer whose additional inputs are positional tensors.

    Reentrant gradient checkpointing follows gradients through positional tensors only.
    """

    def __init__(self, config: DepthLlamaConfig, layer_idx: int) -> None:
        super().__init__()
        width = config.hidden_size
        eps = config.rms_norm_eps
        self.self_attn = DepthLlamaAttention(config, layer_idx)
        self.mlp = LlamaMLP(config)
        scale = (layer_idx + 1) ** -0.5 if config.norm_scaling else 1.0
        self.input_layernorm = DepthLlamaRMSNorm(width, eps=eps, scale=scale)
        self.post_attention_layernorm = DepthLlamaRMSNorm(width, eps=eps, scale=scale)
        self.tree_norms: nn.ModuleList | None = None
        if config.residual == "tree" and layer_idx in (config.tree or {}):
            self.tree_norms = nn.ModuleList(DepthLlamaRMSNorm(width, eps=eps) for _ in ("ancestor", "previous"))
        self.attention_connection: HyperConnection | None = None
        self.mlp_connection: HyperConnection | None = None
        if config.residual == "hyper":
            shape = (width, config.num_streams)
            self.attention_connection = HyperConnection(*shape, start=2 * layer_idx, dynamic=config.hyper_dynamic)
            self.mlp_connection = HyperConnection(*shape, start=2 * layer_idx + 1, dynamic=config.hyper_dynamic)

    def forward(
        self, hidden_states: Tensor, ancestor: Tensor | None = None, *memory: Tensor, **kwargs: Any
    ) -> Tensor | tuple[Tensor, ...]:
        """Run the layer.

        Args:
            hidden_states: output `[B, T, D]` of the layer before, or of the tree's `previous` layer; with
                Hyper-Connections streams `[B, T, n, D]`.
            ancestor: output of the tree's `ancestor` layer, for a layer in the tree.
            *memory: sources of the attention's memory: normalised states (without that of the input, for a layer in the
                tree), or keys and values of earlier layers in turn.
            **kwargs: masks, positions, cache and further arguments of attention.

        Returns:
            Output, of the shape of `hidden_states`; with memory `kv` also this layer's keys and values.
        """
        if self.attention_connection is not None and self.mlp_connection is not None:
            return self._connected(hidden_states, self.attention_connection, self.mlp_connection, **kwargs)
        mixes_states = self.self_attn.memory_norm is not None
        if self.tree_norms is not None:
            hidden_states = self.tree_norms[0](ancestor) + self.tree_norms[1](hidden_states)
            if mixes_states:
                memory = (*memory, normalise(hidden_states, self.input_layernorm.variance_epsilon))
        normed = self.input_layernorm(hidden_states, memory[-1] if mixes_states else None)
        attended, _, *keys_and_values = self.self_attn(normed, stream=hidden_states, memory=memory, **kwargs)
        hidden_states = hidden_states + attended
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))
        return (hidden_states, *keys_and_values) if keys_and_values else hidden_states

    def _connected(self, streams: Tensor, attention: HyperConnection, mlp: HyperConnection, **kwargs: Any) -> Tensor:
        """Run the layer with Hyper-Connections around its branches, from streams `[B, T, n, D]` to streams."""
        hidden_states, carried, beta = attention(streams)
        attended, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states, carried, beta = mlp(attention.add(carried, attended, beta))
        return mlp.add(carried, self.mlp(self.post_attention_layernorm(hidden_states)), beta)


class DepthLlamaPreTrainedModel(PreTrainedModel):
    """Base class of the model and the language model: initial weights, optimiser groups, pruning."""

    config_class = DepthLlamaConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DepthLlamaDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = [CACHE]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_record_outputs = {"hidden_states": DepthLlamaDecoderLayer, "attentions": DepthLlamaAttention}  # noqa: RUF012

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module; routers and connections have schemes of their own."""
        if isinstance(module, ROUTERS):
            module.reset_parameters(std=self.config.initializer_range)
        elif isinstance(module, HyperConnection):
            module.reset_parameters()
        else:
            super()._init_weights(module)

    def parameter_groups(
        self,
        learning_rate: float,
        weight_decay: float,
        router_learning_rate: float | None = None,
        decay: Decay = "matrices",
    ) -> list[dict[str, Any]]:
        """Return the optimiser's groups, by weight decay and learning rate.

        Args:
            learning_rate: learning rate of all parameters except routers.
            weight_decay: weight decay of the parameters that decay.
            router_learning_rate: learning rate of routers; None = `learning_rate`.
            decay: `matrices`: matrices, dynamic and kv routers and the dynamic parts of Hyper-Connections decay; norms,
                biases, embeddings (and a head tied to them), static routers and static parts of Hyper-Connections do
                not. `all`: every parameter. `routers`: dynamic and kv routers only.

        Returns:
            Groups with `params`, `lr`, `weight_decay` and `name`, for `torch.optim.AdamW`. Every parameter is in one
            group, and no group is empty.

        Raises:
            ValueError: for an unknown `decay`.

        Source: `matrices`: "LIME", Table 3 and its public code; static parts: arXiv 2409.19606. `routers`: the wording
        of "LIME", App. A.
        """
        if decay not in get_args(Decay):
            raise ValueError(f"decay must be one of {', '.join(get_args(Decay))}, got {decay!r}")
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for path, parameter in self.named_parameters():  # a tied one counts as the embedding
            owner, _, name = path.rpartition(".")
            module = self.get_submodule(owner)
            groups.setdefault((isinstance(module, ROUTERS), _decays(module, name, decay)), []).append(parameter)
        rates = (learning_rate, learning_rate if router_learning_rate is None else router_learning_rate)
        return [
            {
                "params": groups[router, decays],
                "lr": rates[router],
                "weight_decay": weight_decay if decays else 0.0,
                "name": ("router_" if router else "") + ("decay" if decays else "no_decay"),
            }
            for router, decays in sorted(groups)
        ]

    def prune_routers(self, p: float = 0.9) -> dict[str, Any]:
        """Keep, per head, the smallest set of sources whose weights exceed `p`, in place; all others get weight 0.

        A static router's parameters change. A dynamic router prunes every token's weights from now on, which the
        configuration stores (`router_top_p`).

        Args:
            p: share of the weight to keep, above 0 and at most 1.

        Returns:
            `share`: the share of all routing weights that are zero now; `layers`: the same by 1-based layer. None if it
            depends on the input.

        Raises:
            ValueError: for memory `none` and `kv` (whose weights are not a distribution), or p out of range.

        Source: "LIME", App. B.
        """
        if self.config.memory not in ("static", "dynamic"):
            raise ValueError(f"only memory 'static' and 'dynamic' can be pruned, got {self.config.memory!r}")
        attentions = (module for module in self.modules() if isinstance(module, DepthLlamaAttention))
        layers: dict[int, Any] = {m.layer_idx + 1: m.router.prune(p) for m in attentions if m.router is not None}
        if self.config.memory == "dynamic":
            self.config.router_top_p = p
            return {"share": None, "layers": layers}
        share = sum(layer * layers[layer] for layer in layers) / max(sum(layers), 1)  # layer r has r weights per head
        return {"share": share, "layers": layers}


def _decays(module: nn.Module, name: str, decay: Decay) -> bool:
    """Return True if a parameter of a module has weight decay."""
    if decay != "matrices":
        return decay == "all" or isinstance(module, (DynamicRouter, KeyValueRouter))
    if isinstance(module, (DepthLlamaRMSNorm, nn.Embedding, StaticRouter)):
        return False
    return name != "bias" and not name.startswith("static_")


class DepthLlamaModel(DepthLlamaPreTrainedModel):
    """The decoder without a head.

    `hidden_states` of its output are `h_0..h_L`, the last one after the final norm as in Llama; with Hyper-Connections
    each is the sum of the streams, so that `h_0` is n times the embedding.
    """

    def __init__(self, config: DepthLlamaConfig) -> None:
        config.resolve()
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(DepthLlamaDecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.norm = DepthLlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DepthLlamaRotaryEmbedding(config=config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    @merge_with_config_defaults
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the decoder, with the arguments of `LlamaModel.forward` and the cache under either of its names.

        Raises:
            ValueError: unless exactly one of `input_ids` and `inputs_embeds` is given; for two caches.
            TypeError: for an argument that no part of the model reads.
        """
        refuse_unknown(self, kwargs)
        cache = single_cache(cache, past_key_values)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        named_cache: dict[str, Any] = {CACHE: cache}
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,  # mark packed documents if they were passed
            **named_cache,
        )
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            positions = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past
            position_ids = cast(torch.LongTensor, positions.unsqueeze(0))
        outputs = self._decode(
            inputs_embeds,
            attention_mask=mask,
            position_embeddings=self.rotary_emb(inputs_embeds, position_ids=position_ids),
            position_ids=position_ids,
            cache=cache,
            use_cache=use_cache,
            return_dict=True,
            **kwargs,
        )
        if self.config.residual == "hyper" and outputs.hidden_states is not None:
            outputs.hidden_states = tuple(
                collapse(state) if state is not None and state.ndim == 4 else state for state in outputs.hidden_states
            )
        return outputs

    @capture_outputs
    def _decode(self, hidden_states: Tensor, cache: Cache | None, **kwargs: Any) -> BaseModelOutputWithPast:
        """Run embeddings `[B, T, D]` through all layers, with their inputs from tree and memory, and the final norm."""
        kind = self.config.memory
        eps = self.config.rms_norm_eps
        hyper = self.config.residual == "hyper"
        tree = (self.config.tree or {}) if self.config.residual == "tree" else {}
        read_later = {source for layer, sources in tree.items() for source in sources if source != layer - 1}
        if hyper:
            hidden_states = expand(hidden_states, self.config.num_streams)
        outputs = {EMBEDDING: hidden_states}  # layer -> output, for layers that the tree reads later
        memory: list[Tensor] = []
        for index, layer in enumerate(cast(Iterable[DepthLlamaDecoderLayer], self.layers)):
            if kind in ("static", "dynamic"):
                memory.append(normalise(hidden_states, eps))
            outputs[index - 1] = hidden_states
            ancestor, previous = (outputs[source] for source in tree[index]) if index in tree else (None, hidden_states)
            routed = layer.self_attn.router is not None
            sources = memory[: -1 if index in tree and kind != "kv" else None] if routed else ()
            result = layer(previous, ancestor, *sources, **{CACHE: cache}, **kwargs)
            hidden_states, *keys_and_values = result if isinstance(result, tuple) else (result,)
            memory.extend(keys_and_values)
            if index - 1 not in read_later:
                del outputs[index - 1]
        if hyper:
            hidden_states = collapse(hidden_states)
        named_cache: dict[str, Any] = {CACHE: cache}
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states), **named_cache)


class DepthLlamaForCausalLM(DepthLlamaPreTrainedModel, GenerationMixin):
    """The decoder with a language-model head; with serial residuals and no memory, `LlamaForCausalLM`."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012
    stock_class = LlamaForCausalLM
    """Class that computes the same from `stock_weights`, which have the same names, if no switch is active."""

    def __init__(self, config: DepthLlamaConfig) -> None:
        super().__init__(config)
        self.model = DepthLlamaModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Run the model, with the arguments of `LlamaForCausalLM.forward` and the cache under either of its names.

        `labels` are shifted by the loss, which also takes `num_items_in_batch`, `shift_labels` and `ignore_index`.

        Raises:
            ValueError: as `DepthLlamaModel.forward`.
            TypeError: for an argument that no part of the model reads.
        """
        refuse_unknown(self, kwargs, (*HANDED_ON, *LOSS_ARGUMENTS))
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            cache=single_cache(cache, past_key_values),
            **{name: value for name, value in kwargs.items() if name not in LOSS_ARGUMENTS},
        )
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, positions, :])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            **{CACHE: getattr(outputs, CACHE)},
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def stock_weights(self) -> dict[str, Tensor]:
        """Return weights with which the stock class computes the same: scaled norms have their scale in the gain."""
        gains = {
            f"{name}.weight": module.folded_gain().detach()
            for name, module in self.named_modules()
            if isinstance(module, DepthLlamaRMSNorm)
        }
        return self.state_dict() | gains

    def added_parameters(self) -> set[str]:
        """Return the names of the weights that the switches add to a Llama: routers, connections and their norms.

        A Llama's checkpoint lacks them, so they have the initial values of their papers.
        """
        with torch.device("meta"):
            stock = self.stock_class(self.config.stock_config())
        return self.state_dict().keys() - stock.state_dict().keys()

    def memory_bounds(self, rule: MemoryStart) -> dict[str, float]:
        """Name -> bound b of U(-b, b), for the key and value projections that read a memory.

        `b = k**-0.5`, as in `kaiming_uniform_(a=sqrt(5))`. With memory `kv`, whose keys and values are the memory
        itself, these are the projections of every layer; otherwise of all layers but the first.

        Args:
            rule: `fan-in`: k = D, the inputs. `pseudocode`: k = H_kv D d_h, because torch counts every dimension of
                LIME's tensor `[1, H, D, d_h]` except the first as inputs.

        Raises:
            ValueError: for `pseudocode` with memory `kv`, which is not in the paper's listing.

        Source: "LIME", App. E.
        """
        kv = self.config.memory == "kv"
        if rule == "pseudocode" and kv:
            raise ValueError("rule 'pseudocode' is for memory 'static' and 'dynamic'; use 'fan-in' for memory 'kv'")
        bounds: dict[str, float] = {}
        for name, module in self.named_modules():
            if isinstance(module, DepthLlamaAttention) and (kv or module.memory_norm is not None):
                inputs = module.k_proj.in_features * (module.k_proj.out_features if rule == "pseudocode" else 1)
                bounds |= {f"{name}.{part}.weight": inputs**-0.5 for part in ("k_proj", "v_proj")}
        return bounds

    def _get_candidate_generator(  # type: ignore[override]
        self, generation_config: GenerationConfig, **kwargs: Any
    ) -> CandidateGenerator:
        """Refuse the early exit of transformers, which changes the configuration for drafts."""
        if generation_config.assistant_early_exit is not None:  # transformers changes the configuration for drafts
            raise ValueError(
                "assistant_early_exit is not supported by this class; use fulldepth.exit.generate for drafts from its "
                "first layers"
            )
        return super()._get_candidate_generator(generation_config, **kwargs)  # type: ignore[misc]


__all__ = ["DepthLlamaForCausalLM", "DepthLlamaModel", "DepthLlamaPreTrainedModel"]

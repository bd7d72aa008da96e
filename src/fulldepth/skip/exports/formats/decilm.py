"""`decilm`: the layout of DeciLM, which vLLM, llama.cpp's converter and mlx-lm read, for the shapes of Llama and Qwen2.

Layers without attention are marked `block_configs[i].attention.no_op`. The readers have requirements that the model may
not meet:

- The MLP's width is stored as `ffn_mult` and rounded up to a multiple of 256: the MLP gets neurons of zeros up to it.
- Either all four attention projections have biases or none: Qwen2's output projections get biases of zeros.
- vLLM and llama.cpp need attention in the first layer: it stays there, with an output of zeros.
- llama.cpp drops a layer without MLP (`ffn.no_op`) whole: plans that skip MLPs are not written.

Source: published `config.json` of Llama-3_1-Nemotron-51B; vLLM `nemotron_nas.py`; llama.cpp `conversion/deci.py`.
"""

from __future__ import annotations

from typing import Any

from torch.nn.functional import pad
from transformers import PreTrainedConfig, PreTrainedModel

from fulldepth.architectures import DeciLMConfig, DeciLMForCausalLM
from fulldepth.core.errors import FulldepthError, first_reason
from fulldepth.hf.stream_scale import write_stream_scale
from fulldepth.skip.exports.formats.checkpoint import Draft, plain_values, save
from fulldepth.skip.exports.formats.format import Format
from fulldepth.skip.plan import Plan

MULTIPLE = 256
"""Readers round the MLP's width up to a multiple of this."""
NOT_OF_LLAMA = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
"""Entries of a Qwen2's configuration that a Llama does not have."""
NO_ATTENTION = {"n_heads_in_group": None, "no_op": True}
FFN_REST: dict[str, Any] = {"replace_with_linear": False, "sparsify": None}
CHECKED = (
    "vLLM 0.32.0 (which needs --trust-remote-code) and mlx-lm 0.32.2 computed the plan's logits, with and without a "
    "cache, from exports in this layout (benchmarks/readers.py, 2026-11-28). This folder was checked in transformers, "
    "with the code that it carries."
)
ATTENTION_REST = FFN_REST | {
    **dict.fromkeys(("num_sink_tokens", "window_length")),
    **dict.fromkeys(("unshifted_sink", "use_prefill_window_in_sink_attention"), False),
}
"""Further entries of a block in published configurations."""


def intermediate_size(ffn_mult: float, width: int) -> int:
    """The MLP's width as all readers compute it."""
    size = int(2 * ffn_mult * width / 3)
    return size if size % MULTIPLE == 0 else size + MULTIPLE - size % MULTIPLE


class DeciLM(Format):
    """A checkpoint in the layout of DeciLM, with code for transformers."""

    name = "decilm"
    granularities = ("attention",)
    reader = "carried"
    verified = False

    def check(self, model: PreTrainedModel, plan: Plan) -> None:
        """Refuse a family or shape that the layout cannot describe.

        Raises:
            FulldepthError: with the reason.
        """
        config = model.config
        if config.model_type not in ("llama", "qwen2"):
            raise FulldepthError(f"The decilm layout holds llama and qwen2; this model is a {config.model_type}.")
        rope = config.rope_parameters.get("rope_type", "default")
        reasons = {
            "its heads have a width of their own (head_dim)": getattr(config, "head_dim", None)
            not in (None, config.hidden_size // config.num_attention_heads),
            "some of its layers attend within a sliding window": "sliding_attention"
            in (getattr(config, "layer_types", None) or ()),
            f"its rotary positions are of type {rope!r}": rope not in ("default", "linear", "llama3"),
        }
        if reason := first_reason(reasons):
            raise FulldepthError(f"The decilm layout cannot hold this model: {reason}.")

    def write(self, draft: Draft) -> list[str]:
        """Write the checkpoint, its configuration with the published names, and modelling code for transformers."""
        config = draft.model.config
        state = draft.weights()
        skipped = set(draft.plan.lacking("attention")) - {1}  # readers need its attention
        size = -(-config.intermediate_size // MULTIPLE) * MULTIPLE
        missing = size - config.intermediate_size
        biased = any(name.endswith("q_proj.bias") for name in state)
        llama_values = {name: value for name, value in plain_values(config).items() if name not in NOT_OF_LLAMA}
        values = llama_values | {
            "architectures": ["DeciLMForCausalLM"],
            "intermediate_size": size,
            "attention_bias": biased,
            "block_configs": block_configs(config, skipped, size),
        }
        removed = tuple(f"model.layers.{n - 1}.{name}." for n in skipped for name in ("self_attn", "input_layernorm"))
        weights = {name: weight for name, weight in state.items() if not name.startswith(removed)}
        for name, weight in list(weights.items()):
            if missing and ".mlp." in name:
                if ".down_proj." not in name:
                    weights[name] = weight.map(
                        lambda unpadded: pad(unpadded, (0, 0) * (unpadded.ndim - 1) + (0, missing))
                    )
                elif name.endswith("weight"):
                    weights[name] = weight.map(lambda unpadded: pad(unpadded, (0, missing)))
            if biased and name.endswith("o_proj.weight"):
                bias = weight.map(lambda tensor: tensor.new_zeros(len(tensor)))
                weights.setdefault(name.replace("weight", "bias"), bias)
        decilm = DeciLMConfig(**values)
        write_stream_scale(decilm, draft.state_scale)
        save(draft, DeciLMForCausalLM, decilm, weights)
        notes = [CHECKED, draft.folding.note]
        if missing:
            notes.append(
                f"The MLPs have {size} neurons instead of {config.intermediate_size}, the rest zeros: readers accept "
                f"only multiples of {MULTIPLE}."
            )
        if biased and not any(name.endswith("o_proj.bias") for name in state):
            notes.append("The output projections have biases of zeros: readers need biases on all projections or none.")
        if 1 in draft.plan.lacking("attention"):
            notes.append("Layer 1 keeps its attention, with an output of zeros: vLLM and llama.cpp need a first one.")
        if (config.model_type, config.vocab_size) != ("llama", 128256):
            notes.append("llama.cpp's converter for this layout knows the tokenizers of Llama 2 and 3 only.")
        return notes


def block_configs(config: PreTrainedConfig, skipped: set[int], size: int) -> list[dict[str, dict[str, Any]]]:
    """One entry per layer, with the published names."""
    group = config.num_attention_heads // config.num_key_value_heads
    mult = 1.5 * size / config.hidden_size
    if intermediate_size(mult, config.hidden_size) != size:  # rounding gives the next multiple
        mult = 1.5 * (size - MULTIPLE / 2) / config.hidden_size
    return [
        {
            "attention": (NO_ATTENTION if layer in skipped else {"n_heads_in_group": group, "no_op": False})
            | ATTENTION_REST,
            "ffn": {"ffn_mult": mult, "no_op": False} | FFN_REST,
        }
        for layer in range(1, config.num_hidden_layers + 1)
    ]

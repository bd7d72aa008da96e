"""Writes tiny GGUF files from stock models, with the layout of llama.cpp written out here by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaForCausalLM

LLAMA_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of a query or key projection from halves (transformers) to pairs (llama.cpp), head by head."""
    rows = torch.arange(weight.shape[0]).view(heads, 2, -1)  # [heads, half, pair]
    return weight[rows.transpose(1, 2).reshape(-1)]


def vocabulary(size: int) -> tuple[list[str], list[str]]:
    """Tokens of a byte-level BPE and its merges: three marks, all bytes, and a few words."""
    tokens, merges = [*SPECIAL, *sorted(ByteLevel.alphabet())], []
    for left, right in (("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("12", "3"), ("o", "f")):
        merges.append(f"{left} {right}")
        tokens.append(left + right)
    return tokens + [f"[unused{i}]" for i in range(size - len(tokens))], merges


def write(path: Path, model: LlamaForCausalLM, *, tokenizer: bool = True, rule: str = "smollm", quantise: Any = None,
          architecture: str = "llama", entries: dict[str, Any] | None = None,
          extra: dict[str, np.ndarray] | None = None) -> Path:  # fmt: skip
    """Write a Llama.

    Args:
        path: of the file.
        model: float32.
        tokenizer: whether the file holds one.
        rule: name of its pre-tokenizer.
        quantise: a `gguf.GGMLQuantizationType` for matrices; None = float32.
        architecture: name in the metadata.
        entries: further metadata below the architecture's name: numbers or strings.
        extra: further tensors.
    """
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for name, value in (entries or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"{architecture}.{name}", value)
    if tokenizer:
        tokens, merges = vocabulary(config.vocab_size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(rule)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_add_bos_token(False)
        writer.add_chat_template(CHAT)
    for name, weight in {**tensors(model), **(extra or {})}.items():
        if quantise is not None and weight.ndim == 2:
            writer.add_tensor(name, gguf.quantize(weight, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """Name in llama.cpp -> weight."""
    config, weights = model.config, {"token_embd.weight": model.model.embed_tokens.weight}
    weights["output_norm.weight"] = model.model.norm.weight
    if not config.tie_word_embeddings:
        weights["output.weight"] = model.lm_head.weight
    for index, layer in enumerate(model.model.layers):
        for ours, theirs in LLAMA_NAMES.items():
            weight = layer.get_submodule(ours).weight
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(theirs)
            weights[f"blk.{index}.{theirs}.weight"] = weight if heads is None else interleaved(weight, heads)
    return {name: weight.detach().numpy() for name, weight in weights.items()}

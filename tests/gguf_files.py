"""Writes tiny GGUF files from stock models: names by llama.cpp's own table, what it changes in weights by hand."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from tokenizers.pre_tokenizers import ByteLevel

ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama", "qwen3_5_text": "qwen35", "qwen3_moe": "qwen3moe"}
"""Model type -> name of the architecture in llama.cpp, where it is another."""
ONE_ADDED = ("gemma2", "gemma3", "nemotron", "qwen35")
"""Architectures whose norms are stored with 1 added to the weights."""
SPLIT_EXPERTS = ("ffn_gate_exps", "ffn_up_exps")
CHAT = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
OPTIONS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "feed_forward_length": ("intermediate_size", "ffn_hidden_size"),
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "vocab_size": "vocab_size",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
"""Entry below the architecture's name -> option of the configuration, or several names of it."""


def interleaved(weight, heads):
    """Rows of a query or key projection from halves (transformers) to pairs (llama.cpp), head by head."""
    rows = torch.arange(weight.shape[0]).view(heads, 2, -1)  # [heads, half, pair]
    return weight[rows.transpose(1, 2).reshape(-1)]


def vocabulary(size):
    """Tokens of a byte-level BPE and its merges: three marks, all bytes, and a few words."""
    tokens, merges = [*SPECIAL, *sorted(ByteLevel.alphabet())], []
    for left, right in (("t", "h"), ("th", "e"), ("Ġ", "the"), ("1", "2"), ("12", "3"), ("o", "f")):
        merges.append(f"{left} {right}")
        tokens.append(left + right)
    return tokens + [f"[unused{i}]" for i in range(size - len(tokens))], merges


def write(path, model, *, rule = "smollm", quantise = None,
          architecture = None, entries = None,
          extra = None, whole_entries = None,
          pad = 2) :  # fmt: skip
    """Write a decoder.

    Args:
        path: of the file.
        model: float32, with a vocabulary of 300 or more.
        rule: name of the tokenizer's way to split text; None = the file holds no tokenizer.
        quantise: a `gguf.GGMLQuantizationType` for matrices; None = float32.
        architecture: name in the metadata, if not the model's.
        entries: further metadata below the architecture's name: numbers, strings or lists.
        extra: further tensors.
        whole_entries: further metadata, whole numbers by their full names.
        pad: id of the padding token; negative ones are written as signed numbers.
    """
    config = model.config
    own = ARCHITECTURES.get(config.model_type, config.model_type)
    architecture = architecture or own
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    for name, value in (_entries(config) | (entries or {})).items():
        kinds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add = kinds[type(value)]
        add(f"{architecture}.{name}", value)
    for name, value in (whole_entries or {}).items():
        writer.add_uint16(name, value)
    if rule is not None:
        _add_tokenizer(writer, config.vocab_size, rule, pad)
    for name, weight in {**_tensors(model, own), **(extra or {})}.items():
        if quantise is not None and weight.ndim == 2:
            writer.add_tensor(name, gguf.quantize(weight, quantise), raw_dtype=quantise)
        else:
            writer.add_tensor(name, weight)
    return finished(writer, path)


def finished(writer, path):
    """The path, to which everything is written."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def without_attention(source, target, layers):
    """Copy a file of the architecture `llama` as `deci`, without the attention of some layers (1-based)."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, "deci")
    count = reader.fields["llama.block_count"].contents()
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        key, value, kinds = name.replace("llama.", "deci.", 1), field.contents(), field.types
        if key in ("deci.attention.head_count", "deci.attention.head_count_kv", "deci.feed_forward_length"):
            gone = layers if "attention" in key else set()
            writer.add_array(key, [0 if layer in gone else value for layer in range(1, count + 1)])
        else:
            writer.add_key_value(key, value, kinds[0], kinds[-1] if len(kinds) > 1 else None)
    for tensor in reader.tensors:
        block, _, rest = tensor.name.removeprefix("blk.").partition(".")
        if not (block.isdigit() and int(block) + 1 in layers and rest.startswith("attn_")):
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    return finished(writer, target)


def _entries(config):
    found = {}
    for name, options in OPTIONS.items():
        values = [getattr(config, option, None) for option in ([options] if isinstance(options, str) else options)]
        if stated := [value for value in values if value is not None]:
            found[name] = stated[0]
    found.setdefault("feed_forward_length", 4 * config.hidden_size)
    found.setdefault("attention.head_count_kv", config.num_attention_heads)
    if config.model_type == "lfm2":
        kinds = config.layer_types
        found["attention.head_count_kv"] = [config.num_key_value_heads * (kind != "conv") for kind in kinds]
        found["attention.layer_norm_rms_epsilon"] = found.pop("attention.layer_norm_epsilon")
    if config.model_type == "qwen3_5_text":
        found["ssm.inner_size"] = config.linear_value_head_dim * config.linear_num_value_heads
        found["rope.dimension_sections"] = [*config.rope_parameters["mrope_section"], 0]
    if rotary := getattr(config, "rope_parameters", None):
        rotary = rotary.get("full_attention", rotary)
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        found["rope.freq_base"] = float(rotary["rope_theta"])
        found["rope.dimension_count"] = int(head * rotary.get("partial_rotary_factor", 1.0))
    return found


def _add_tokenizer(writer, size, rule, pad):
    tokens, merges = vocabulary(size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(rule)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    (writer.add_int32 if pad < 0 else writer.add_uint32)("tokenizer.ggml.padding_token_id", pad)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT)


def _tensors(model, architecture):
    """Name in llama.cpp -> weight."""
    config, weights = model.config, {}
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for full_name, parameter in model.state_dict().items():
        if full_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = parameter.detach()
        if full_name.endswith("experts.gate_up_proj"):
            for name, half in zip(SPLIT_EXPERTS, weight.chunk(2, dim=1), strict=True):
                weights[f"blk.{full_name.split('.')[2]}.{name}.weight"] = half
            continue
        module, _, suffix = (
            full_name.rpartition(".") if full_name.endswith(("weight", "bias")) else (full_name, "", "weight")
        )
        if full_name.endswith("dt_bias"):
            weights[f"blk.{full_name.split('.')[2]}.ssm_dt.bias"] = weight
            continue
        name = names.get_name(module)
        if name.endswith("ssm_a"):
            weights[name] = -weight.exp()  # without an ending
            continue
        if "conv" in name and weight.ndim == 3:
            weight = weight.squeeze(1)
        if config.model_type == "gpt2" and weight.ndim == 2 and ".h." in full_name:
            weight = weight.T  # Conv1D
        if architecture in ONE_ADDED and name.endswith("norm") and suffix == "weight" and "ssm" not in name:
            weight = weight + 1
        heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", None)}
        if architecture == "llama" and name.split(".")[-1] in heads:
            weight = interleaved(weight, heads[name.split(".")[-1]])
        weights[f"{name}.{suffix}"] = weight
    return {name: np.ascontiguousarray(weight.numpy()) for name, weight in weights.items()}

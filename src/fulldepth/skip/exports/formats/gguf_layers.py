"""The layers of a GGUF file without some attentions and MLPs, and which of them llama.cpp computes.

Removed branches leave a sequence of attentions and MLPs, which is packed into layers again. If every layer has both,
the file keeps its architecture. Otherwise it becomes `deci`, whose graph in llama.cpp is that of `llama` with a number
of heads and a width of the MLP for each layer. The graphs of `qwen2` and `phi3` are that one, too, except for the order
of rows in their files (`formats.gguf.as_deci`).

llama.cpp derives some properties from a layer's number, or from the number of layers. A file without whole layers
would then be read as another model without an error, and is refused with what can be removed instead.

Source: llama.cpp, `src/models/*.cpp` (`load_swa_pattern`, `set_recr_pattern`, `n_layer_nextn`).
"""

from __future__ import annotations

import re
from collections.abc import Collection

from fulldepth.core.errors import FulldepthError, names_of
from fulldepth.hf.gguf import NEXTN, SCALED_BY_WIDTH, Header, load_gguf_config
from fulldepth.skip.exports.formats.format import period_of

BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
DECI_TENSORS = re.compile(r"(attn_(norm|q|k|v|qkv|output)|ffn_(norm|gate|up|down))\.(weight|bias)")
"""Tensors of a layer that llama.cpp reads for `deci`, `attn_qkv` after it is split."""
DECI_WHOLE = ("token_embd.weight", "output_norm.weight", "output.weight", "rope_freqs.weight")
"""Tensors outside of layers that llama.cpp reads for `deci`."""
DECI_SOURCES = ("llama", "phi3", "qwen2")
"""Architectures with the graph of `deci`. `llama` includes Mistral; the others have norms of queries and keys, norms
after the branches, LayerNorm, another activation or experts."""
KIND_LISTS = {"lfm2": "attention.head_count_kv", "gemma4": "attention.sliding_window_pattern"}
"""Architecture -> its entry with a value for each layer from which all versions of llama.cpp take the layer's kind."""
COUNTS = ("leading_dense_block_count", "attention.shared_kv_layers", "embedding_length_per_layer_input")
"""Entries that count layers from the first or the last one, or whose tensors hold a part for each layer."""
HEADS = "attention.head_count"
KV_HEADS = "attention.head_count_kv"
WIDTH = "feed_forward_length"
Layers = list[tuple[int | None, int | None]]
"""For each layer of the new file the 1-based layers of the source that its attention and its MLP are from; blocks for
multi-token prediction come last."""


def layers_of(header: Header, without_attention: Collection[int], without_mlp: Collection[int]) -> Layers:
    """The layers of the new file.

    Args:
        header: of the source.
        without_attention: 1-based layers whose attention is removed.
        without_mlp: 1-based layers whose MLP is removed.

    Raises:
        FulldepthError: if llama.cpp does not compute them, with what it does.
    """
    predicting = header.entries.get(NEXTN, 0)
    num_layers = header.entries["block_count"] - predicting
    layers = packed(num_layers, without_attention, without_mlp)
    if not all(attention == mlp for attention, mlp in layers):
        check_deci(header)
    elif len(layers) < num_layers:
        check_whole(header, layers)
    return layers + [(number, number) for number in range(num_layers + 1, num_layers + predicting + 1)]


def packed(num_layers: int, without_attention: Collection[int], without_mlp: Collection[int]) -> Layers:
    """The layers of the new file: branches in their order, an MLP in the layer of the attention before it."""
    layers: Layers = []
    for number in range(1, num_layers + 1):
        attention, mlp = (None if number in without else number for without in (without_attention, without_mlp))
        if attention is None and layers and layers[-1][1] is None:
            layers[-1] = (layers[-1][0], mlp)
        elif (attention, mlp) != (None, None):
            layers.append((attention, mlp))
    if not layers:
        raise FulldepthError(f"The plan removes all {num_layers} layers; a model needs at least one.")
    return layers


def check_deci(header: Header) -> None:
    """Refuse a file whose layers `deci` does not compute.

    Raises:
        FulldepthError: with the reason.
    """
    entries = header.entries
    blocks = {name: BLOCK.fullmatch(name) for name in header.shapes}
    unknown_tensors = sorted(
        {
            block[2] if block else name
            for name, block in blocks.items()
            if not (DECI_TENSORS.fullmatch(block[2]) if block else name in DECI_WHOLE)
        }
    )
    heads = entries[HEADS]
    width = entries.get("attention.key_length", entries["embedding_length"] // of_layer(heads, 1))
    rotary = entries.get("rope.dimension_count", width)
    if entries.get(NEXTN):
        reason = " with a block for multi-token prediction"
    elif header.architecture not in DECI_SOURCES:
        reason = ""
    elif unknown_tensors:
        reason = f" with {names_of(unknown_tensors)}"
    elif rotary != width:
        reason = f" with rotary positions in {rotary} of {width} channels"
    else:
        return
    raise FulldepthError(
        f"llama.cpp computes layers without attention or MLP for {', '.join(DECI_SOURCES)} only (its architecture "
        f"deci). This is a {header.architecture}{reason}. Use --format fast or folded, or a plan of whole layers "
        "(--granularity layer), which keep their architecture."
    )


def check_whole(header: Header, layers: Layers) -> None:
    """Refuse to remove layers where llama.cpp concludes from a layer's number, or from their count, what it computes.

    Raises:
        FulldepthError: with what can be removed.
    """
    architecture = header.architecture
    num_layers = header.entries["block_count"] - header.entries.get(NEXTN, 0)
    kinds = getattr(load_gguf_config(header.path), "layer_types", None) or []
    remaining_kinds = [kinds[number - 1] for number, _ in layers if number and kinds]
    if KIND_LISTS.get(architecture) not in per_layer(header) and remaining_kinds != kinds[: len(remaining_kinds)]:
        period = period_of(kinds)
        raise FulldepthError(
            f"llama.cpp takes from the number of a {architecture} layer what it computes: "
            f"{', '.join(kinds[:period])}, and so on. The layers that are left do not follow that. The last layers can "
            f"be removed, and any {period} neighbours."
        )
    if counted := [name for name in COUNTS if header.entries.get(name)]:
        raise FulldepthError(
            f"llama.cpp counts the layers of a {architecture} by {names_of(counted)}, which --format gguf does not "
            "change. Use --format fast or folded."
        )
    if any((architecture, count) in SCALED_BY_WIDTH for count in (len(layers), num_layers)):
        raise FulldepthError(
            f"llama.cpp takes the scale of the attention of a {architecture} from its number of layers; with "
            f"{len(layers)} instead of {num_layers} it would be another."
        )


def per_layer(header: Header) -> set[str]:
    """The architecture's entries that hold a value for each layer, with or without those for multi-token prediction."""
    counts = {header.entries["block_count"] - number for number in (0, header.entries.get(NEXTN, 0))}
    return {
        name
        for name, value in header.entries.items()
        if isinstance(value, tuple) and len(value) in counts and not name.startswith("rope.")
    }


def of_layer(value: int | tuple[int, ...], number: int) -> int:
    """The value of a 1-based layer, from an entry that holds one for all layers or one for each."""
    return value[number - 1] if isinstance(value, tuple) else value

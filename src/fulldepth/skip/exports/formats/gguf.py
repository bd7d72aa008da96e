"""`gguf`: the source's GGUF file without the removed layers, attention or MLPs, for llama.cpp.

Metadata, tokenizer and chat template are copied, and so are the bytes of every tensor whose weights did not change.
Removed branches leave a sequence of attentions and MLPs, which is packed into layers again. If every layer has both,
the file keeps its architecture. Otherwise it becomes `deci`, whose graph in llama.cpp is that of `llama` with a number
of heads and a width of the MLP for each layer. Two of its shapes do not compute what they seem to:

- A layer with an MLP of width 0 is left out with its attention: it gets one neuron of zeros instead.
- The first layer must have heads, because the width of all heads is read from it: without attention it gets the linear
  one of that architecture (a matrix after the norm, no cache), of zeros.

Source: llama.cpp, `models/deci.cpp`; both shown by its log-probabilities in `tests/skip/exports/test_gguf.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.gguf.utils import is_gguf_arch_supported
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

from fulldepth.core.errors import FulldepthError, names_of
from fulldepth.hf import Anatomy, device_of, load_checkpoint
from fulldepth.hf.gguf import SCALED_BY_WIDTH, Header, find_gguf, load_gguf_config, packaged, read_header
from fulldepth.hf.scalars import GRANULARITIES, ROLES
from fulldepth.hf.stream_scale import GGUF_ENTRY
from fulldepth.skip.exports.formats.checkpoint import Draft, Weight
from fulldepth.skip.exports.formats.format import Format
from fulldepth.skip.plan import Plan

BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
DECI_TENSORS = re.compile(r"(attn_(norm|q|k|v|output)|ffn_(norm|gate|up|down))\.(weight|bias)")
"""Tensors of a layer that llama.cpp reads for `deci`."""
WRITTEN = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
"""Types of tensors that the `gguf` package writes."""
ROUNDING = 0.25
"""Largest error of a stored weight, relative to its norm: in four bits 0.08 for normal values, 0.13 for heavy tails."""
HEADS = "attention.head_count"
KV_HEADS = "attention.head_count_kv"
WIDTH = "feed_forward_length"
Layers = list[tuple[int | None, int | None]]
"""For each layer of the new file the 1-based layers of the source that its attention and its MLP are from."""


class Gguf(Format):
    """A GGUF file made from the one that the model was loaded from."""

    name = "gguf"
    granularities = GRANULARITIES
    precision = torch.bfloat16
    """llama.cpp rounds the inputs of products with quantised weights to 8 bits."""
    keeps_removed = False
    suffix = ".gguf"

    def check(self, model: PreTrainedModel, plan: Plan) -> None:
        """Refuse a model that was not loaded from a GGUF file, and layers that llama.cpp does not compute.

        Raises:
            FulldepthError: with the way to get such a file, or the reason.
        """
        layers_of(read_header(source_of(model)), plan.lacking("attention"), plan.lacking("mlp"))

    def least_bytes(self, anatomy: Anatomy, plan: Plan, gguf_type: str | None) -> int:
        """Bytes of the tensors that stay, matrices in the smaller one of the source's type and `gguf_type`."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader  # noqa: PLC0415

        source = source_of(anatomy.model)
        layers = layers_of(read_header(source), plan.lacking("attention"), plan.lacking("mlp"))
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[(gguf_type or "f32").upper()]]
        return sum(
            min(tensor.n_bytes, tensor.n_elements // block * size)
            for tensor in GGUFReader(source).tensors
            if place(layers, tensor.name) is not None
        )

    def first_layers(self, anatomy: Anatomy, layers: int, folder: Path) -> PreTrainedModel:
        """A model loaded from a file with the source's bytes of the first layers, which is written into the folder."""
        source = source_of(anatomy.model)
        gone = range(layers + 1, anatomy.num_layers + 1)
        folder.mkdir()
        write_gguf(source, folder / source.name, gone, gone)
        device = device_of(anatomy.model)
        return load_checkpoint(folder / source.name, dtype=anatomy.model.dtype, device=device).model

    def write(self, draft: Draft) -> list[str]:
        """Write the file."""
        attention, mlp = (draft.plan.lacking(part) for part in ROLES)
        source = source_of(draft.model)
        notes, stored = write_gguf(
            source, draft.folder, attention, mlp, draft.weights(), draft.gguf_type, draft.state_scale
        )
        draft.stored.update(stored)
        return [draft.folding.note, *notes]


def source_of(model: PreTrainedModel) -> Path:
    """The GGUF file that a model was loaded from.

    Raises:
        FulldepthError: if it was loaded from something else.
    """
    source = find_gguf(packaged(model.name_or_path)) if model.name_or_path else None
    if source is None:
        raise FulldepthError(
            f"--format gguf changes a GGUF file, and {model.name_or_path or 'this model'} is none. Convert it once "
            "with llama.cpp (`python convert_hf_to_gguf.py MODEL --outtype auto`) and give the file as MODEL. The plan "
            "holds for it too if no weight was rounded; otherwise search again with the file. Quantise the result "
            "(`llama-quantize`)."
        )
    return source


def write_gguf(
    source: Path,
    output: Path,
    without_attention: Collection[int],
    without_mlp: Collection[int],
    weights: Mapping[str, Weight] | None = None,
    gguf_type: str | None = None,
    scale: Sequence[float] | None = None,
) -> tuple[list[str], dict[str, Tensor]]:
    """Write a GGUF file without some attentions and MLPs.

    Args:
        source: the GGUF file of the whole model.
        output: the file to write.
        without_attention: 1-based layers whose attention is removed; a whole layer is in both lists.
        without_mlp: 1-based layers whose MLP is removed.
        weights: name in transformers, with the source's layer numbers -> weight to store. Where it equals the source's
            dequantised weight in its own precision, the source's bytes are copied. None = no weight changed.
        gguf_type: `f16`, `bf16` or `q8_0`, of changed matrices; None = the source's type, or `q8_0` where the `gguf`
            package cannot write that (`f16` where a row is no multiple of 32).
        scale: c_0..c_L of the states of the source's layers (`hf.stream_scale`); None = 1.

    Returns:
        Notes on what was written, and the changed weights as the file holds them.

    Raises:
        FulldepthError: if llama.cpp has no architecture for the result, or a changed weight cannot be stored.
    """
    from gguf import GGUFReader, GGUFValueType, GGUFWriter  # noqa: PLC0415

    header = read_header(source)
    reader = GGUFReader(source)
    layers = layers_of(header, without_attention, without_mlp)
    architecture = "deci" if any(None in layer for layer in layers) else header.architecture
    replaced, stored = changes(header, reader.tensors, layers, weights or {}, gguf_type)
    with closing(GGUFWriter(output, architecture)) as writer:
        writer.data_alignment = reader.alignment
        for key, value in metadata(header, layers, architecture).items():
            field = reader.fields.get(key.replace(f"{architecture}.", f"{header.architecture}.", 1))
            kind = field.types[-1] if field else GGUFValueType.UINT32  # of the entries of a list
            array = isinstance(value, list | tuple)
            writer.add_key_value(key, value, GGUFValueType.ARRAY if array else kind, kind if array else None)
        if scale is not None and any(factor != 1 for factor in scale):
            after = [scale[mlp or attention or 0] for attention, mlp in layers]
            writer.add_key_value(GGUF_ENTRY, [scale[0], *after], GGUFValueType.ARRAY, GGUFValueType.FLOAT32)
        written = {name: (data, kind) for name, data, kind in tensors(header, reader.tensors, layers, replaced)}
        for name, (data, kind) in written.items():
            writer.add_tensor(name, data, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    again = {tensor.name: tensor for tensor in GGUFReader(output).tensors}
    if again.keys() != written.keys() or not all(
        np.array_equal(again[n].data, data) for n, (data, _) in written.items()
    ):
        raise FulldepthError(f"The export is dropped: {output} does not hold the tensors that were written.")
    anew = f"written anew: {names_of(replaced)}" if replaced else "no tensor changed"
    note = f"{len(layers)} layers in llama.cpp's architecture {architecture}; {anew}. Other bytes are the source's."
    return [note], stored


def layers_of(header: Header, without_attention: Collection[int], without_mlp: Collection[int]) -> Layers:
    """The layers of the new file; refuses those that llama.cpp does not compute."""
    if header.entries.get("nextn_predict_layers"):
        raise FulldepthError(
            f"{header.path} also holds layers for multi-token prediction (nextn_predict_layers), which are not part of "
            "the plan's model. Use --format folded or layer."
        )
    layers = packed(header.entries["block_count"], without_attention, without_mlp)
    if all(attention == mlp for attention, mlp in layers):
        check_whole(header, layers)
    else:
        check_deci(header)
    return layers


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
    blocks = (BLOCK.fullmatch(name) for name in header.shapes)
    unknown_tensors = sorted({block[2] for block in blocks if block and not DECI_TENSORS.fullmatch(block[2])})
    if header.architecture != "llama" or unknown_tensors:
        also = f" with {names_of(unknown_tensors)}" if header.architecture == "llama" else ""
        raise FulldepthError(
            "llama.cpp computes layers without attention or MLP for a plain llama only (its architecture deci). This "
            f"is a {header.architecture}{also}. Use --format fast or folded, or a plan of whole layers."
        )


def check_whole(header: Header, layers: Layers) -> None:
    """Refuse to remove layers where llama.cpp concludes from a layer's number, or from their count, what it computes.

    Raises:
        FulldepthError: with what can be removed.
    """
    kinds = getattr(load_gguf_config(header.path), "layer_types", None) or []
    remaining_kinds = [kinds[number - 1] for number, _ in layers if number and kinds]
    listed = per_layer(header)
    if not listed and remaining_kinds != kinds[: len(remaining_kinds)]:
        period = next(step for step in range(1, len(kinds) + 1) if kinds[step:] == kinds[:-step])
        raise FulldepthError(
            f"llama.cpp takes from the number of a {header.architecture} layer whether its attention has a window: "
            f"{', '.join(kinds[:period])}, and so on. The layers that are left do not follow that. The last layers can "
            f"be removed, and any {period} neighbours."
        )
    counts = (len(layers), header.entries["block_count"])
    if any((header.architecture, count) in SCALED_BY_WIDTH for count in counts):
        raise FulldepthError(
            f"llama.cpp takes the scale of the attention of a {header.architecture} from its number of layers; with "
            f"{counts[0]} instead of {counts[1]} it would be another."
        )


def per_layer(header: Header) -> set[str]:
    """The architecture's entries that hold a value for each layer."""
    entries = header.entries
    return {
        name
        for name, value in entries.items()
        if isinstance(value, tuple) and len(value) == entries["block_count"] and not name.startswith("rope.")
    }


def metadata(header: Header, layers: Layers, architecture: str) -> dict[str, Any]:
    """Key -> value of the new file's metadata, in the source's order, without the architecture."""
    entries = header.entries
    listed = per_layer(header)
    values: dict[str, Any] = {"block_count": len(layers)}
    values |= {name: [entries[name][(a or m or 0) - 1] for a, m in layers] for name in listed}
    if architecture == "deci":
        heads = entries[HEADS]
        width = entries[WIDTH]
        # In the first layer heads without keys and values are the linear attention.
        values[HEADS] = [heads if attention or not index else 0 for index, (attention, _) in enumerate(layers)]
        values[KV_HEADS] = [entries.get(KV_HEADS, heads) if attention else 0 for attention, _ in layers]
        values[WIDTH] = [width if mlp else 1 for _, mlp in layers]
    prefix = f"{header.architecture}."
    renamed = {
        f"{architecture}.{key.removeprefix(prefix)}" if key.startswith(prefix) else key: value
        for key, value in header.metadata.items()
        if key not in ("general.architecture", GGUF_ENTRY) and value != ()
    }
    return renamed | {f"{architecture}.{name}": value for name, value in values.items()}


def changes(
    header: Header, stored: list[Any], layers: Layers, weights: Mapping[str, Weight], gguf_type: str | None
) -> tuple[dict[str, tuple[np.ndarray, Any]], dict[str, Tensor]]:
    """Name of a tensor of the source whose weights are to be others -> its new bytes and their type; and the name of
    this weight in transformers -> the values of these bytes.

    Raises:
        FulldepthError: if transformers converts such a tensor in a way that has no inverse here.
    """
    from gguf import dequantize  # noqa: PLC0415

    config = load_gguf_config(header.path)
    architecture = header.architecture
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    names = get_gguf_hf_weights_map(model, processor)
    replaced = {}
    held = {}
    for tensor in stored:
        name = names.get(tensor.name) or names.get(tensor.name.removesuffix(".weight"))
        if name not in weights or place(layers, tensor.name) is None:
            continue
        joined: dict[str, Any] = {"tensors": {}}  # where a stored tensor is a part of a weight

        def process(values: np.ndarray, stored_name: str = tensor.name, joined: Any = joined) -> Any:
            return processor.process(values, name=stored_name, tensor_key_mapping=names, parsed_parameters=joined)

        weight = weights[name].read().cpu()
        values = dequantize(tensor.data, tensor.tensor_type)
        read = process(values)
        known = joined["tensors"][name] if read.name is None else torch.from_numpy(np.array(read.weights))
        known = known.to(weight.dtype)
        if torch.equal(known, weight if read.name else weight.where(known != 0, known)):
            continue
        if read.name is None or (is_gguf_arch_supported(architecture) and architecture not in TENSOR_PROCESSORS):
            raise FulldepthError(f"{name} changed, and --format gguf does not store such a weight of a {architecture}.")
        # transformers moves the entries and, for some norms, adds a constant.
        index = np.arange(values.size).reshape(values.shape)
        added = process(np.zeros_like(index)).weights.flat[0]
        moved = process(index).weights - added
        values = np.empty(values.size, np.float32)
        values[moved.ravel()] = weight.float().numpy().ravel() - added
        replaced[tensor.name] = data, kind = encoded(values.reshape(index.shape), tensor.tensor_type, gguf_type)
        held[name] = torch.from_numpy(np.array(process(dequantize(data, kind)).weights)).to(weight.dtype)
        if not (held[name] - weight).norm() <= ROUNDING * weight.norm():
            raise FulldepthError(f"{kind.name} rounds the changed {name} too much. Choose a larger type (--gguf-type).")
    return replaced, held


def encoded(values: np.ndarray, source_type: Any, gguf_type: str | None = None) -> tuple[np.ndarray, Any]:
    """The bytes of new values and their type, as explained for `write_gguf`; vectors keep the source's type."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quantize  # noqa: PLC0415

    kind = source_type
    if values.ndim > 1 and (gguf_type or kind.name not in WRITTEN):
        kind = GGMLQuantizationType[(gguf_type or "q8_0").upper()]
    if values.shape[-1] % GGML_QUANT_SIZES[kind][0]:
        kind = GGMLQuantizationType.F16
    return quantize(values, kind), kind


def place(layers: Layers, name: str) -> str | None:
    """The new name of a tensor; None if it is removed."""
    block = BLOCK.fullmatch(name)
    if block is None:
        return name
    part = int(block[2].startswith("ffn_"))
    number = int(block[1]) + 1
    index = next((index for index, layer in enumerate(layers) if layer[part] == number), None)
    return None if index is None else f"blk.{index}.{block[2]}"


def tensors(
    header: Header, stored: list[Any], layers: Layers, replaced: Mapping[str, tuple[np.ndarray, Any]]
) -> Iterator[tuple[str, np.ndarray, Any]]:
    """(name, bytes, type) of every tensor of the new file."""
    for tensor in stored:
        if (name := place(layers, tensor.name)) is not None:
            yield name, *replaced.get(tensor.name, (tensor.data, tensor.tensor_type))
    of = {tensor.name: tensor for tensor in stored}
    width = header.entries["embedding_length"]
    for index, (attention, mlp) in enumerate(layers):
        if mlp is None:
            norm = "ffn_norm"
            zeros = {"ffn_gate": (1, width), "ffn_up": (1, width), "ffn_down": (width, 1)}
        elif attention is None and index == 0:
            norm = "attn_norm"
            zeros = {"attn_output": (width, width)}
        else:
            continue
        new = f"blk.{index}"
        old = f"blk.{(attention or mlp or 0) - 1}"
        yield f"{new}.{norm}.weight", of[f"{old}.{norm}.weight"].data, of[f"{old}.{norm}.weight"].tensor_type
        for name, shape in zeros.items():
            kind = of[f"{old}.{name}.weight"].tensor_type
            yield f"{new}.{name}.weight", *encoded(np.zeros(shape, np.float32), kind)

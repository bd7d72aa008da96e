"""`gguf`: the source's GGUF file without the removed layers, attention or MLPs, for llama.cpp.

Metadata, tokenizer and chat template are copied, and so are the bytes of every tensor whose weights did not change.
`formats.gguf_layers` decides the layers and the architecture. Two shapes of the architecture `deci` do not compute what
they seem to:

- A layer with an MLP of width 0 is left out with its attention: it gets one neuron of zeros instead.
- The first layer must have heads, because the width of all heads is read from it: without attention it gets the linear
  one of that architecture (a matrix after the norm, no cache), of zeros.

Source: llama.cpp, `models/deci.cpp`; both shown by its log-probabilities in `tests/skip/exports/test_gguf.py`.
"""

from __future__ import annotations

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
from fulldepth.hf.gguf import Header, find_gguf, load_gguf_config, packaged, read_header
from fulldepth.hf.scalars import GRANULARITIES, ROLES
from fulldepth.hf.stream_scale import GGUF_ENTRY
from fulldepth.skip.exports.formats.checkpoint import Draft, Weight
from fulldepth.skip.exports.formats.format import Format
from fulldepth.skip.exports.formats.gguf_layers import (
    BLOCK,
    HEADS,
    KV_HEADS,
    WIDTH,
    Layers,
    layers_of,
    of_layer,
    per_layer,
)
from fulldepth.skip.plan import Plan

WRITTEN = {"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"}
"""Types of tensors that the `gguf` package writes."""
ROUNDING = 0.25
"""Largest error of a stored weight, relative to its norm: in four bits 0.08 for normal values, 0.13 for heavy tails."""


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
    source = gguf_of(model)
    if source is None:
        raise FulldepthError(
            f"--format gguf changes a GGUF file, and {model.name_or_path or 'this model'} is none. Convert it once "
            "with llama.cpp (`python convert_hf_to_gguf.py MODEL --outtype auto`) and give the file as MODEL. The plan "
            "holds for it too if no weight was rounded; otherwise search again with the file. Quantise the result "
            "(`llama-quantize`)."
        )
    return source


def gguf_of(model: PreTrainedModel) -> Path | None:
    """The GGUF file that a model was loaded from, None if it was loaded from something else.

    Raises:
        FulldepthError: if the file or the package is gone.
    """
    return find_gguf(packaged(model.name_or_path)) if model.name_or_path else None


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
            numbers = (mlp or attention or 0 for attention, mlp in layers)
            after = [scale[number] for number in numbers if number < len(scale)]
            writer.add_key_value(GGUF_ENTRY, [scale[0], *after], GGUFValueType.ARRAY, GGUFValueType.FLOAT32)
        parts = (header, reader.tensors, layers, architecture, replaced)
        written = {name: (data, kind) for name, data, kind in tensors(*parts)}
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


def metadata(header: Header, layers: Layers, architecture: str) -> dict[str, Any]:
    """Key -> value of the new file's metadata, in the source's order, without the architecture."""
    entries = header.entries
    values: dict[str, Any] = {"block_count": len(layers)}
    for name in per_layer(header):
        numbers = (attention or mlp or 0 for attention, mlp in layers)
        values[name] = [entries[name][number - 1] for number in numbers if number <= len(entries[name])]
    if architecture == "deci":
        heads = entries[HEADS]
        kv_heads = entries.get(KV_HEADS, heads)
        # In the first layer heads without keys and values are the linear attention.
        values[HEADS] = [
            of_layer(heads, attention or 1) if attention or not index else 0
            for index, (attention, _) in enumerate(layers)
        ]
        values[KV_HEADS] = [of_layer(kv_heads, attention) if attention else 0 for attention, _ in layers]
        values[WIDTH] = [of_layer(entries[WIDTH], mlp) if mlp else 1 for _, mlp in layers]
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
    if not weights:
        return {}, {}
    if is_gguf_arch_supported(architecture) and architecture not in TENSOR_PROCESSORS:
        raise FulldepthError(f"--format gguf does not store weights of a {architecture}. Use --format folded.")
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
        if read.name is None:
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
    header: Header,
    stored: list[Any],
    layers: Layers,
    architecture: str,
    replaced: Mapping[str, tuple[np.ndarray, Any]],
) -> Iterator[tuple[str, np.ndarray, Any]]:
    """(name, bytes, type) of every tensor of the new file."""
    for tensor in stored:
        data, kind = replaced.get(tensor.name, (tensor.data, tensor.tensor_type))
        parts = as_deci(header, tensor.name, data) if architecture == "deci" else {tensor.name: data}
        for part, rows in parts.items():
            if (name := place(layers, part)) is not None:
                yield name, rows, kind
    of = {tensor.name: tensor for tensor in stored}
    width = header.entries["embedding_length"]
    for index, (attention, mlp) in enumerate(layers):
        if mlp is None:
            norm = "ffn_norm"
            like = "ffn_up"
            zeros = {"ffn_gate": (1, width), "ffn_up": (1, width), "ffn_down": (width, 1)}
        elif attention is None and index == 0:
            norm = "attn_norm"
            like = "attn_output"
            zeros = {"attn_output": (width, width)}
        else:
            continue
        new = f"blk.{index}"
        old = f"blk.{(attention or mlp or 0) - 1}"
        yield f"{new}.{norm}.weight", of[f"{old}.{norm}.weight"].data, of[f"{old}.{norm}.weight"].tensor_type
        for name, shape in zeros.items():
            kind = of[f"{old}.{like}.weight"].tensor_type
            yield f"{new}.{name}.weight", *encoded(np.zeros(shape, np.float32), kind)


def as_deci(header: Header, name: str, data: np.ndarray) -> dict[str, np.ndarray]:
    """Return a tensor of the source in the layout of `deci`, as name with the source's layer number -> rows.

    `phi3` joins queries, keys and values, and the gate and up projections. `qwen2` and `phi3` rotate the channels c and
    c + d/2 of a head of d together, `llama` and `deci` 2c and 2c + 1. Rows are stored one by one, so that no byte of
    them changes.

    Args:
        header: of the source.
        name: of the tensor.
        data: `[rows, ...]` its values or bytes.
    """
    block = BLOCK.fullmatch(name)
    if block is None or header.architecture == "llama":
        return {name: data}
    own_name, _, ending = block[2].partition(".")
    heads = of_layer(header.entries[HEADS], int(block[1]) + 1)
    kv_heads = of_layer(header.entries.get(KV_HEADS, heads), int(block[1]) + 1)
    parts = {own_name: data}
    if own_name == "attn_qkv":
        width = len(data) // (heads + 2 * kv_heads)
        ends = [heads * width, (heads + kv_heads) * width]
        parts = dict(zip(("attn_q", "attn_k", "attn_v"), np.split(data, ends), strict=True))
    elif own_name == "ffn_up" and header.architecture == "phi3":
        parts = dict(zip(("ffn_gate", "ffn_up"), np.split(data, 2), strict=True))
    for part, count in (("attn_q", heads), ("attn_k", kv_heads)):
        if part in parts:
            halves = np.arange(len(parts[part])).reshape(count, 2, -1)  # [heads, half, pair]
            parts[part] = parts[part][halves.swapaxes(1, 2).ravel()]
    return {f"blk.{block[1]}.{part}.{ending}": np.ascontiguousarray(rows) for part, rows in parts.items()}

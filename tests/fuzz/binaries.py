"""Mutations of binary formats that keep their frame intact: safetensors, parquet, pictures and pickles."""

from __future__ import annotations

import io
import json
import pickle
import struct

from fuzz import documents
from fuzz.world import OWNED


def _split(content):
    """The header of a safetensors file, and its data."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _join(header, data, length=None):
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def safetensors_header(rng, content):
    """Lie in the header: another type, shape, offset or name; or a length that is not true."""
    header, data = _split(content)
    key = rng.choice([key for key in header if key != "__metadata__"])
    entry = header[key]
    shape, (start, end) = entry["shape"], entry["data_offsets"]
    how = rng.choice(["length", "dtype", "shape", "data_offsets", "name", "any", "any"])
    if how == "length":
        length = rng.choice([0, 1, 7, 2**31, 2**63, 2**64 - 1, len(content), len(content) * 2])
        return _join(documents.serialised(header, "line"), data, length), f"header length {length}"
    if how == "any":
        header, words = documents.change(rng, header)
    elif how == "name":
        new = rng.choice(
            [*documents.KEYS, "model.layers.99.mlp.up_proj.weight", key + ".weight", key[:-1], "z" * 200_000]
        )
        header = {new if other == key else other: value for other, value in header.items()}
        words = f"rename {key} to {documents.brief(new)}"
    else:
        values = {
            "dtype": ["", *["I32", "U8", "F16", "BF16", "F64", "BOOL", "F8_E4M3", "I64", "C64", "F32X"]],
            "shape": [shape[::-1], [], [0], [-1], [2**62, 4], [*shape, 1], [1, *shape], [2**32] * 2],
            "data_offsets": [[end, start], [0, 0], [start, 2**63], [0, end - start], [start, end + 4]],
        }
        words = f"{key}: {how} {entry[how]}"
        entry[how] = rng.choice(values[how])
        words += f" becomes {entry[how]}"
    return _join(documents.serialised(header, "line"), data), f"header: {words}"


def safetensors_weights(rng, content):
    """Write other weights: not finite, all zero, huge, of another type; or leave a tensor out."""
    import numpy as np
    from safetensors.numpy import load, save

    tensors = {name: tensor.copy() for name, tensor in load(content).items()}
    metadata = _split(content)[0].get("__metadata__")
    how = rng.choice([np.nan, np.inf, -np.inf, 0.0, 1e38, 1e-40, 0.02, "one NaN", "int32", "float64", "none", "row"])
    chosen = sorted(tensors) if rng.random() < 0.3 else [rng.choice(sorted(tensors))]
    for name in chosen:
        if isinstance(how, float):
            tensors[name][:] = how
        elif how == "one NaN":
            tensors[name].flat[rng.randrange(tensors[name].size)] = np.nan
        elif how == "none":
            del tensors[name]
        else:
            tensors[name] = tensors[name][:1] if how == "row" else (tensors[name] * 100).astype(how)
    return save(tensors, metadata), f"weights: {how} in {chosen[0] if len(chosen) == 1 else 'every tensor'}"


def parquet(rng, content):
    """Change a column: its name, its type, its values; or the rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(content), use_threads=False)
    i = rng.randrange(table.num_columns)
    name, count = table.column_names[i], table.num_rows
    changes = {
        "no rows": lambda: table.slice(0, 0),
        "half of the rows": lambda: table.slice(0, count // 2),
        "rows twice": lambda: pa.concat_tables([table, table]),
        "no columns": lambda: table.select([]),
        f"without {name}": lambda: table.remove_column(i),
        f"{name} is null": lambda: table.set_column(i, name, pa.nulls(count, table.schema.field(i).type)),
        f"{name} is dates": lambda: table.set_column(i, name, pa.array(range(count), pa.timestamp("us"))),
        f"{name} twice": lambda: table.append_column(name, table.column(i)),
    }
    texts = ["text", "", "y" * 20_000, "</script><script>alert(1)</script>", "__proto__"]
    for value in [None, 0.5, float("nan"), float("inf"), 2**62, -1, True, *texts, b"\xff\xfe", [0, None], {"a": 1}]:
        changes[f"{name} is {documents.brief(value)}"] = lambda value=value: table.set_column(
            i, name, pa.array([value] * count)
        )
    for new in ("__proto__", "", "text", "value", "label"):
        names = [*table.column_names[:i], new, *table.column_names[i + 1 :]]
        changes[f"rename {name} to {new!r}"] = lambda names=names: table.rename_columns(names)
    words = rng.choice(list(changes))
    sink = io.BytesIO()
    pq.write_table(changes[words](), sink)
    return sink.getvalue(), words


PICTURES = [("RGB", 1, 1, "PNG"), ("RGB", 1, 3000, "PNG"), ("1", 14_000, 14_000, "PNG"), ("F", 8, 8, "TIFF")]
PICTURES += [(mode, 8, 8, "PNG") for mode in ("L", "I;16", "RGBA", "P")] + [("P", 8, 8, "GIF")]
"""Mode, width, height and format."""


def picture(rng, _):
    """Another picture in place of this one."""
    from PIL import Image

    mode, width, height, form = rng.choice(PICTURES)
    sink = io.BytesIO()
    Image.new(mode, (width, height)).save(sink, form)
    return sink.getvalue(), f"a {form} of {width} x {height}, mode {mode}"


class Touch:
    """Unpickling this creates the file `OWNED`."""

    def __reduce__(self):
        return (exec, (f"open({OWNED!r}, 'w').close()",))


def pickled(rng, _):
    """A pickle in place of a file that torch has written: of code, or of another type."""
    if rng.random() < 0.5:
        return pickle.dumps(Touch()), "a pickle that runs code"
    import torch

    sink = io.BytesIO()
    value = rng.choice([None, [], {}, 3, "text", {"state": None}, torch.zeros(3), {"state": {}, "param_groups": []}])
    torch.save(value, sink)
    return sink.getvalue(), f"torch.save({value!r})"

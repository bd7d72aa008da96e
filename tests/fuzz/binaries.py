"""Mutations of binary formats that keep their frame intact: safetensors, parquet and pictures."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
from collections.abc import Callable
from typing import Any

from fuzz import documents
from fuzz.world import OWNED

Change = Callable[[random.Random, bytes], tuple[bytes, str]]


def _split(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and its data."""
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _join(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def safetensors_header(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Lie in the header: another type, shape, offset or name; or a length that is not true."""
    header, data = _split(content)
    if rng.random() < 0.15:
        length = rng.choice([0, 1, 7, 2**31, 2**63, 2**64 - 1, len(content), len(content) * 2])
        return _join(documents.to_json(header, None), data, length), f"header length {length}"
    tensors = [key for key in header if key != "__metadata__"]
    key = rng.choice(tensors)
    entry = header[key]
    how = rng.choice(["dtype", "shape", "offsets", "rename", "remove", "any", "long name"])
    if how == "dtype":
        entry["dtype"] = rng.choice(["I32", "U8", "F16", "BF16", "F64", "BOOL", "F8_E4M3", "I64", "C64", "", "F32X"])
        words = f"{key}: dtype {entry['dtype']}"
    elif how == "shape":
        shape = entry["shape"]
        entry["shape"] = rng.choice([shape[::-1], [], [0], [-1], [2**62, 4], [*shape, 1], [1, *shape], [2**32] * 2])
        words = f"{key}: shape {entry['shape']} for {shape}"
    elif how == "offsets":
        start, end = entry["data_offsets"]
        entry["data_offsets"] = rng.choice([[end, start], [0, 0], [start, 2**63], [0, end - start], [start, end + 4]])
        words = f"{key}: data_offsets {entry['data_offsets']} for {[start, end]}"
    elif how == "rename":
        new = rng.choice([*documents.KEYS, "model.layers.99.mlp.up_proj.weight", key + ".weight", key[:-1]])
        header = {new if k == key else k: v for k, v in header.items()}
        words = f"rename {key} to {documents.brief(new)}"
    elif how == "long name":
        header = {"z" * 200_000 if k == key else k: v for k, v in header.items()}
        words = f"rename {key} to 200,000 letters"
    elif how == "remove":
        del header[key]
        words = f"remove {key} from the header"
    else:
        header, words = documents.change(rng, header)
    return _join(documents.to_json(header, None), data), f"header: {words}"


def safetensors_weights(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Write other weights: not finite, all zero, huge, of another type; or leave a tensor out."""
    import numpy as np

    header, data = _split(content)
    tensors = {
        key: np.frombuffer(data[slice(*entry["data_offsets"])], np.float32).reshape(entry["shape"]).copy()
        for key, entry in header.items()
        if key != "__metadata__" and entry["dtype"] == "F32"
    }
    if not tensors:
        return content[:-4], "no float32 tensor: cut 4 bytes"
    key = rng.choice(sorted(tensors))
    chosen = sorted(tensors) if rng.random() < 0.3 else [key]
    values: dict[str, float] = {
        "NaN": np.nan,
        "infinity": np.inf,
        "-infinity": -np.inf,
        "zero": 0.0,
        "1e38": 1e38,
        "1e-40": 1e-40,
        "the same number": 0.02,
    }
    how = rng.choice([*values, "one NaN", "integers", "float64", "leave out", "one row"])
    types: dict[str, str] = {}
    for name in chosen:
        if how in values:
            tensors[name][:] = values[how]
        elif how == "one NaN":
            tensors[name].flat[rng.randrange(tensors[name].size)] = np.nan
        elif how == "integers":
            tensors[name], types[name] = (tensors[name] * 100).astype(np.int32), "I32"
        elif how == "float64":
            tensors[name], types[name] = tensors[name].astype(np.float64), "F64"
        elif how == "leave out":
            del tensors[name]
        else:
            tensors[name] = tensors[name][:1]
    new: dict[str, Any] = {k: v for k, v in header.items() if k == "__metadata__"}
    body = b""
    for name, tensor in tensors.items():
        raw = tensor.tobytes()
        entry = {"dtype": types.get(name, "F32"), "shape": list(tensor.shape)}
        new[name] = entry | {"data_offsets": [len(body), len(body) + len(raw)]}
        body += raw
    return _join(json.dumps(new).encode(), body), f"weights: {how} in {key if len(chosen) == 1 else 'every tensor'}"


def parquet(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Change a column: its name, its type, its values; or the rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(io.BytesIO(content), use_threads=False)
    i = rng.randrange(table.num_columns)
    name, count = table.column_names[i], table.num_rows

    def column(values: list[Any], kind: Any = None) -> Any:
        return table.set_column(i, name, pa.array(values, kind))

    changes: dict[str, Callable[[], Any]] = {
        "no rows": lambda: table.slice(0, 0),
        "half of the rows": lambda: table.slice(0, count // 2),
        "rows twice": lambda: pa.concat_tables([table, table]),
        "no columns": lambda: table.select([]),
        f"without {name}": lambda: table.remove_column(i),
        f"{name} is null": lambda: column([None] * count, table.schema.field(i).type),
        f"{name} has the type null": lambda: column([None] * count),
        f"{name} is numbers": lambda: column([float(k) for k in range(count)]),
        f"{name} is NaN": lambda: column([float("nan")] * count),
        f"{name} is infinite": lambda: column([float("inf")] * count),
        f"{name} is 2**62": lambda: column([2**62] * count),
        f"{name} is -1": lambda: column([-1] * count),
        f"{name} is true": lambda: column([True] * count),
        f"{name} is text": lambda: column(["text"] * count),
        f"{name} is empty text": lambda: column([""] * count),
        f"{name} is long text": lambda: column(["y" * 20_000] * count),
        f"{name} is markup": lambda: column(["</script><script>alert(1)</script>"] * count),
        f"{name} is __proto__": lambda: column(["__proto__"] * count),
        f"{name} is bytes": lambda: column([b"\xff\xfe"] * count),
        f"{name} is lists": lambda: column([[k, None] for k in range(count)]),
        f"{name} is mappings": lambda: column([{"a": k} for k in range(count)]),
        f"{name} is dates": lambda: column([k for k in range(count)], pa.timestamp("us")),
        f"{name} twice": lambda: table.append_column(name, table.column(i)),
    }
    for new in ("__proto__", "", "text", "value", "label"):
        names = [*table.column_names[:i], new, *table.column_names[i + 1 :]]
        changes[f"rename {name} to {new!r}"] = lambda names=names: table.rename_columns(names)
    words = rng.choice(list(changes))
    sink = io.BytesIO()
    pq.write_table(changes[words](), sink)
    return sink.getvalue(), words


def _picture(mode: str, size: tuple[int, int], form: str = "PNG") -> Callable[[], bytes]:
    def draw() -> bytes:
        from PIL import Image

        sink = io.BytesIO()
        Image.new(mode, size).save(sink, form)
        return sink.getvalue()

    return draw


PICTURES: dict[str, Callable[[], bytes]] = {
    "a picture of 1 x 1": _picture("RGB", (1, 1)),
    "a picture of 1 x 3,000": _picture("RGB", (1, 3000)),
    "a picture of 14,000 x 14,000": _picture("1", (14_000, 14_000)),
    "a grey picture": _picture("L", (8, 8)),
    "a picture of 16 bits": _picture("I;16", (8, 8)),
    "a transparent picture": _picture("RGBA", (8, 8)),
    "a palette": _picture("P", (8, 8)),
    "a GIF": _picture("P", (8, 8), "GIF"),
    "a TIFF of floats": _picture("F", (8, 8), "TIFF"),
    "text": lambda: b"no picture",
    "nothing": lambda: b"",
}


def picture(rng: random.Random, _: bytes) -> tuple[bytes, str]:
    """Another picture in place of this one."""
    kind = rng.choice(sorted(PICTURES))
    return PICTURES[kind](), kind


class Touch:
    """Unpickling this creates the file `OWNED`."""

    def __reduce__(self) -> Any:
        return (exec, (f"open({OWNED!r}, 'w').close()",))


def pickled(rng: random.Random, _: bytes) -> tuple[bytes, str]:
    """A pickle in place of a file that torch has written: of code, or of another type."""
    if rng.random() < 0.5:
        return pickle.dumps(Touch()), "a pickle that runs code"
    import torch

    sink = io.BytesIO()
    value = rng.choice([None, [], {}, 3, "text", {"state": None}, torch.zeros(3), {"state": {}, "param_groups": []}])
    torch.save(value, sink)
    return sink.getvalue(), f"torch.save({value!r})"

"""Mutations of documents: values in JSON, JSON Lines and YAML, and text that no serialiser would write."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

import yaml

RAW = "@raw:{}@"
"""A string that stands for text which a serialiser cannot write; replaced after serialising."""

DEEP = 20_000
RAW_TEXTS: dict[str, str] = {
    "deep list": "[" * DEEP + "]" * DEEP,
    "deep mapping": '{"a":' * DEEP + "1" + "}" * DEEP,
    "unclosed lists": "[" * DEEP,
    "NaN": "NaN",
    "Infinity": "Infinity",
    "-Infinity": "-Infinity",
    "1e999": "1e999",
    "integer of 5,000 digits": "9" * 5000,
    "lone surrogate": '"\\ud800"',
    "nothing": "",
    "two values": "1 2",
}
NUMBERS: list[Any] = [0, -1, 1, 2, 7, 0.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**31 - 1, 2**63, 2**64, 10**30]
TEXTS: list[str] = [
    "",
    " ",
    "text",
    "1",
    "true",
    "null",
    "__proto__",
    "constructor",
    "</script><script>alert(1)</script>",
    "{}",
    "%s%n",
    "naïve ✓ \u202e\U0001f600",
    "a\x00b",
    "line\nline",
    "x" * 300,
    "y" * 200_000,
]
PATHS: list[str] = [
    "/dev/zero",
    "/dev/stdin",
    "/dev/null",
    "/etc/hostname",
    "../other/model.safetensors",
    "../../outside.safetensors",
    "missing.safetensors",
    "model.bin",
    ".",
    "fifo",
    "file:///etc/hostname",
]
LISTS: list[Any] = [[], [[]], [None], {}, {"a": 1}, [1, "a", None], [0] * 1000, {"": ""}, [1e308, -1e308]]
KEYS: list[str] = ["__proto__", "constructor", "", "a" * 300, "naïve ✓", "__class__", "0", "value", "auto_map"]
ADDED: dict[str, Any] = {
    "__proto__": {"polluted": True},
    "trust_remote_code": True,
    "auto_map": {
        "AutoConfig": "foreign.Config",
        "AutoModelForCausalLM": "foreign.Model",
        "AutoTokenizer": ["foreign.Words", "foreign.Words"],
    },
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "model_type": "gpt2",
    "architectures": ["LlamaForCausalLMX"],
    "torch_dtype": "int4",
    "dtype": "float8_e4m3fn",
    "extra": None,
}

Node = tuple[Any, ...]


def nodes(value: Any, at: Node = ()) -> list[Node]:
    """The path of every value in a document, the document itself first."""
    result = [at]
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        result.extend(nodes(item, (*at, key)))
    return result


def get(document: Any, at: Node) -> Any:
    for key in at:
        document = document[key]
    return document


def put(document: Any, at: Node, value: Any) -> Any:
    """The document with another value at a path."""
    if not at:
        return value
    get(document, at[:-1])[at[-1]] = value
    return document


def odd_value(rng: random.Random) -> Any:
    """A value of any type; some are marks of `RAW_TEXTS`."""
    pool: list[list[Any]] = [NUMBERS, TEXTS, PATHS, LISTS, [None, True, False], [RAW.format(k) for k in RAW_TEXTS]]
    return copy.deepcopy(rng.choice(rng.choices(pool, [5, 3, 2, 3, 3, 2])[0]))


def pick(rng: random.Random, document: Any) -> Node:
    """A path, found by walking down: long lists do not crowd out what stands beside them."""
    at: Node = ()
    while rng.random() < 0.85:
        value = get(document, at)
        keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
        if not keys:
            break
        at = (*at, rng.choice(keys))
    return at


def replace_value(rng: random.Random, document: Any) -> tuple[Any, str]:
    at = pick(rng, document)
    value = odd_value(rng)
    return put(document, at, value), f"set {name(at)} to {brief(value)}"


def scale_number(rng: random.Random, document: Any) -> tuple[Any, str]:
    numbers = [
        at
        for at in nodes(document)
        if isinstance(get(document, at), int | float) and get(document, at) not in (True, 0)
    ]
    if not numbers:
        return replace_value(rng, document)
    at = rng.choice(numbers)
    value = get(document, at)
    new = rng.choice([-value, value + 1, value - 1, value * 1000, value / 7, str(value), float(value), value * 10**12])
    return put(document, at, new), f"change {name(at)} from {brief(value)} to {brief(new)}"


def _inside(rng: random.Random, document: Any, kind: type) -> Node | None:
    """The path of a list or mapping that is not empty."""
    choice = [at for at in nodes(document) if isinstance(get(document, at), kind) and get(document, at)]
    return rng.choice(choice) if choice else None


def remove_key(rng: random.Random, document: Any) -> tuple[Any, str]:
    at = _inside(rng, document, dict)
    if at is None:
        return replace_value(rng, document)
    key = rng.choice(list(get(document, at)))
    del get(document, at)[key]
    return document, f"remove {name((*at, key))}"


def rename_key(rng: random.Random, document: Any) -> tuple[Any, str]:
    at = _inside(rng, document, dict)
    if at is None:
        return replace_value(rng, document)
    mapping = get(document, at)
    key, new = rng.choice(list(mapping)), rng.choice(KEYS)
    renamed = {new if k == key else k: v for k, v in mapping.items()}
    return put(document, at, renamed), f"rename {name((*at, key))} to {brief(new)}"


def add_key(rng: random.Random, document: Any) -> tuple[Any, str]:
    places = [at for at in nodes(document) if isinstance(get(document, at), dict)]
    if not places:
        return replace_value(rng, document)
    at = () if () in places and rng.random() < 0.6 else rng.choice(places)
    key = rng.choice([*ADDED, *KEYS])
    value = copy.deepcopy(ADDED[key]) if key in ADDED else odd_value(rng)
    get(document, at)[key] = value
    return document, f"add {name((*at, key))} = {brief(value)}"


def change_list(rng: random.Random, document: Any) -> tuple[Any, str]:
    at = _inside(rng, document, list)
    if at is None:
        return replace_value(rng, document)
    items = get(document, at)
    changes: dict[str, Callable[[], list[Any]]] = {
        "drop the first item of": lambda: items[1:],
        "drop the last item of": lambda: items[:-1],
        "double": lambda: items * 2,
        "repeat 2,000 times": lambda: items[:20] * 2000,
        "reverse": lambda: items[::-1],
        "append an odd value to": lambda: [*items, odd_value(rng)],
    }
    how = rng.choice(list(changes))
    return put(document, at, changes[how]()), f"{how} {name(at)}"


def swap_values(rng: random.Random, document: Any) -> tuple[Any, str]:
    choice = [at for at in nodes(document) if at]
    if len(choice) < 2:
        return replace_value(rng, document)
    a, b = rng.sample(choice, 2)
    if a == b[: len(a)] or b == a[: len(b)]:  # one inside the other
        return replace_value(rng, document)
    first, second = get(document, a), get(document, b)
    return put(put(document, a, second), b, first), f"swap {name(a)} and {name(b)}"


def wrap(rng: random.Random, document: Any) -> tuple[Any, str]:
    at = pick(rng, document)
    value = get(document, at)
    if rng.random() < 0.5:
        return put(document, at, [value]), f"put {name(at)} into a list"
    return put(document, at, {"value": value}), f"put {name(at)} into a mapping"


CHANGES = {
    replace_value: 8,
    scale_number: 3,
    remove_key: 4,
    rename_key: 2,
    add_key: 3,
    change_list: 2,
    swap_values: 1,
    wrap: 1,
}


def change(rng: random.Random, document: Any) -> tuple[Any, str]:
    """A document with one thing changed, and in words what."""
    return rng.choices(list(CHANGES), list(CHANGES.values()))[0](rng, document)


def to_json(document: Any, indent: int | None = 2) -> bytes:
    text = json.dumps(document, indent=indent)
    for key, raw in RAW_TEXTS.items():
        text = text.replace(f'"{RAW.format(key)}"', raw)
    return text.encode()


def to_yaml(document: Any) -> bytes:
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    for key, raw in RAW_TEXTS.items():
        text = text.replace(f"'{RAW.format(key)}'", raw)
    return text.encode()


def json_file(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Change a value in a JSON document."""
    document, words = change(rng, json.loads(content))
    return to_json(document), words


def json_lines(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Change a row of JSON Lines, or every row in the same way."""
    rows = [json.loads(line) for line in content.splitlines()]
    if not rows:
        return b"null\n", "one row: null"
    if rng.random() < 0.3:
        seed = rng.random()
        changed = [change(random.Random(seed), row) for row in rows]
        return b"".join(to_json(row, None) + b"\n" for row, _ in changed), f"in every row: {changed[0][1]}"
    i = rng.randrange(len(rows))
    rows[i], words = change(rng, rows[i])
    return b"".join(to_json(row, None) + b"\n" for row in rows), f"row {i + 1}: {words}"


def alias_bomb(levels: int) -> str:
    """A YAML list whose aliases expand to 9 ** levels items."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for i in range(1, levels):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]")
    return "\n".join(lines) + "\n"


YAML_TEXTS: dict[str, Callable[[str], str]] = {
    "add an alias bomb": lambda text: text + alias_bomb(9),
    "an alias bomb alone": lambda _: alias_bomb(9),
    "a list that contains itself": lambda text: text + "about: &a [*a]\n",
    "a mapping that contains itself": lambda text: text + "model: &m {inner: *m}\n",
    "a Python tag": lambda text: text + '\nabout: !!python/object/apply:os.system ["touch foreign-code-ran"]\n',
    "an unknown tag": lambda text: text + "\nabout: !what {a: 1}\n",
    "a merge key": lambda text: "x: &x {steps: 3}\n<<: *x\n" + text,
    "two documents": lambda text: text + "---\n" + text,
    "a key twice": lambda text: text + text,
    "tabs": lambda text: text.replace("  ", "\t"),
    "an unknown anchor": lambda text: text + "seed: *nowhere\n",
    "a key that is a list": lambda text: text + "? [a, b]\n: 1\n",
    "a key that is null": lambda text: text + "~: 1\n",
    "a date": lambda text: text + "seed: 2020-01-01\n",
    "base 60": lambda text: text + "seed: 190:20:30:00:59:59:59\n",
    "octal": lambda text: text + "seed: 0o17\n",
    "deep flow": lambda text: text + "anatomy: " + "[" * DEEP + "]" * DEEP + "\n",
    "deep block": lambda text: text + "\n".join(" " * i + "a:" for i in range(2000)) + "\n",
    "binary": lambda text: text + "about: !!binary |\n  R0lGODlhDAAMAIQAAP\n",
    "only a comment": lambda _: "# nothing\n",
    "only a scalar": lambda _: "42\n",
    "quotes that never close": lambda text: text + 'about: "never\n',
}


def yaml_file(rng: random.Random, content: bytes) -> tuple[bytes, str]:
    """Change a value of a YAML document, or write YAML that few expect."""
    if rng.random() < 0.35:
        words = rng.choice(list(YAML_TEXTS))
        return YAML_TEXTS[words](content.decode()).encode(), words
    document, words = change(rng, yaml.safe_load(content))
    return to_yaml(document), words


def name(at: Node) -> str:
    return ".".join(brief(str(key))[1:-1] for key in at) or "the document"


def brief(value: Any) -> str:
    text = value if isinstance(value, str) and value.startswith("@raw:") else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"

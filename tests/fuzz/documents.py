"""Mutations of documents: values in JSON, JSON Lines and YAML, and text that no serialiser would write."""

# ruff: noqa: SIM905  # odd words read best in one line
from __future__ import annotations

import copy
import json
import random

import yaml

RAW = "@raw:{}@"
"""A string that stands for text which a serialiser cannot write; replaced after serialising."""

DEEP = 20_000
RAW_TEXTS = {
    "deep list": "[" * DEEP + "]" * DEEP,
    "deep mapping": '{"a":' * DEEP + "1" + "}" * DEEP,
    "unclosed lists": "[" * DEEP,
    "integer of 5,000 digits": "9" * 5000,
    "lone surrogate": '"\\ud800"',
    "nothing": "",
    **{text: text for text in ("NaN", "Infinity", "-Infinity", "1e999", "1 2")},
}
NUMBERS = [0, -1, 1, 2, 7, 0.5, -0.0, 1e-320, 1e308, -1e308, 2**31, 2**31 - 1, 2**63, 2**64, 10**30]
TEXTS = ["", " ", *"text 1 true null __proto__ constructor </script><script>alert(1)</script> {} %s%n".split()]
TEXTS += ["naïve ✓ \u202e\U0001f600", "a\x00b", "line\nline", "x" * 300, "y" * 200_000]
PATHS = "/dev/zero /dev/stdin /dev/null /etc/hostname ../other/model.safetensors ../../outside.safetensors".split()
PATHS += "missing.safetensors model.bin . fifo file:///etc/hostname".split()
LISTS = [[], [[]], [None], {}, {"a": 1}, [1, "a", None], [0] * 1000, {"": ""}, [1e308, -1e308]]
KEYS = ["", "a" * 300, "naïve ✓", *"__proto__ constructor __class__ 0 value auto_map".split()]
CLASSES = {"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.Model"}
ADDED = {
    "__proto__": {"polluted": True},
    "trust_remote_code": True,
    "auto_map": {**CLASSES, "AutoTokenizer": ["foreign.Words", "foreign.Words"]},
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "model_type": "gpt2",
    "architectures": ["LlamaForCausalLMX"],
    "torch_dtype": "int4",
    "dtype": "float8_e4m3fn",
    "extra": None,
}


def get(document, at):
    for key in at:
        document = document[key]
    return document


def put(document, at, value):
    """The document with another value at a path."""
    if not at:
        return value
    get(document, at[:-1])[at[-1]] = value
    return document


def inner(value):
    """The keys of a mapping, or the indices of a list."""
    return list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []


def nodes(value, at=()):
    """The path of every value in a document, the document itself first."""
    return [at, *(path for key in inner(value) for path in nodes(value[key], (*at, key)))]


def odd_value(rng):
    """A value of any type; some are marks of `RAW_TEXTS`."""
    pool = [NUMBERS, TEXTS, PATHS, LISTS, [None, True, False], [RAW.format(k) for k in RAW_TEXTS]]
    return copy.deepcopy(rng.choice(rng.choices(pool, [5, 3, 2, 3, 3, 2])[0]))


def pick(rng, document):
    """A path, found by walking down: long lists do not crowd out what stands beside them."""
    at = ()
    while (keys := inner(get(document, at))) and rng.random() < 0.85:
        at = (*at, rng.choice(keys))
    return at


CHANGES = {"set": 8, "scale": 3, "remove": 4, "rename": 2, "add": 3, "list": 2, "swap": 1, "wrap": 1}
"""What is changed, and how often."""


def change(rng, document):
    """A document with one thing changed, and in words what."""
    how = rng.choices(list(CHANGES), list(CHANGES.values()))[0]
    values = {at: get(document, at) for at in nodes(document)}
    numbers = [at for at, value in values.items() if isinstance(value, int | float) and value not in (True, 0)]
    mappings = [at for at, value in values.items() if isinstance(value, dict)]
    full = [at for at in mappings if values[at]]
    lists = [at for at, value in values.items() if isinstance(value, list) and value]
    if how == "scale" and numbers:
        at = rng.choice(numbers)
        value = values[at]
        new = rng.choice(
            [-value, value + 1, value - 1, value * 1000, value / 7, str(value), float(value), value * 1e12]
        )
        return put(document, at, new), f"change {name(at)} from {brief(value)} to {brief(new)}"
    if how == "remove" and full:
        at = rng.choice(full)
        key = rng.choice(list(values[at]))
        del values[at][key]
        return document, f"remove {name((*at, key))}"
    if how == "rename" and full:
        at = rng.choice(full)
        key, new = rng.choice(list(values[at])), rng.choice(KEYS)
        renamed = {new if other == key else other: value for other, value in values[at].items()}
        return put(document, at, renamed), f"rename {name((*at, key))} to {brief(new)}"
    if how == "add" and mappings:
        at = () if () in mappings and rng.random() < 0.6 else rng.choice(mappings)
        key = rng.choice([*ADDED, *KEYS])
        values[at][key] = copy.deepcopy(ADDED[key]) if key in ADDED else odd_value(rng)
        return document, f"add {name((*at, key))} = {brief(values[at][key])}"
    if how == "list" and lists:
        at = rng.choice(lists)
        items = values[at]
        new = rng.choice([items[1:], items[:-1], items * 2, items[:20] * 2000, items[::-1], [*items, odd_value(rng)]])
        return put(document, at, new), f"{len(new):,} other items in {name(at)}"
    if how == "swap" and len(values) > 2:
        one, other = rng.sample(list(values)[1:], 2)
        if one != other[: len(one)] and other != one[: len(other)]:  # else one is inside the other
            document = put(put(document, one, values[other]), other, values[one])
            return document, f"swap {name(one)} and {name(other)}"
    at = pick(rng, document)
    if how == "wrap":
        return put(document, at, rng.choice([[values[at]], {"value": values[at]}])), f"wrap {name(at)}"
    value = odd_value(rng)
    return put(document, at, value), f"set {name(at)} to {brief(value)}"


def serialised(document, form="json"):
    """A document as `json`, `yaml`, or `line` of JSON, with what serialisers do not write."""
    if form == "yaml":
        text, quote = yaml.safe_dump(document, sort_keys=False, allow_unicode=True), "'"
    else:
        text, quote = json.dumps(document, indent=2 if form == "json" else None), '"'
    for key, raw in RAW_TEXTS.items():
        text = text.replace(quote + RAW.format(key) + quote, raw)
    return text.encode()


def json_file(rng, content):
    """Change a value in a JSON document."""
    document, words = change(rng, json.loads(content))
    return serialised(document), words


def json_lines(rng, content):
    """Change a row of JSON Lines, or every row in the same way."""
    rows = [json.loads(line) for line in content.splitlines()]
    seed, number = rng.random(), rng.randrange(len(rows))
    changed = range(len(rows)) if rng.random() < 0.3 else [number]
    for index in changed:
        rows[index], words = change(random.Random(seed), rows[index])
    return b"".join(serialised(row, "line") + b"\n" for row in rows), f"{len(changed)} rows from {number + 1}: {words}"


def alias_bomb():
    """A YAML list whose aliases expand to 9 ** 9 items."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    return "\n".join(lines) + "\n"


YAML_TEXTS = {
    "two documents": lambda text: text + "---\n" + text,
    "a key twice": lambda text: text + text,
    "tabs": lambda text: text.replace("  ", "\t"),
    "a merge key": lambda text: "x: &x {steps: 3}\n<<: *x\n" + text,
    "only a comment": lambda _: "# nothing\n",
    "only a scalar": lambda _: "42\n",
}
YAML_ENDS = {
    "an alias bomb": alias_bomb(),
    "a list that contains itself": "about: &a [*a]\n",
    "a mapping that contains itself": "model: &m {inner: *m}\n",
    "a Python tag": '\nabout: !!python/object/apply:os.system ["touch foreign-code-ran"]\n',
    "an unknown tag": "\nabout: !what {a: 1}\n",
    "an unknown anchor": "seed: *nowhere\n",
    "a key that is a list": "? [a, b]\n: 1\n",
    "a key that is null": "~: 1\n",
    "a date": "seed: 2020-01-01\n",
    "base 60": "seed: 190:20:30:00:59:59:59\n",
    "octal": "seed: 0o17\n",
    "deep flow": "anatomy: " + "[" * DEEP + "]" * DEEP + "\n",
    "deep block": "\n".join(" " * i + "a:" for i in range(2000)) + "\n",
    "binary": "about: !!binary |\n  R0lGODlhDAAMAIQAAP\n",
    "quotes that never close": 'about: "never\n',
}
"""What is added at the end."""


def yaml_file(rng, content):
    """Change a value of a YAML document, or write YAML that few expect."""
    if rng.random() >= 0.35:
        document, words = change(rng, yaml.safe_load(content))
        return serialised(document, "yaml"), words
    words = rng.choice([*YAML_TEXTS, *YAML_ENDS])
    text = content.decode()
    return (YAML_TEXTS[words](text) if words in YAML_TEXTS else text + YAML_ENDS[words]).encode(), words


def name(at):
    return ".".join(brief(str(key))[1:-1] for key in at) or "the document"


def brief(value):
    text = value if isinstance(value, str) and value.startswith("@raw:") else repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text):,} characters)"

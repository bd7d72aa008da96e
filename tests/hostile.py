"""Seeded damage: JSON values with something hostile in one place, and bytes that are cut, flipped or replaced."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

LONG = "an integer of 5,000 digits, which Python refuses to print"
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 10**9, 10**30, -(10**30), LONG, 0.5, -0.5, 1e308, -1e308, 1e-320),
    *(float("nan"), float("inf"), float("-inf"), "", "x", "1", "\ud800", "\x00", "é" * 40, "A" * 100_000, "../../x"),
    *([], [[]], [1, 2], ["x"], [None], {}, {"": 0}, {"x": {}}, {"1": 1}, {"-1": []}, {"999999999": 1}),
]
"""What stands in the place of an entry."""


def damaged_json(value: Any, rng: random.Random) -> str:
    """A JSON text of `value` in which one to three entries are replaced, removed, added or nested; or no JSON."""
    if rng.random() < 0.1:
        return damaged_bytes(json.dumps(value).encode(), rng).decode("utf-8", "replace")
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        value = _edited(value, rng)
    return json.dumps(value).replace(json.dumps(LONG), "1" + "0" * 5000)


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """The content cut short, with bytes flipped, with a piece replaced or taken out, empty, or of another kind."""
    at, kind = rng.randrange(len(content) + 1), rng.randrange(6)
    length = rng.choice((1, 8, 200))
    noise = bytes(rng.randrange(256) for _ in range(length))
    return {
        0: content[:at],
        1: content[:at] + noise + content[at + length :],
        2: content[:at] + content[at + length :],
        3: content[:at] + bytes(length) + content[at + length :],
        4: b"",
        5: rng.choice((b"\x80\x04N.", b"PK\x03\x04", b"[" * 50_000, b'{"a": 1}', b"null", noise)),
    }[kind]


def _edited(value: Any, rng: random.Random) -> Any:
    """The value with one place changed, at a random depth."""
    inner = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not inner or rng.random() < 0.15:
        return _replacement(value, rng)
    key = rng.choice(inner)
    if rng.random() < 0.75:
        value[key] = _edited(value[key], rng)
    elif rng.random() < 0.5:
        del value[key]
    elif isinstance(value, dict):
        value[rng.choice(("", "x", "1", "-1", "0", "999999999999", "A" * 5000, str(key) + "x"))] = value[key]
    else:
        value.insert(rng.choice(inner), value[key])
    return value


def _replacement(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.1:
        for _ in range(rng.choice((3, 100, 300))):
            value = [value] if rng.random() < 0.5 else {"x": value}
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.4:
        return rng.choice((value + 1, -value, value * 1000, float(value), str(value), [value]))
    return copy.deepcopy(rng.choice(VALUES))

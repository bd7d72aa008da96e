"""Seeded damage to the files of other tests, by the mutations of the fuzzer."""

from __future__ import annotations

import copy

from fuzz import documents, mutations


def damaged_json(value, rng):
    """A JSON text of `value` in which one thing is changed, or no JSON."""
    text = documents.serialised(documents.change(rng, copy.deepcopy(value))[0])
    return (damaged_bytes(text, rng) if rng.random() < 0.1 else text).decode("utf-8", "replace")


def damaged_bytes(content, rng):
    """The content cut short, with bytes flipped or replaced, empty, or of another kind."""
    return rng.choice([mutations.edit, mutations.replace])(rng, content)[0]

"""Held-out conversations: none of them, and no other response of their chats, is trained on, whatever is repeated."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fulldepth.data import conversations
from fulldepth.training.text import TEMPLATE, held_out_rows


class Tokenizer:
    chat_template = TEMPLATE


def chat(*texts):
    roles = ("user", "assistant") * len(texts)
    return {"messages": [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]}


@given(st.lists(st.integers(0, 12), min_size=2, max_size=60), st.integers(1, 10), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_no_content_is_in_both_parts(numbers, most, seed):
    given_rows = [chat(f"ask {n}", f"answer {n}", f"more {n % 3}", "yes", f"{n // 2}?", "no") for n in numbers]
    rows = conversations(given_rows, Tokenizer())
    held_out = held_out_rows(rows, most, seed)
    if len(set(numbers)) == 1:
        assert held_out is None
        return
    assert held_out is not None
    openings = [row["messages"][0]["content"] for row in rows]
    kept, trained = (
        {o for o, out in zip(openings, held_out, strict=True) if bool(out) is flag} for flag in (True, False)
    )
    assert kept
    assert trained
    assert not kept & trained
    sizes = [openings.count(opening) for opening in set(openings)]
    assert held_out.sum() <= max(most, min(sizes))
    if max(sizes) == 1:
        assert held_out.sum() == min(most, len(rows) - 1)


def test_the_choice_follows_the_content_and_the_seed_and_not_the_order():
    pairs = [{"prompt": f"{n}?", "response": f"{n}."} for n in range(40)]
    shuffled = random.Random(0).sample(pairs, 40)
    rows, others = (conversations(data) for data in (pairs, shuffled))
    assert rows.column_names == ["prompt", "completion"]

    def texts(data, seed):
        return {data[int(i)]["prompt"] for i in np.flatnonzero(held_out_rows(data, 10, seed))}

    assert texts(rows, 0) == texts(others, 0) != texts(rows, 1)
    assert len(texts(rows, 0)) == 10

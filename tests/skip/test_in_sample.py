"""Which held-out rows chose the blocks of a plan: by the rows themselves, whatever else was read with them."""

from __future__ import annotations

import pytest

from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.skip.exports.card import card_of
from fulldepth.skip.exports.formats import FORMATS
from fulldepth.skip.selection.search import search
from fulldepth.skip.summary import ENTRY, in_sample, overlap, rows_of
from skip import plain
from skip.planned import plan
from skip.word_tokenizer import tokenizer
from tiny_models import build

SENTENCE = "Measured on the text that chose the blocks; expect slightly more loss on other text."


def row(*ids: int) -> Example:
    return Example.of(ids, 1, len(ids))


def read(rows: list[Example], digit: str = "1") -> Examples:
    """Held-out rows, read with other training rows for every digit, so that the hash of all data is another one."""
    return Examples([], rows, {"hash": "sha256:" + digit * 64})


@pytest.fixture(scope="module")
def model():
    return build("llama").eval()


def chosen_on(model, rows: list[Example], **entries):
    data = {"hash": "sha256:" + "0" * 64, ENTRY: rows_of(rows)}
    return plan(model, [1], values=None, data=data, **{"search": "greedy", **entries})


def test_full_partial_and_no_overlap(model) -> None:
    ours = [row(3, number, 5) for number in range(10)]
    made = chosen_on(model, ours)
    assert overlap(made, read(ours[::-1])) == SENTENCE
    assert overlap(made, read(ours[:4])) == SENTENCE
    others = [row(3, number, 6) for number in range(10)]
    assert overlap(made, read([*ours[:3], *others])) == "3 of 13 held-out rows also chose the blocks."
    assert overlap(made, read(others)) is None
    loss_elsewhere = [Example.of([3, number, 5], 2, 3) for number in range(10)]
    assert overlap(made, read(loss_elsewhere)) == SENTENCE  # the same text, other tokens of it counted


def test_what_decided_nothing_is_not_in_sample(model) -> None:
    ours = [row(3, number, 5) for number in range(4)]
    made = chosen_on(model, ours, search="random")
    assert in_sample(made) is None
    assert overlap(made, read(ours)) is None
    healed = plan(model, [1], data={"hash": "sha256:" + "0" * 64, ENTRY: rows_of(ours)})
    assert "the text that stopped the training of scalars;" in str(overlap(healed, read(ours)))


def test_older_plans_list_no_rows(model) -> None:
    ours = [row(3, number, 5) for number in range(4)]
    made = plan(model, [1], values=None, search="greedy")
    assert "It is not known whether the held-out rows also chose the blocks" in str(overlap(made, read(ours)))
    assert overlap(made, read(ours, "0")) == SENTENCE  # the very same data
    made = plan(model, [1], values=None, search="greedy", data={"hash": "sha256:" + "0" * 64, ENTRY: "no digits"})
    assert "not known" in str(overlap(made, read(ours)))


def test_a_search_lists_its_rows_and_the_card_says_it(model) -> None:
    train, held = plain.sentences(4, 1), plain.sentences(6, 2)
    meta = {"hash": "sha256:" + "4" * 64, "heldout": {"name": "a seeded fifth of a|b.jsonl"}, "warnings": []}
    made = search(model, Examples(train, held, meta), 1, tokenizer=tokenizer(), fit=False)
    assert len(made.data[ENTRY]) == 16 * len({tuple(example.input_ids.tolist()) for example in held})
    assert overlap(made, read(plain.sentences(6, 2))) == SENTENCE
    assert overlap(made, read(train)) is None
    card, other = (card_of(of, FORMATS["fast"], 0.0, 1, []).text() for of in (made, plan(model, [1], values=None)))
    assert f"| In-sample | {SENTENCE} |" in card
    assert r"| Held-out text | a seeded fifth of a\|b.jsonl |" in card
    assert f"| Held-out text | examples with the hash sha256:{'0' * 64} |" in other
    assert "In-sample" not in other

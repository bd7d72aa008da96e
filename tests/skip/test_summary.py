"""Which held-out rows chose the blocks of a plan: by the rows themselves, whatever else was read with them."""

from __future__ import annotations

import pytest

from fulldepth.data.batches import Example
from fulldepth.data.examples import Examples
from fulldepth.skip.exports.export import card_of
from fulldepth.skip.exports.formats import FORMATS
from fulldepth.skip.plan import ENTRY, decided, listing, overlap
from fulldepth.skip.search import search
from skip import plain
from skip.planned import plan
from skip.word_tokenizer import tokenizer
from tiny_models import build

SENTENCE = "Measured on the text that chose the blocks; expect slightly more loss on other text."
OURS = [Example.of([3, number, 5], 1, 3) for number in range(10)]
OTHERS = [Example.of([3, number, 6], 1, 3) for number in range(10)]


@pytest.fixture(scope="module")
def model():
    return build("llama").eval()


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (OURS[::-1], SENTENCE),
        (OURS[:4], SENTENCE),
        ([Example.of([3, number, 5], 2, 3) for number in range(10)], SENTENCE),  # other tokens of the same text counted
        ([*OURS[:3], *OTHERS], "3 of 13 held-out rows also chose the blocks."),
        (OTHERS, None),
    ],
)
def test_rows_are_known_by_their_tokens(model, rows, said):
    data = {"hash": "sha256:" + "0" * 64, **listing(OURS)}
    assert overlap(plan(model, [1], values=None, data=data, search="greedy"), plain.held_out(rows)) == said
    assert overlap(plan(model, [1], values=None, data=data, search="random"), plain.held_out(rows)) is None


def test_older_plans_list_no_rows(model):
    made = plan(model, [1], values=None, search="greedy", data={"hash": "sha256:" + "0" * 64})
    assert "It is not known whether the held-out rows also chose the blocks" in str(overlap(made, plain.held_out(OURS)))
    assert overlap(made, plain.held_out(OURS, "0")) == SENTENCE  # the very same data


def test_losses_are_in_sample_where_their_rows_decided_something(model):
    both, fit = "chose the blocks and stopped the training of scalars", "stopped the training of scalars"
    for searched, values, expected in (("greedy", "fitted", both), ("given", "fitted", fit), ("given", None, None)):
        assert decided(plan(model, [2], values=values, search=searched)) == expected


def test_a_search_lists_its_rows_and_the_card_says_it(model):
    train, held = plain.sentences(4, 1), plain.sentences(6, 2)
    meta = {"hash": "sha256:" + "4" * 64, "heldout": {"name": "a seeded fifth of a|b.jsonl"}, "warnings": []}
    made = search(model, Examples(train, held, meta), 1, tokenizer=tokenizer(), fit=False)
    assert len(made.data[ENTRY]) == 16 * len({tuple(example.input_ids.tolist()) for example in held})
    assert overlap(made, plain.held_out(held)) == SENTENCE
    assert overlap(made, plain.held_out(train)) is None
    card, other = (card_of(of, FORMATS["fast"], 0.0, 1, []).text() for of in (made, plan(model, [1], values=None)))
    assert f"| In-sample | {SENTENCE} |" in card
    assert r"| Held-out text | a seeded fifth of a\|b.jsonl |" in card
    assert f"| Held-out text | examples with the hash sha256:{'0' * 64} |" in other
    assert "In-sample" not in other

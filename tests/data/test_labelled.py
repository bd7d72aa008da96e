"""Rows held out of labelled data, and built-in labelled data."""

from __future__ import annotations

import numpy as np

from fulldepth.data import ShuffledSampler, Source, open_source, train_wordpiece
from fulldepth.data.labelled import EpochSampler, check_rows, held_out, name_classes
from fulldepth.data.records import TextRecord
from refusals import refused


def rows_of(texts, labels):
    source = Source("rows", "labelled-text", [TextRecord(text=t, label=n) for t, n in zip(texts, labels, strict=True)])
    return check_rows(source, "text-classification", name_classes(source))


def test_held_out_rows_have_the_shares_of_all_and_share_no_content():
    rng = np.random.default_rng(1)
    labels = rng.choice(3, 200, p=[0.7, 0.2, 0.1]).tolist()
    texts = [f"{label} {rng.integers(0, 30)}" for label in labels]  # many occur several times
    rows = rows_of(texts, labels)
    chosen = held_out(rows, 30, seed=4)
    inside, outside = ({t for t, c in zip(texts, chosen, strict=True) if c == part} for part in (True, False))
    assert not inside & outside
    assert 20 <= chosen.sum() <= 30
    assert {text[0] for text in outside} == {"0", "1", "2"}
    order = rng.permutation(200)
    again = held_out(rows_of([texts[i] for i in order], [labels[i] for i in order]), 30, seed=4)
    assert {texts[order[i]] for i in np.flatnonzero(again)} == inside


def test_equal_rows_cannot_be_held_out():
    with refused("No row of rows can be held out"):
        held_out(rows_of(["a", "a", "b"], [0, 0, 1]), 5, seed=0)


def test_keys_hold_the_epoch():
    order, keys = ShuffledSampler(3, seed=1).indices(0, 14).tolist(), EpochSampler(3, seed=1, length=7)
    expected = [position // 3 * 3 + index for position, index in enumerate(order)]
    assert [*keys, *keys] == expected
    assert sorted(expected[:12]) == list(range(12))


def test_builtin_digits_are_split_within_each_class():
    assert open_source("digits:builtin").name == "digits:builtin/test"
    assert open_source("digits:builtin", held_out=False).name == "digits:builtin/train"
    for part, size in (("train", 1442), ("test", 355)):
        source = open_source(f"digits:builtin/{part}")
        counts = np.bincount([record.label for record in source.records if record.label is not None])
        assert len(counts) == len(source.class_names) == 10
        assert counts.max() - counts.min() <= 9
        assert counts.sum() == len(source) == size


def test_wordpiece_frames_texts_and_pairs_as_bert_does():
    tokenizer = train_wordpiece(["the film is good", "the film is bad"] * 2, 300)
    one, two = tokenizer("the film"), tokenizer("the film", "is good")
    assert tokenizer.convert_ids_to_tokens(one["input_ids"]) == ["[CLS]", "the", "film", "[SEP]"]
    assert two["token_type_ids"] == [0, 0, 0, 0, 1, 1, 1]
    assert tokenizer.pad_token_id == 0


def test_a_wordpiece_tokenizer_follows_from_its_texts():
    """The trainer of `tokenizers` alone gives another vocabulary each time."""
    texts = [f"film {number} is {word}, says {word}er" for number in range(40) for word in ("dull", "naïve")]
    one, *others = [train_wordpiece(texts, 80) for _ in range(4)]
    assert all(other.get_vocab() == one.get_vocab() for other in others)
    assert len(one) == 80
    assert set(one.all_special_tokens) == {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"}
    assert one.decode(one("Naive films ##d").input_ids) == "[CLS] naive films [UNK] [UNK] d [SEP]"

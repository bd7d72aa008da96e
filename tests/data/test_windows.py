"""Windows of text: uniform over all text, within documents, with their clusters; words in them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from data.test_prepare_text import prepared, words
from fulldepth.core.uncertainty import identity
from fulldepth.data import builtin_texts, open_source, train_tokenizer
from fulldepth.data.drawing import draw_windows, first_windows
from fulldepth.data.sources import identities
from fulldepth.data.tokens import Frame, WordFinder, leading_ids, plain_ids


def test_windows_are_uniform_over_all_text(number_tokenizer):
    """Documents of 1 to 40 lengths of a window get windows by their length; at most once each piece."""
    sizes = [100, 200, 400, 800, 1600, 4000]
    texts = [words(*[d] * n) for d, n in enumerate(sizes)]
    counts = Counter()
    for seed in range(60):
        data = prepared(number_tokenizer, texts, sequence_length=8, max_sequences=40, seed=seed)
        assert len(data) == 40
        for example in data.examples:
            (document,) = set(example.input_ids.tolist())  # a window is within a document
            counts[document - 2] += 1
    expected = 40 * 60 * np.array(sizes) / sum(sizes)
    observed = [counts[d] for d in range(len(sizes))]
    assert chisquare(observed, expected).pvalue > 1e-3  # without replacement it varies less than a multinomial


def test_windows_are_contiguous_distinct_and_spread_over_a_document(number_tokenizer):
    text = words(*(i % 499 for i in range(499 * 40)))
    starts = []
    for seed in range(40):
        data = prepared(number_tokenizer, [text], sequence_length=16, max_sequences=30, seed=seed)
        assert all({*np.diff(example.input_ids).tolist()} <= {1, -498} for example in data.examples)
        starts += [int(example.input_ids[0]) for example in data.examples]
    observed, _ = np.histogram(starts, bins=10, range=(2, 501))
    assert chisquare(observed).pvalue > 1e-3


def test_few_characters_are_tokenised():
    """24 windows of the built-in corpus do not need all of its 0.8 MB; beginnings are those of the whole text."""
    tokenizer = train_tokenizer([builtin_texts("heldout")[0][:120_000]], vocab_size=600)
    sizes = []

    def tokenise(text, *_):
        sizes.append(len(text))
        return plain_ids(tokenizer, text)

    documents = list(enumerate(builtin_texts("heldout")))
    assert len(draw_windows(documents, tokenise, window=256, count=24, seed=0).windows) == 24
    assert sum(sizes) < 0.15 * 830_000
    whole = plain_ids(tokenizer, documents[0][1][:60_000])
    for needed in (1, 100, 5000):
        ids = leading_ids(tokenizer, documents[0][1][:60_000], needed)
        assert needed <= len(ids) < len(whole)
        assert ids == whole[: len(ids)]


def test_short_documents_are_joined_within_a_window(number_tokenizer):
    texts = [words(*[i] * 5) for i in range(300)]
    data = prepared(number_tokenizer, texts, sequence_length=17, max_sequences=20)
    assert len(data) == 20
    documents = [set(example.input_ids.tolist()) - {1} for example in data.examples]
    assert all(len(each) == 3 for each in documents)
    assert len(set.union(*documents)) == 60, "no document is in two windows"
    assert len(set(data.clusters)) == 20
    assert data.unit == "document"


@pytest.mark.parametrize(("bos", "count"), [("auto", 9), ("always", 9), ("never", 0)])
def test_every_window_begins_with_bos(bert_tokenizer, number_tokenizer, bos, count):
    """Windows from the middle of a document lacked it."""
    for order in ("random", "first"):
        options = {"sequence_length": 32, "max_sequences": 9, "order": order}
        data = prepared(bert_tokenizer, [words(*range(400))], bos=bos, **options)
        assert data.lengths == [32] * 9
        assert sum(int(example.input_ids[0]) == 2 for example in data.examples) == count
        assert sum((example.input_ids == 2).sum() for example in data.examples) == count
    bare = prepared(number_tokenizer, ["w1 w2 w3"], bos=bos)
    assert bare.lengths == [3]
    assert bool(bare.warnings) == (bos == "always")


def test_one_sequence_for_each_row(number_tokenizer):
    texts = [words(*range(n)) for n in range(1, 31)]
    data = prepared(number_tokenizer, texts, sequence_length=20, one_per_row=True)
    assert data.lengths == [min(n, 20) for n in range(1, 31)]
    assert len(set(data.clusters)) == 30
    assert "10 texts are longer than 20 tokens and cut there." in data.warnings


def test_clusters_of_windows_are_documents_or_blocks(number_tokenizer):
    def windows(texts, most):
        return prepared(number_tokenizer, texts, max_sequences=most, sequence_length=64)

    data = windows([words(*[i] * 1000) for i in range(3)], 100)
    pairs = {(int(e.input_ids[0]), c) for e, c in zip(data.examples, data.clusters, strict=True)}
    assert len(pairs) == len({cluster for _, cluster in pairs}) == len({document for document, _ in pairs}) == 3
    assert (data.unit, data.no_error) == ("document", None)
    assert data.describe()["clusters"] == 3

    whole = windows([words(*[1] * 4096 * 10)], 1000)
    assert (len(whole), len(set(whole.clusters)), whole.no_error) == (640, 10, None)
    assert whole.unit == "block of 4,096 tokens"
    assert sorted(Counter(whole.clusters).values()) == [64] * 10
    drawn = windows([words(*[1] * 4096 * 30)], 60)
    assert 8 <= len(set(drawn.clusters)) <= 30
    few = windows([words(*[1] * 4096 * 3)], 60)
    assert len(set(few.clusters)) == 1
    assert few.no_error is not None
    assert "8 blocks" in few.no_error

    short = [words(*[i] * 64) for i in range(2, 11)]
    mixed = windows([words(*[1] * 4096 * 10), *short], 1000)
    assert (mixed.unit, len(set(mixed.clusters)), mixed.no_error) == ("block of 4,096 tokens", 19, None)
    longer = windows([words(*[1] * 4096 * 3), *short[:4]], 1000)
    assert "one document of 5 holds 98 % of the tokens; an error needs" in longer.no_error
    equal = windows([words(*[1] * 640), *[words(*[i] * 64) for i in range(2, 12)]], 1000)
    assert (equal.unit, equal.no_error) == ("document", None)


def test_one_row_with_most_of_the_tokens_leaves_no_error(number_tokenizer):
    lengths = [900, *[10] * 20]
    texts = [words(*[i + 1] * length) for i, length in enumerate(lengths)]
    data = prepared(number_tokenizer, texts, sequence_length=1000, one_per_row=True)
    assert data.no_error == "one document of 21 holds 82 % of the tokens"
    lengths[0] = 100
    texts = [words(*[i + 1] * length) for i, length in enumerate(lengths)]
    assert prepared(number_tokenizer, texts, sequence_length=1000, one_per_row=True).no_error is None


def test_rows_and_pairs_are_their_own_clusters(number_tokenizer):
    rows = [{"prompt": f"w{i}", "response": f"w{i + 1}"} for i in range(5)]
    data = prepared(number_tokenizer, rows)
    assert (len(set(data.clusters)), data.unit) == (5, "row")
    again = prepared(number_tokenizer, rows[::-1])
    assert again.clusters == data.clusters[::-1]


def letters(text, needed):
    return [ord(c) for c in text]


def cut_windows(texts, tokenise, *, window, count, separator=None):
    """Token ids of the first windows, and the tokens left over."""

    def join(ids, following):
        between = [separator] if separator is not None and ids[-1] != separator else []
        return [*ids, *between, *following]

    drawn = first_windows(texts, tokenise, window=window, count=count, join=join)
    return [each.ids for each in drawn.windows], drawn.left_over


@given(
    st.lists(st.text(alphabet="abcxyz", max_size=30), max_size=12),
    st.integers(1, 9),
    st.integers(1, 6),
    st.sampled_from([None, 0]),
)
def test_windows_are_a_prefix_of_the_stream(texts, window, most, separator):
    filled = [t for t in texts if t]
    joint = "".join(filled) if separator is None else "\0".join(filled)
    stream = [ord(c) for c in joint]
    windows, left_over = cut_windows(texts, letters, window=window, count=most, separator=separator)
    together = [token for w in windows for token in w]
    assert together == stream[: len(together)]
    if len(stream) < window:
        assert together == stream
    else:
        assert all(len(w) == window for w in windows)
        assert len(windows) == min(most, len(stream) // window)
        assert left_over == (0 if len(stream) >= window * most else len(stream) % window)


def test_frame_is_read_off_the_tokenizer(bert_tokenizer, number_tokenizer):
    assert Frame.of(bert_tokenizer, ["", "w1 w2"]) == Frame((2,), (3,))
    assert Frame.of(number_tokenizer, ["w1"]) == Frame()
    assert Frame((2,), (3,)).wrap([9]) == [2, 9, 3]


def test_words_are_found_whole_longest_and_with_or_without_space():
    tokenizer = train_tokenizer(["this is island was wasp, is new york new york york"] * 3, vocab_size=300)
    finder = WordFinder(tokenizer, ["is", "york", "new york"])
    ids = plain_ids(tokenizer, "is this island, is york (new york) is")
    found = finder.find(ids)
    # independently: the text up to and including the marked token ends with the word, in this order
    marked = [(tokenizer.decode(ids[: i + 1]), w) for i, w in enumerate(found) if w >= 0]
    assert marked == [
        ("is", 0),
        ("is this island, is", 0),
        ("is this island, is york", 1),
        ("is this island, is york (new york", 2),
        ("is this island, is york (new york) is", 0),
    ]


def word_piece():
    pieces = ["[UNK]", "is", "##land", "##is", "th", "an", ",", "it"]
    core = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    core.normalizer, core.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    return core


def test_whole_words_in_word_pieces():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_piece(), unk_token="[UNK]")
    ids = plain_ids(tokenizer, "Is this an island, it is")
    found = WordFinder(tokenizer, ["is"]).find(ids)
    assert [i for i, word in enumerate(found) if word == 0] == [0, len(ids) - 1]


def test_windows_are_drawn_by_the_content_of_documents_alone():
    """Stored results, as those of the gallery, can be made again."""
    texts = ["one two", "three"]
    assert identities(open_source(texts, limit=1, window=1)) == [identity(text) for text in texts]

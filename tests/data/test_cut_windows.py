import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fulldepth.data.drawing import first_windows
from fulldepth.data.tokens import Frame, WordFinder, leading_ids, plain_ids


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


def test_packing_reads_no_further_than_needed():
    read = []

    def texts():
        for i in range(100):
            read.append(i)
            yield "abcde"

    cut_windows(texts(), letters, window=5, count=3)
    assert read == [0, 1, 2, 3]  # the fourth is looked at and left


@given(st.integers(1, 60), st.lists(st.integers(0, 400), max_size=3000))
def test_leading_ids_are_those_of_the_whole_text(number_tokenizer, needed, numbers):
    ids = leading_ids(number_tokenizer, " ".join(f"w{n}" for n in numbers), needed)
    assert ids == [n + 2 for n in numbers][: len(ids)]
    assert len(ids) >= min(needed, len(numbers))


def test_leading_ids_agree_with_a_real_bpe_tokenizer():
    from fulldepth.data import builtin_texts, train_tokenizer

    text = builtin_texts("heldout")[0][:120_000]
    tokenizer = train_tokenizer([text], vocab_size=600)
    whole = tokenizer(text, verbose=False)["input_ids"]
    for needed in (1, 100, 5000):
        ids = leading_ids(tokenizer, text, needed)
        assert needed <= len(ids) < len(whole)
        assert ids == whole[: len(ids)]


def test_frame_is_read_off_the_tokenizer(bert_tokenizer, number_tokenizer):
    assert Frame.of(bert_tokenizer, ["", "w1 w2"]) == Frame((2,), (3,))
    assert Frame.of(number_tokenizer, ["w1"]) == Frame()
    assert Frame((2,), (3,)).wrap([9]) == [2, 9, 3]


def test_words_are_found_whole_longest_and_with_or_without_space():
    from fulldepth.data import train_tokenizer

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


def metaspace():
    pieces = ["<unk>", "\u2581is", "is", "land", "\u2581th", "\u2581an", ",", "\u2581it", "\u2581"]
    core = Tokenizer(models.Unigram([(p, -1.0) for p in pieces], unk_id=0))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return core


@pytest.mark.parametrize("make", [word_piece, metaspace])
def test_whole_words_in_other_kinds_of_tokenizers(make):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make(), unk_token=make().id_to_token(0))
    ids = plain_ids(tokenizer, "Is this an island, it is")
    found = WordFinder(tokenizer, ["is"]).find(ids)
    marked = [i for i, word in enumerate(found) if word == 0]
    assert marked == [0, len(ids) - 1]

"""Packed text: windows against the plain formula, tokens on disk, files laid out as datatrove does."""

import pickle
from itertools import count

import datasets
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import BertJapaneseTokenizer

from data.conftest import jsonl, splitting
from fulldepth.core.progress import Watcher
from fulldepth.data import Documents, pack, packing, train_tokenizer
from fulldepth.data.packing import Encoder
from refusals import refused

EOS = 1
WORD = 2**64 - 1


def texts(n, seed=0, most=12):
    """`n` documents of 1 to `most` - 1 words."""
    random = np.random.default_rng(seed)
    return [" ".join(f"w{w}" for w in random.integers(0, 500, random.integers(1, most))) for _ in range(n)]


def mix(z):
    """The finaliser of splitmix64, in whole numbers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def chance(number, seed=0):
    """Output `number` of splitmix64 from a state that the seed gives, as a share."""
    state = mix((seed + 1) * 0x9E3779B97F4A7C15 & WORD)
    return mix((state + (number + 1) * 0x9E3779B97F4A7C15) & WORD) / 2**64


def by_hand(documents, share, seed=0):
    """Ids of the documents of both parts, joined: w7 is 9, and 1 ends a document that has a word."""
    parts = ([], [])
    for number, text in enumerate(documents):
        ids = [int(word[1:]) + 2 for word in text.split()]
        parts[chance(number, seed) < share].extend([*ids, EOS] if ids else [])
    return parts


def cut(stream, length):
    return [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]


def listed(windows, name="input_ids"):
    return [window[name].tolist() for window in windows]


def write(folder, documents, dtype="<u2", name="a"):
    """Token files as datatrove lays them out."""
    folder.mkdir(exist_ok=True)
    ids = [by_hand([text], 0)[0] for text in documents]
    np.array([i for each in ids for i in each], dtype).tofile(folder / f"{name}.ds")
    np.cumsum([len(each) for each in ids]).astype("<u8").tofile(folder / f"{name}.ds.index")


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=2, max_size=40),
    share=st.sampled_from([0.0, 0.3, 0.7]),
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(2, 9),
    most=st.none() | st.integers(9, 80),
    breaks=st.integers(1, 39),
    across=st.booleans(),
)
@example(sizes=[0, 1, 1], share=0.3, seed=1, length=2, most=None, breaks=1, across=True)
def test_any_documents_parts_and_files(
    tmp_path_factory, number_tokenizer, sizes, share, seed, length, most, breaks, across
):
    """Every window is that of the plain formula: leave out what is held out, join, cut."""
    folder, random = tmp_path_factory.mktemp("tokens"), np.random.default_rng(seed)
    documents = [" ".join(f"w{w}" for w in random.integers(0, 500, size)) for size in sizes]
    write(folder, documents[:breaks])
    write(folder, documents[breaks:], "<u4", "b")
    expected = [cut(part[:most], length) for part in by_hand(documents, share, seed)]
    options = {"sequence_length": length, "validation_share": share, "seed": seed, "across_documents": across}
    if not expected[0] or (share and not expected[1]):
        with refused():
            pack(None, number_tokenizer, tokens=folder, max_tokens=most, **options)
        return
    packed = pack(None, number_tokenizer, tokens=folder, max_tokens=most, **options)
    assert [listed(packed.train), listed(packed.validation)] == expected
    if not across:
        for window in packed.train:
            ids, places = window["input_ids"].tolist(), window["position_ids"].tolist()
            assert places == [i - max([0, *(j + 1 for j in range(i) if ids[j] == EOS)]) for i in range(length)]


def packed_in(cache, data, tokenizer, **options):
    return pack(data, tokenizer, cache=cache, **{"sequence_length": 4, "validation_share": 0.2, **options})


def test_every_way_of_tokenising_gives_the_same_file(tmp_path, number_tokenizer, monkeypatch):
    documents = [*texts(60), "", *texts(20, 1)]
    rows = [{"text": text} for text in documents]
    jsonl(tmp_path / "a.jsonl", *rows)
    stream = Documents("stream", {"name": "stream"}, lambda: iter(documents), is_stream=True)
    forms = [documents, tmp_path / "a.jsonl", datasets.Dataset.from_list(rows), stream]
    packed = [packed_in(tmp_path / str(n), form, number_tokenizer) for n, form in enumerate(forms)]
    monkeypatch.setattr(packing, "PROCESS_DOCUMENTS", 40)
    packed.append(packed_in(tmp_path / "processes", documents, number_tokenizer))
    assert len({each.hash for each in packed}) == 1
    assert listed(packed[0].train) == cut(by_hand(documents, 0.2)[0], 4)
    assert (packed[0].folder / "text.ds").stat().st_size == 2 * packed[0].tokens
    again = pickle.loads(pickle.dumps(packed[0].train))
    assert listed(again) == listed(packed[0].train)


def test_one_bar_shows_the_tokenising_and_nothing_without_a_watcher(tmp_path, number_tokenizer, monkeypatch, capfd):
    monkeypatch.setattr(packing, "PROCESS_DOCUMENTS", 10)
    monkeypatch.setattr(packing.os, "cpu_count", lambda: 2)
    shown = []
    watcher = Watcher(begin=lambda *task: shown.append(task), advance=shown.append)
    packed_in(tmp_path / "shown", texts(50), number_tokenizer, watcher=watcher)
    packed_in(tmp_path / "silent", texts(50), number_tokenizer)
    assert shown == [("Tokenising", 50), 20, 20, 10]
    assert capfd.readouterr() == ("", "")


def test_a_stream_is_read_no_further_than_needed(tmp_path, number_tokenizer):
    read = []

    def endless():
        for number in count():
            read.append(number)
            yield f"w{number % 500} w1 w2"

    data = Documents("endless", {"name": "endless"}, endless, is_stream=True)
    packed = packed_in(tmp_path, data, number_tokenizer, max_tokens=4000)
    assert packed.train.tokens == 4000
    assert len(read) < 5000


def test_tokens_are_made_once_for_all_seeds_lengths_and_shares(tmp_path, number_tokenizer, monkeypatch):
    documents = texts(80)
    first = packed_in(tmp_path, documents, number_tokenizer)
    monkeypatch.setattr(Encoder, "__call__", None)
    others = [{"seed": 3}, {"sequence_length": 5}, {"validation_share": 0.3}, {"across_documents": False}, {}]
    hashes = [packed_in(tmp_path, documents, number_tokenizer, **options).hash for options in others]
    assert len({*hashes}) == 5
    assert hashes[-1] == first.hash
    with pytest.raises(TypeError):
        packed_in(tmp_path, documents[1:], number_tokenizer)


def test_a_killed_run_goes_on_from_what_is_finished(tmp_path, number_tokenizer, monkeypatch):
    """The kill comes while the ids are written: neither texts are read nor tokenised again."""
    reads = []

    def read():
        reads.append(1)
        return iter(texts(50))

    data = Documents("killed", {"name": "killed"}, read)
    with monkeypatch.context() as patch:
        patch.setattr(packing, "_write", lambda batches, *_: len(list(batches)) / 0)
        with pytest.raises(ZeroDivisionError):
            packed_in(tmp_path, data, number_tokenizer)
    monkeypatch.setattr(Encoder, "__call__", None)
    assert listed(packed_in(tmp_path, data, number_tokenizer).train) == cut(by_hand(texts(50), 0.2)[0], 4)
    assert len(reads) == 1


@pytest.mark.parametrize("cores", [(1, 2), (2, 1), (2, 4)])
def test_a_killed_run_goes_on_with_another_number_of_cores(cores, tmp_path, number_tokenizer, monkeypatch):
    """Each core takes 20 documents at once, so another number of cores cuts the documents into other parts."""
    monkeypatch.setattr(packing, "PROCESS_DOCUMENTS", 20)
    documents = texts(70)
    with monkeypatch.context() as patch:
        patch.setattr(packing.os, "cpu_count", lambda: cores[0])
        patch.setattr(packing, "_write", lambda batches, *_: len(next(batches)) / 0)
        with pytest.raises(ZeroDivisionError):
            packed_in(tmp_path, documents, number_tokenizer)
    monkeypatch.setattr(packing.os, "cpu_count", lambda: cores[1])
    assert listed(packed_in(tmp_path, documents, number_tokenizer).train) == cut(by_hand(documents, 0.2)[0], 4)


def test_a_tokenizer_written_in_python_is_known_by_its_settings(tmp_path):
    """Its vocabulary is the same, and so is its class."""
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nthe\nthem\nThem\n")
    spelled = [
        BertJapaneseTokenizer(
            tmp_path / "vocab.txt", word_tokenizer_type="basic", do_lower_case=lower, eos_token="[SEP]"
        )
        for lower in (False, True, True)
    ]
    assert [tokenizer("Them")["input_ids"] for tokenizer in spelled] == [[2, 7, 3], [2, 6, 3], [2, 6, 3]]
    first, second, third = (Encoder(tokenizer).fingerprint() for tokenizer in spelled)
    assert first != second == third


def test_validation_windows_are_spread_or_come_from_other_text(tmp_path, number_tokenizer):
    documents = texts(100)
    whole = packed_in(tmp_path, documents, number_tokenizer)
    some = packed_in(tmp_path, documents, number_tokenizer, validation_sequences=3)
    held = listed(whole.validation)
    assert listed(some.validation) == [held[i * len(held) // 3] for i in range(3)]
    other = packed_in(tmp_path, documents, number_tokenizer, validation=texts(20, 5))
    assert listed(other.train) == cut(by_hand(documents, 0)[0], 4)
    assert listed(other.validation) == cut(by_hand(texts(20, 5), 0)[0], 4)
    assert len({whole.hash, some.hash, other.hash}) == 3


def test_parts_of_texts_have_no_end_and_no_target_at_their_first_token(tmp_path, number_tokenizer, bare_tokenizer):
    random = np.random.default_rng(0)
    documents = [random.integers(10, 400, size) for size in (3, 1, 9, 0, 6, 5)]
    packing.write_tokens(documents, tmp_path / "tokens")
    packing.write_tokens(documents[::-1], tmp_path / "held")
    packing.write_tokens(documents, tmp_path / "held")
    options = {"sequence_length": 4, "end_of_text": False}
    packed = pack(None, bare_tokenizer, tokens=tmp_path / "tokens", validation=tmp_path / "held", **options)
    labels = [label for ids in documents if len(ids) for label in [-100, *ids[1:].tolist()]]
    for part in (packed.train, packed.validation):
        assert listed(part) == cut(np.concatenate(documents).tolist(), 4)
        assert listed(part, "labels") == cut(labels, 4)
    words = texts(40)
    own = [number_tokenizer(text, add_special_tokens=False)["input_ids"] for text in words]
    packed = packed_in(tmp_path, words, number_tokenizer, validation_share=0, end_of_text=False)
    assert listed(packed.train) == cut([token for ids in own for token in ids], 4)
    assert packed.hash != packed_in(tmp_path, words, number_tokenizer, validation_share=0).hash


REFUSED = [
    ([], {}, "rows is empty"),
    (["", ""], {}, "empty"),
    (["w1 w2 w3 w4"], {}, "1 document,"),
    (["w1", "w2"], {"sequence_length": 40, "validation_share": 0}, "sequence of 40"),
    (texts(9), {"sequence_length": 1}, "sequence_length"),
    (texts(9), {"validation_share": 1}, "share"),
    (texts(9), {"vocab_size": 100}, "vocabulary"),
]


@pytest.mark.parametrize(("documents", "options", "name"), REFUSED)
def test_bad_text_and_settings_are_refused(tmp_path, number_tokenizer, documents, options, name):
    with refused(name):
        packed_in(tmp_path, documents, number_tokenizer, **options)


def test_bad_folders_and_tokenizers_are_refused(tmp_path, number_tokenizer, bare_tokenizer):
    def refuse(name, tokenizer=number_tokenizer, cache=tmp_path, **options):
        with refused(name):
            packed_in(cache, texts(9), tokenizer, **options)

    refuse("eos_token", bare_tokenizer)
    (tmp_path / "file").touch()
    refuse("data.cache", cache=tmp_path / "file")
    write(tmp_path / "tokens", texts(9))
    refuse("eos_token", train_tokenizer(texts(9), 300), tokens=tmp_path / "tokens")
    refuse("vocabulary", tokens=tmp_path / "tokens", vocab_size=100)
    with (tmp_path / "tokens" / "a.ds").open("ab") as file:
        file.write(b"x")
    refuse(r"a\.ds", tokens=tmp_path / "tokens")
    refuse("gone", tokens=tmp_path / "gone")


@pytest.mark.parametrize("highest", [2**16 - 1, 2**16])
def test_ids_that_two_bytes_do_not_hold_take_four(highest, tmp_path):
    words = splitting({"[UNK]": 0, "[EOS]": EOS, "last": highest}, eos_token="[EOS]")
    packed = pack(["last last"] * 4, words, sequence_length=3, validation_share=0.0, cache=tmp_path)
    assert listed(packed.train) == [[highest, highest, EOS]] * 4

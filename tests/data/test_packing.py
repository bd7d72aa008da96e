import json
import pickle
import signal
import subprocess
import sys
import threading
from itertools import count, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from fulldepth.data import open_documents, pack, token_cache
from fulldepth.data.documents import Documents
from fulldepth.data.token_cache import Encoder
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher

EOS = 1


def texts(n, seed=0, most=12):
    """`n` documents of 1 to `most` - 1 words."""
    random = np.random.default_rng(seed)
    return [" ".join(f"w{w}" for w in random.integers(0, 500, random.integers(1, most))) for _ in range(n)]


WORD = 2**64 - 1


def mix(z):
    """The finaliser of splitmix64, in whole numbers."""
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & WORD
    return z ^ (z >> 31)


def chance(number, seed=0):
    """Output `number` of splitmix64 from a state that the seed gives, as a share."""
    state = mix((seed + 1) * 0x9E3779B97F4A7C15 & WORD)
    return mix((state + (number + 1) * 0x9E3779B97F4A7C15) & WORD) / 2**64


def by_hand(documents, share, seed=0, most=None):
    """Ids of each document of both parts, written down anew: w7 is 9, and 1 ends a document."""
    parts = ([], [])
    for number, text in enumerate(documents):
        ids = [int(word[1:]) + 2 for word in text.split()]
        if ids:
            parts[chance(number, seed) < share].append([*ids, EOS])
        if most and any(sum(map(len, part)) >= most for part in parts):
            break
    return parts


def cut(documents, length):
    stream = [i for ids in documents for i in ids]
    return [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]


def listed(windows, name="input_ids"):
    return [window[name].tolist() for window in windows]


def files(cache):
    """Everything that was written and stays, by name."""
    (folder,) = [path for path in cache.iterdir() if path.is_dir()]
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def ids_in(cache):
    """Ids of each file of tokens."""
    (folder,) = cache.iterdir()
    return [json.loads(path.read_text())["tokens"] for path in sorted(folder.glob("*.json"))]


@pytest.fixture
def small(monkeypatch):
    """Files of 20 ids, batches of 4 documents."""
    monkeypatch.setattr(token_cache, "FILE_TOKENS", 20)
    monkeypatch.setattr(token_cache, "BATCH_DOCUMENTS", 4)


class Stopped(BaseException):
    """Stands for a kill: nothing catches it."""


def stopping(source, after):
    """The same documents, read no further than `after`."""

    def read(skip):
        for number, text in enumerate(islice(source, skip, None), start=skip):
            if number == after:
                raise Stopped
            yield text

    return Documents(source.name, source.identity, read, source.length)


@settings(max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=40),
    share=st.sampled_from([0.0, 0.01, 0.3, 0.7]),
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(2, 9),
    most=st.none() | st.integers(2, 80),
    file=st.integers(1, 30),
    workers=st.sampled_from([1, 2]),
    across=st.booleans(),
)
def test_any_documents_split_files_and_writers(
    tmp_path_factory, sizes, share, seed, length, most, file, workers, across
):
    """Every window is that of the plain formula: leave out what is held out, join, cut."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(500), unk_token="[UNK]", eos_token="[EOS]")
    documents = [" ".join(f"w{(17 * row + n) % 500}" for n in range(size)) for row, size in enumerate(sizes)]
    home = tmp_path_factory.mktemp("any")
    (home / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    parts = by_hand(documents, share, seed, most)
    streams = [[i for ids in part for i in ids][:most] for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_cache, "FILE_TOKENS", file)
        patch.setattr(token_cache, "BATCH_DOCUMENTS", 3)
        asked = dict(sequence_length=length, cache=home / "cache", max_tokens=most, validation_share=share, seed=seed)
        fits = len(streams[0]) >= length and (not share or (len(parts[1]) and len(streams[1]) >= length))
        made = []

        def run():
            try:
                made.append(pack(home / "text.jsonl", tokenizer, across_documents=across, **asked))
            except FulldepthError:
                made.append(None)

        threads = [threading.Thread(target=run) for _ in range(workers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run()  # from the cache
        if not fits:
            assert made == [None] * len(made)
            return
        for packed in made:
            assert listed(packed.train) == cut([streams[0]], length)
            assert listed(packed.validation) == cut([streams[1]], length)
            assert (packed.train.tokens, packed.validation.tokens) == tuple(map(len, streams))
            assert (packed.train.documents, packed.validation.documents) == tuple(map(len, parts))
            assert packed.hash == made[0].hash
            if not across:
                check_positions(packed.train, streams[0], length)


def check_positions(windows, stream, length):
    for window, ids in zip(windows, cut([stream], length), strict=True):
        expected, position = [], 0
        for token in ids:
            expected.append(position)
            position = 0 if token == EOS else position + 1
        assert window["position_ids"].tolist() == expected


def words(n):
    core = Tokenizer(models.WordLevel({"[UNK]": 0, "[EOS]": 1, **{f"w{i}": i + 2 for i in range(n)}}, "[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return core


def test_two_bytes_where_they_do_and_four_where_not(tmp_path):
    for size, each in ((2**16 - 2, 2), (2**16 - 1, 4)):
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(size), unk_token="[UNK]", eos_token="[EOS]")
        cache = tmp_path / str(size)
        packed = pack([f"w{size - 1} w0"], tokenizer, sequence_length=3, cache=cache, validation_share=0)
        assert listed(packed.train) == [[size + 1, 2, EOS]]
        assert len(files(cache)["000000.bin"]) == 3 * each + 4


def test_ids_are_those_that_the_tokenizer_gives(bert_tokenizer):
    tokenizer = pickle.loads(pickle.dumps(bert_tokenizer))
    tokenizer.eos_token = "[SEP]"
    written = ["w0 [SEP] w1", "", "w2 w3", "[MASK]"]
    for raw in (False, True):
        tokenizer.split_special_tokens = raw
        ids, lengths = Encoder(tokenizer)(written)
        plain = tokenizer(written, add_special_tokens=False)["input_ids"]
        expected = [[2, *ids, 3] if ids else [] for ids in plain]
        assert ids.tolist() == [i for ids in expected for i in ids]
        assert lengths.tolist() == list(map(len, expected))


def test_documents_added_move_none_and_the_seed_moves_some(tmp_path, number_tokenizer):
    def held_out(documents, **options):
        windows = pack(
            documents, number_tokenizer, sequence_length=2, cache=tmp_path, validation_share=0.3, **options
        ).validation
        return [i for window in listed(windows) for i in window]

    few, many = held_out(texts(60)), held_out([*texts(60), *texts(60, seed=1)])
    assert many[: len(few)] == few
    assert held_out(texts(60), seed=1)[: len(few)] != few
    share = pack(["w1"] * 4000, number_tokenizer, sequence_length=2, cache=tmp_path, validation_share=0.05).validation
    assert abs(share.documents / 4000 - 0.05) < 4 * (0.05 * 0.95 / 4000) ** 0.5


def test_validation_windows_are_spread_or_come_from_other_text(tmp_path, number_tokenizer):
    _, held_out = by_hand(texts(200), 0.5)
    whole = cut(held_out, 8)
    asked = dict(sequence_length=8, cache=tmp_path)
    some = pack(texts(200), number_tokenizer, **asked, validation_share=0.5, validation_sequences=7)
    assert listed(some.validation) == [whole[i * len(whole) // 7] for i in range(7)]
    all_of_them = pack(texts(200), number_tokenizer, **asked, validation_share=0.5, validation_sequences=10**6)
    assert listed(all_of_them.validation) == whole
    assert all_of_them.warnings == (f"The validation text fills only {len(whole)} of 1000000 sequences.",)
    other = pack(texts(50), number_tokenizer, **asked, validation=texts(30, seed=5), validation_share=0.5)
    assert listed(other.train) == cut(by_hand(texts(50), 0)[0], 8)
    assert listed(other.validation) == cut(by_hand(texts(30, seed=5), 0)[0], 8)
    assert len({some.hash, all_of_them.hash, other.hash}) == 3


def test_most_tokens_end_the_reading_of_an_endless_text(tmp_path, small, number_tokenizer):
    read = []

    def endless(skip):
        for number in count(skip):
            read.append(number)
            yield f"w{number % 500} w0"

    told = []
    watcher = Watcher(begin=lambda title, total: told.append(total), advance=told.append)
    documents = Documents("endless", {"kind": "test"}, endless)
    asked = dict(sequence_length=10, cache=tmp_path, validation_share=0.2)
    packed = pack(documents, number_tokenizer, max_tokens=100, watcher=watcher, **asked)
    train, held_out = by_hand((f"w{i % 500} w0" for i in count()), 0.2, most=100)
    stream = [i for ids in train for i in ids][:100]
    assert [i for window in listed(packed.train) for i in window] == stream
    assert packed.documents == len(train) + len(held_out)
    assert (packed.train.tokens, packed.validation.tokens) == (100, sum(map(len, held_out)))
    assert read == list(range(len(read)))
    assert len(read) <= packed.documents + 21 + 8  # the rest of a file of 20 ids or of the next, a batch ahead
    assert (told[0], sum(told[1:])) == (125, 125)
    before = len(read)
    longer = pack(documents, number_tokenizer, max_tokens=200, **asked)
    assert listed(longer.train)[:10] == listed(packed.train)
    assert read[before] > packed.documents  # nothing is read again
    assert longer.hash != packed.hash == pack(documents, number_tokenizer, max_tokens=100, **asked).hash


def test_one_cache_for_all_seeds_shares_and_lengths(tmp_path, number_tokenizer):
    def never(skip):
        raise AssertionError("read again")

    source = open_documents(texts(50))
    asked = {"sequence_length": 8, "cache": tmp_path, "validation_share": 0.2}
    first = pack(source, number_tokenizer, **asked)
    again = Documents(source.name, source.identity, never)
    assert pack(again, number_tokenizer, **asked).hash == first.hash
    hashes = {first.hash}
    for change in ({"sequence_length": 5}, {"validation_share": 0.3}, {"seed": 1}, {"max_tokens": 90}):
        hashes.add(pack(again, number_tokenizer, **{**asked, **change}).hash)
    assert len(hashes) == 5
    used = pickle.loads(pickle.dumps(number_tokenizer))
    used.pad_token = "[EOS]"
    used(["w1", "w1 w2"], padding=True, truncation=True, max_length=2)  # leaves settings behind
    assert pack(again, used, **asked).hash == first.hash
    other = PreTrainedTokenizerFast(tokenizer_object=words(499), unk_token="[UNK]", eos_token="[EOS]")
    moved = Documents(source.name, {**source.identity, "revision": "b"}, never)
    for documents, tokenizer in ((again, other), (moved, number_tokenizer)):
        with pytest.raises(AssertionError, match="read again"):
            pack(documents, tokenizer, **asked)


def test_the_hash_is_that_of_what_a_run_sees(tmp_path, small, number_tokenizer):
    def seen(documents, **options):
        asked = {"sequence_length": 4, "max_tokens": 60, "validation_share": 0.2, **options}
        return pack(documents, number_tokenizer, cache=tmp_path, **asked).hash

    assert seen(texts(40)) == seen([*texts(40), "w1 w2"])  # what lies behind the last token is not seen
    assert seen(texts(40)) != seen(["w499", *texts(40)[1:]])
    assert seen(texts(40)) != seen(texts(40), seed=1)
    assert seen(texts(40), validation_share=0) == seen(texts(40), validation_share=0, seed=1)
    joined = [f"{texts(2)[0]} {texts(2)[1]}", *texts(40)[2:]]
    assert seen(texts(40), validation_share=0) != seen(joined, validation_share=0)


@pytest.mark.parametrize(
    ("after", "damage"), [(3, "none"), (30, "none"), (59, "longer"), (30, "shorter"), (30, "no note"), (59, "lengths")]
)
def test_a_killed_run_is_taken_up_again(tmp_path, small, number_tokenizer, after, damage):
    def run(documents, cache, say=lambda line: None):
        options = dict(sequence_length=5, validation_share=0.3, watcher=Watcher(say=say))
        return pack(documents, number_tokenizer, cache=cache, **options)

    documents, said, read = open_documents(texts(60)), [], []
    straight = run(documents, tmp_path / "a")
    with pytest.raises(Stopped):
        run(stopping(documents, after), tmp_path / "b")
    (folder,) = (tmp_path / "b").iterdir()
    assert not [path for path in folder.iterdir() if path.name.endswith(".part")]
    whole = sorted(folder.glob("*.bin"))
    if whole and damage == "longer":
        whole[-1].write_bytes(whole[-1].read_bytes() + b"xyz")
    if whole and damage == "shorter":
        whole[0].write_bytes(whole[0].read_bytes()[:-1])
    if whole and damage == "no note":
        whole[-1].with_suffix(".json").unlink()
    if whole and damage == "lengths":
        whole[-1].write_bytes(bytes(whole[-1].stat().st_size))

    def noted(skip):
        read.append(skip)
        return islice(documents, skip, None)

    resumed = run(Documents(documents.name, documents.identity, noted), tmp_path / "b", said.append)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert resumed.hash == straight.hash
    goes_on = after > 3 and damage != "shorter"
    assert (read[0] > 0) == goes_on
    assert ("goes on after" in "".join(said)) == goes_on


def test_workers_read_the_same(tmp_path, small, number_tokenizer):
    options = dict(sequence_length=6, cache=tmp_path, validation_share=0.3, across_documents=False)
    packed = pack(texts(40), number_tokenizer, **options)
    packed.train[0]
    assert len(pickle.dumps(packed)) < 5000
    batches = list(DataLoader(pickle.loads(pickle.dumps(packed)).train, batch_size=4, num_workers=1))
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.cat([batch[name] for batch in batches]).tolist() == listed(packed.train, name)


KILLED = """
import os, pickle, signal, sys
from pathlib import Path
from fulldepth.data import pack, token_cache
token_cache.FILE_TOKENS, token_cache.BATCH_DOCUMENTS = 20, 4
write = token_cache.TokenCache._write_file
def dying(cache, ahead):
    write(cache, ahead)
    if len(cache.files) == 6:
        os.kill(os.getpid(), signal.SIGKILL)
token_cache.TokenCache._write_file = dying
documents, tokenizer = pickle.loads(Path(sys.argv[1]).read_bytes())
pack(documents, tokenizer, sequence_length=5, cache=Path(sys.argv[2]), validation_share=0.3)
"""


@pytest.mark.thorough
def test_kill_minus_9(tmp_path, small, number_tokenizer):
    (tmp_path / "input").write_bytes(pickle.dumps((texts(60), number_tokenizer)))
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "input", tmp_path / "a"], check=False)
    assert done.returncode == -signal.SIGKILL
    said = []
    for cache in (tmp_path / "a", tmp_path / "b"):
        options = dict(sequence_length=5, validation_share=0.3, watcher=Watcher(say=said.append))
        pack(texts(60), number_tokenizer, cache=cache, **options)
    assert len(said) == 1
    assert said[0].startswith("Tokenising goes on after 1")
    assert files(tmp_path / "a") == files(tmp_path / "b")


REFUSED = [
    (["", " "], {}, "texts"),
    ([], {}, "rows"),
    (["w1 w1 w1 w1"], {}, "0.3"),
    (["w1 w1 w1 w1"], {"validation_share": 0.9999}, "0.9999"),
    (["w1 w1"], {"validation_share": 0}, "training"),
    (["w1 " * 3000] * 2 + ["w1"] * 7, {"sequence_length": 2000}, "validation"),
    (texts(50), {"vocab_size": 100}, "tokenizer"),
    (texts(50), {"sequence_length": 1}, "sequence_length"),
    (texts(50), {"validation_share": 1}, "share"),
    (texts(50), {"max_tokens": 0}, "max_tokens"),
]


@pytest.mark.parametrize(("documents", "options", "name"), REFUSED)
def test_bad_text_and_settings_are_refused(tmp_path, number_tokenizer, documents, options, name):
    settled = {"sequence_length": 4, "cache": tmp_path, "validation_share": 0.3, **options}
    with pytest.raises(FulldepthError, match=name):
        pack(documents, number_tokenizer, **settled)


def test_bad_places_and_tokenizers_are_refused(tmp_path, number_tokenizer, bare_tokenizer):
    options = {"sequence_length": 4, "validation_share": 0}
    with pytest.raises(FulldepthError, match="eos_token"):
        pack(texts(50), bare_tokenizer, cache=tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(FulldepthError, match=r"file.*FULLDEPTH_CACHE"):
        pack(texts(50), number_tokenizer, cache=tmp_path / "file", **options)
    few = pack(["w1 w2 w3"] * 3, number_tokenizer, cache=tmp_path, vocab_size=10, **options)
    assert len(few.warnings) == 1
    few.require_documents(3)
    with pytest.raises(FulldepthError, match="4 processes"):
        few.require_documents(4)
    with pytest.raises(FulldepthError, match="the id 5"):  # from the cache as well
        pack(["w1 w2 w3"] * 3, number_tokenizer, cache=tmp_path, vocab_size=5, **options)

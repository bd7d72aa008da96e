import hashlib
import pickle
import signal
import subprocess
import sys
import threading
import time
from itertools import count

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from fulldepth.data import open_documents, pack, tokenising
from fulldepth.data.documents import Documents
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher

EOS = 1


def texts(n, seed=0, most=12):
    """`n` documents of 1 to `most` - 1 words."""
    random = np.random.default_rng(seed)
    return [" ".join(f"w{w}" for w in random.integers(0, 500, random.integers(1, most))) for _ in range(n)]


def by_hand(documents, share, seed=0):
    """Ids of each document of both parts, written down anew: w7 is 9, and 1 ends a document."""
    parts = ([], [])
    for number, text in enumerate(documents):
        ids = [int(word[1:]) + 2 for word in text.split()]
        chance = int(hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).hexdigest(), 16) / 2**64
        if ids:
            parts[chance < share].append([*ids, EOS])
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


@pytest.fixture
def small(monkeypatch):
    """Shards of 20 ids, batches of 4 documents, a note of the state every 20 ids."""
    for name, value in {"SHARD_TOKENS": 20, "BATCH_DOCUMENTS": 4, "SAVE_TOKENS": 20}.items():
        monkeypatch.setattr(tokenising, name, value)


class Stopped(BaseException):
    """Stands for a kill: nothing catches it."""


def stopping(source, after):
    """The same documents, read no further than `after`."""

    def read(skip):
        for number, text in enumerate(source.read(skip), start=skip):
            if number == after:
                raise Stopped
            yield text

    return Documents(source.name, source.identity, read, source.length)


@pytest.mark.parametrize("length", [2, 5, 16])
def test_windows_are_the_documents_end_to_end(tmp_path, small, number_tokenizer, length):
    documents = [*texts(40), "", " \n", *texts(20, seed=1)]
    train, held_out = by_hand(documents, 0.25)
    packed = pack(documents, number_tokenizer, sequence_length=length, cache=tmp_path, validation_share=0.25)
    assert listed(packed.train) == listed(packed.train, "labels") == cut(train, length)
    assert listed(packed.validation) == cut(held_out, length)
    assert (packed.train.documents, packed.validation.documents) == (len(train), len(held_out))
    assert (packed.documents, packed.tokens) == (60, sum(map(len, train + held_out)))
    assert packed.train[-1]["input_ids"].tolist() == cut(train, length)[-1]
    with pytest.raises(IndexError):
        packed.train[len(packed.train)]
    shards = sorted((name, len(data)) for name, data in files(tmp_path).items() if name[-9:-4].isdigit())
    assert max(size for _, size in shards) == 2 * 20
    assert len(shards) == sum(-(-sum(map(len, part)) // 20) for part in (train, held_out))


@settings(max_examples=25)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(2, 9), st.integers(1, 5), st.booleans(), st.data()
)
def test_any_lengths_of_documents_windows_and_shards(tmp_path_factory, sizes, length, shard, across, data):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words(500), unk_token="[UNK]", eos_token="[EOS]")
    documents = [" ".join(["w3"] * n) for n in sizes]
    train, _ = by_hand(documents, 0)
    most = data.draw(st.integers(length, 60))
    stream = [i for ids in train for i in ids][:most]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenising, "SHARD_TOKENS", shard)
        cache = tmp_path_factory.mktemp("cache")
        asked = dict(sequence_length=length, cache=cache, max_tokens=most, validation_share=0, across_documents=across)
        if len(stream) < length:
            with pytest.raises(FulldepthError):
                pack(documents, tokenizer, **asked)
            return
        packed = pack(documents, tokenizer, **asked)
    assert listed(packed.train) == cut([stream], length)
    if not across:
        for window, ids in zip(packed.train, cut([stream], length), strict=True):
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
        assert len(files(cache)["train-00000.bin"]) == 3 * each


def test_special_tokens_stand_where_the_tokenizer_puts_them(tmp_path, bert_tokenizer):
    tokenizer = pickle.loads(pickle.dumps(bert_tokenizer))
    tokenizer.eos_token = "[SEP]"
    packed = pack(["w0 w1", "w2"], tokenizer, sequence_length=7, cache=tmp_path, validation_share=0)
    assert listed(packed.train) == [[2, 5, 6, 3, 2, 7, 3]]  # [SEP] is there once


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
    packed = pack(
        documents,
        number_tokenizer,
        sequence_length=10,
        cache=tmp_path,
        max_tokens=100,
        validation_share=0.1,
        watcher=watcher,
    )
    train, held_out = by_hand((f"w{i % 500} w0" for i in range(len(read))), 0.1)
    stream = [i for ids in train for i in ids][:100]
    assert [i for window in listed(packed.train) for i in window] == stream
    meanwhile = packed.documents - 34  # 33 documents of 3 tokens are in `train`, and the first token of another
    assert (packed.train.tokens, packed.validation.tokens) == (100, sum(map(len, held_out[:meanwhile])))
    assert len(read) <= packed.documents + 4  # one batch ahead at most
    assert (told[0], sum(told[1:])) == (100, 100)


def test_the_same_call_reads_nothing_again(tmp_path, number_tokenizer):
    def never(skip):
        raise AssertionError("read again")

    source = open_documents(texts(50))
    first = pack(source, number_tokenizer, sequence_length=8, cache=tmp_path, validation_share=0.2)
    again = Documents(source.name, source.identity, never)
    for length in (8, 5):  # another length of windows is no other text
        packed = pack(again, number_tokenizer, sequence_length=length, cache=tmp_path, validation_share=0.2)
        assert (packed.hash == first.hash) == (length == 8)
    used = pickle.loads(pickle.dumps(number_tokenizer))
    used.pad_token = "[EOS]"
    used(["w1", "w1 w2"], padding=True, truncation=True, max_length=2)  # leaves settings behind
    pack(again, used, sequence_length=8, cache=tmp_path, validation_share=0.2)
    for change in ({"validation_share": 0.3}, {"seed": 1}, {"max_tokens": 90}):
        with pytest.raises(AssertionError, match="read again"):
            pack(again, number_tokenizer, **{"sequence_length": 8, "validation_share": 0.2, **change}, cache=tmp_path)
    other = PreTrainedTokenizerFast(tokenizer_object=words(499), unk_token="[UNK]", eos_token="[EOS]")
    with pytest.raises(AssertionError, match="read again"):
        pack(again, other, sequence_length=8, cache=tmp_path, validation_share=0.2)
    moved = Documents(source.name, {**source.identity, "revision": "b"}, never)
    with pytest.raises(AssertionError, match="read again"):
        pack(moved, number_tokenizer, sequence_length=8, cache=tmp_path, validation_share=0.2)


@pytest.mark.parametrize("after", [3, 30, 59])
@pytest.mark.parametrize("damage", ["none", "more behind", "shorter", "no note"])
def test_a_killed_run_is_taken_up_again(tmp_path, small, number_tokenizer, after, damage):
    def run(documents, cache, say=lambda line: None):
        options = dict(sequence_length=5, validation_share=0.3, watcher=Watcher(say=say))
        return pack(documents, number_tokenizer, cache=cache, **options)

    documents, said, read = open_documents(texts(60)), [], []
    straight = run(documents, tmp_path / "a")
    with pytest.raises(Stopped):
        run(stopping(documents, after), tmp_path / "b")
    (folder,) = (tmp_path / "b").iterdir()
    assert not (folder / "index.json").exists()
    if damage == "more behind":
        for path in folder.glob("*.bin"):
            path.write_bytes(path.read_bytes() + b"xyz")
        (folder / "train-00099.bin").write_bytes(b"xy")
    if damage == "shorter":
        for path in folder.glob("*-00000.bin"):
            path.write_bytes(path.read_bytes()[:-1])
    if damage == "no note":
        (folder / "progress.json").unlink(missing_ok=True)

    def noted(skip):
        read.append(skip)
        return documents.read(skip)

    resumed = run(Documents(documents.name, documents.identity, noted), tmp_path / "b", said.append)
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert resumed.hash == straight.hash
    goes_on = after >= 8 and damage in ("none", "more behind")
    assert (read[0] > 0) == goes_on
    assert ("goes on after" in "".join(said)) == goes_on
    assert ("damaged" in "".join(said)) == (after >= 8 and damage == "shorter")


def test_a_finished_cache_that_lost_something_is_made_anew(tmp_path, small, monkeypatch, number_tokenizer):
    monkeypatch.setattr(tokenising, "SHARD_TOKENS", 60)

    def run():
        return pack(texts(15), number_tokenizer, sequence_length=5, cache=tmp_path, validation_share=0.3)

    run()
    whole = files(tmp_path)
    (folder,) = tmp_path.iterdir()
    for name in whole:
        (folder / name).write_bytes(whole[name][:-2])
        run()
        assert files(tmp_path) == whole, name
        (folder / name).unlink()
        run()
        assert files(tmp_path) == whole, name


def test_only_one_of_two_writes(tmp_path, number_tokenizer):
    read, said, made = [], [], []
    source = open_documents(texts(40))

    def slowly(skip):
        read.append(skip)
        time.sleep(0.3)
        yield from source.read(skip)

    def run():
        documents = Documents(source.name, source.identity, slowly)
        watcher = Watcher(say=said.append)
        options = dict(sequence_length=5, cache=tmp_path, validation_share=0.3, watcher=watcher)
        made.append(pack(documents, number_tokenizer, **options))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == [0]
    assert len({packed.hash for packed in made}) == 1
    assert len(made) == 3
    assert len([line for line in said if "Waiting for another process" in line]) == 2


def test_workers_read_the_same(tmp_path, small, number_tokenizer):
    options = dict(sequence_length=6, cache=tmp_path, validation_share=0.3, across_documents=False)
    packed = pack(texts(40), number_tokenizer, **options)
    packed.train[0]
    assert len(pickle.dumps(packed)) < 5000
    batches = list(DataLoader(pickle.loads(pickle.dumps(packed)).train, batch_size=4, num_workers=1))
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.cat([batch[name] for batch in batches]).tolist() == listed(packed.train, name)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_stays_inside_documents(tmp_path, number_tokenizer, attention):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        attn_implementation=attention,
    )
    model = LlamaForCausalLM(config).double().eval()
    documents = texts(30, most=6)
    options = dict(sequence_length=13, cache=tmp_path, validation_share=0)
    packed = pack(documents, number_tokenizer, **options, across_documents=False)
    items = [packed.train[i] for i in range(len(packed.train))]
    batch = {name: torch.stack([item[name] for item in items]) for name in items[0]}
    with torch.no_grad():
        found = model(**batch, use_cache=False).logits
        across = model(input_ids=batch["input_ids"], use_cache=False).logits
        apart = torch.zeros_like(found)
        for row, ids in enumerate(batch["input_ids"]):
            ends = [i + 1 for i, token in enumerate(ids) if token == EOS or i == len(ids) - 1]
            for start, stop in zip([0, *ends], ends, strict=False):  # each document alone, by its EOS
                apart[row, start:stop] = model(input_ids=ids[None, start:stop], use_cache=False).logits[0]
    torch.testing.assert_close(found, apart, atol=1e-12, rtol=0)
    assert (found - across).abs().max() > 1e-3


def test_bad_input(tmp_path, number_tokenizer, bare_tokenizer):
    def expect(message, documents=None, tokenizer=number_tokenizer, **options):
        settled = {"sequence_length": 4, "cache": tmp_path, "validation_share": 0.3, **options}
        with pytest.raises(FulldepthError, match=message):
            pack(texts(50) if documents is None else documents, tokenizer, **settled)

    expect("texts is empty: 2 documents, and no token", ["", " "])
    expect("texts is empty: 0 documents", [])
    expect("too few to hold out a share of 0.3: none is left for validation", ["w1 w1 w1 w1"])
    expect("none is left for training", ["w1 w1 w1 w1"], validation_share=0.9999)
    expect("texts has 3 training tokens, fewer than one sequence of 4", ["w1 w1"], validation_share=0)
    expect("validation tokens, fewer than one sequence of 2000", ["w1 " * 3000] * 2 + ["w1"] * 7, sequence_length=2000)
    expect("no end-of-text token", tokenizer=bare_tokenizer)
    expect(r"has 502 tokens and gave the id \d+, but the model's vocabulary has 100", vocab_size=100)
    expect("at least 2 tokens.*got 1", sequence_length=1)
    expect("share must be at least 0 and below 1, got 1", validation_share=1)
    expect("max_tokens must be at least 1, got 0", max_tokens=0)
    (tmp_path / "file").write_text("")
    expect("Cannot write tokens to .*file", cache=tmp_path / "file")
    few = pack(["w1 w2 w3"] * 3, number_tokenizer, sequence_length=4, cache=tmp_path, validation_share=0, vocab_size=10)
    assert few.warnings == ("The tokenizer has 502 tokens, the model's vocabulary 10; no id beyond came up.",)
    few.require_documents(3)
    with pytest.raises(FulldepthError, match="has 3 training documents, fewer than the 4 processes"):
        few.require_documents(4)
    with pytest.raises(FulldepthError, match="gave the id 5, but"):  # from the cache as well
        pack(["w1 w2 w3"] * 3, number_tokenizer, sequence_length=4, cache=tmp_path, validation_share=0, vocab_size=5)


KILLED = """
import os, pickle, signal, sys
from pathlib import Path
from fulldepth.data import pack, tokenising
tokenising.SHARD_TOKENS, tokenising.BATCH_DOCUMENTS, tokenising.SAVE_TOKENS = 20, 4, 20
note = tokenising._write_json
def dying(path, value):
    note(path, value)
    if value["read"] > 30:
        os.kill(os.getpid(), signal.SIGKILL)
tokenising._write_json = dying
documents, tokenizer = pickle.loads(Path(sys.argv[1]).read_bytes())
pack(documents, tokenizer, sequence_length=5, cache=Path(sys.argv[2]), validation_share=0.3)
"""


@pytest.mark.slow
def test_kill_minus_9(tmp_path, small, number_tokenizer):
    (tmp_path / "input").write_bytes(pickle.dumps((texts(60), number_tokenizer)))
    done = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "input", tmp_path / "a"], check=False)
    assert done.returncode == -signal.SIGKILL
    said = []
    for cache in (tmp_path / "a", tmp_path / "b"):
        options = dict(sequence_length=5, validation_share=0.3, watcher=Watcher(say=said.append))
        pack(texts(60), number_tokenizer, cache=cache, **options)
    assert said == ["Tokenising goes on after 32 documents."]
    assert files(tmp_path / "a") == files(tmp_path / "b")


def test_a_share_of_the_builtin_corpus_is_some_of_each_novel(tmp_path, number_tokenizer):
    source = open_documents("corpus:builtin/heldout")
    packed = pack(str(source.name), number_tokenizer, sequence_length=32, cache=tmp_path, validation_share=0.2)
    assert (packed.name, packed.documents) == (source.name, source.length)
    chances = [int(hashlib.blake2b(f"0:{i}".encode(), digest_size=8).hexdigest(), 16) / 2**64 for i in range(81)]
    assert packed.validation.documents == sum(chance < 0.2 for chance in chances[: source.length])

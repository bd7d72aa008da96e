"""One way to rows: every form of data, every kind of file, samples that read little more than themselves, refusals."""

import io
import json
import os
import re
from collections import Counter

import datasets
import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest

from data.conftest import jsonl
from fulldepth.data import builtin_texts, files, open_documents, open_source, pack, train_tokenizer
from fulldepth.data.examples import read_examples
from fulldepth.data.opening import PIECE, open_data, sampled_texts, text_pieces
from refusals import refused


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows)


def forms(rows, folder):
    """The same rows as a list, a `.jsonl`, a `.tsv`, a `.parquet` file of several row groups, a data set, a folder."""
    texts = ["\t".join(rows[0]), *("\t".join(map(str, row.values())) for row in rows)]
    write(folder / "a.jsonl", lines(*rows))
    write(folder / "a.tsv", "\r\n".join(texts))
    pd.DataFrame(rows).to_parquet(folder / "a.parquet", row_group_size=97)
    third = len(rows) // 3
    write(folder / "parts" / "a.jsonl", lines(*rows[:third]) + "\n\n")
    write(folder / "parts" / "inside" / "b.tsv", "\n".join([texts[0], *texts[1 + third : 1 + 2 * third]]))
    pd.DataFrame(rows[2 * third :]).to_parquet(folder / "parts" / "inside" / "c.parquet")
    write(folder / "parts" / ".cache" / "x.jsonl", "hidden")
    table = datasets.Dataset.from_list(rows)
    paths = [folder / "a.jsonl", str(folder / "a.tsv"), folder / "a.parquet", folder / "parts"]
    return [rows, *paths, table, datasets.DatasetDict(train=table)]


def test_every_verb_reads_every_form(number_tokenizer, tmp_path):
    rows = [{"text": f"w{i} w{i + 1} w{i + 2}"} for i in range(6)]
    texts = [row["text"] for row in rows]
    hashes, prepared = set(), set()
    for data in [*forms(rows, tmp_path), texts]:
        opened = open_data(data)
        assert [row["text"] for _, row in opened.rows()] == texts
        assert len(opened) == 6
        assert [row["text"] for _, row in opened.rows(numbers=[1, 5])] == [texts[1], texts[5]]
        assert [record.text for record in open_source(data).records] == texts
        assert list(open_documents(data)) == texts
        hashes.add(read_examples(data, number_tokenizer, 64).meta["hash"])
        prepared.add(pack(data, number_tokenizer, sequence_length=4, cache=tmp_path / "c", validation_share=0.3).hash)
    assert len(hashes) == len(prepared) == 1


@pytest.mark.parametrize("chunk", [1, 7, files.CHUNK])
def test_blank_lines_are_no_rows_of_a_sample(chunk, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", chunk)
    texts = [f"w{i} é" for i in range(9)]
    for name, rows in {
        "a.jsonl": [json.dumps({"text": text}, ensure_ascii=False) for text in texts],
        "a.tsv": ["text\tsecond", *(f"{text}\tx" for text in texts)],
    }.items():
        for end in ("\n", "\r\n"):
            path = write(tmp_path / f"{len(end)}-{name}", f"{end}{end} \t{end}".join(rows) + end + end)
            opened = open_data(path)
            assert len(opened) == len(texts)
            assert [row["text"] for _, row in opened.rows(numbers=[0, 3, 8])] == [texts[i] for i in (0, 3, 8)]
            assert len(open_source(path, limit=5)) == 5
    spaces = "\u00a0\u3000"  # white space outside ASCII is the text of a row
    rows = ["", "text\tsecond", "w1\tx", f"{spaces}\t{spaces}", "w2\tx"]
    for name, start in (("spaces.tsv", ""), ("marked.tsv", "\ufeff")):
        opened = open_data(write(tmp_path / name, start + "\n".join(rows)))
        assert len(opened) == 3
        for chosen in (None, [0, 1, 2]):
            assert [row["text"] for _, row in opened.rows(numbers=chosen)] == ["w1", spaces, "w2"]
    damaged = write(tmp_path / "b.jsonl", '{"text": "w"}\n\0\0\n')  # the end of a file after a crash is no blank line
    with refused("not a text file"):
        open_source(damaged, limit=5)


def test_text_files(tmp_path):
    path = write(tmp_path / "a.txt", "\ufeffone\r\n\r\ntwo\n")
    source = open_source(path)
    assert (source.name, source.kind, [r.text for r in source.records]) == ("a.txt", "text", ["one\n\ntwo\n"])
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "notes.md", "not read")
    assert [r.text for r in open_source(tmp_path).records] == ["one\n\ntwo\n", "second"]
    assert len(open_source(tmp_path, limit=1)) == 1
    assert [r.text for r in open_source("corpus:builtin").records] == builtin_texts("heldout")
    assert len(open_source("corpus:builtin", split="train")) == 19


LABELLED = [
    ("a.jsonl", lines({"question": "q", "answer": "a"}), "pairs", [("q", "a", None)], ()),
    ("b.jsonl", lines({"text": "x\u2028", "label": "p"}, {"text": "b", "label": "n "}), None, [1, 0], ("n", "p")),
    ("c.jsonl", lines(*({"text": "a", "label": x} for x in (True, None, -1, " 0"))), None, [1, None, None, 0], ()),
    ("d.tsv", "\ufeffsentence\tlabel\r\na b\t 1\r\n\r\nc\t\r\n", None, [1, None], ()),
    ("e.jsonl", lines(*({"text": "a", "label": x} for x in ("x", "\ud800"))), None, [0, 1], ("x", "\ufffd")),
]


@pytest.mark.parametrize(("name", "content", "kind", "values", "classes"), LABELLED)
def test_labels_and_pairs(tmp_path, name, content, kind, values, classes):
    source = open_source(write(tmp_path / name, content))
    assert (source.kind, source.class_names) == (kind or "labelled-text", classes)
    assert [r.label if kind is None else (r.prompt, r.response, r.label) for r in source.records] == values


def test_tsv_quotes_nothing(tmp_path):
    path = write(tmp_path / "a.tsv", 'Quality\t#1 String\t#2 String\n1\t"he said\tshe did\n0\tx "y" z\t"\n')
    found = [(r.text, r.second, r.label) for r in open_source(path).records]
    assert found == [('"he said', "she did", 1), ('x "y" z', '"', 0)]


def test_names_of_classes_are_kept(tmp_path):
    tables = {}
    for name, classes in (("a", ["x", "y"]), ("b", ["x", "y"]), ("c", ["y", "x"])):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=classes)})
        tables[name] = datasets.Dataset.from_dict({"text": ["one", "two"], "label": [1, 0]}, features=features)
        tables[name].to_parquet(tmp_path / f"{name}.parquet")
    for data in (tmp_path / "a.parquet", tables["a"]):
        source = open_source(data)
        assert (source.class_names, [record.label for record in source.records]) == (("x", "y"), [1, 0])
    with refused("have different names"):
        open_source(tmp_path)


def test_splits_and_streams():
    table = datasets.Dataset.from_dict({"text": ["a", "b"]})
    splits = datasets.DatasetDict(train=table, validation=table.select([1]))
    assert [r.text for r in open_source(splits).records] == ["b"]
    assert [r.text for r in open_source(splits, split="train").records] == ["a", "b"]
    stream = open_source(table.to_iterable_dataset(), limit=1)
    assert [r.text for r in stream.records] == ["a"]
    assert "stream" in stream.warnings[0]
    for read, named in (
        (open_source, "is streamed and may have no end: give a limit"),
        (lambda _: open_source(splits, split="test"), "has no split 'test'. It has: train, validation"),
        (open_documents, "Give a `datasets.Dataset`"),
        (lambda _: open_documents([{"prompt": "a", "response": "b"}]), "rows row 1 has no column text"),
    ):
        with refused(named):
            read(table.to_iterable_dataset())


# Samples

IMBALANCED = [{"text": f"w{i % 500} w{i // 500}", "label": int(i % 10 == 0)} for i in range(4000)]
"""90 % of class 0, the classes in a regular order."""


def test_a_sample_has_the_shares_of_all(tmp_path):
    texts = {row["text"]: row["label"] for row in IMBALANCED}
    for data in forms(IMBALANCED, tmp_path):
        samples = [open_source(data, limit=400, seed=seed).records for seed in (0, 0, 1, 2, 3)]
        assert samples[0] == samples[1] != samples[2]
        labels = [record.label for sample in samples[1:] for record in sample]
        assert len(labels) == 1600
        assert binomtest(labels.count(0), 1600, 0.9).pvalue > 1e-4
        assert all(texts[record.text] == record.label for record in samples[0])
    assert "covers 400 of the 4,000 rows" in open_source(data, limit=400).warnings[0]


def test_names_of_classes_are_those_of_all_rows(tmp_path):
    rows = [{"text": f"w{i}", "label": "rare" if i == 7 else "z" if i % 2 else "a"} for i in range(1000)]
    labels = {row["text"]: row["label"] for row in rows}
    for data in forms(rows, tmp_path):
        source = open_source(data, limit=20)
        assert source.class_names == ("a", "rare", "z")
        assert all(source.class_names[record.label] == labels[record.text] for record in source.records)


def test_a_limit_reaches_the_reader(tmp_path, monkeypatch):
    """200,000 lines, 64 sequences: every line was parsed once."""
    parsed, original = Counter(), files._json_row
    monkeypatch.setattr(files, "_json_row", lambda *row: parsed.update(["rows"]) or original(*row))
    path = tmp_path / "a.jsonl"
    jsonl(path, *({"text": f"row {i}", "label": i % 3} for i in range(200_000)))
    records = open_source(path, limit=64).records
    assert len({record.text for record in records}) == 64
    assert parsed["rows"] == 65  # the first row states the columns
    assert all(record.text[4:] == str(int(record.where.split()[-1]) - 1) for record in records)
    parsed.clear()
    long = "one two three four five six seven eight nine ten " * 60
    jsonl(path, *({"text": f"{i} {long}"} for i in range(5000)))
    source = open_source(path, limit=64, window=256)
    assert sum(len(record.text) for record in source.records) >= 32 * 64 * 256
    assert parsed["rows"] <= 500
    parsed.clear()
    open_source(path, limit=64, window=256, order="first")
    assert parsed["rows"] <= 200


def test_only_row_groups_of_drawn_rows_are_read(tmp_path, monkeypatch):
    pd.DataFrame({"text": [f"row {i}" for i in range(10_000)]}).to_parquet(tmp_path / "a.parquet", row_group_size=100)
    read, original = [], files._parquet_batches
    monkeypatch.setattr(
        files, "_parquet_batches", lambda *given: (read.append(batch) or batch for batch in original(*given))
    )
    records = open_source(tmp_path / "a.parquet", limit=10).records
    assert len({record.text for record in records}) == 10
    assert all(record.where.split()[-1] == str(int(record.text[4:]) + 1) for record in records)
    assert len(read) <= 1 + 10


class Hub:
    """Stands for `datasets` with a Hub data set of two splits, and notes what is loaded."""

    def __init__(self, monkeypatch, table):
        self.asked, self.table = [], table
        monkeypatch.setattr(datasets, "get_dataset_split_names", lambda *_: ["test", "train"])
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def load(self, name, configuration, split, streaming):
        self.asked.append((name, configuration, split, streaming))
        self.table.info.download_checksums = {f"hf://datasets/{name}@{'ab' * 20}/x.parquet": {}}
        return self.table.to_iterable_dataset() if streaming else self.table


def test_of_a_hub_data_set_one_split_is_read_and_with_a_limit_little_of_it(monkeypatch):
    read = []

    def rows():
        for number in range(10_000):
            read.append(number)
            yield {"text": f"row {number}"}

    hub = Hub(monkeypatch, datasets.Dataset.from_dict({"text": ["a", "b"], "content": ["c", "d"]}))
    documents = open_documents("owner/name", config="sample", column="content")
    assert (documents.name, list(documents)) == ("owner/name:sample/train", ["c", "d"])
    assert documents.identity["revision"] == "ab" * 20
    assert list(open_documents("owner/name:sample", split="test", streaming=True)) == ["a", "b"]
    assert hub.asked == [("owner/name", "sample", "train", False), ("owner/name", "sample", "test", True)]
    assert open_documents("owner/name", held_out=True, column="content").name == "owner/name/test"
    hub.table = datasets.IterableDataset.from_generator(rows)
    hub.table.to_iterable_dataset = lambda: hub.table
    records = open_source("owner/name", limit=50).records
    assert hub.asked[-1] == ("owner/name", None, "test", True)
    assert len({record.text for record in records}) == 50
    assert [record.text for record in records] != [f"row {i}" for i in range(50)]
    assert len(read) <= 300
    two = "Two configurations were asked for: 'one' in name:one, and 'two'"
    for name, options, named in (("name", {"column": "txt"}, "txt"), ("name:one", {"config": "two"}, two)):
        with refused(named):
            list(open_documents(name, **options))


def test_hub_out_of_reach(monkeypatch):
    def fails(*_, **__):
        raise ConnectionError("Couldn't reach the Hub.")

    monkeypatch.setattr(datasets, "get_dataset_split_names", fails)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with refused(r"owner/name is .*reach the Hub.*HF_HUB_OFFLINE"):
        open_source("owner/name")


# Documents to train on


def test_long_text_is_cut_at_empty_lines_and_nothing_is_lost():
    text = "one\ntwo\n\nthree\n \nfour five six\nseven\neight\nnine"
    assert list(text_pieces(io.StringIO(text), 9)) == [
        "one\ntwo\n\n",
        "three\n \nfour five six\n",  # 22 characters and no empty line: cut at a line end
        "seven\neight\nnine",
    ]
    assert list(text_pieces(io.StringIO("a\n<|endoftext|>\n\n<|endoftext|>\n<|endoftext|>\nb"))) == ["a\n", "\n", "b"]
    novel = builtin_texts("heldout")[0]
    pieces = list(text_pieces(io.StringIO(novel)))
    assert "".join(pieces) == novel
    assert all(len(piece) >= PIECE for piece in pieces[:-1])
    assert list(open_documents("corpus:builtin/heldout"))[: len(pieces)] == pieces


def test_documents_of_a_folder_and_their_identity(tmp_path):
    pd.DataFrame({"body": ["e", "f"], "text": ["c", "d"]}).to_parquet(tmp_path / "b.parquet")
    write(tmp_path / "a.txt", "one\r\ntwo")
    path = write(tmp_path / "c" / "rows.jsonl", lines({"sentence": "g", "id": 1}, {"sentence": "h"}))
    whole = open_documents(tmp_path)
    assert list(whole) == list(whole) == ["one\ntwo", "c", "d", "g", "h"]
    assert [text for _, text in sampled_texts(open_data(tmp_path), 8, None)] == list(whole)
    assert list(open_documents(tmp_path / "b.parquet", column="body")) == ["e", "f"]
    assert open_documents(whole) is whole
    first = open_documents(path).identity
    assert json.loads(json.dumps(first)) == first == open_documents(str(path)).identity
    os.utime(path, ns=(10**18, 10**18))
    later = open_documents(path).identity
    others = [open_documents(path, column="id").identity, open_documents(path, articles=True).identity]
    lists = [open_documents(texts).identity for texts in (["ab", "c"], ["a", "bc"])]
    assert len({json.dumps(each) for each in (first, later, *others, *lists)}) == 6


@pytest.mark.parametrize("source", ["text", "rows"])
def test_an_article_is_a_document_and_is_held_out_whole(tmp_path, source):
    empty = " \n"
    articles = [
        f" = Article {n} of <unk> = \n{empty} It is known as art{n} , and x = {n} . \n{empty} = = Sources = = \n{empty}"
        f" = = = Of it = = = \n{empty} = {n} = is no heading of art{n} \n = y = 3 \n{empty}"
        for n in range(30)
    ]
    data = write(tmp_path / "wiki.txt", " \n" + "".join(articles))
    if source == "rows":
        found = "".join(articles).splitlines(keepends=True)
        data = [{"text": line if line.strip() else ""} for line in found]
    documents = open_documents(data, articles=True)
    assert [" ".join(text.split()) for text in documents] == [" ".join(text.split()) for text in articles]
    tokenizer = train_tokenizer(articles, 500)
    packed = pack(documents, tokenizer, sequence_length=16, cache=tmp_path / "cache", validation_share=0.2)
    train, held_out = (
        set(re.findall(r"art\d+(?= )", tokenizer.decode(np.concatenate([row["input_ids"] for row in part]))))
        for part in (packed.train, packed.validation)
    )
    assert train
    assert held_out
    assert not train & held_out
    assert packed.documents == 30


# Refusals

BAD_FILES = [
    ("empty.txt", b"", "empty.txt"),
    ("nul.txt", b"abc\0def", "byte 3"),
    ("bom.txt", b"\xef\xbb\xbfab\xff", r"byte 5 \(0xff\)"),
    ("a.jsonl", b'{"text": "a"}\n{"text": }\n', "a.jsonl line 2.* column 10"),
    ("b.jsonl", b'{"text": "a"}\n["text"]\n', "b.jsonl line 2"),
    ("c.jsonl", b'{"txt": "a", "id": 1}', "c.jsonl line 1.*'txt', 'id'"),
    ("e.jsonl", b'{"text": "a"}\n{"text": null}', "e.jsonl line 2, 'text'"),
    ("g.jsonl", b'{"text": "a", "label": 0.5}', "g.jsonl line 1.*0.5"),
    ("h.jsonl", b'{"text": "a", "label": "x"}\n{"text": "a", "label": 1}', "'x'"),
    ("h.jsonl", b'{"text": "a"}\n{"text": "a", "label": 1, "text": "b"}', "h.jsonl line 2.*'text' appears twice"),
    ("i.jsonl", b"[" * 200_000, "i.jsonl line 1"),
    ("j.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "j.jsonl line 1"),
    ("k.jsonl", b'{"text": "a"}\n{"text": "a", "label": 1}', "k.jsonl line 2"),
    ("a.tsv", b"text\tlabel\na\t1\nb\n", "a.tsv line 3"),
    ("b.tsv", b"a\tb\n1\t2\n", "b.tsv line 2.*'a', 'b'"),
    ("d.tsv", b"text\tlabel\tlabel\n1\t2\t3\n", "d.tsv line 1"),
    ("a.parquet", b"PAR1 not really", "a.parquet"),
    ("a.zip", b"PK not really", "has the suffix '.zip'. Expected one of: .txt, .*Unpack the archive"),
]


@pytest.mark.parametrize(("name", "content", "place"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES])
def test_bad_files(tmp_path, name, content, place):
    path = write(tmp_path / name, content)
    with refused(place):
        open_source(path)
    if "label" not in str(content) and name != "b.tsv":
        with refused(place.split(".*")[0]):
            list(open_documents(path))


BAD_DATA = [
    ("gone.txt", {}, "gone.txt"),
    ("./gone", {}, "./gone"),
    ("a\0b.txt", {}, "There is no file or folder a b.txt"),
    ("x" * 5000, {}, "Cannot read x+.*name too long"),
    ("~nobody-here/a.txt", {}, "Cannot read ~nobody-here/a.txt: .*home directory"),
    ("y" * 300 + ".jsonl", {}, "Cannot read y+.*name too long"),
    ("corpus:builtin/test", {}, "'test'"),
    (3, {}, "Cannot read data of type int. Expected a file .*, a list"),
    ([], {}, "rows is empty. Expected rows with the columns"),
    (["a", 1], {}, "must hold texts only or mappings only, got int, str"),
    ("FOLDER", {}, "holds no images and no .txt, .* files. Found: .csv"),
    ("FOLDER", {"split": "test"}, "has no splits and no configurations. Leave out 'test'"),
]


@pytest.mark.parametrize(("data", "options", "name"), BAD_DATA)
def test_bad_names_and_objects(tmp_path, data, options, name):
    write(tmp_path / "bad.csv", "a")
    with refused(name):
        open_source(tmp_path if data == "FOLDER" else data, **options)
    if name.startswith(("There is no", "Cannot read")):
        with refused(name):
            open_documents(data)

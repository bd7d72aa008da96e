import json

import datasets
import pytest

from fulldepth.data import open_source
from fulldepth.errors import FulldepthError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows)


def test_txt_is_one_document(tmp_path):
    path = write(tmp_path / "a.txt", "\ufeffone\r\n\r\ntwo\n")
    source = open_source(path)
    assert (source.name, source.kind) == ("a.txt", "text")
    assert [r.text for r in source.records] == ["one\n\ntwo\n"]
    assert open_source(str(path)).records[0].text == source.records[0].text


def test_folder_of_txt_in_the_order_of_names(tmp_path):
    write(tmp_path / "b.txt", "second")
    write(tmp_path / "a.txt", "first")
    write(tmp_path / "notes.md", "not read")
    assert [r.text for r in open_source(tmp_path).records] == ["first", "second"]
    assert len(open_source(tmp_path, limit=1)) == 1


def test_jsonl_of_each_kind(tmp_path):
    path = tmp_path / "a.jsonl"
    write(path, lines({"text": "one\u2028line"}, {"text": "b"}) + "\n\n")
    assert [r.text for r in open_source(path).records] == ["one\u2028line", "b"]
    assert len(open_source(path, limit=1)) == 1
    write(path, lines({"question": "q", "answer": "a"}))
    source = open_source(path)
    assert (source.kind, source.records[0].prompt, source.records[0].response) == ("pairs", "q", "a")
    write(path, lines({"sentence": "a", "label": "pos"}, {"sentence": "b", "label": "neg"}))
    source = open_source(path)
    assert (source.kind, source.class_names) == ("labelled-text", ("neg", "pos"))
    assert [r.label for r in source.records] == [1, 0]
    write(path, lines({"text": "a", "label": True}, {"text": "b", "label": None}, {"text": "c", "label": -1}))
    assert [r.label for r in open_source(path).records] == [1, None, None]


def test_tsv_quotes_nothing(tmp_path):
    path = write(tmp_path / "a.tsv", 'Quality\t#1 String\t#2 String\n1\t"he said\tshe did\n0\tx "y" z\t"\n')
    source = open_source(path)
    assert [(r.text, r.second, r.label) for r in source.records] == [('"he said', "she did", 1), ('x "y" z', '"', 0)]
    assert source.kind == "labelled-text"


def test_space_around_labels_does_not_count(tmp_path):
    path = write(tmp_path / "a.tsv", "text\tlabel\na\t 1\nb\t0 \nc\t\n")
    assert [r.label for r in open_source(path).records] == [1, 0, None]
    names = write(tmp_path / "a.jsonl", lines(*({"text": "a", "label": label} for label in ("x", "x ", " ", "\ud800"))))
    source = open_source(names)
    assert (source.class_names, [r.label for r in source.records]) == (("x", "\ufffd"), [0, 0, None, 1])


def test_tsv_with_the_line_ends_and_the_mark_of_windows(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes("\ufeffsentence\tlabel\r\na b\t1\r\nc\t0\r\n\r\n".encode())
    assert [(r.text, r.label) for r in open_source(path).records] == [("a b", 1), ("c", 0)]


def test_parquet_files_keep_the_names_of_their_classes(tmp_path):
    for name, classes in (("a", ["x", "y"]), ("b", ["x", "y"]), ("c", ["y", "x"])):
        features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=classes)})
        rows = datasets.Dataset.from_dict({"text": ["one", "two"], "label": [1, 0]}, features=features)
        rows.to_parquet(tmp_path / f"{name}.parquet")
    source = open_source(tmp_path / "a.parquet")
    assert (source.class_names, [record.label for record in source.records]) == (("x", "y"), [1, 0])
    with pytest.raises(FulldepthError, match="have different names"):
        open_source(tmp_path)
    (tmp_path / "c.parquet").unlink()
    assert open_source(tmp_path).class_names == ("x", "y")


def test_python_objects():
    assert [r.text for r in open_source(["a", "b"]).records] == ["a", "b"]
    assert open_source([{"prompt": "p", "response": "r"}]).kind == "pairs"
    source = open_source(["a"])
    assert open_source(source) is source
    table = datasets.Dataset.from_dict(
        {"text": ["a", "b"], "label": [1, 0], "other": [1, 2]},
        features=datasets.Features(
            {
                "text": datasets.Value("string"),
                "label": datasets.ClassLabel(names=["x", "y"]),
                "other": datasets.Value("int64"),
            }
        ),
    )
    source = open_source(table)
    assert source.class_names == ("x", "y")
    assert [(r.text, r.label) for r in source.records] == [("a", 1), ("b", 0)]
    assert [r.text for r in open_source(table, limit=1, order="first").records] == ["a"]
    splits = datasets.DatasetDict(train=table, validation=table.select([1]))
    assert [r.text for r in open_source(splits).records] == ["b"]
    assert [r.text for r in open_source(splits, split="train").records] == ["a", "b"]
    stream = open_source(table.to_iterable_dataset(), limit=1)
    assert [r.text for r in stream.records] == ["a"]
    assert stream.warnings == ("datasets.Dataset is a stream: its first 1 rows are read, which are no sample of all.",)
    with pytest.raises(FulldepthError, match="give a limit"):
        open_source(table.to_iterable_dataset())
    with pytest.raises(FulldepthError, match=r"no split 'test'\. It has: train, validation"):
        open_source(splits, split="test")


def test_hub_out_of_reach_says_what_was_tried(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach the Hub.")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(FulldepthError) as caught:
        open_source("owner/name")
    for part in ("owner/name is no file or folder", "as a Hub data set", "reach the Hub.", "HF_HUB_OFFLINE", ".jsonl"):
        assert part in str(caught.value)


def test_builtin_corpus_by_name():
    heldout, train = open_source("corpus:builtin"), open_source("corpus:builtin/train")
    assert heldout.name == "corpus:builtin/heldout"
    assert (len(heldout), len(train)) == (2, 19)
    assert open_source("corpus:builtin", split="train").records == train.records


BAD_FILES = [
    ("empty.txt", b"", "empty.txt"),
    ("blank.txt", b" \n\n", "blank.txt"),
    ("nul.txt", b"abc\0def", "byte 3"),
    ("latin.txt", "caf\xe9 au lait".encode("latin-1"), r"byte 3 \(0xe9\)"),
    ("bom.txt", b"\xef\xbb\xbfab\xff", r"byte 5 \(0xff\)"),
    ("a.jsonl", b'{"text": "a"}\n{"text": }\n', "a.jsonl line 2.* column 10"),
    ("b.jsonl", b'{"text": "a"}\n["text"]\n', "b.jsonl line 2"),
    ("c.jsonl", b'{"txt": "a", "id": 1}', "c.jsonl line 1.*'txt', 'id'"),
    ("d.jsonl", b'{"text": "a"}\n{"label": 1}', "d.jsonl line 2"),
    ("e.jsonl", b'{"text": 5}', "e.jsonl line 1, 'text'"),
    ("f.jsonl", b'{"text": null}', "f.jsonl line 1, 'text'"),
    ("g.jsonl", b'{"text": "a", "label": 0.5}', "g.jsonl line 1.*0.5"),
    ("h.jsonl", b'{"text": "a", "label": "x"}\n{"text": "a", "label": 1}', "'x'"),
    ("i.jsonl", b"[" * 200_000, "i.jsonl line 1"),
    ("j.jsonl", b'{"text": ' + b"1" * 5000 + b"}", "j.jsonl line 1"),
    ("k.jsonl", b'{"text": "a"}\n{"text": "a", "label": 1}', "k.jsonl line 2"),
    ("a.tsv", b"text\tlabel\na\t1\nb\n", "a.tsv line 3"),
    ("b.tsv", b"a\tb\n1\t2\n", "b.tsv line 2.*'a', 'b'"),
    ("c.tsv", b"text\tlabel\n", "c.tsv"),
    ("d.tsv", b"text\tlabel\tlabel\n1\t2\t3\n", "d.tsv line 1"),
    ("a.parquet", b"PAR1 not really", "a.parquet"),
    ("a.pkl", b"\x80\x04.", "a.pkl"),
    ("a.zip", b"PK not really", "a.zip.*Unpack"),
]


@pytest.mark.parametrize(("name", "content", "place"), BAD_FILES, ids=[name for name, _, _ in BAD_FILES])
def test_bad_files(tmp_path, name, content, place):
    with pytest.raises(FulldepthError, match=place):
        open_source(write(tmp_path / name, content))


BAD_DATA = [
    ("gone.txt", {}, "gone.txt"),
    ("./gone", {}, "./gone"),
    ("corpus:builtn", {}, "corpus:builtn"),
    ("corpus:builtin/test", {}, "'test'"),
    (3, {}, "int"),
    ([], {}, "rows"),
    (["a", 1], {}, "int, str"),
    (["a"], {"limit": 0}, "limit 0"),
    ("FOLDER", {}, ".csv"),
    ("FOLDER", {"split": "test"}, "'test'"),
]


@pytest.mark.parametrize(("data", "options", "name"), BAD_DATA)
def test_bad_names_and_objects(tmp_path, data, options, name):
    write(tmp_path / "bad.csv", "a")
    with pytest.raises(FulldepthError, match=name):
        open_source(tmp_path if data == "FOLDER" else data, **options)

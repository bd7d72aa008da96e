import io
import json
import os
import re
from itertools import islice

import datasets
import pandas as pd
import pytest

from fulldepth.data import builtin_texts, open_documents, pack, train_tokenizer
from fulldepth.data.documents import PIECE, text_pieces
from fulldepth.errors import FulldepthError


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def lines(*rows):
    return "\n".join(json.dumps(row) for row in rows)


def test_long_text_is_cut_at_empty_lines_and_nothing_is_lost():
    text = "one\ntwo\n\nthree\n \nfour five six\nseven\neight\nnine"
    #        4   8    9     15  17
    assert list(text_pieces(io.StringIO(text), 9)) == [
        "one\ntwo\n\n",
        "three\n \nfour five six\n",  # 22 characters and no empty line: cut at a line end
        "seven\neight\nnine",
    ]
    assert list(text_pieces(io.StringIO("a\n<|endoftext|>\n\n<|endoftext|>\n<|endoftext|>\nb"))) == ["a\n", "\n", "b"]
    assert list(text_pieces(io.StringIO("short\n\n"))) == ["short\n\n"]
    novels = builtin_texts("heldout")
    for novel in novels:
        pieces = list(text_pieces(io.StringIO(novel)))
        assert "".join(pieces) == novel
        assert all(len(piece) >= PIECE for piece in pieces[:-1])


def test_files_of_each_kind_and_folders_of_them(tmp_path):
    pd.DataFrame({"body": ["e", "f"], "text": ["c", "d"]}).to_parquet(tmp_path / "b.parquet")
    write(tmp_path / "a.txt", "\ufeffone\r\ntwo")
    write(tmp_path / "c" / "rows.jsonl", lines({"sentence": "g", "id": 1}, {"sentence": "h"}))
    write(tmp_path / "c" / "rows.tsv", "id\ttext\n1\ti\n")
    write(tmp_path / ".cache" / "x.txt", "hidden")
    write(tmp_path / "notes.md", "not read")
    whole = open_documents(tmp_path)
    assert list(whole) == list(whole) == ["one\ntwo", "c", "d", "g", "h", "i"]
    assert whole.length is None
    table = open_documents(str(tmp_path / "b.parquet"), column="body")
    assert (table.name, table.length, list(table)) == ("b.parquet", 2, ["e", "f"])
    assert list(open_documents(["x\ud800", "y"])) == ["x\ufffd", "y"]
    assert open_documents(table) is table


def test_files_are_read_no_further_than_needed(tmp_path):
    path = write(tmp_path / "a.jsonl", lines(*[{"text": f"{i}"} for i in range(3)]) + "\nnot JSON\n")
    documents = open_documents(path)
    assert list(islice(documents, 3)) == ["0", "1", "2"]
    with pytest.raises(FulldepthError, match=r"a.jsonl line 4 is not valid JSON"):
        list(documents)


def test_identity_changes_with_what_is_read(tmp_path):
    path = write(tmp_path / "a.jsonl", lines({"text": "a", "body": "b"}))
    os.utime(path, ns=(10**18, 10**18))
    first = open_documents(path).identity
    assert json.loads(json.dumps(first)) == first == open_documents(str(path)).identity
    assert open_documents(path, column="body").identity != first
    os.utime(path, ns=(10**18, 10**18 + 1))
    assert open_documents(path).identity != first
    assert open_documents(["ab", "c"]).identity != open_documents(["a", "bc"]).identity


TABLE = {"text": ["a", "b", "c"], "content": ["d", "e", "f"]}


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_data_set(monkeypatch, streaming):
    asked = []

    def load_dataset(name, configuration, split, streaming):
        asked.append((name, configuration, split, streaming))
        table = datasets.Dataset.from_dict(TABLE)
        if streaming:
            table = table.to_iterable_dataset()
        else:
            table.info.download_checksums = {f"hf://datasets/{name}@{'ab' * 20}/x.parquet": {}}
        kind = datasets.IterableDatasetDict if streaming else datasets.DatasetDict
        return kind(test=table, train=table) if split is None else table

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    documents = open_documents("owner/name", config="sample", column="content", streaming=streaming)
    assert (documents.name, documents.length) == ("owner/name:sample/train", None if streaming else 3)
    assert list(documents) == list(documents) == ["d", "e", "f"]
    assert list(documents.read(2)) == ["f"]
    assert documents.identity["revision"] == (None if streaming else "ab" * 20)
    assert list(open_documents("owner/name:sample", split="test", streaming=streaming)) == ["a", "b", "c"]
    assert asked == [("owner/name", "sample", None, streaming), ("owner/name", "sample", "test", streaming)]
    with pytest.raises(FulldepthError, match=r"Unknown column of name/train 'txt'. Did you mean 'text'"):
        open_documents("name", column="txt", streaming=streaming)
    with pytest.raises(FulldepthError, match="Two configurations"):
        open_documents("name:one", config="two")


def test_hub_that_stops_in_the_middle(monkeypatch):
    def rows():
        yield {"text": "a"}
        raise ConnectionError("Server disconnected.")

    monkeypatch.setattr(
        datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(rows, split="train")
    )
    documents = open_documents("owner/name", split="train", streaming=True)
    with pytest.raises(FulldepthError, match=r"stopped after 1 documents: Server disconnected. Start again"):
        list(documents)


def wikitext(count):
    """Articles in the layout of WikiText, and their rows on the Hub, where white space is no text."""
    empty = " \n"
    articles = [
        f" = Article {n} of <unk> = \n{empty} It is known as art{n} , and x = {n} . \n{empty} = = Sources = = \n{empty}"
        f" = = = Of it = = = \n{empty} = {n} = is no heading of art{n} \n = y = 3 \n{empty}"
        for n in range(count)
    ]
    rows = [line if line.strip() else "" for line in "".join(articles).splitlines(keepends=True)]
    return articles, [{"text": row} for row in rows]


@pytest.mark.parametrize("source", ["text", "rows", "parquet"])
def test_an_article_is_a_document_and_is_held_out_whole(tmp_path, source):
    articles, rows = wikitext(30)
    if source == "text":
        data = write(tmp_path / "wiki.txt", " \n" + "".join(articles))
    elif source == "rows":
        data = datasets.Dataset.from_list(rows)
    else:
        data = tmp_path / "wiki.parquet"
        pd.DataFrame(rows).to_parquet(data, row_group_size=7)
    documents = open_documents(data, articles=True)
    found = list(documents)
    assert [" ".join(text.split()) for text in found] == [" ".join(text.split()) for text in articles]
    assert list(documents.read(28)) == found[28:]
    assert documents.identity != open_documents(data).identity
    tokenizer = train_tokenizer(articles, 500)
    packed = pack(documents, tokenizer, sequence_length=16, cache=tmp_path / "cache", validation_share=0.2)
    train, held_out = (
        set(re.findall(r"art\d+(?= )", tokenizer.decode([i for row in part for i in row["input_ids"]])))
        for part in (packed.train, packed.validation)
    )
    assert train
    assert held_out
    assert not train & held_out
    assert packed.documents == 30


REFUSED = [
    ("a.jsonl", lines({"text": "a"}, {"text": None}), {}, "'text'"),
    ("b.jsonl", lines({"text": "a"}, {"x": "a"}), {}, "b.jsonl line 2"),
    ("c.jsonl", lines({"prompt": "a"}), {}, "c.jsonl line 1"),
    ("a.txt", "a", {"split": "test"}, "'test'"),
    ("empty.txt", "", {}, "empty.txt"),
]


@pytest.mark.parametrize(("name", "content", "options", "named"), REFUSED)
def test_bad_files_are_refused(tmp_path, name, content, options, named):
    with pytest.raises(FulldepthError, match=named):
        list(open_documents(write(tmp_path / name, content), **options))


def test_columns_of_another_kind_are_refused(tmp_path):
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "d.parquet")
    for options in ({}, {"column": "x"}):
        with pytest.raises(FulldepthError, match=r"d\.parquet"):
            list(open_documents(tmp_path / "d.parquet", **options))

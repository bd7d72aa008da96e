"""One reader: every verb reads every form of the same rows."""

import json

import datasets
import pandas as pd
import pytest

from fulldepth.data import open_documents, open_source, pack
from fulldepth.data.examples import read_examples
from fulldepth.data.opening import open_data
from fulldepth.errors import FulldepthError

ROWS = [{"text": f"w{i} w{i + 1} w{i + 2}"} for i in range(6)]
TEXTS = [row["text"] for row in ROWS]


@pytest.fixture
def forms(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    lines = [json.dumps(row) for row in ROWS]
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    (folder / "a.jsonl").write_text("\n".join(lines[:2]))
    (folder / "inside" / "b.tsv").write_text("text\n" + "\n".join(TEXTS[2:4]))
    pd.DataFrame(ROWS[4:]).to_parquet(folder / "inside" / "c.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return [tmp_path / "a.jsonl", str(folder), table, datasets.DatasetDict(train=table), ROWS, TEXTS]


def test_every_verb_reads_every_form(forms, number_tokenizer, tmp_path):
    hashes, prepared = set(), set()
    for data in forms:
        assert [row["text"] for _, row in open_data(data).rows()] == TEXTS
        assert [record.text for record in open_source(data).records] == TEXTS
        assert list(open_documents(data)) == TEXTS
        hashes.add(read_examples(data, number_tokenizer, 64).meta["hash"])
        packed = pack(data, number_tokenizer, sequence_length=4, cache=tmp_path / "cache", validation_share=0.3)
        prepared.add(packed.hash)
    assert len(hashes) == len(prepared) == 1


def test_tokens_of_a_data_set_are_found_again_by_its_fingerprint(number_tokenizer, tmp_path):
    def folder(rows):
        options = {"sequence_length": 4, "cache": tmp_path, "validation_share": 0}
        return pack(datasets.Dataset.from_list(rows), number_tokenizer, **options).folder

    assert folder(ROWS) == folder(ROWS) != folder(ROWS[1:] + ROWS[:1])
    with pytest.raises(FulldepthError, match="Give a Dataset"):
        open_documents(datasets.Dataset.from_list(ROWS).to_iterable_dataset())


def test_a_limit_and_the_place_of_a_row(forms):
    for data in forms:
        (where, row), *others = open_data(data, limit=2).rows()
        assert len(others) == 1
        assert row["text"] == TEXTS[0]
        assert where.endswith((" row 1", "a.jsonl line 1"))

"""Samples: uniform over rows and over text, the same in any order, without reading more than they need; clusters."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
from scipy.stats import binomtest, chisquare

from fulldepth.data import drawing as drawing_module
from fulldepth.data import files as files_module
from fulldepth.data import open_source, prepare
from fulldepth.data.drawing import Window, block_clusters, draw_documents, pieces_of
from fulldepth.uncertainty import distinct, identity

IMBALANCED = [{"text": f"w{i % 500} w{i // 500}", "label": int(i % 10 == 0)} for i in range(4000)]
"""90 % of class 0, the classes in a regular order."""


def words(numbers: Any) -> str:
    return " ".join(f"w{n}" for n in numbers)


def forms(rows: list[dict[str, Any]], folder: Any) -> list[Any]:
    """The same rows as a list, a `.jsonl`, a `.tsv` and a `.parquet` file of several row groups, and a data set."""
    (folder / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (folder / "a.tsv").write_text("\n".join(["text\tlabel", *(f"{row['text']}\t{row['label']}" for row in rows)]))
    pd.DataFrame(rows).to_parquet(folder / "a.parquet", row_group_size=97)
    return [rows, folder / "a.jsonl", folder / "a.tsv", folder / "a.parquet", datasets.Dataset.from_list(rows)]


def test_a_sample_of_labelled_rows_has_the_shares_of_all(tmp_path: Any) -> None:
    """Balanced by class, unsaid, a constant classifier had 0.5 to 0.77 in place of 0.9."""
    for data in forms(IMBALANCED, tmp_path):
        labels = [record.label for seed in range(4) for record in open_source(data, limit=400, seed=seed).records]
        assert len(labels) == 1600
        assert binomtest(labels.count(0), 1600, 0.9).pvalue > 1e-4
        source = open_source(data, limit=400)
        assert [record.text for record in source.records] == [r.text for r in open_source(data, limit=400).records]
        assert [record.text for record in source.records] != [
            record.text for record in open_source(data, limit=400, seed=1).records
        ]
        texts = {row["text"]: row["label"] for row in IMBALANCED}
        assert all(texts[record.text or ""] == record.label for record in source.records)


def test_a_sample_does_not_depend_on_the_order_of_rows(tmp_path: Any) -> None:
    shuffled = random.Random(1).sample(IMBALANCED, len(IMBALANCED))
    (tmp_path / "other").mkdir()
    pairs = zip(forms(IMBALANCED, tmp_path), forms(shuffled, tmp_path / "other"), strict=True)
    for one, other in list(pairs)[:3]:  # rows of tables are drawn by their numbers
        texts, again = ({record.text for record in open_source(data, limit=50).records} for data in (one, other))
        assert texts == again


def test_equal_rows_are_drawn_one_by_one(tmp_path: Any) -> None:
    rows = [{"text": "same", "label": 0}] * 900 + [{"text": f"w{i}", "label": 1} for i in range(100)]
    for data in forms(rows, tmp_path):
        labels = [record.label for seed in range(5) for record in open_source(data, limit=100, seed=seed).records]
        assert binomtest(labels.count(0), 500, 0.9).pvalue > 1e-4


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the rows that are parsed."""
    counts: Counter[str] = Counter()
    for name in ("_json_row", "_tsv_row"):
        original = getattr(files_module, name)

        def counting(*arguments: Any, original: Any = original, name: str = name) -> Any:
            counts[name] += 1
            return original(*arguments)

        monkeypatch.setattr(files_module, name, counting)
    return counts


def test_a_limit_reaches_the_reader(tmp_path: Any, parsed: Counter[str]) -> None:
    """200,000 rows, 64 sequences: every row was parsed."""
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        for i in range(200_000):
            file.write(f'{{"text": "row {i}", "label": {i % 3}}}\n')
    source = open_source(path, limit=64)
    assert len({record.text for record in source.records}) == 64
    assert parsed["_json_row"] <= 66  # the first row states the columns
    assert all((record.text or "")[4:] == str(int(record.where.split()[-1]) - 1) for record in source.records)
    parsed.clear()
    text = "one two three four five six seven eight nine ten " * 60
    with path.open("w") as file:
        for i in range(5000):
            file.write(json.dumps({"text": f"{i} {text}"}) + "\n")
    source = open_source(path, limit=64, window=256)
    assert 55 <= len(source) <= 64
    assert parsed["_json_row"] <= 200


def test_only_row_groups_of_drawn_rows_are_read(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pd.DataFrame({"text": [f"row {i}" for i in range(10_000)], "label": 0}).to_parquet(
        tmp_path / "a.parquet", row_group_size=100
    )
    read: list[Any] = []
    original = files_module._parquet_batches

    def counting(path: Any, names: Any, chosen: Any = None) -> Any:
        for batch in original(path, names, chosen):
            read.append(chosen)
            yield batch

    monkeypatch.setattr(files_module, "_parquet_batches", counting)
    source = open_source(tmp_path / "a.parquet", limit=10)
    assert len({record.text for record in source.records}) == 10
    assert all(record.where.split()[-1] == str(int((record.text or "")[4:]) + 1) for record in source.records)
    assert len([groups for groups in read if groups is not None]) <= 10


def test_names_of_classes_are_those_of_all_rows(tmp_path: Any) -> None:
    rows = [{"text": f"w{i}", "label": "rare" if i == 7 else "z" if i % 2 else "a"} for i in range(1000)]
    for data in forms(rows, tmp_path):
        source = open_source(data, limit=20)
        assert source.class_names == ("a", "rare", "z")
        texts = {row["text"]: row["label"] for row in rows}
        assert all(source.class_names[record.label or 0] == texts[record.text or ""] for record in source.records)


def test_windows_are_uniform_over_all_text(number_tokenizer: Any) -> None:
    """Documents of 1 to 40 lengths of a window get windows by their length; at most once each piece."""
    sizes = [100, 200, 400, 800, 1600, 4000]
    texts = [words([d] * n) for d, n in enumerate(sizes)]
    counts: Counter[int] = Counter()
    for seed in range(60):
        data = prepare(
            open_source(texts),
            task="causal-lm",
            tokenizer=number_tokenizer,
            sequence_length=8,
            max_sequences=40,
            seed=seed,
        )
        assert len(data) == 40
        for example in data.examples:
            (document,) = set(example.input_ids.tolist())  # a window is within a document
            counts[document - 2] += 1
    expected = 40 * 60 * np.array(sizes) / sum(sizes)
    observed = [counts[d] for d in range(len(sizes))]
    assert chisquare(observed, expected).pvalue > 1e-3  # without replacement it varies less than a multinomial


def test_windows_are_contiguous_distinct_and_spread_over_a_document(number_tokenizer: Any) -> None:
    text = words(i % 499 for i in range(499 * 40))
    starts = []
    for seed in range(40):
        data = prepare(
            open_source([text]),
            task="causal-lm",
            tokenizer=number_tokenizer,
            sequence_length=16,
            max_sequences=30,
            seed=seed,
        )
        for example in data.examples:
            steps = np.diff(example.input_ids.numpy())
            assert set(steps.tolist()) <= {1, -498}
        starts += [int(example.input_ids[0]) for example in data.examples]
    observed, _ = np.histogram(starts, bins=10, range=(2, 501))
    assert chisquare(observed).pvalue > 1e-3


def test_few_characters_are_tokenised() -> None:
    """24 windows of the built-in corpus do not need all of its 0.8 MB."""

    class Counting:
        characters, name_or_path, eos_token_id, bos_token_id, unk_token_id = 0, "counting", None, None, None
        pad_token_id, mask_token_id, all_special_ids = None, None, ()

        def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
            self.characters += len(text)
            return {"input_ids": [len(word) for word in text.split()]}

        def __len__(self) -> int:
            return 100

    counting = Counting()
    data = prepare(open_source("corpus:builtin"), task="causal-lm", tokenizer=counting, max_sequences=24)
    assert len(data) == 24
    assert counting.characters < 0.15 * 830_000


def test_short_documents_are_joined_within_a_window(number_tokenizer: Any) -> None:
    texts = [words([i] * 5) for i in range(300)]
    data = prepare(
        open_source(texts), task="causal-lm", tokenizer=number_tokenizer, sequence_length=17, max_sequences=20
    )
    assert len(data) == 20
    documents = [set(example.input_ids.tolist()) - {1} for example in data.examples]
    assert all(len(each) == 3 for each in documents)
    assert len(set.union(*documents)) == 60, "no document is in two windows"
    assert len(set(data.clusters)) == 20
    assert data.unit == "document"


@pytest.mark.parametrize(("bos", "count"), [("auto", 9), ("always", 9), ("never", 0)])
def test_every_window_begins_with_bos(bert_tokenizer: Any, number_tokenizer: Any, bos: Any, count: int) -> None:
    """Windows from the middle of a document lacked it."""
    for order in ("random", "first"):
        data = prepare(
            open_source([words(range(400))]),
            task="causal-lm",
            tokenizer=bert_tokenizer,
            sequence_length=32,
            max_sequences=9,
            bos=bos,
            order=order,
        )
        assert data.lengths == [32] * 9
        assert sum(int(example.input_ids[0]) == 2 for example in data.examples) == count
        assert sum((example.input_ids == 2).sum() for example in data.examples) == count
    bare = prepare(open_source(["w1 w2 w3"]), task="causal-lm", tokenizer=number_tokenizer, bos=bos)
    assert bare.lengths == [3]
    assert bool(bare.warnings) == (bos == "always")


def test_one_sequence_for_each_row(number_tokenizer: Any) -> None:
    texts = [words(range(n)) for n in range(1, 31)]
    data = prepare(
        open_source(texts), task="causal-lm", tokenizer=number_tokenizer, sequence_length=20, one_per_row=True
    )
    assert data.lengths == [min(n, 20) for n in range(1, 31)]
    assert len(set(data.clusters)) == 30
    assert "10 texts are longer than 20 tokens and cut there." in data.warnings


def test_clusters_of_windows_are_documents_or_blocks(number_tokenizer: Any) -> None:
    options: dict[str, Any] = {"task": "causal-lm", "tokenizer": number_tokenizer, "sequence_length": 64}
    texts = [words([i] * 1000) for i in range(3)]
    data = prepare(open_source(texts), max_sequences=100, **options)
    by_document = {int(e.input_ids[0]): c for e, c in zip(data.examples, data.clusters, strict=True)}
    assert len(set(by_document.values())) == 3
    assert all(by_document[int(e.input_ids[0])] == c for e, c in zip(data.examples, data.clusters, strict=True))
    assert (data.unit, data.no_error) == ("document", None)
    assert data.describe()["clusters"] == 3

    whole = prepare(open_source([words([1] * 4096 * 10)]), max_sequences=1000, **options)
    assert (len(whole), len(set(whole.clusters)), whole.no_error) == (640, 10, None)
    assert whole.unit == "block of 4,096 tokens"
    assert sorted(Counter(whole.clusters).values()) == [64] * 10
    drawn = prepare(open_source([words([1] * 4096 * 30)]), max_sequences=60, **options)
    assert 8 <= len(set(drawn.clusters)) <= 30
    few = prepare(open_source([words([1] * 4096 * 3)]), max_sequences=60, **options)
    assert len(set(few.clusters)) == 1
    assert few.no_error is not None
    assert "8 blocks" in few.no_error


def test_blocks_of_two_documents_are_told_apart() -> None:
    windows = [Window([1], d, b) for d in range(2) for b in range(4)]
    clusters, unit, no_error = block_clusters(windows, [5, 6])
    assert len(set(clusters)) == 8
    assert (unit, no_error) == ("block of 4,096 tokens", None)


def test_rows_and_pairs_are_their_own_clusters(number_tokenizer: Any) -> None:
    rows = [{"prompt": f"w{i}", "response": f"w{i + 1}"} for i in range(5)]
    data = prepare(open_source(rows), task="causal-lm", tokenizer=number_tokenizer)
    assert (len(set(data.clusters)), data.unit) == (5, "row")
    again = prepare(open_source(rows[::-1]), task="causal-lm", tokenizer=number_tokenizer)
    assert again.clusters == data.clusters[::-1]


def test_documents_are_drawn_by_their_true_lengths() -> None:
    """Rows whose bytes are mostly something else: the bounds alone would draw them far too often."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(100, 40_000, 400)
    bounds = sizes * rng.choice([1, 8], 400)
    names = distinct([identity(i) for i in range(400)])
    read: list[int] = []

    def length_of(numbers: list[int]) -> list[int]:
        read.extend(numbers)
        return sizes[numbers].tolist()

    for seed in range(20):
        chosen = draw_documents(names, bounds, length_of, count=10, window=64, seed=seed)
        pieces = pieces_of(names, sizes, 64, seed)
        best = pieces.key.argsort()
        filled = np.cumsum(pieces.filled[best])
        expected = sorted(set(pieces.document[best[: int(np.searchsorted(filled, 10 - 1e-9)) + 1]].tolist()))
        assert chosen == expected
    assert len(read) < 20 * 120


def test_long_sources_are_thinned_to_the_same_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [words([i] * (50 + i)) for i in range(300)]
    everything = drawing_module.thinned(texts, count=12, window=8, seed=3)
    monkeypatch.setattr(drawing_module, "BUFFER", 2000)
    few = drawing_module.thinned(texts, count=12, window=8, seed=3)
    assert len(few) < len(everything) == 300

    def windows(documents: Any) -> list[list[int]]:
        drawn = drawing_module.draw_windows(
            documents, lambda text: [len(word) for word in text.text.split()] or [0], window=8, count=12, seed=3
        )
        return [[documents[each.document][0], *each.ids] for each in drawn.windows]

    assert windows(few) == windows(everything)

"""The result folder: what is written is what is read, whole or not at all, and broken ones are refused in words."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulldepth.errors import FulldepthError
from fulldepth.files import atomic
from fulldepth.results import COLUMNS, DOCUMENT, TABLE, Results, finite, tabulate

ROWS = [
    ("displacement", "residual", 1, None, "mean", 0.25, 10, "1"),
    ("displacement", "residual", 2, None, "mean", float("nan"), 10, "1"),
    ("cka", "residual", 0, 2, "debiased", 0.5, 10, "1"),
    ("effective_depth", "residual", None, None, "eps=0.05", 2.0, 10, "layers"),
]


@pytest.fixture
def results() -> Results:
    headline = {"zeta_L": {"value": 1.5, "unit": "%", "sentence": "Little jumps."}}
    return Results(tabulate(ROWS), {"kind": "measure", "headline": headline, "note": "ünï</script>"})


def without_hash(folder: Path) -> None:
    """Make the document one of an earlier version, which did not name its table."""
    document = json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))
    del document["table"]
    (folder / DOCUMENT).write_text(json.dumps(document), encoding="utf-8")


def test_what_is_saved_is_loaded(results: Results, tmp_path: Path) -> None:
    folder = results.save(tmp_path / "deep" / "out", page=False)
    again = Results.load(folder)
    pd.testing.assert_frame_equal(again.table, results.table)
    assert again.meta == {"schema_version": 1, **results.meta}
    assert again.headline["zeta_L"]["value"] == 1.5
    assert not again.is_series
    assert not again.is_comparison
    assert sorted(path.name for path in folder.iterdir()) == [DOCUMENT, TABLE]


def test_other_tools_read_both_files(results: Results, tmp_path: Path) -> None:
    folder = results.save(tmp_path, page=False)
    rows = pq.read_table(folder / TABLE).to_pylist()
    assert [tuple(row.values())[:5] for row in rows] == [row[:5] for row in ROWS]
    assert list(rows[0]) == COLUMNS
    assert json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))["note"] == "ünï</script>"


def test_extra_columns_mark_a_series_and_survive(tmp_path: Path) -> None:
    series = Results(tabulate(ROWS, step=500), {"kind": "measure"})
    again = Results.load(series.save(tmp_path, page=False))
    assert again.is_series
    assert set(again.table["step"]) == {500}


def test_values_by_layer(results: Results) -> None:
    assert results.values("displacement", "mean", "residual").to_dict()[1] == 0.25
    assert results.values("cka", "debiased", other=2).to_dict() == {0: 0.5}
    with pytest.raises(
        FulldepthError, match=r"No rows for cka mean, other 2. There are: cka debiased, displacement mean"
    ):
        results.values("cka", "mean", other=2)


def test_a_failed_save_leaves_the_old_result(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.save(tmp_path, page=False)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(FulldepthError, match=r"Cannot write results into .*No space left on device"):
        Results(results.table.head(1), {"kind": "other"}).save(tmp_path, page=False)
    monkeypatch.undo()
    assert Results.load(tmp_path).meta["kind"] == "measure"
    assert len(Results.load(tmp_path).table) == len(ROWS)
    assert len(list(tmp_path.iterdir())) == 2


def test_numbers_that_json_lacks_are_refused_before_anything_is_written(results: Results, tmp_path: Path) -> None:
    results.meta["bad"] = float("nan")
    with pytest.raises(ValueError, match="JSON compliant"):
        results.save(tmp_path / "out", page=False)
    assert not (tmp_path / "out").exists()


def test_a_file_where_the_folder_should_be(results: Results, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    with pytest.raises(FulldepthError, match=r"Cannot write .*out: File exists"):
        results.save(tmp_path / "out", page=False)
    assert (tmp_path / "out").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (DOCUMENT, None, "not a result folder: it has no results.json"),
        (TABLE, None, "not a result folder: it has no results.parquet"),
        (DOCUMENT, b'{"schema_version": 1', "Cannot read"),
        (DOCUMENT, b"\xff\xfe\x00\x01", "Cannot read"),
        (DOCUMENT, b"[]", "schema version None"),
        (DOCUMENT, b'{"schema_version": 2}', "schema version 2, this fulldepth reads 1"),
        (TABLE, b"PAR1", "do not belong together"),
        (TABLE, b"", "do not belong together"),
    ],
)
def test_broken_folders_are_refused(
    results: Results, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    folder = results.save(tmp_path, page=False)
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    with pytest.raises(FulldepthError, match=message):
        Results.load(folder)


def test_a_truncated_table_is_refused(results: Results, tmp_path: Path) -> None:
    folder = results.save(tmp_path, page=False)
    whole = (folder / TABLE).read_bytes()
    (folder / TABLE).write_bytes(whole[: len(whole) // 2])
    without_hash(folder)
    with pytest.raises(FulldepthError, match=r"Cannot read .*results\.parquet"):
        Results.load(folder)


def test_a_table_without_a_column_is_refused(results: Results, tmp_path: Path) -> None:
    folder = results.save(tmp_path, page=False)
    results.table.drop(columns=["unit", "count"]).to_parquet(folder / TABLE)
    without_hash(folder)
    with pytest.raises(FulldepthError, match="lacks the columns count, unit"):
        Results.load(folder)


def test_atomic_keeps_the_old_file_when_the_writer_fails(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old", encoding="utf-8")

    def write() -> None:
        with atomic(path) as part:
            part.write_text("half", encoding="utf-8")
            assert path.read_text(encoding="utf-8") == "old"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert path.read_text(encoding="utf-8") == "old"
    assert os.listdir(tmp_path) == ["a.txt"]
    with atomic(path) as part:
        part.write_text("new", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == "new"
    assert os.listdir(tmp_path) == ["a.txt"]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(plain)
def test_finite_makes_anything_valid_json_and_changes_nothing_else(value: object) -> None:
    safe = finite(value)
    assert json.loads(json.dumps(safe, allow_nan=False)) == safe
    if "nan" not in repr(value) and "inf" not in repr(value):
        assert safe == value

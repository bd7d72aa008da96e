"""The result folder: what is written is what is read, whole or not at all, and broken ones are refused in words."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulldepth.errors import FulldepthError
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


def test_what_is_saved_is_loaded_and_other_tools_read_it(results: Results, tmp_path: Path) -> None:
    folder = results.save(tmp_path / "deep" / "out", page=False)
    again = Results.load(folder)
    pd.testing.assert_frame_equal(again.table, results.table)
    assert again.meta == {"schema_version": 1, **results.meta}
    assert (again.is_series, again.is_comparison) == (False, False)
    assert {path.name for path in folder.iterdir()} == {DOCUMENT, TABLE}
    rows = pq.read_table(folder / TABLE).to_pylist()
    assert [tuple(row.values())[:5] for row in rows] == [row[:5] for row in ROWS]
    assert list(rows[0]) == COLUMNS
    assert json.loads((folder / DOCUMENT).read_text(encoding="utf-8"))["note"] == "ünï</script>"


def test_a_failed_save_leaves_the_old_result(results: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results.save(tmp_path, page=False)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with pytest.raises(FulldepthError, match="No space left on device"):
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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (DOCUMENT, None, "no results.json"),
        (TABLE, None, "no results.parquet"),
        (DOCUMENT, b'{"schema_version": 1', "Cannot read"),
        (DOCUMENT, b"\xff\xfe\x00\x01", "Cannot read"),
        (DOCUMENT, b"[]", "version None"),
        (DOCUMENT, b'{"schema_version": 2}', "version 2"),
        (TABLE, b"PAR1", "do not belong together"),
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

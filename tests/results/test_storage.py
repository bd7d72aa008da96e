"""What a killed save leaves, what a folder of an earlier version is, and what a table may not hold."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fulldepth.errors import FulldepthError
from fulldepth.results import (
    DOCUMENT,
    GROUPS,
    PAGE,
    TABLE,
    Results,
    TableMismatchError,
    gathered,
    groups_entry,
    holder,
    tabulate,
)
from fulldepth.results import table as table_room

OPERATIONS = ("mkdir", "open", "replace", "unlink", "fsync")
"""Functions of `os` that touch the disk while results are saved, beside `Path.open`."""


def results(value: float, groups: int = 4) -> Results:
    """Results with influences of every row."""
    rows = [("displacement", "residual", n, None, "mean", value, 10, "1") for n in range(1, 4)]
    entries = [(*row[:5], np.arange(groups) * value) for row in rows]
    model = {"name": f"model-{value}", "num_layers": 3}
    meta = {"kind": "measure", "model": model, "headline": {}, "groups": groups_entry(range(groups), "row", "text")}
    return Results(tabulate(rows), meta, gathered(entries, groups))


def stored(folder: Path, **entries: Any) -> Path:
    """Change entries of a document. No table is named any more, so that it may be any; influences may be any, too."""
    document = json.loads((folder / DOCUMENT).read_text(encoding="utf-8")) | entries
    document.pop("table", None)
    frame = (folder / GROUPS).read_bytes()
    document["influences"] = {"sha256": hashlib.sha256(frame).hexdigest(), "bytes": len(frame)}
    (folder / DOCUMENT).write_text(json.dumps(document), encoding="utf-8")
    return folder


def killed_at(number: int, action: Callable[[], object]) -> bool:
    """Run `action` in a process of its own that dies before its file operation `number`; whether it died."""
    child = os.fork()
    if child == 0:
        begun = iter(range(1, 1000))

        def watched(operation: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                if next(begun) >= number:
                    os._exit(9)
                return operation(*arguments, **options)

            return call

        for name in OPERATIONS:
            setattr(os, name, watched(getattr(os, name)))
        Path.open = watched(Path.open)  # type: ignore[method-assign]
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.fixture
def named_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages that only name their model."""
    monkeypatch.setattr("fulldepth.reporting.render", lambda _, meta: meta["model"]["name"])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_kill_at_any_file_operation_never_mixes_two_results(tmp_path: Path, named_pages: None) -> None:
    refused: list[TableMismatchError] = []
    without_page = 0
    for number in range(1, 60):
        folder = results(1.0).save(tmp_path / str(number))
        died = killed_at(number, lambda folder=folder: results(2.0).save(folder))  # type: ignore[misc]
        try:
            found = Results.load(folder)
        except TableMismatchError as error:
            refused.append(error)
            assert not (folder / PAGE).exists()
        else:
            (value,) = set(found.table["value"])
            assert found.influences is not None
            assert found.meta["model"]["name"] == f"model-{value}" == f"model-{found.influences['group_1'][0]}"
            assert value == 2.0 or (died and value == 1.0)
            without_page += not (folder / PAGE).exists()
            assert not (folder / PAGE).exists() or (folder / PAGE).read_text() == f"model-{value}"
        results(3.0).save(folder)
        assert set(Results.load(folder).table["value"]) == {3.0}
        assert (folder / PAGE).read_text() == "model-3.0"
        assert sorted(path.name for path in folder.iterdir()) == sorted([PAGE, DOCUMENT, TABLE, GROUPS]), (
            "leftovers are gone"
        )
        if not died:
            break
    assert not died
    assert number > 5
    assert len(refused) >= 2, "between the three renames"
    assert without_page, "after the old page was removed"
    assert all("interrupted while it was written" in str(error) for error in refused)
    assert {error.meta["model"]["name"] for error in refused} == {"model-1.0"}


def test_a_document_that_names_no_table_is_an_earlier_version_s(tmp_path: Path) -> None:
    assert set(Results.load(stored(results(1.0).save(tmp_path, page=False))).table["value"]) == {1.0}
    assert "table" not in Results.load(results(1.0).save(tmp_path, page=False)).meta


@pytest.mark.parametrize("name", [TABLE, GROUPS])
def test_a_changed_or_missing_file_is_refused_before_it_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = results(1.0).save(tmp_path / "one", page=False)
    shutil.copy(results(2.0).save(tmp_path / "two", page=False) / name, folder)
    monkeypatch.setattr(table_room, "read", lambda *_: pytest.fail("parsed"))
    with pytest.raises(TableMismatchError, match=name):
        Results.load(folder)
    (folder / name).unlink()
    with pytest.raises(FulldepthError, match=name):
        Results.load(folder)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"headline": {"zeta_L": {"value": "12"}}}, r"headline\.zeta_L\.value"),
        ({"model": {"num_layers": 10**9}}, r"model\.num_layers.*1024"),
        ({"model": {"num_layers": 2}}, "layer 3 of a model of 2 layers"),
        ({"steps": [{"step": -1}]}, r"steps\.0\.step"),
        ({"lens_grid": {"samples": [{"tokens": ["a"], "targets": [], "saturation": [1], "grid": []}]}}, "lengths"),
        ({"plan": {"blocks": [0]}}, r"plan\.blocks\.0"),
        ({"kind": "skips"}, "skips"),
        ({"kind": "training"}, "step"),
        ({"kind": "comparison"}, "model, difference"),
        ({"models": [{"label": "a"}]}, "models"),
        ({"router_tokens": {"routers": [{"layer": 2, "source": 0, "head": 0}]}}, r"routers\.0\.tokens"),
    ],
)
def test_entries_of_the_wrong_type_or_out_of_range_are_named(
    tmp_path: Path, entries: dict[str, Any], words: str
) -> None:
    folder = stored(results(1.0).save(tmp_path, page=False), **entries)
    with pytest.raises(FulldepthError, match=words) as caught:
        Results.load(folder)
    assert str(caught.value).startswith("Cannot read ")
    assert len(str(caught.value)) < 1000


def column(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        made = values(len(table)) if callable(values) else pa.array(values)
        if name not in table.column_names:
            return table.append_column(name, made)
        return table.set_column(table.column_names.index(name), name, made)

    return change


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        (TABLE, column("layer", [1, -5, 2]), "-5"),
        (TABLE, column("layer", [1, 10**9, 2]), "1000000000"),
        (TABLE, column("count", [1.5, 2.0, 3.0]), "count"),
        (TABLE, column("measure", [1, 2, 3]), "measure"),
        (TABLE, column("measure", ["a", None, "b"]), "measure has missing"),
        (TABLE, column("step", [1, None, 2]), "step has missing"),
        (TABLE, column("other", pa.array([2**64 - 1] * 3, pa.uint64())), "Cannot read"),
        (TABLE, column("x" * 5000, pa.array([[1]] * 3)), "expected numbers or text"),
        (TABLE, lambda table: table.drop_columns(["unit"]), "unit"),
        (TABLE, lambda table: table.append_column("value", table["value"]), "twice"),
        (GROUPS, lambda table: table.drop_columns(["statistic"]), "statistic"),
        (GROUPS, lambda table: table.drop_columns(["group_3"]), "3 groups"),
        (GROUPS, column("group_2", ["a", "b", "c"]), "group_2"),
        (GROUPS, column("layer", [1, 2, 2]), "several entries"),
        (GROUPS, column("layer", [1, 2, 900]), "layer 900"),
    ],
)
def test_tables_with_columns_of_the_wrong_type_or_out_of_range(
    tmp_path: Path, name: str, change: Callable[[pa.Table], pa.Table], words: str
) -> None:
    folder = results(1.0).save(tmp_path, page=False)
    pq.write_table(change(pq.read_table(folder / name)), folder / name)
    with pytest.raises(FulldepthError, match=words) as caught:
        Results.load(stored(folder))
    assert str(folder) in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_a_table_that_is_small_on_disk_and_large_in_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stored(results(1.0).save(tmp_path, page=False))
    monkeypatch.setattr(table_room, "MOST_ROWS", 2)
    with pytest.raises(FulldepthError, match="3 rows"):
        Results.load(folder)
    monkeypatch.undo()
    rows = pq.read_table(folder / TABLE)
    long = pa.DictionaryArray.from_arrays([0, 0, 0], ["x" * 100_000])
    pq.write_table(column("site", long)(rows), folder / TABLE)
    assert (folder / TABLE).stat().st_size < 20_000
    monkeypatch.setattr(table_room, "MOST_BYTES", 400_000)
    with pytest.raises(FulldepthError, match=r"300,0\d\d bytes of text"):
        Results.load(folder)
    monkeypatch.setattr(table_room, "MOST_BYTES", 1000)
    with pytest.raises(FulldepthError, match=r"larger than|declares"):
        Results.load(folder)


def test_whose_a_folder_is(tmp_path: Path) -> None:
    assert holder(tmp_path / "absent") is None
    results(1.0).save(tmp_path, page=False)
    assert holder(tmp_path) is None
    (tmp_path / "plan.json").touch()
    assert holder(tmp_path) == "a plan of fulldepth skip"
    (tmp_path / "settings.yaml").touch()
    assert holder(tmp_path) == "a training run"


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    one = results(0.5)
    again = Results.load(one.save(tmp_path, page=False))
    assert again.influences is not None
    pd.testing.assert_frame_equal(again.influences, one.influences, check_dtype=False)
    np.testing.assert_array_equal(again.influences.loc[0, "group_0":"group_3"], [0, 0.5, 1, 1.5])
    assert again.meta["groups"] == one.meta["groups"]
    assert "influences" not in again.meta
    assert gathered([], 4) is None
    shorter = gathered([("cka", "residual", 1, 2, "debiased", [1.0, 2.0])], 3)
    assert shorter is not None
    assert np.isnan(shorter["group_2"][0])

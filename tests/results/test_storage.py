"""Result folders: what is written is what is read, whole or not at all; what a document and its tables may not hold."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from packaging.version import Version
from pandas.testing import assert_frame_equal

import fulldepth
from fulldepth.results import (
    COLUMNS,
    DOCUMENT,
    GROUPS,
    PAGE,
    TABLE,
    Finding,
    Results,
    TableMismatchError,
    finite,
    gathered,
    groups_entry,
    holder,
    provenance,
    tabulate,
)
from fulldepth.results import table as table_room
from json_files import any_value, read_json, write_json
from kills.moments import moments
from refusals import refused


def results(value, groups=4):
    """Results with influences of every row."""
    rows = [("displacement", "residual", n, None, "mean", value, 10, "1") for n in range(1, 4)]
    entries = [(*row[:5], np.arange(groups) * value) for row in rows]
    model = {"name": f"model-{value}", "num_layers": 3}
    meta = {"kind": "measure", "model": model, "headline": {}, "groups": groups_entry(range(groups), "row", "text")}
    return Results(tabulate(rows), meta, gathered(entries, groups))


def saved(folder, value=1.0):
    """The folder with those results, without a page."""
    return results(value).save(folder, page=False)


def stored(folder, **entries):
    """Change entries of a document. No table is named any more, so that it may be any; influences may be any, too."""
    document = read_json(folder / DOCUMENT) | entries
    document.pop("table", None)
    frame = (folder / GROUPS).read_bytes()
    document["influences"] = {"sha256": hashlib.sha256(frame).hexdigest(), "bytes": len(frame)}
    write_json(folder / DOCUMENT, document)
    return folder


@pytest.fixture
def named_pages(monkeypatch):
    """Pages that only name their model."""
    monkeypatch.setattr("fulldepth.reporting.render", lambda _, meta: meta["model"]["name"])


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_kill_at_any_file_operation_never_mixes_two_results(tmp_path, named_pages):
    folder = results(1.0).save(tmp_path / "out")
    _, copies = moments(folder, tmp_path / "copies", lambda: results(2.0).save(folder))
    mixed = []
    without_page, values = 0, set()
    for copy in copies:
        try:
            found = Results.load(copy)
        except TableMismatchError as error:
            mixed.append(error)
            assert not (copy / PAGE).exists()
        else:
            (value,) = set(found.table["value"])
            assert found.influences is not None
            assert found.meta["model"]["name"] == f"model-{value}" == f"model-{found.influences['group_1'][0]}"
            values.add(value)
            without_page += not (copy / PAGE).exists()
            assert not (copy / PAGE).exists() or (copy / PAGE).read_text() == f"model-{value}"
        results(3.0).save(copy)
        assert set(Results.load(copy).table["value"]) == {3.0}
        assert (copy / PAGE).read_text() == "model-3.0"
        assert sorted(path.name for path in copy.iterdir()) == sorted([PAGE, DOCUMENT, TABLE, GROUPS]), (
            "leftovers are gone"
        )
    assert values == {1.0, 2.0}
    assert len(copies) > 5
    assert len(mixed) >= 2, "between the three renames"
    assert without_page, "after the old page was removed"
    assert all("Writing was interrupted" in str(error) for error in mixed)
    assert {error.meta["model"]["name"] for error in mixed} == {"model-1.0"}


def test_a_document_that_names_no_table_is_an_earlier_version_s(tmp_path):
    assert set(Results.load(stored(saved(tmp_path))).table["value"]) == {1.0}
    assert "table" not in Results.load(saved(tmp_path)).meta


@pytest.mark.parametrize("name", [TABLE, GROUPS])
def test_a_changed_or_missing_file_is_refused_before_it_is_parsed(tmp_path, monkeypatch, name):
    folder = saved(tmp_path / "one")
    shutil.copy(saved(tmp_path / "two", 2.0) / name, folder)
    monkeypatch.setattr(table_room, "read_table", lambda *_: pytest.fail("parsed"))
    with pytest.raises(TableMismatchError, match=name):
        Results.load(folder)
    (folder / name).unlink()
    with refused(name):
        Results.load(folder)


def entry(**entries):
    return lambda folder: stored(folder, **entries)


def document(content):
    return lambda folder: (folder / DOCUMENT).unlink() if content is None else (folder / DOCUMENT).write_bytes(content)


def table(name, change):
    def damage(folder):
        pq.write_table(change(pq.read_table(folder / name)), folder / name)
        stored(folder)

    return damage


def with_column(table, name, values):
    if name not in table.column_names:
        return table.append_column(name, pa.array(values))
    return table.set_column(table.column_names.index(name), name, pa.array(values))


def column(name, values, file=TABLE):
    return table(file, lambda rows: with_column(rows, name, values))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (document(None), "no results.json"),
        (document(b'{"schema_version": 1'), "Cannot read"),
        (document(b"\xff\xfe\x00\x01"), "Cannot read"),
        (document(b"[]"), "version None"),
        (document(b'{"schema_version": 2}'), "version 2"),
        (entry(headline={"zeta_L": {"value": "12"}}), r"headline\.zeta_L\.value"),
        (entry(headline={"a": {"unit": "%", "added later": [1]}}), r"headline\.a\.value: "),
        (entry(headline={"a": {"value": 1, "standard_error": "0.1"}}), r"headline\.a\.standard_error: "),
        (entry(model={"num_layers": 10**9}), r"model\.num_layers.*1024"),
        (entry(model={"num_layers": 2}), "layer 3 of a model of 2 layers"),
        (entry(steps=[{"step": -1}]), r"steps\.0\.step"),
        (entry(lens_grid={"samples": [{"tokens": ["a"], "targets": [], "saturation": [1], "grid": []}]}), "lengths"),
        (entry(plan={"blocks": [0]}), r"plan\.blocks\.0"),
        (entry(kind="skips"), "skips"),
        (entry(kind="training"), "step"),
        (entry(kind="comparison"), "model, difference"),
        (entry(models=[{"label": "a"}]), "models"),
        (entry(router_tokens={"routers": [{"layer": 2, "source": 0, "head": 0}]}), r"routers\.0\.tokens"),
        (column("layer", [1, -5, 2]), "-5"),
        (column("layer", [1, 10**9, 2]), "1000000000"),
        (column("count", [1.5, 2.0, 3.0]), "count"),
        (column("measure", [1, 2, 3]), "measure"),
        (column("measure", ["a", None, "b"]), "measure has missing"),
        (column("step", [1, None, 2]), "step has missing"),
        (column("other", pa.array([2**64 - 1] * 3, pa.uint64())), "Cannot read"),
        (column("x" * 5000, [[1]] * 3), "expected numbers or text"),
        (table(TABLE, lambda rows: rows.drop_columns(["unit"])), "unit"),
        (table(TABLE, lambda rows: rows.append_column("value", rows["value"])), "twice"),
        (table(GROUPS, lambda rows: rows.drop_columns(["statistic"])), "statistic"),
        (table(GROUPS, lambda rows: rows.drop_columns(["group_3"])), "3 groups"),
        (column("group_2", ["a", "b", "c"], GROUPS), "group_2"),
        (column("layer", [1, 2, 2], GROUPS), "several entries"),
        (table(TABLE, lambda rows: pa.concat_tables([rows, rows.slice(1, 1)])), "several rows for one number"),
        (column("layer", [1, 2, 900], GROUPS), "layer 900"),
    ],
)
def test_what_is_damaged_of_the_wrong_type_or_out_of_range_is_named(tmp_path, damage, words):
    folder = saved(tmp_path)
    damage(folder)
    with refused(words, str(folder)):
        Results.load(folder)


def test_a_table_that_is_small_on_disk_and_large_in_memory_is_refused(tmp_path, monkeypatch):
    folder = stored(saved(tmp_path))
    monkeypatch.setattr(table_room, "MOST_ROWS", 2)
    with refused("3 rows"):
        Results.load(folder)
    monkeypatch.undo()
    rows = pq.read_table(folder / TABLE)
    long = pa.DictionaryArray.from_arrays([0, 0, 0], ["x" * 100_000])
    pq.write_table(with_column(rows, "site", long), folder / TABLE)
    assert (folder / TABLE).stat().st_size < 20_000
    monkeypatch.setattr(table_room, "MOST_BYTES", 400_000)
    with refused(r"300,0\d\d bytes of text"):
        Results.load(folder)
    monkeypatch.setattr(table_room, "MOST_BYTES", 1000)
    with refused(r"larger than|declares"):
        Results.load(folder)


def test_whose_a_folder_is(tmp_path):
    assert holder(tmp_path / "absent") is None
    saved(tmp_path)
    assert holder(tmp_path) is None
    (tmp_path / "plan.json").touch()
    assert holder(tmp_path) == "a plan of fulldepth skip"
    (tmp_path / "settings.yaml").touch()
    assert holder(tmp_path) == "a training run"


def test_what_is_saved_is_loaded_and_other_tools_read_it(tmp_path):
    rows = [
        ("displacement", "residual", 1, None, "mean", 0.25, 10, "1"),
        ("displacement", "residual", 2, None, "mean", math.nan, 10, "1"),
        ("cka", "residual", 0, 2, "debiased", 0.5, 10, "1"),
        ("effective_depth", "residual", None, None, "eps=0.05", 2.0, 10, "layers"),
    ]
    one = results(0.5)
    one.table, one.meta["note"] = tabulate(rows), "ünï</script>"
    folder = one.save(tmp_path / "deep" / "out", page=False)
    again = Results.load(folder)
    assert_frame_equal(again.table, one.table)
    assert again.meta == {"schema_version": 1, **one.meta}
    assert (again.is_series, again.is_comparison) == (False, False)
    assert {path.name for path in folder.iterdir()} == {DOCUMENT, TABLE, GROUPS}
    read = pq.read_table(folder / TABLE).to_pylist()
    assert [tuple(row.values())[:5] for row in read] == [row[:5] for row in rows]
    assert list(read[0]) == COLUMNS
    assert read_json(folder / DOCUMENT)["note"] == "ünï</script>"
    assert again.influences is not None
    assert_frame_equal(again.influences, one.influences, check_dtype=False)
    assert_array_equal(again.influences.loc[0, "group_0":"group_3"], [0, 0.5, 1, 1.5])
    assert gathered([], 4) is None
    shorter = gathered([("cka", "residual", 1, 2, "debiased", [1.0, 2.0])], 3)
    assert shorter is not None
    assert np.isnan(shorter["group_2"][0])


def test_a_failed_save_leaves_the_old_result(tmp_path, monkeypatch):
    saved(tmp_path)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pd.DataFrame, "to_parquet", full)
    with refused("No space left on device"):
        saved(tmp_path, 2.0)
    monkeypatch.undo()
    assert set(Results.load(tmp_path).table["value"]) == {1.0}
    assert len(list(tmp_path.iterdir())) == 3


def test_numbers_that_json_lacks_are_refused_before_anything_is_written(tmp_path):
    bad = results(1.0)
    bad.meta["bad"] = math.nan
    with pytest.raises(ValueError, match="JSON compliant"):
        bad.save(tmp_path / "out", page=False)
    assert not (tmp_path / "out").exists()


@given(any_value(st.floats()))
def test_finite_makes_anything_valid_json_and_changes_nothing_else(value):
    safe = finite(value)
    assert json.loads(json.dumps(safe, allow_nan=False)) == safe
    if "nan" not in repr(value) and "inf" not in repr(value):
        assert safe == value


WRITTEN = {
    Finding(2, "layers"): '{"value": 2, "unit": "layers"}',
    Finding(None, "nats", "Unknown."): '{"value": null, "unit": "nats", "sentence": "Unknown."}',
    Finding(math.nan, "x", ""): '{"value": null, "unit": "x", "sentence": ""}',
    Finding(1.5, "%", "So much.", 0.25): '{"value": 1.5, "unit": "%", "standard_error": 0.25, "sentence": "So much."}',
    Finding(29, "layers", interval=(24, 30)): '{"value": 29, "unit": "layers", "interval": [24, 30]}',
    Finding(1.5, sentence="So much.", no_standard_error="one sequence"): (
        '{"value": 1.5, "unit": "1", "standard_error": null, "sentence": "So much.", '
        '"no_standard_error": "one sequence"}'
    ),
}


def test_a_finding_is_the_entry_of_a_headline(tmp_path):
    headline = {str(n): finding for n, finding in enumerate(WRITTEN)}
    meta = finite({"kind": "measure", "headline": headline})
    assert [json.dumps(entry) for entry in meta["headline"].values()] == [*WRITTEN.values()]
    Results(results(1.0).table, meta).save(tmp_path, page=False)
    assert [*Results.load(tmp_path).headline.values()] == [json.loads(text) for text in WRITTEN.values()]


def test_provenance_says_when_and_with_which_versions():
    before = datetime.now(UTC) - timedelta(seconds=1)
    block = provenance("bench", {"rounds": 3}, packages=("torch", "numpy"), seed=7)
    assert before <= datetime.fromisoformat(block.pop("created")) <= datetime.now(UTC)
    python = ".".join(map(str, sys.version_info[:3]))
    found = block.pop("versions")
    assert Version(found.pop("torch")).public == Version(torch.__version__).public  # a build's name may be left out
    assert found == {"fulldepth": fulldepth.__version__, "numpy": np.__version__, "python": python}
    assert block == {"kind": "bench", "complete": True, "settings": {"rounds": 3}, "seed": 7}
    assert list(provenance("comparison", {}, packages=())["versions"]) == ["fulldepth", "python"]

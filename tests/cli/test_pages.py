"""`report` and `compare`: what is in a folder already stays, and two commands do not write at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from fulldepth.demonstration import demo
from fulldepth.errors import FulldepthError
from fulldepth.files import locked
from fulldepth.results import PAGE, Results, tabulate


def saved(folder: Path, value: float, name: str = "m") -> Path:
    rows = [("displacement", "residual", layer, None, "mean", value, 10, "1") for layer in (1, 2, 3)]
    headline = {"zeta_L": {"value": value, "unit": "%", "sentence": f"It is {value}."}}
    meta = {"kind": "measure", "model": {"name": name, "num_layers": 3}, "data": {"hash": "1"}, "headline": headline}
    return Results(tabulate(rows), meta).save(folder)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def test_a_page_of_other_results_is_replaced_only_when_asked(main, tmp_path):
    a, b = saved(tmp_path / "a", 0.1), saved(tmp_path / "b", 0.2)
    before = files(b)
    code, _, err = main("report", a, "-o", b)
    assert code == 2
    assert f"{b} holds results of its own" in err
    assert files(b) == before
    assert main("report", a, "-o", b, "--overwrite")[0] == 0
    assert files(b)[PAGE] != before.pop(PAGE)
    assert {name: content for name, content in files(b).items() if name != PAGE} == before


def test_the_page_of_a_folder_is_made_again_and_an_empty_one_is_filled(main, tmp_path):
    a = saved(tmp_path / "a", 0.1)
    page = (a / PAGE).read_bytes()
    (a / PAGE).unlink()
    assert main("report", a)[0] == 0
    assert (a / PAGE).read_bytes() == page
    assert main("report", a, "-o", f"{a}/../a")[0] == 0
    for _ in range(2):
        assert main("report", a, "-o", tmp_path / "page")[0] == 0


@pytest.mark.parametrize("name", ["settings.yaml", "plan.json"])
def test_a_comparison_does_not_go_where_another_command_keeps_its_results(main, tmp_path, name):
    a, b, out = saved(tmp_path / "a", 0.1), saved(tmp_path / "b", 0.2), tmp_path / "out"
    out.mkdir()
    (out / name).touch()
    for more in ([], ["--overwrite"]):
        code, _, err = main("compare", a, b, "-o", out, *more)
        assert code == 2
        assert "which needs its own results there" in err
    assert list(files(out)) == [name]


def test_two_commands_do_not_write_into_one_folder(main, tmp_path, monkeypatch):
    """A lock that another process has is one that cannot be had here: another object stands for it."""
    a, b, out = saved(tmp_path / "a", 0.1), saved(tmp_path / "b", 0.2), tmp_path / "out"
    assert main("compare", a, b, "-o", out)[0] == 0
    before = files(out)
    other = FileLock(out / ".lock", is_singleton=False)
    with other:
        for command in (["compare", a, b, "--overwrite"], ["report", a, "--overwrite"]):
            code, _, err = main(*command, "-o", out)
            assert code == 2
            assert "Another fulldepth process is writing into" in err
        with pytest.raises(FulldepthError, match="Another fulldepth process"):
            demo(out)
    assert files(out) == before
    assert main("compare", a, b, "-o", out, "--overwrite")[0] == 0
    with locked(out):
        assert main("report", a, "-o", out, "--overwrite")[0] == 0, "the same process may"

"""`report` and `compare`: what is in a folder already stays, and two commands do not write at once."""

from __future__ import annotations

import re

import pytest

from api.test_output_folders import small
from fulldepth.results import PAGE


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("[!.]*")}


def test_a_page_of_other_results_is_replaced_only_when_asked(main, tmp_path):
    a, b = small(0.1).save(tmp_path / "a"), small(0.2).save(tmp_path / "b")
    before = files(b)
    code, _, err = main("report", a, "-o", b)
    assert code == 2
    assert f"{b} holds results of its own" in err
    assert files(b) == before
    assert main("report", a, "-o", b, "--overwrite")[0] == 0
    assert files(b)[PAGE] != before.pop(PAGE)
    assert {name: content for name, content in files(b).items() if name != PAGE} == before


def test_the_page_of_a_folder_is_made_again_and_an_empty_one_is_filled(main, tmp_path):
    a = small(0.1).save(tmp_path / "a")
    page = (a / PAGE).read_bytes()
    (a / PAGE).unlink()
    assert main("report", a)[0] == 0
    assert (a / PAGE).read_bytes() == page
    assert main("report", a, "-o", f"{a}/../a")[0] == 0
    for _ in range(2):
        assert main("report", a, "-o", tmp_path / "page")[0] == 0


@pytest.mark.parametrize("name", ["settings.yaml", "plan.json"])
def test_a_comparison_does_not_go_where_another_command_keeps_its_results(main, tmp_path, name):
    a, b, out = small(0.1).save(tmp_path / "a"), small(0.2).save(tmp_path / "b"), tmp_path / "out"
    out.mkdir()
    (out / name).touch()
    for more in ([], ["--overwrite"]):
        code, _, err = main("compare", a, b, "-o", out, *more)
        assert code == 2
        assert "which needs its own results there" in err
    assert list(files(out)) == [name]


def test_the_help_says_what_holds(main):
    """Formats, defaults, and what can be compared."""
    command_help = {
        name: " ".join(re.sub("[│╭╮╰╯─]", " ", main(*name.split(), "--help")[1]).split())
        for name in ("skip apply", "skip search", "compare")
    }
    assert "layout of vLLM and mlx-lm" in command_help["skip apply"]
    assert "[default: yes, unless blocks are ranked" in command_help["skip search"]
    assert "None: yes" not in command_help["skip search"]
    assert "fulldepth evaluate" in command_help["compare"]

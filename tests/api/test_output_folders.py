"""One way to save: every verb holds its output folder, refuses results of others, and survives an interruption."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fulldepth
from fulldepth import cli, reporting
from fulldepth.errors import FulldepthError
from fulldepth.exit import generate_texts, sweep
from fulldepth.results import DOCUMENT, PAGE, Results, tabulate
from fulldepth.skip import bench, curve, search

HOLD = "import sys; from fulldepth.files import locked\nwith locked(sys.argv[1]): print('held', flush=True); input()"
VERBS: dict[str, Callable[[Path], Any]] = {
    "measure": lambda output: fulldepth.measure("nowhere", ["text"], output=output),
    "compare": lambda output: fulldepth.compare(["nowhere", "nowhere"], output=output),
    "exit": lambda output: sweep("nowhere", ["text"], output=output),
    "generate": lambda output: generate_texts("nowhere", ["text"], output=output),
    "skip search": lambda output: search("nowhere", ["text"], output=output, blocks=1),
    "skip curve": lambda output: curve("nowhere", ["text"], output=output, blocks=1),
    "skip bench": lambda output: bench("nowhere", ["nowhere"], output),
    "evaluate": lambda output: fulldepth.evaluate("nowhere", output=output, generation_quality="nowhere"),
}
"""Verb -> a call that fails as soon as it looks for its model."""


def small(value: float) -> Results:
    rows = [("displacement", "residual", n, None, "mean", value, 10, "1") for n in (1, 2, 3)]
    meta = {"kind": "measure", "model": {"name": f"model-{value}", "num_layers": 3}, "headline": {}}
    return Results(tabulate(rows), meta)


def test_a_folder_that_another_process_holds_is_refused_before_any_work(tmp_path: Path) -> None:
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        for call in VERBS.values():
            with pytest.raises(FulldepthError, match="Another fulldepth process is writing into"):
                call(tmp_path)
    finally:
        other.communicate("\n")
    for call in VERBS.values():  # free again
        with pytest.raises(FulldepthError, match="nowhere"):
            call(tmp_path)


def test_results_of_others_are_refused_before_any_work(tmp_path: Path) -> None:
    before = (small(1.0).save(tmp_path) / DOCUMENT).read_bytes()
    for call in [call for verb, call in VERBS.items() if verb != "measure"]:
        with pytest.raises(FulldepthError, match="already holds"):
            call(tmp_path)
    assert (tmp_path / DOCUMENT).read_bytes() == before


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """The program in this process: (exit code, stderr)."""

    def run(*arguments: Any) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["fulldepth", *map(str, arguments)])
        code = 0
        try:
            cli.main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return code, capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    ("moment", "overwrite"), [("before", False), ("document", True), ("page", False), ("page", True)]
)
def test_the_command_that_is_advised_after_an_interruption_works(
    main: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, overwrite: bool
) -> None:
    """Ctrl-C before the comparison, before its document is renamed, and while its page is made."""
    folders = [small(value).save(tmp_path / f"{value}") for value in (1.0, 2.0)]
    output = tmp_path / "both"
    if overwrite:
        fulldepth.compare([folders[1], folders[0]], output=output)
    replace = os.replace

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    if moment == "before":
        monkeypatch.setattr("fulldepth.results.compare", interrupt)
    elif moment == "document":
        monkeypatch.setattr(os, "replace", lambda a, b: interrupt() if str(b).endswith(DOCUMENT) else replace(a, b))
    else:
        monkeypatch.setattr(reporting, "render", interrupt)
    code, err = main("compare", *folders, "--output", output, *(["--overwrite"] if overwrite else []))
    assert code == 130, err
    assert moment == "before" or not (output / PAGE).exists(), "the old page stands beside new numbers"
    monkeypatch.undo()
    advised = shlex.split(err.strip().splitlines()[-1].partition(": ")[2])
    code, err = main(*advised[1:])
    assert code == 0, err
    found = Results.load(output)
    assert [model["label"] for model in found.meta["models"]] == ["1.0", "2.0"]
    assert (output / PAGE).read_text(encoding="utf-8") == reporting.render(found.table, found.meta)

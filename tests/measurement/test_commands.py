"""The commands as the documentation writes them, from text to page."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from fulldepth.results import Results

FEW = ["--max-sequences", "4", "--sequence-length", "12"]


def test_measure_with_every_option_of_the_example(main, checkpoint, tmp_path):
    outcome = main(
        *("measure", checkpoint("llama"), "--data", "corpus:builtin", "--measures", "displacement,cka"),
        *("--max-sequences", 6, "--sequence-length", 32, "--batch-size", 8, "--token-policy", "no-first"),
        *("--output", tmp_path / "out"),
    )
    assert outcome.code == 0, outcome.err
    results = Results.load(tmp_path / "out")
    assert set(results.table.measure) == {"displacement", "cka"}
    assert results.meta["data"]["name"] == "corpus:builtin/heldout"
    assert set(results.table[results.table.measure == "displacement"]["count"]) == {6 * 31}
    assert results.meta["settings"]["tokens"] == "no-first"
    assert sorted(path.name for path in (tmp_path / "out").glob("[!.]*")) == [
        *("report.html", "results.json", "results.parquet")
    ]
    document = json.loads((tmp_path / "out" / "results.json").read_text(), parse_constant=pytest.fail)
    assert document["schema_version"] == 1


def test_what_is_printed(main, checkpoint, text_file, tmp_path):
    out = tmp_path / "out"
    outcome = main("measure", checkpoint("llama"), "--data", text_file, "--output", out, *FEW)
    said, shown = outcome.err.splitlines(), outcome.out.splitlines()
    memory = next(index for index, line in enumerate(said) if line.startswith("Memory"))
    assert "48 of 48 tokens" in said[memory]
    assert "MiB" in said[memory]
    assert [line for line in said if line.startswith("Left out: nc1, because ")]
    assert shown[-1] == f"Page: {out / 'report.html'}"
    for name in Results.load(out).headline:
        assert any(line.startswith(name) for line in shown), name
    again = main("measure", checkpoint("llama"), "--data", text_file, "--output", out, *FEW)
    assert again.code == 0
    assert "nothing to do" in again.err
    assert again.out == outcome.out


@pytest.mark.thorough
def test_in_a_shell(checkpoint, text_file, tmp_path):
    """No colours, bars or warnings of the libraries in what a pipe gets."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "fulldepth", "measure", checkpoint("llama"), "--data", text_file]
    done = subprocess.run(
        [*map(str, command), "--output", str(tmp_path / "out"), *FEW],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"Page: {tmp_path / 'out' / 'report.html'}"
    assert "\x1b" not in done.stdout
    for noise in ("Warning", "warn", "Traceback", "Loading weights"):
        assert noise not in done.stderr, done.stderr

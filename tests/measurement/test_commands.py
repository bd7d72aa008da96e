"""The command as the documentation writes it, from text to page, and the document that it leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from fulldepth.results import Results

FEW = ["--max-sequences", "4", "--sequence-length", "12"]


def test_the_example_and_its_document(main, checkpoint, tmp_path):
    code, _, error = main(
        *("measure", checkpoint("llama"), "--data", "corpus:builtin", "--measures", "displacement,cka"),
        *("--max-sequences", 6, "--sequence-length", 32, "--batch-size", 8, "--token-policy", "no-first"),
        *("--output", tmp_path / "out"),
    )
    assert code == 0, error
    results = Results.load(tmp_path / "out")
    assert set(results.table.measure) == {"displacement", "cka"}
    assert set(results.table.query("measure == 'displacement'")["count"]) == {6 * 31}
    assert {path.name for path in (tmp_path / "out").glob("[!.]*")} == {
        *("report.html", "results.json", "results.parquet")
    }
    meta = json.loads((tmp_path / "out" / "results.json").read_text(), parse_constant=pytest.fail)
    assert (meta["schema_version"], meta["kind"], meta["complete"]) == (1, "measure", True)
    assert meta["settings"]["token_policy"] == "no-first"
    shown = [meta["model"][key] for key in ("name", "class", "family", "task", "num_layers", "width", "dtype")]
    assert shown == [str(checkpoint("llama")), "LlamaForCausalLM", "llama", "causal-lm", 3, 32, "float32"]
    assert meta["model"]["config_hash"].startswith("sha256:")
    assert meta["data"]["hash"].startswith("sha256:")
    assert [meta["data"][key] for key in ("name", "sequences", "tokens")] == ["corpus:builtin/heldout", 6, 192]
    assert set(meta["versions"]) == {"fulldepth", "torch", "transformers", "python"}
    assert meta["sampling"]["reservoir_tokens"] == meta["sampling"]["counted_tokens"] == 6 * 31
    assert meta["memory"]["reservoirs"] >= 6 * 31 * 4 * 32 * 4


def test_what_is_printed(main, checkpoint, text_file, tmp_path):
    out = tmp_path / "out"
    (_, shown, said), (_, again, error) = (
        main("measure", checkpoint("llama"), "--data", text_file, "--output", out, *FEW) for _ in "12"
    )
    assert re.search("^Memory .* 48 of 48 tokens", said, re.MULTILINE)
    assert "\nLeft out: nc1, because " in said
    assert shown.endswith(f"\nPage: {out / 'report.html'}\n")
    for name in Results.load(out).headline:
        assert f"\n{name}" in f"\n{shown}"
    assert "nothing to do" in error
    assert again == shown
    assert Results.load(out).meta["data"]["path"] == str(text_file), "the advised command repeats it"


@pytest.mark.thorough
def test_in_a_shell(checkpoint, text_file, tmp_path):
    """No colours, bars or warnings of the libraries in what a pipe gets."""
    command = [sys.executable, "-m", "fulldepth", "measure", checkpoint("llama"), "--data", text_file, *FEW]
    command += ["--output", tmp_path / "out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.splitlines()[-1] == f"Page: {tmp_path / 'out' / 'report.html'}"
    assert "\x1b" not in done.stdout
    for noise in ("Warning", "warn", "Traceback", "Loading weights"):
        assert noise not in done.stderr, done.stderr

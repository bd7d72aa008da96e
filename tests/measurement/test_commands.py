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
        *("--max-sequences", 6, "--sequence-length", 32, "--batch-size", 8, "--tokens", "no-first"),
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


def test_layers_of_settings(main, checkpoint, text_file, tmp_path):
    """Defaults < recipe < options < --set, and the result carries what came of it."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("measures: [displacement, norm_ratio]\nmax_sequences: 7\nseed: 5\ntokens: no-first\n")
    command = ["measure", checkpoint("llama"), "--data", text_file, "--output", tmp_path / "out", "--recipe", recipe]
    outcome = main(*command, "--sequence-length", "12", "--seed", "6", "--set", "max_sequences=3", "--set", "seed=7")
    assert outcome.code == 0, outcome.err
    settings = Results.load(tmp_path / "out").meta["settings"]
    wanted = {"max_sequences": 3, "seed": 7, "tokens": "no-first", "sequence_length": 12, "batch_size": 8}
    assert settings.items() >= wanted.items()
    assert set(Results.load(tmp_path / "out").table.measure) == {"displacement", "norm_ratio"}


def test_shipped_recipe(main, checkpoint, text_file, tmp_path):
    outcome = main(
        "measure", checkpoint("gpt2"), "--data", text_file, "--output", tmp_path / "out", "--recipe", "quick"
    )
    assert outcome.code == 0, outcome.err
    assert set(Results.load(tmp_path / "out").table.measure) == {"displacement", "jump_rate", "norm_ratio"}


def test_report_needs_the_two_data_files_only(main, refused, checkpoint, text_file, tmp_path):
    out = tmp_path / "out"
    assert main("measure", checkpoint("llama"), "--data", text_file, "--output", out, *FEW).code == 0
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    outcome = main("report", out)
    assert outcome.code == 0, outcome.err
    assert (out / "report.html").read_bytes() == page
    (out / "results.parquet").unlink()
    refused("report", out, says=["results.parquet"])


def test_compare(main, refused, checkpoint, text_file, tmp_path):
    for seed, name in ((0, "a"), (1, "b")):
        command = ["measure", checkpoint("llama", seed), "--data", text_file, "--output", tmp_path / name, *FEW]
        assert main(*command).code == 0
    folders, output = [tmp_path / "a", tmp_path / "b"], tmp_path / "both"
    outcome = main("compare", *folders, "--output", output, "--names", "old,new")
    assert outcome.code == 0, outcome.err
    assert f"Page: {output / 'report.html'}" in outcome.out
    both = Results.load(output)
    assert both.is_comparison
    one, other = (Results.load(folder).values("displacement", "mean", "residual") for folder in folders)
    rows = both.table[(both.table.measure == "displacement") & (both.table.statistic == "mean")]
    rows = rows[(rows.site == "residual") & (rows.model == "new")].set_index("layer")
    assert rows.difference.to_dict() == pytest.approx((other - one).to_dict(), rel=1e-12)  # JREG, Eq. 7
    before = (output / "results.json").read_bytes()
    refused("compare", *folders, "--output", output, says=["already holds results", "--overwrite"])
    assert (output / "results.json").read_bytes() == before
    assert main("compare", *folders, "--output", output, "--overwrite").code == 0
    refused("compare", *folders, "--output", tmp_path / "c", "--depth", "metres", says=["metres", "relative"])
    refused("compare", *folders, "--output", tmp_path / "c", "--names", "one", says=["name"])
    assert not (tmp_path / "c").exists()


def test_models_of_other_precision_and_names_with_spaces(main, checkpoint, text_file, tmp_path):
    model = tmp_path / "my model – 模型"
    model.symlink_to(checkpoint("qwen3"), target_is_directory=True)
    command = ["measure", model, "--data", text_file, "--output", tmp_path / "o u t", *FEW, "--dtype", "bfloat16"]
    outcome = main(*command)
    assert outcome.code == 0, outcome.err
    assert Results.load(tmp_path / "o u t").meta["model"]["name"] == str(model)
    assert Results.load(tmp_path / "o u t").meta["model"]["dtype"] == "bfloat16"


@pytest.mark.slow
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

"""Two processes give what one gives, whatever the share of the batches that each takes."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from pandas.testing import assert_frame_equal

from fulldepth.measurement import MeasureSettings, measure_into
from fulldepth.results import Results
from two_processes import fulldepth

pytestmark = pytest.mark.slow
KEYS = ["measure", "site", "layer", "other", "statistic"]


def compare(two_processes, model, data, folder, **settings):
    """Both ways, into two folders; the tables must be equal to 1e-6."""
    given = [f"--set={name}={value}" for name, value in settings.items()]
    done = two_processes(fulldepth, "measure", model, "--data", data, "--output", folder / "two", *given)
    for code, _, error in done:
        assert code == 0, error
    lists = {name: value.split(",") for name, value in settings.items() if name in ("words", "measures")}
    one = measure_into(model, str(data), folder / "one", MeasureSettings(**(settings | lists)))
    two = Results.load(folder / "two")
    keys = [*KEYS, "step"] if one.is_series else KEYS
    left, right = (r.table.set_index(keys)[["value", "count", "unit"]].sort_index() for r in (one, two))
    assert_frame_equal(left, right, rtol=1e-6, atol=1e-6)
    if one.influences is None:  # too few documents for errors
        assert two.influences is None
    else:
        groups = [r.influences.set_index(keys).sort_index() for r in (one, two)]
        assert_frame_equal(*groups, rtol=1e-5, atol=1e-6, check_dtype=False)
    assert two.meta["headline"].keys() == one.meta["headline"].keys()
    for key in ("sampling", "left_out", "warnings", "token_policy", "model", "data", "groups", "lens_grid"):
        assert two.meta[key] == one.meta[key], key
    return one, two, done


@pytest.fixture(scope="module")
def sentences(tmp_path_factory, corpus):
    """Ragged labelled texts with look-alike words in them."""
    path = tmp_path_factory.mktemp("two") / "rows.tsv"
    pieces = [corpus[n * 53 : n * 53 + 15 + 3 * n].split() for n in range(21)]
    rows = [
        f"{' '.join(words)} {('the', 'and')[n % 2]} {('the', 'and')[n // 2 % 2]}\t{n % 3}"
        for n, words in enumerate(pieces)
    ]
    path.write_text("text\tlabel\n" + "\n".join(rows) + "\n", "utf-8")
    return path


def test_uneven_number_of_batches_and_samples_that_overflow(two_processes, trained, sentences, checkpoint, tmp_path):
    """Three batches over two processes; reservoir, lens and entropy samples smaller than the data."""
    one, _, done = compare(
        two_processes,
        trained,
        sentences,
        tmp_path,
        batch_size=7,
        sequence_length=48,
        reservoir_tokens=60,
        lens_tokens=50,
        entropy_sequences=6,
        words="the,and",
        reference=str(checkpoint("llama", 1)),
        dtype="float64",
    )
    assert {"separability", "renyi_entropy", "cka", "spectral_norm", "mmd", "nc1", "saturation"} <= set(
        one.table.measure
    )
    assert [out.count("Page: ") for _, out, _ in done] == [1, 0], "only the first process prints"
    assert (tmp_path / "two" / "report.html").is_file()
    assert not list((tmp_path / "two").glob(".*"))


@pytest.mark.thorough
def test_a_series(two_processes, checkpoint, text_file, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for seed, step in ((0, 10), (1, 20)):
        (run / f"checkpoint-{step}").symlink_to(checkpoint("llama", seed), target_is_directory=True)
    _, two, _ = compare(two_processes, run, text_file, tmp_path, max_sequences=5, sequence_length=12, batch_size=2)
    assert [entry["step"] for entry in two.meta["steps"]] == [10, 20]
    few = ["--max-sequences", "5", "--sequence-length", "12", "--batch-size", "2"]
    again = two_processes(fulldepth, "measure", run, "--data", text_file, "--output", tmp_path / "two", *few)
    assert [code for code, _, _ in again] == [0, 0]
    assert "nothing to do" in again[0][1] + again[0][2]


@pytest.mark.thorough
def test_a_mistake_in_one_share_ends_both_processes(overflowing, text_file, tmp_path):
    """With one readable message, not with a process that waits for ever: the command under torchrun."""
    few = ["--max-sequences", "6", "--sequence-length", "16", "--batch-size", "2", "--set", "order=first"]
    program = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2 -m fulldepth".split()
    given = ["measure", overflowing, "--data", text_file, "--output", tmp_path / "out", *few]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*program, *given], capture_output=True, text=True, env=environment, check=False, timeout=300)
    assert done.returncode != 0
    assert re.search("^Error:.*sequences 4..5", done.stderr, re.MULTILINE), done.stderr[-2000:]
    assert "sequences 4..5" in done.stderr[-1500:].partition("Root Cause")[2], done.stderr[-2000:]
    assert not (tmp_path / "out" / "results.json").exists()


def test_effects_of_removed_parts(two_processes, trained, sentences, tmp_path):
    """Sums, maxima and the samples behind quantiles are those of all processes."""
    one, _, _ = compare(
        two_processes,
        trained,
        sentences,
        tmp_path,
        measures="layer_effect",
        batch_size=7,
        sequence_length=48,
        reservoir_tokens=60,
        effect_positions=2,
    )
    assert {"q90_future", "max_all", "loss_added"} <= set(one.table.statistic)


def test_maps_of_the_linear_lens_are_fitted_by_both(two_processes, trained, documents_file, tmp_path):
    """The second process has no batch of the text to fit on in the last round."""
    one, two, _ = compare(
        two_processes, trained, documents_file, tmp_path, batch_size=4, sequence_length=48, dtype="float64",
        measures="lens_loss,linear_lens_accuracy,linear_lens_loss", fit="corpus:builtin", fit_sequences=9,
    )  # fmt: skip
    stated, both = (results.meta["linear_lens"] for results in (one, two))
    for name in ("ridge", "unexplained"):
        assert both.pop(name) == pytest.approx(stated.pop(name), rel=1e-9)
    assert both == stated

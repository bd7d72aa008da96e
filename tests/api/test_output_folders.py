"""One way to save: every verb holds its output folder, and refuses results of others."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fulldepth
from fulldepth.cli.demo import demo
from fulldepth.exit import generate_texts, sweep
from fulldepth.results import DOCUMENT, Results, tabulate
from fulldepth.skip import bench, curve, search
from refusals import refused

HOLD = (
    "import sys; from fulldepth.core.files import locked\nwith locked(sys.argv[1]): print('held', flush=True); input()"
)
VERBS = {
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


def small(value):
    rows = [("displacement", "residual", n, None, "mean", value, 10, "1") for n in (1, 2, 3)]
    meta = {"kind": "measure", "model": {"name": f"model-{value}", "num_layers": 3}, "headline": {}}
    return Results(tabulate(rows), meta)


def test_a_folder_that_another_process_holds_is_refused_before_any_work(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        page = small(1.0).save(tmp_path / "measured")
        for call in (*VERBS.values(), demo, lambda output: fulldepth.report(page, output)):
            with refused("Another fulldepth process is writing into"):
                call(tmp_path)
    finally:
        other.communicate("\n")
    for call in VERBS.values():  # free again
        with refused("nowhere"):
            call(tmp_path)


def of_kind(kind):
    results = small(2.0)
    results.meta["kind"] = kind
    return results


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(("kind", "other", "beside"), [("comparison", "measure", None), ("skip", "curve", "plan.json")])
def test_results_of_another_kind_are_replaced_only_if_asked(tmp_path, kind, other, beside):
    if beside is not None:
        (tmp_path / beside).touch()
    of_kind(kind).save(tmp_path)
    before = contents(tmp_path)
    with refused(f"holds results of kind {kind}, these are of kind {other}. .*overwrite=True"):
        of_kind(other).save(tmp_path)
    assert contents(tmp_path) == before
    of_kind(kind).save(tmp_path)
    assert contents(tmp_path) == before, "the same kind again"
    of_kind(other).save(tmp_path, overwrite=True)
    assert Results.load(tmp_path).meta["kind"] == other


@pytest.mark.parametrize(
    ("kind", "file", "message"),
    [
        ("skip", "plan.json", "holds a plan of fulldepth skip"),
        ("curve", "progress.json", "holds an unfinished search"),
        ("training", "settings.yaml", "holds a training run"),
    ],
)
def test_results_are_never_saved_beside_a_run_or_plan_of_others(tmp_path, kind, file, message):
    (tmp_path / file).touch()
    for _ in range(2):  # its own results, once they are there too
        before = contents(tmp_path)
        for overwrite in (False, True):
            with refused(message):
                of_kind("bench").save(tmp_path, overwrite=overwrite)
        assert contents(tmp_path) == before
        of_kind(kind).save(tmp_path, page=False)


def test_results_of_others_are_refused_before_any_work(tmp_path):
    before = (small(1.0).save(tmp_path) / DOCUMENT).read_bytes()
    for call in [call for verb, call in VERBS.items() if verb != "measure"]:
        with refused("already holds"):
            call(tmp_path)
    assert (tmp_path / DOCUMENT).read_bytes() == before

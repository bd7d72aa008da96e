"""`search_into`: the folder that a search leaves, whole after a restart, and never over something else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from fulldepth.data.examples import read_examples
from fulldepth.errors import FulldepthError
from fulldepth.execution import verify
from fulldepth.hf.model_hash import model_hash
from fulldepth.results import Results
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.plan import Plan
from fulldepth.skip.responses import Responses, stored_responses
from fulldepth.skip.selection.outcome import analyse, settings_of
from fulldepth.skip.selection.search import search_into
from skip import plain, planned
from skip.word_tokenizer import tokenizer, words
from tiny_models import build

SETTINGS = SearchSettings(blocks=2, epochs=2, batch_size=4)
PAIRS = [
    {"prompt": words(n, n + 1, 3 * n % 80), "response": " " + words(*((7 * n + i * i) % 80 for i in range(4 + n % 3)))}
    for n in range(20)
]


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint with its tokenizer, and pairs beside it."""
    folder = tmp_path / "model"
    build("llama").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)), encoding="utf-8")
    return folder


def test_a_search_leaves_its_plan_and_its_outcome(checkpoint, tmp_path) -> None:
    data, out = str(tmp_path / "pairs.jsonl"), tmp_path / "out"
    plan = search_into(str(checkpoint), data, out, SETTINGS)
    assert Plan.load(out) == plan
    assert plan.model.name == str(checkpoint)
    results, again = Results.load(out), analyse(str(checkpoint), plan, data)
    assert results.meta["plan"] == plan.document()
    pd.testing.assert_frame_equal(results.table, again.table)
    assert results.headline == again.headline
    assert results.meta["settings"] == SETTINGS.model_dump()
    base = plain.loss(build("llama"), read_examples(data, tokenizer(), 64).heldout, (), "attention")
    first = results.table.iloc[0]
    assert (first.measure, first.state) == ("loss", "original")
    assert first.value == pytest.approx(base, rel=1e-5)
    assert not list(out.glob(".*")), "something half-written stayed"


def test_a_restart_makes_what_is_missing_and_nothing_else(checkpoint, tmp_path) -> None:
    data, out = str(tmp_path / "pairs.jsonl"), tmp_path / "out"
    plan = search_into(str(checkpoint), data, out, SETTINGS)
    before = Results.load(out)
    written = (out / "results.json").stat().st_mtime_ns
    assert search_into(str(checkpoint), data, out, SETTINGS, resume=True) == plan
    assert (out / "results.json").stat().st_mtime_ns == written
    for name in ("results.json", "results.parquet"):
        (out / name).unlink()
    assert search_into(str(checkpoint), data, out, SETTINGS, resume=True) == plan
    after = Results.load(out)
    pd.testing.assert_frame_equal(before.table, after.table)
    assert before.meta | {"created": ""} == after.meta | {"created": ""}


def test_other_files_are_not_written_over(checkpoint, tmp_path) -> None:
    data, out = tmp_path / "out" / "responses.jsonl", tmp_path / "out"
    out.mkdir()
    data.write_text((tmp_path / "pairs.jsonl").read_text())
    with pytest.raises(FulldepthError, match="would replace"):
        search_into(str(checkpoint), str(data), out, SETTINGS, responses=9, max_new_tokens=2)
    for name in ("plan.json", "results.json", "settings.yaml"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("{}")
        for resume in (False, True):
            with pytest.raises(FulldepthError):
                search_into(str(checkpoint), str(data), folder, SETTINGS, resume=resume)
        assert {path.name: path.read_text() for path in folder.iterdir()} == {name: "{}"}
    assert [path.name for path in out.iterdir()] == ["responses.jsonl"]


def test_a_model_is_read_hashed_and_proven_once(checkpoint, tmp_path, monkeypatch) -> None:
    """However many steps use it: counted at every place of the package that holds the function."""
    calls: list[str] = []

    def counted(function):
        def counting(*args, **kwargs):
            calls.append(function.__name__)
            return function(*args, **kwargs)

        return counting

    package = [module for name, module in sys.modules.items() if name.split(".")[0] == "fulldepth"]
    for function in (verify, model_hash, read_examples):
        for module in package:
            for name in [name for name, value in vars(module).items() if value is function]:
                monkeypatch.setattr(module, name, counted(function))
    once, data = ["model_hash", "read_examples", "verify"], str(tmp_path / "pairs.jsonl")
    search_into(str(checkpoint), data, tmp_path / "out", SETTINGS)
    assert sorted(calls) == once
    calls.clear()
    plan = search_into(str(checkpoint), data, tmp_path / "answered", SETTINGS, responses=8, max_new_tokens=5)
    assert sorted(calls) == once
    assert plan.data["responses"]["max_new_tokens"] == 5


@pytest.mark.thorough
def test_two_processes_write_once(checkpoint, tmp_path) -> None:
    data = tmp_path / "pairs.jsonl"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fulldepth"]
    given = [checkpoint, "--data", data, "--blocks", 2, "--batch-size", 4, "--set", "epochs=2", "-o", tmp_path / "two"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, "skip", "search", *map(str, given)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    plan = search_into(str(checkpoint), str(data), tmp_path / "one", SETTINGS)
    one, two = Results.load(tmp_path / "one"), Results.load(tmp_path / "two")
    assert two.meta["plan"]["blocks"] == plan.blocks
    pd.testing.assert_frame_equal(one.table, two.table, rtol=1e-4, atol=1e-7)


def test_models_without_a_next_token_are_refused_before_anything_is_read(tmp_path):
    build("vit").save_pretrained(tmp_path / "model")
    with pytest.raises(FulldepthError, match="is no causal language model"):
        search_into(tmp_path / "model", "absent.jsonl", tmp_path / "out", SETTINGS)


def test_a_plan_grants_nothing() -> None:
    plan = planned.plan(build("llama"), [2])
    stored = {"trust_remote_code": True, "tokenizer": "elsewhere", "revision": "theirs", "device": "meta", "seed": 7}
    plan = plan.changed(cost={**plan.cost, "settings": stored})
    found = settings_of(plan, {})
    assert found == SearchSettings(blocks=1, seed=7)
    assert settings_of(plan, {"trust_remote_code": True}).trust_remote_code


def answers(text: str = "yes") -> Responses:
    return Responses([{"prompt": "a", "response": text}], {"prompts": 1})


def test_responses_are_found_again_and_never_written_over(tmp_path: Path) -> None:
    notes, file = tmp_path / "responses.json", tmp_path / "responses.jsonl"
    made = stored_responses(tmp_path, {"count": 1}, answers)
    assert made == {"prompts": 1}
    before = file.read_bytes()
    assert stored_responses(tmp_path, {"count": 1}, lambda: pytest.fail("generated again")) == made
    with pytest.raises(FulldepthError, match="other responses: count was 1, is 2"):
        stored_responses(tmp_path, {"count": 2}, answers)
    file.unlink()  # killed between the two files
    assert stored_responses(tmp_path, {"count": 1}, answers) == made
    assert file.read_bytes() == before
    file.write_text("edited\n")
    with pytest.raises(FulldepthError, match="has changed since it was generated"):
        stored_responses(tmp_path, {"count": 1}, answers)
    notes.unlink()
    with pytest.raises(FulldepthError, match="never written over"):
        stored_responses(tmp_path, {"count": 1}, answers)
    assert file.read_text() == "edited\n"

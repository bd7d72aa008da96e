"""Stored files of a search with hostile content, and output folders that are somebody else's."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher
from fulldepth.settings import layer
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.assessment.curve import curve
from fulldepth.skip.assessment.outcome import settings_of
from fulldepth.skip.plan import Plan
from fulldepth.skip.responses import Responses
from fulldepth.skip.run import search_into
from fulldepth.skip.selection import search as searching
from fulldepth.skip.stored_responses import stored_responses
from hostile import damaged_json
from skip import plain, planned, word_tokenizer

OPTIONS = {"batch_size": 4, "epochs": 1, "blocks": 2, "patience": 1}
LAYERS, WIDTH = 4, 16


class Killed(BaseException):
    """Nothing that anybody catches."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`quick(folder, ...)`: a resumed search whose model and data are opened and proven once for all."""
    model, examples = plain.fresh(LAYERS, WIDTH).eval(), plain.examples(train=8, heldout=32)
    opened: dict[str, Any] = {}
    real = searching.prepared

    @contextmanager
    def prepared(model: Any, data: Any, settings: SearchSettings, *more: Any, **options: Any) -> Iterator[Any]:
        key = settings.model_dump_json()
        if key not in opened:
            stack = real(model, data, settings, *more, **options)
            opened[key] = (stack.__enter__(), stack)
        yield opened[key][0]

    monkeypatch.setattr(searching, "prepared", prepared)

    def run(folder: Path, **options: Any) -> Plan:
        watcher = options.pop("watcher", Watcher())
        return searching.search(model, examples, output=folder, resume=True, watcher=watcher, **(OPTIONS | options))

    yield run
    for _, stack in reversed(opened.values()):
        stack.__exit__(None, None, None)


def stopping(after: int) -> Watcher:
    told = itertools.count(1)

    def advance(count: int) -> None:
        if next(told) == after:
            raise Killed

    return Watcher(advance=advance)


@pytest.mark.parametrize(("criterion", "after", "cases"), [("loss", 30, 150), ("scaled", 60, 60)])
def test_damaged_progress_is_refused_in_words_or_does_not_matter(
    quick: Any, tmp_path: Path, criterion: str, after: int, cases: int
) -> None:
    with pytest.raises(Killed):
        quick(tmp_path / "out", criterion=criterion, watcher=stopping(after))
    path, rng, refused = tmp_path / "out" / "progress.json", random.Random(0), []
    document = json.loads(path.read_text())
    assert len(document["log"]) > 5
    for _ in range(cases):
        path.parent.mkdir(exist_ok=True)
        path.write_text(damaged_json(document, rng), encoding="utf-8", errors="replace")
        try:
            plan = quick(path.parent, criterion=criterion)
        except FulldepthError as error:
            refused.append(str(error))
        else:
            assert len(plan.blocks) == 2
            (path.parent / "plan.json").unlink()
    assert len(refused) > cases / 3
    for message in refused:
        assert str(path) in message
        assert len(message) < 1000
        assert "Remove the file" in message or "another search" in message or "schema version" in message


def test_a_damaged_plan_is_refused_in_words_or_is_a_plan(tmp_path: Path) -> None:
    model, rng, path = tiny_models.build("llama"), random.Random(1), tmp_path / "plan.json"
    plan = planned.plan(model, [2])
    document = plan.changed(cost={**plan.cost, "settings": {"seed": 3, "epochs": 2, "given": None}}).document()
    refused = []
    for _ in range(600):
        path.write_text(damaged_json(document, rng), encoding="utf-8", errors="replace")
        try:
            plan = Plan.load(path)
            settings_of(plan, {})
            plan.check_model(model)
        except FulldepthError as error:
            refused.append(str(error))
    assert len(refused) > 200
    assert all(len(message) < 1000 for message in refused)


def test_a_plan_grants_nothing() -> None:
    plan = planned.plan(tiny_models.build("llama"), [2])
    stored = {"trust_remote_code": True, "tokenizer": "elsewhere", "revision": "theirs", "device": "meta", "seed": 7}
    plan = plan.changed(cost={**plan.cost, "settings": stored})
    found = settings_of(plan, {})
    assert found == SearchSettings(blocks=1, seed=7)
    assert settings_of(plan, {"trust_remote_code": True}).trust_remote_code


@pytest.mark.parametrize(
    "setting",
    ["blocks", "batch_size", "chunks", "sequence_length", "limit", "seed", "learning_rate", "epochs", "patience"],
)
def test_absurd_numbers_are_refused(setting: str) -> None:
    for value in (10**30, -1, 1e300, float("inf")):
        with pytest.raises(FulldepthError, match=setting):
            layer(SearchSettings, {setting: value})


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


def test_damaged_notes_of_responses_are_refused(tmp_path: Path) -> None:
    stored_responses(tmp_path, {"count": 1, "seed": 0}, answers)
    document, rng = json.loads((tmp_path / "responses.json").read_text()), random.Random(2)
    refused = []
    for _ in range(300):
        (tmp_path / "responses.json").write_text(damaged_json(document, rng), encoding="utf-8", errors="replace")
        try:
            stored_responses(tmp_path, {"count": 1, "seed": 0}, lambda: pytest.fail("generated again"))
        except FulldepthError as error:
            refused.append(str(error))
    assert len(refused) > 100
    assert all("responses" in message and len(message) < 1000 for message in refused)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint with its tokenizer, and pairs in a folder of their own."""
    tiny_models.build("llama").save_pretrained(tmp_path / "model")
    word_tokenizer.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "out").mkdir()
    rows = [{"prompt": word_tokenizer.words(n), "response": word_tokenizer.words(n, n + 1)} for n in range(12)]
    (tmp_path / "out" / "responses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "model"


def test_prompts_are_not_written_over_by_the_responses_to_them(checkpoint: Path, tmp_path: Path) -> None:
    data = tmp_path / "out" / "responses.jsonl"
    before = data.read_bytes()
    settings = SearchSettings(blocks=1, fit=False)
    with pytest.raises(FulldepthError, match="which the generated responses would replace"):
        search_into(checkpoint, str(data), tmp_path / "out", settings, responses=9, max_new_tokens=2)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["responses.jsonl"]
    assert data.read_bytes() == before


@pytest.mark.parametrize("name", ["results.json", "settings.yaml"])
@pytest.mark.parametrize("resume", [False, True])
def test_folders_of_other_commands_are_refused_before_anything_is_written(
    checkpoint: Path, tmp_path: Path, name: str, resume: bool
) -> None:
    folder = tmp_path / "foreign"
    folder.mkdir()
    (folder / name).write_text("{}")
    data = str(tmp_path / "out" / "responses.jsonl")
    with pytest.raises(FulldepthError):
        search_into(checkpoint, data, folder, SearchSettings(blocks=1, fit=False), resume=resume)
    if name == "results.json":
        with pytest.raises(FulldepthError):
            curve(checkpoint, data, max_blocks=1, output=folder, resume=resume)
    assert {path.name: path.read_text() for path in folder.iterdir()} == {name: "{}"}

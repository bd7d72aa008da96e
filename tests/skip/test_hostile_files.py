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
from fulldepth.settings.search import SearchSettings
from fulldepth.skip.assessment.outcome import settings_of
from fulldepth.skip.plan import Plan
from fulldepth.skip.responses import Responses, stored_responses
from fulldepth.skip.selection import search as searching
from hostile import damaged_json
from skip import plain, planned

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


def test_damaged_progress_is_refused_in_words_or_does_not_matter(quick: Any, tmp_path: Path) -> None:
    criterion, cases = "scaled", 60
    with pytest.raises(Killed):
        quick(tmp_path / "out", criterion=criterion, watcher=stopping(60))
    path, rng, refused = tmp_path / "out" / "progress.json", random.Random(0), []
    document = json.loads(path.read_text())
    assert len(document["steps"]) > 5
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
        assert "Remove the file" in message or "another search" in message


def test_a_plan_grants_nothing() -> None:
    plan = planned.plan(tiny_models.build("llama"), [2])
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

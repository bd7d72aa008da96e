"""`fulldepth data prepare`: the tokens of a run, made before it by any number of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fulldepth.cli import app
from fulldepth.data import builtin_texts, units
from fulldepth.data.cache import token_files
from fulldepth.data.cache.encoder import Encoder
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher
from fulldepth.settings import assignments, layer, read
from fulldepth.training import TrainSettings, prepare_text, train


def settings_of(path: Path, *changes: str) -> TrainSettings:
    return layer(TrainSettings, read(path, "train"), assignments(list(changes)))


def tokens_in(cache: Path) -> dict[str, bytes]:
    """Everything that stays in a cache, but the locks."""
    return {str(p.relative_to(cache)): p.read_bytes() for p in cache.rglob("*") if p.is_file() and p.stat().st_size}


def test_a_run_reads_what_was_prepared(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    path = recipe(data={"cache": str(cache)})
    outcome = CliRunner().invoke(app, ["data", "prepare", str(path), "steps=2", "--workers", "1"])
    assert outcome.exit_code == 0
    (folder,) = cache.iterdir()
    notes = [json.loads(p.read_text()) for p in folder.glob("0*.json")]
    tokens, documents = (sum(note[name] for note in notes) for name in ("tokens", "documents"))
    last = " ".join(outcome.stdout.split())
    assert f"{tokens:,} tokens of {documents} documents are in {folder}; fulldepth train {path} finds" in last
    whole = {name: content for name, content in tokens_in(cache).items() if "split" not in name}

    def never(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(Encoder, "__call__", never)
    for number, change in enumerate(("seed=0", "seed=3", "sequence_length=16", "data.validation_share=0.1")):
        results = train(settings_of(path, "steps=2", "eval_every=2", change), tmp_path / f"run-{number}")
        assert results.meta["data"]["tokens"] == tokens
        assert not (tmp_path / f"run-{number}" / "tokens").exists()
    assert {name: content for name, content in tokens_in(cache).items() if "split" not in name} == whole


def test_what_cannot_be_prepared_says_why(recipe: Any) -> None:
    with pytest.raises(FulldepthError, match="fine-tunes on conversations"):
        prepare_text(settings_of(recipe(stage="sft")))
    with pytest.raises(FulldepthError, match="needs a tokenizer: tokenizer=builtin:2048"):
        prepare_text(settings_of(recipe(tokenizer=None)))


def test_all_of_a_text_or_as_much_as_a_run_reads(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulldepth.training.text.SMALL_CORPUS", 1)
    monkeypatch.setattr(units, "UNIT_BYTES", 2000)
    monkeypatch.setattr(token_files, "SHARD_TOKENS", 500)
    settings = settings_of(recipe(data={"cache": str(tmp_path / "cache")}), "steps=20")
    some = prepare_text(settings, writers=1)
    before = tokens_in(tmp_path / "cache")
    every = prepare_text(settings, whole=True, writers=1)
    again = prepare_text(settings, writers=1)
    assert some.train.tokens == 20 * 4 * 24 < every.train.tokens
    assert before.items() <= tokens_in(tmp_path / "cache").items()
    assert some.hash == again.hash != every.hash


@pytest.fixture
def big(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`big(cache)`: settings of a run over a text of several units."""
    monkeypatch.setattr(units, "UNIT_BYTES", 30_000)
    monkeypatch.setattr(token_files, "SHARD_TOKENS", 5_000)
    text = tmp_path / "text"
    text.mkdir()
    for number, novel in enumerate(builtin_texts("heldout")):
        (text / f"{number}.txt").write_text(novel[:150_000], encoding="utf-8")
    return lambda cache: settings_of(recipe(data={"name": str(text), "cache": str(cache)}))


@pytest.mark.slow
def test_two_processes_write_what_one_does(big: Any, tmp_path: Path) -> None:
    lines: list[str] = []
    advanced: list[int] = []
    one = prepare_text(big(tmp_path / "one"), whole=True, writers=1)
    watcher = Watcher(say=lines.append, advance=advanced.append, begin=lambda title, total: lines.append(str(total)))
    two = prepare_text(big(tmp_path / "two"), whole=True, writers=2, watcher=watcher)
    assert two.hash == one.hash
    assert tokens_in(tmp_path / "one") == tokens_in(tmp_path / "two")
    assert [str(sum(advanced))] == lines


PREPARE = """
import sys
from pathlib import Path
from fulldepth.data import units
from fulldepth.data.cache import token_files
from fulldepth.training import TrainSettings, prepare_text
units.UNIT_BYTES, token_files.SHARD_TOKENS = 30_000, 5_000
prepare_text(TrainSettings.model_validate_json(Path(sys.argv[1]).read_text()), whole=True, writers=2)
"""


@pytest.mark.slow
def test_processes_that_are_killed_leave_what_another_goes_on_with(big: Any, tmp_path: Path) -> None:
    one = prepare_text(big(tmp_path / "one"), whole=True, writers=1)
    (tmp_path / "settings.json").write_text(big(tmp_path / "two").model_dump_json())
    process = subprocess.Popen([sys.executable, "-c", PREPARE, tmp_path / "settings.json"])
    while process.poll() is None and len(list((tmp_path / "two").rglob("0*.json"))) < 3:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    two = prepare_text(big(tmp_path / "two"), whole=True, writers=1)
    assert two.hash == one.hash
    assert tokens_in(tmp_path / "one") == tokens_in(tmp_path / "two")

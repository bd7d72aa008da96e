"""`fulldepth data prepare`: the tokens of a run, made before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fulldepth.cli import app
from fulldepth.data import token_cache
from fulldepth.data.token_cache import Encoder
from fulldepth.errors import FulldepthError
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
    outcome = CliRunner().invoke(app, ["data", "prepare", str(path), "steps=2"])
    assert outcome.exit_code == 0
    (folder,) = cache.iterdir()
    notes = [json.loads(p.read_text()) for p in folder.glob("*.json")]
    tokens, documents = (sum(note[name] for note in notes) for name in ("tokens", "documents"))
    last = " ".join(outcome.stdout.split())
    assert f"{tokens:,} tokens of {documents} documents are in {folder}; fulldepth train {path} finds" in last
    whole = tokens_in(cache)

    def never(*_: Any) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(Encoder, "__call__", never)
    for number, change in enumerate(("seed=0", "seed=3", "sequence_length=16", "data.validation_share=0.1")):
        results = train(settings_of(path, "steps=2", "eval_every=2", change), tmp_path / f"run-{number}")
        assert results.meta["data"]["tokens"] == tokens
        assert not (tmp_path / f"run-{number}" / "tokens").exists()
    assert tokens_in(cache) == whole


def test_what_cannot_be_prepared_says_why(recipe: Any) -> None:
    with pytest.raises(FulldepthError, match="fine-tunes on conversations"):
        prepare_text(settings_of(recipe(stage="sft")))
    with pytest.raises(FulldepthError, match="needs a tokenizer: tokenizer=builtin:2048"):
        prepare_text(settings_of(recipe(tokenizer=None)))


def test_all_of_a_text_or_as_much_as_a_run_reads(recipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fulldepth.training.text.SMALL_CORPUS", 1)
    monkeypatch.setattr(token_cache, "FILE_TOKENS", 500)
    monkeypatch.setattr(token_cache, "BATCH_DOCUMENTS", 4)
    settings = settings_of(recipe(data={"cache": str(tmp_path / "cache")}), "steps=20")
    some = prepare_text(settings)
    before = tokens_in(tmp_path / "cache")
    every = prepare_text(settings, whole=True)
    again = prepare_text(settings)
    assert some.train.tokens == 20 * 4 * 24 < every.train.tokens
    assert before.items() <= tokens_in(tmp_path / "cache").items()
    assert some.hash == again.hash != every.hash

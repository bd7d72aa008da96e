"""Code that a checkpoint carries runs where the command allows it, whatever the checkpoint or a pipe says."""

from __future__ import annotations

import io
import sys

import pytest
import yaml

import tiny_models
from data.conftest import jsonl
from json_files import change_json
from marks import thorough
from skip import planned, word_tokenizer

EVIL = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig as Config, LlamaForCausalLM as Model, PreTrainedTokenizerFast as Tokenizer
"""
AUTO = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoModel": "evil.Model"}


def change(path, **entries):
    change_json(path, **entries)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A checkpoint of a known and one of an unknown type, both with code; data, recipes and a plan that trusts."""
    home = tmp_path_factory.mktemp("house")
    model = tiny_models.build("llama")
    rows = [
        {"prompt": word_tokenizer.words(n, n + 1), "response": word_tokenizer.words(*range(n, n + 6))}
        for n in range(12)
    ]
    jsonl(home / "pairs.jsonl", *rows)
    jsonl(home / "text.jsonl", *({"text": row["response"]} for row in rows * 2))
    data = {"name": str(home / "text.jsonl"), "validation_share": 0.3}
    for name in ("known", "unknown"):
        folder = home / name
        model.save_pretrained(folder)
        word_tokenizer.tokenizer().save_pretrained(folder)
        change(folder / "config.json", auto_map=AUTO)
        change(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "evil.Tokenizer"]})
        (folder / "evil.py").write_text(EVIL.format(marker=str(home / "ran")))
        recipe = {"model": {"checkpoint": str(folder)}, "data": data, "steps": 1, "global_batch_size": 1}
        (home / f"{name}.yaml").write_text(yaml.safe_dump(recipe | {"sequence_length": 8, "tokenizer": str(folder)}))
    change(home / "unknown" / "config.json", model_type="evil", architectures=["Model"])
    change(home / "unknown" / "tokenizer_config.json", tokenizer_class="EvilTokenizer")
    plan = planned.plan(model)
    settings = {"trust_remote_code": True, "tokenizer": str(home / "unknown"), "batch_size": 4}
    plan.changed(cost={**plan.cost, "settings": settings}).save(home / "plan.json")
    return home


@pytest.fixture
def house(built, monkeypatch):
    """The same, and somebody who says yes to every question."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    return built


COMMANDS = {
    "measure": ["measure", "{model}", "--data", "{home}/text.jsonl"],
    "search": ["skip", "search", "{model}", "--data", "{home}/pairs.jsonl", "--blocks", "1", "--no-fit"],
    "curve": ["skip", "curve", "{model}", "--data", "{home}/pairs.jsonl", "--blocks", "1"],
    "apply": ["skip", "apply", "{home}/plan.json", "{model}"],
    "bench": ["skip", "bench", "{model}", "{model}", "--batches", "1", "--contexts", "4", "--repeats", "1"],
    "exit": ["exit", "{model}", "--data", "{home}/text.jsonl", "--set", "prompts=0"],
    "exit export": ["exit", "export", "{model}", "--layers", "1"],
    "train": ["train", "{model}.yaml"],
}


@pytest.mark.parametrize("kind", [thorough("known"), "unknown"])
@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_runs_code_of_a_checkpoint(main, house, tmp_path, name, kind):
    model = str(house / kind)
    command = [word.format(model=model, home=house) for word in COMMANDS[name]]
    code, _, err = main(*command, "--output", tmp_path / "out")
    assert not (house / "ran").exists()
    assert code == (0 if kind == "known" else 2), err
    if kind == "unknown":
        assert "its own code" in err
    written = [path for path in tmp_path.rglob("*config.json") if "evil" in path.read_text()]
    assert not written, "a run's checkpoint names the code"

"""`fulldepth skip` as a newcomer runs it: from a checkpoint to exports, and every mistake that ends with 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import tiny_models
from skip import word_tokenizer

FRESH = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained(sys.argv[1]).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
total, tokens = 0.0, 0
for line in open(sys.argv[2]):
    row = json.loads(line)
    prompt = tokenizer(row["prompt"])["input_ids"]
    ids = prompt + tokenizer(row["response"])["input_ids"]
    with torch.no_grad():
        said = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    for at in range(len(prompt), len(ids)):
        total -= float(said[at - 1, ids[at]])
        tokens += 1
assert "fulldepth" not in sys.modules
print(total / tokens)
"""


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        numbers = torch.randint(0, 80, (9,), generator=generator).tolist()
        made.append(
            {"prompt": f"{word_tokenizer.words(*numbers[:4])} ", "response": word_tokenizer.words(*numbers[4:])}
        )
    return made


def write(path, made):
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A checkpoint, another one, and pairs to train and to score with."""
    home = tmp_path_factory.mktemp("skip")
    for name, seed in (("model", 0), ("other", 1)):
        model = tiny_models.build("llama", seed=seed)
        model.save_pretrained(home / name)
        word_tokenizer.tokenizer().save_pretrained(home / name)
    write(home / "pairs.jsonl", rows(24, 0))
    write(home / "heldout.jsonl", rows(12, 1))
    return home


@pytest.fixture(scope="module")
def planned(house):
    """A finished search, by another process."""
    command = ["skip", "search", "model", "--data", "pairs.jsonl", "--heldout", "heldout.jsonl", "--blocks", "2"]
    options = ["--output", "plan", "--set", "epochs=2", "--set", "learning_rate=0.01", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "fulldepth", *command, *options], cwd=house, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Page: " in done.stderr
    assert json.loads(done.stdout) == json.loads((house / "plan" / "results.json").read_text())["headline"]
    return json.loads((house / "plan" / "plan.json").read_text())


def test_search_writes_plan_results_and_page(house, planned):
    assert len(planned["blocks"]) == 2
    assert planned["healed_loss"] <= planned["losses"][-1]
    assert {path.name for path in (house / "plan").iterdir()} == {
        "plan.json",
        "results.json",
        "results.parquet",
        "report.html",
    }


def test_the_folded_export_has_the_plans_loss_in_stock_transformers(main, house, planned, tmp_path):
    code, out, err = main(
        "skip", "apply", house / "plan", house / "model", "--format", "folded", "-o", tmp_path / "folded"
    )
    assert code == 0, err
    assert "logit error" in out
    arguments = [tmp_path / "folded", house / "heldout.jsonl"]
    done = subprocess.run(
        [sys.executable, "-c", FRESH, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(planned["healed_loss"], rel=1e-4)


SEARCHES = [
    ("--blocks 4", ["4", "3 layers"]),
    ("", ["blocks"]),
    ("--blocks 1 --search greedi", ["greedi", "greedy"]),
    ("--blocks 1 --given 3,x", ["given", "x"]),
    ("--given 7", ["7", "3"]),
    ("--blocks 1 --budget 2e15", ["2e15", "10m"]),
    ("--blocks 1 --set epoch=1", ["epoch", "epochs"]),
    ("--blocks 1 --recipe hopscoch", ["hopscotch"]),
    ("--blocks 1 --data absent.jsonl", ["absent.jsonl"]),
    ("--blocks 1 --data unanswered.jsonl", ["response"]),
    ("--blocks 1 --data long.jsonl", ["92", "64 tokens"]),
]


@pytest.mark.parametrize(("arguments", "words"), SEARCHES, ids=str)
def test_a_search_that_cannot_be_is_refused(main, house, tmp_path, arguments, words, monkeypatch):
    write(house / "unanswered.jsonl", [{"prompt": word_tokenizer.words(1), "response": ""}] * 4)
    write(house / "long.jsonl", [{"prompt": word_tokenizer.words(*[1] * 90), "response": word_tokenizer.words(2)}] * 4)
    monkeypatch.chdir(house)
    data = [] if "--data" in arguments else ["--data", "pairs.jsonl"]
    refused(main("skip", "search", "model", *data, "--output", tmp_path / "out", *arguments.split()), words)
    assert not (tmp_path / "out").exists()


def refused(result, words):
    code, _, err = result
    assert code == 2, err
    said = [line for line in err.strip().splitlines() if line.startswith("Error: ")]
    assert len(said) == 1, err
    assert "Traceback" not in err
    for word in words:
        assert word in said[0], said[0]


def test_an_export_of_another_model_is_refused(main, house, planned, tmp_path):
    apply = ["skip", "apply", house / "plan", house / "other", "-o", tmp_path / "out"]
    refused(main(*apply), ["another LlamaForCausalLM"])
    refused(main(*apply, "--format", "fats"), ["fats", "'fast'"])
    assert not (tmp_path / "out").exists()

"""`fulldepth skip heal`: a healed checkpoint, and what healing brought beside its control."""

from __future__ import annotations

import re
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_models
from cli.conftest import shell
from cli.test_cli import options_of
from data.conftest import jsonl
from fulldepth.data.examples import read_examples
from fulldepth.hf.model_hash import model_hash
from fulldepth.results import PAGE, Results
from fulldepth.skip.healed import NAMES
from fulldepth.skip.least_squares import split_rows
from fulldepth.skip.plan import Plan
from fulldepth.training import train
from skip import plain, planned
from skip.word_tokenizer import tokenizer, words


@pytest.mark.parametrize(("fast", "precision"), [(True, "autocast"), (False, "float32")])
def test_the_command_heals_trains_and_compares_with_its_control(tmp_path, main, monkeypatch, fast, precision):
    """The removed attention stays away in the trained checkpoint, whose own forward pass gives the stated loss."""
    monkeypatch.setattr("fulldepth.skip.exports.export.prove_export", lambda *_: 0.0)  # tested with exports
    runs = []
    monkeypatch.setattr("fulldepth.skip.heal.has_bfloat16", lambda: fast)
    monkeypatch.setattr(
        "fulldepth.skip.heal.train", lambda run, *given, **named: runs.append(run) or train(run, *given, **named)
    )
    model, texts_file = tiny_models.build("llama"), tmp_path / "text.jsonl"
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [words(*((n + i) % 8 for i in range(24))) for n in range(40)]
    jsonl(texts_file, *({"text": row} for row in rows))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    planned.plan(loaded, [2], "attention", None).changed(
        model={"name": str(tmp_path / "model"), "class": "LlamaForCausalLM", "hash": model_hash(loaded)}
    ).save(tmp_path / "plan.json")
    out = tmp_path / "healed"
    options = ["--data", str(texts_file), "--sequence-length", "16", "--steps", "20", "--rank", "4"]
    options += ["--learning-rate", "0.01", "--output", str(out)]
    code, shown, said = main("skip", "heal", tmp_path / "plan.json", tmp_path / "model", *options)
    assert code == 0, said
    results = Results.load(out)
    assert [run.precision for run in runs] == [precision] * 2
    assert results.meta["settings"]["precision"] == precision
    states = ["original", "removed", "refitted", "trained", "control"]
    losses = {state: results.values("loss", "mean", "model", model=state).item() for state in states}
    assert losses["trained"] < losses["refitted"]
    assert losses["control"] < losses["original"]
    healed = AutoModelForCausalLM.from_pretrained(out)
    assert sum("self_attn" in name for name in healed.state_dict()) == 4 * 2
    for name, weight in healed.state_dict().items():  # only projections are healed, by least squares or by training
        assert torch.equal(weight, model.state_dict()[name]) is not name.endswith(("o_proj.weight", "down_proj.weight"))
    examples = read_examples(str(texts_file), tokenizer(), 64, sequence_length=16)
    unseen = split_rows(Plan.load(tmp_path), examples, False, 0)[2]
    assert losses["trained"] == pytest.approx(plain.loss(healed, unseen, (), "layer"), abs=1e-4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["healed", "model", "plan.json", "text.jsonl"]
    first, second = (line.split()[0] for line in shown.splitlines()[:2])
    assert (first, second) == ("net_cost", "loss_added")
    card, page = (out / "README.md").read_text(), (out / PAGE).read_text()
    stated = dict(re.findall(r"^\| ([^|]+) \| (-?[+\d.]+)", card, re.MULTILINE))
    names = {"original": "Held-out loss of the original", **NAMES}
    assert {state: float(stated[names[state]]) for state in states} == pytest.approx(losses, abs=1e-4)
    net = losses["trained"] - losses["control"]
    assert float(stated["Net cost of removal, against the control"]) == pytest.approx(net, abs=1e-4)
    assert "| Loss on other text | unknown |" in card
    assert "chose the blocks; expect" not in card
    (lead,) = re.findall(r'<div id="story"[^>]*><p><bdi>(.*?)</bdi>', page)
    assert lead.startswith("Net cost of removal: ")
    assert lead.index("the loss on other text is unknown") < lead.index("Refitted, then trained")
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0].replace("PATH", str(out))
    done = shell(sys.executable, "-c", code.rpartition("# Without fulldepth")[2].partition("\n")[2], cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_healing_that_is_refused_before_a_step_leaves_its_folder_free(tmp_path, main, monkeypatch):
    """Its texts are too few to train on: the same command with longer ones is another healing."""
    monkeypatch.setattr("fulldepth.skip.exports.export.prove_export", lambda *_: 0.0)
    tiny_models.build("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    planned.plan(loaded, [2], "attention", None).changed(
        model={"name": str(tmp_path / "model"), "class": "LlamaForCausalLM", "hash": model_hash(loaded)}
    ).save(tmp_path / "plan.json")
    jsonl(tmp_path / "short.jsonl", *({"prompt": words(n), "response": words(n, n + 1)} for n in range(40)))
    options = ["--data", tmp_path / "short.jsonl", "--sequence-length", "48", "--steps", "1"]
    code, _, said = main("skip", "heal", tmp_path / "plan.json", tmp_path / "model", *options, "-o", tmp_path / "out")
    assert code != 0
    assert "fewer than one sequence" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "plan.json", "short.jsonl"]


def test_a_ranking_without_losses_is_healed_and_nothing_is_said_of_its_losses(tmp_path, main, monkeypatch):
    """The losses of the healing are those of a stock forward pass on rows that it did not fit."""
    monkeypatch.setattr("fulldepth.skip.exports.export.prove_export", lambda *_: 0.0)
    tiny_models.build("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    rows = [words(*((n + i) % 8 for i in range(24))) for n in range(40)]
    jsonl(tmp_path / "text.jsonl", *({"text": row} for row in rows))
    data = ["--data", tmp_path / "text.jsonl", "--sequence-length", "16"]
    search = ["--search", "cosine", "--blocks", "1", "--no-fit", "-o", tmp_path / "plan"]
    search += ["--seed", "3", "--batch-size", "4"]
    code, _, said = main("skip", "search", tmp_path / "model", *data, *search)
    assert code == 0, said
    plan = Plan.load(tmp_path / "plan")
    assert not plan.losses
    code, _, said = main(
        "skip", "heal", tmp_path / "plan", tmp_path / "model", *data, "--steps", "0", "-o", tmp_path / "h",
        "--set", "seed=null",
    )  # fmt: skip
    assert code == 0, said
    results = Results.load(tmp_path / "h")
    of_search = {"seed": 3, "batch_size": 4, "chat": True, "dtype": "auto"}
    assert results.meta["settings"].items() >= of_search.items()
    described = options_of(main("skip", "heal", "--help")[1])
    for name in (*of_search, "sequence_length"):
        assert "[default: as in the search]" in described[f"--{name.replace('_', '-')}"], name
    assert not any("removed blocks are the search's" in line for line in results.meta["warnings"])
    healed = AutoModelForCausalLM.from_pretrained(tmp_path / "h")
    examples = read_examples(str(tmp_path / "text.jsonl"), tokenizer(), 64, sequence_length=16, seed=3)
    unseen = split_rows(plan, examples, False, 3)[2]
    stated = results.values("loss", "mean", "model", model="refitted").item()
    assert stated == pytest.approx(plain.loss(healed, unseen, (), "layer"), abs=1e-4)

"""`fulldepth skip` as a newcomer runs it: from a checkpoint to exports, and every mistake that ends with 2."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
import torch

import tiny_models
from cli.conftest import shell
from data.conftest import jsonl
from fulldepth.execution.latency import OtherLoad
from fulldepth.results import PAGE, Results
from fulldepth.skip import load
from json_files import read_json
from skip import word_tokenizer
from tiny_models import seeded

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
    generator = seeded(seed)
    made = []
    for _ in range(count):
        numbers = torch.randint(0, 80, (9,), generator=generator).tolist()
        made.append(
            {"prompt": f"{word_tokenizer.words(*numbers[:4])} ", "response": word_tokenizer.words(*numbers[4:])}
        )
    return made


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """A checkpoint, another one, and pairs to train and to score with."""
    home = tmp_path_factory.mktemp("skip")
    for name, seed in (("model", 0), ("other", 1)):
        model = tiny_models.build("llama", seed=seed)
        model.save_pretrained(home / name)
        word_tokenizer.tokenizer().save_pretrained(home / name)
    jsonl(home / "pairs.jsonl", *rows(24, 0))
    jsonl(home / "heldout.jsonl", *rows(12, 1))
    return home


@pytest.fixture(scope="module")
def planned(house):
    """A finished search, by another process."""
    command = ["skip", "search", "model", "--data", "pairs.jsonl", "--heldout", "heldout.jsonl", "--blocks", "2"]
    options = ["--output", "plan", "--set", "epochs=2", "--set", "learning_rate=0.01", "--json"]
    done = shell(sys.executable, "-m", "fulldepth", *command, *options, cwd=house)
    assert done.returncode == 0, done.stderr
    assert "Page: " in done.stderr
    assert json.loads(done.stdout) == read_json(house / "plan" / "results.json")["headline"]
    return read_json(house / "plan" / "plan.json")


def test_the_folded_export_has_the_plans_loss_in_stock_transformers(main, house, planned, tmp_path):
    assert len(planned["blocks"]) == 2
    assert planned["healed_loss"] <= planned["losses"][-1]
    files = {path.name for path in (house / "plan").iterdir()}
    assert files == {"plan.json", "results.json", "results.parquet", "report.html"}
    code, out, err = main(
        "skip", "apply", house / "plan", house / "model", "--format", "folded", "-o", tmp_path / "folded"
    )
    assert code == 0, err
    assert "logit error" in out
    named = ", ".join(f"model.layers.{block - 1}.self_attn" for block in sorted(planned["blocks"]))
    assert f"Note: Removed (layers counted from 0, as in transformers): {named}.\n" in out
    arguments = [tmp_path / "folded", house / "heldout.jsonl"]
    done = shell(sys.executable, "-c", FRESH, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(planned["healed_loss"], rel=1e-4)


@pytest.mark.slow
def test_a_tree_is_searched_folded_in_its_own_class_and_measured(main, house, tmp_path):
    word_tokenizer.checkpoint(tmp_path / "tree", "depth_llama-tree")
    data, folded = ["--data", house / "pairs.jsonl"], tmp_path / "folded"
    asked = ["skip", "search", tmp_path / "tree", *data, "--blocks", "2", "--granularity", "layer"]
    code, _, err = main(*asked, "-o", tmp_path / "plan")
    assert code == 2
    assert "--no-fit" in err
    code, out, err = main(*asked, "--no-fit", "-o", tmp_path / "plan")
    assert code == 0, err
    assert "folded only" in err
    assert "takes a forward pass of its own, at most" in err
    code, _, err = main("skip", "apply", tmp_path / "plan", tmp_path / "tree", "-o", folded)
    assert code == 0, err
    removed = read_json(tmp_path / "plan" / "plan.json")["blocks"]
    assert len(removed) == 2
    named = ", ".join(f"model.layers.{block - 1}" for block in sorted(removed))
    assert f"\nRemoved (layers counted from 0, as in transformers): {named}\n" in out
    for number, block in enumerate(load(folded).model.layers, start=1):
        for matrix in (block.self_attn.o_proj.weight, block.mlp.down_proj.weight):
            assert bool(matrix.any()) is (number not in removed)
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": row["prompt"] + row["response"]}) + "\n" for row in rows(6, 2)))
    measured = ["--data", texts, "--measures", "displacement", "--set", "lens_tokens=null", "-o", tmp_path / "out"]
    code, _, err = main("measure", folded, *measured)
    assert code == 0, err
    assert len(Results.load(tmp_path / "out").values("displacement", "mean", "residual")) == tiny_models.LAYERS


MISTAKES = [
    ("search model --data pairs.jsonl --blocks 4", ["4", "3 attention blocks that can be removed"]),
    ("search model --data pairs.jsonl --blocks 1 --budget 2e15", ["2e15", "10m"]),
    ("search model --data absent.jsonl --blocks 1", ["absent.jsonl"]),
    ("apply plan other", ["another LlamaForCausalLM"]),
    ("apply plan other --format fats", ["fats", "'fast'"]),
    ("apply plan model --format mergekit", ["name must end with .yaml"]),
    ("apply plan model --gguf-type f16", ["--gguf-type has no effect with --format folded; it applies to gguf."]),
]


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=str)
def test_a_mistake_ends_with_2_and_one_message(main, house, planned, tmp_path, arguments, words, monkeypatch):
    monkeypatch.chdir(house)
    code, _, err = main("skip", *arguments.split(), "--output", tmp_path / "out")
    assert code == 2, err
    (said,) = [line for line in err.strip().splitlines() if line.startswith("Error: ")]
    assert "Traceback" not in err
    assert all(word in said for word in words), said
    assert not (tmp_path / "out").exists()


def test_a_benchmark_on_a_busy_machine_begins_with_the_reason_and_the_command(main, house, tmp_path, monkeypatch):
    """The command that page and console name runs, and makes the same benchmark on a quiet machine."""
    load = {"share": 0.71}
    monkeypatch.setattr(OtherLoad, "share", lambda _: load["share"])
    output = tmp_path / "busy results"
    options = ["--batches", "1", "--set", "contexts=[12]", "--set", "max_new_tokens=3", "--set", "repeats=1"]
    code, shown, said = main("skip", "bench", house / "model", house / "other", *options, "--output", output)
    assert code == 0, said
    assert shown.split()[:3] == ["times", "-", "Not"]
    command = next(line for line in shown.splitlines() if line.startswith("Next: ")).partition("fulldepth ")[2]
    (lead,) = re.findall(r'<div id="story"[^>]*><p><bdi>(.*?)</bdi>', (output / PAGE).read_text())
    assert lead == "Not timed: other programs used 71 % of the processor. Run again on a quiet machine."
    assert "--overwrite" in (output / PAGE).read_text()
    before, load["share"] = Results.load(output).meta["settings"], 0.0
    code, shown, said = main(*shlex.split(command))
    assert code == 0, said
    again = Results.load(output)
    assert again.meta["settings"] == before
    assert not again.meta.get("next")
    assert "times" not in again.headline


def test_several_files_are_one_argument_with_or_without_shares(main, house, tmp_path):
    jsonl(tmp_path / "one.jsonl", *rows(12, 5))
    jsonl(tmp_path / "two.jsonl", *rows(12, 6))
    both = f"{tmp_path}/one.jsonl,{tmp_path}/two.jsonl"
    shares = f"{tmp_path}/one.jsonl=0.25,{tmp_path}/two.jsonl=0.75"
    for name, data, more in (("all", both, ()), ("shares", shares, ("--max-sequences", 16))):
        options = ("--blocks", 1, "--no-fit", "--output", tmp_path / name, *more)
        code, _, err = main("skip", "search", house / "model", "--data", data, *options)
        assert code == 0, err
    sources = read_json(tmp_path / "shares" / "plan.json")["data"]["name"]
    assert "one.jsonl (3 rows) and two.jsonl (10 rows)" in sources.replace(str(tmp_path) + "/", "")
    missing = f"{tmp_path}/one.jsonl=0.5,{tmp_path}/three.jsonl=0.5"
    code, _, err = main("skip", "search", house / "model", "--data", missing, "--blocks", 1, "--output", tmp_path / "x")
    assert code == 2
    assert f"There is no file or folder {tmp_path}/three.jsonl." in err


def test_a_folder_with_text_of_the_models_own_alone_can_be_searched_into(main, house, tmp_path):
    """Such a folder stays where a search ended before its first loss, by an interruption or an error."""
    command = ("skip", "search", house / "model", "--data", "own:text", "--max-sequences", 8, "--sequence-length", 16)
    code, _, err = main(*command, "--blocks", 1, "--no-fit", "--output", tmp_path / "plan")
    assert code == 0, err
    own = ("own.json", "own.jsonl")
    left = tmp_path / "left"
    left.mkdir()
    for name in own:
        (left / name).write_bytes((tmp_path / "plan" / name).read_bytes())
    code, _, err = main(*command, "--blocks", 1, "--no-fit", "--output", left, "--resume")
    assert code == 0, err
    assert read_json(left / "plan.json")["losses"] == read_json(tmp_path / "plan" / "plan.json")["losses"]

"""`fulldepth skip` as a newcomer runs it: from a checkpoint to exports, and every mistake that ends with 2."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForMaskedLM

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
    assert "forward passes" in done.stderr
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


def test_bench_and_curve_write_results(main, house, planned, tmp_path):
    code, _, err = main("skip", "apply", house / "plan", house / "model", "--format", "fast", "-o", tmp_path / "fast")
    assert code == 0, err
    grid = ["--batches", "2", "--contexts", "8,12", "--new-tokens", "3", "--repeats", "2"]
    code, out, err = main(
        "skip", "bench", house / "model", tmp_path / "fast", "-o", tmp_path / "bench", *grid, "--json"
    )
    assert code == 0, err
    assert json.loads(out) == json.loads((tmp_path / "bench" / "results.json").read_text())["headline"]
    table = pd.read_parquet(tmp_path / "bench" / "results.parquet")
    sizes = table[table.measure == "parameter_bytes"].set_index("model")["value"]
    stock = sum(p.numel() * 4 for p in AutoModelForCausalLM.from_pretrained(house / "model").parameters())
    assert sizes["model"] == stock
    assert sizes["fast"] < stock
    code, out, err = main(
        "skip", "curve", house / "model", "--data", house / "pairs.jsonl", "--max-blocks", "9", "-o", tmp_path / "curve"
    )
    assert code == 0, err
    assert "break_point" in out
    curve = pd.read_parquet(tmp_path / "curve" / "results.parquet")
    assert curve.removed.max() == tiny_models.LAYERS, "as many as there are"


def test_a_finished_search_is_not_overwritten(main, house, planned):
    before = (house / "plan" / "plan.json").read_bytes()
    code, _, err = main("skip", "search", house / "model", "--data", house / "pairs.jsonl", "-o", house / "plan")
    assert (code, (house / "plan" / "plan.json").read_bytes()) == (2, before)
    assert "already holds a plan.json" in err


def _search(house, out, *more, model="model", data="pairs.jsonl", blocks="1"):
    found = ["skip", "search", house / model, "--data", house / data, "--output", out, *more]
    return [*found, "--blocks", blocks] if blocks else found


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"blocks": "4"}, ["4", "3 layers"]),
        ({"blocks": "0"}, ["blocks", "0"]),
        ({"blocks": None}, ["blocks"]),
        ({"more": ["--search", "greedi"]}, ["greedi", "greedy"]),
        ({"more": ["--criterion", "los"]}, ["los", "loss"]),
        ({"more": ["--given", "3,x"]}, ["--given", "3,x"]),
        ({"more": ["--search", "given", "--given", "2,2"], "blocks": None}, ["2"]),
        ({"more": ["--search", "given", "--given", "7"], "blocks": None}, ["7", "3"]),
        ({"more": ["--budget", "soon"]}, ["soon", "10m"]),
        ({"more": ["--set", "epoch=1"]}, ["epoch", "epochs"]),
        ({"more": ["--recipe", "hopscoch"]}, ["hopscotch"]),
        ({"data": "absent.jsonl"}, ["absent.jsonl"]),
        ({"data": "empty.jsonl"}, ["empty.jsonl"]),
        ({"data": "unanswered.jsonl"}, ["response"]),
        ({"data": "long.jsonl"}, ["92", "64 tokens"]),
        ({"model": "bert"}, ["BertForMaskedLM"]),
        ({"model": "absent"}, ["absent"]),
    ],
    ids=str,
)
def test_a_search_that_cannot_be_is_refused(main, house, tmp_path, more, words):
    write(house / "empty.jsonl", [])
    write(house / "unanswered.jsonl", [{"prompt": word_tokenizer.words(1), "response": ""}] * 4)
    write(house / "long.jsonl", [{"prompt": word_tokenizer.words(*[1] * 90), "response": word_tokenizer.words(2)}] * 4)
    if more.get("model") == "bert" and not (house / "bert").exists():
        config = BertConfig(
            vocab_size=96, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
        )
        BertForMaskedLM(config).save_pretrained(house / "bert")
        word_tokenizer.tokenizer().save_pretrained(house / "bert")
    extra = more.pop("more", [])
    refused(main(*_search(house, tmp_path / "out", *extra, **more)), words)
    assert not (tmp_path / "out").exists()


def refused(result, words):
    code, _, err = result
    assert code == 2, err
    said = [line for line in err.strip().splitlines() if line.startswith("Error: ")]
    assert len(said) == 1, err
    assert "Traceback" not in err
    for word in words:
        assert word in said[0], said[0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks": [9, 2], "scalars": {}, "healed_loss": None, "control_loss": None}, ["9", "3 layers"]),
        ({"blocks": [1, 1]}, ["more than once"]),
        ({"blocks": "many"}, ["blocks"]),
        ({"losses": [1.0]}, ["losses"]),
        ({"schema_version": 7}, ["7"]),
        ({"criterion": "taste"}, ["taste"]),
        ({"extra": 1}, ["extra"]),
        ({"healed_loss": float("nan")}, ["plan.json", "NaN"]),
    ],
    ids=str,
)
def test_a_plan_edited_into_nonsense_is_refused(main, house, planned, tmp_path, change, words):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(planned | change))
    refused(main("skip", "apply", path, house / "model", "-o", tmp_path / "out"), words)
    assert not (tmp_path / "out").exists()


def test_exports_that_cannot_be_are_refused(main, house, planned, tmp_path):
    apply = ["skip", "apply", house / "plan"]
    (tmp_path / "there").mkdir()
    refused(main(*apply, house / "other", "-o", tmp_path / "out"), ["another LlamaForCausalLM"])
    refused(main(*apply, house / "model", "-o", tmp_path / "there"), ["there", "exists"])
    refused(main(*apply, house / "model", "-o", tmp_path / "out", "--format", "fats"), ["fats", "'fast'"])
    refused(main(*apply, house / "model", "-o", tmp_path / "out", "--format", "layer"), ["layer"])
    refused(main("skip", "apply", tmp_path / "nothing", house / "model", "-o", tmp_path / "out"), ["nothing"])
    (tmp_path / "plan.json").write_text("{")
    refused(main("skip", "apply", tmp_path, house / "model", "-o", tmp_path / "out"), ["plan.json"])
    negative = json.loads(json.dumps(planned))
    negative["scalars"]["3"]["s_mlp"] = -0.5
    (tmp_path / "plan.json").write_text(json.dumps(negative))
    refused(main("skip", "apply", tmp_path, house / "model", "-o", tmp_path / "out"), ["s_mlp", "layer 3", "-0.5"])
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".*")), "nothing half-written is left"


def test_a_full_disk_ends_a_search_with_one_message(house, tmp_path):
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))\n"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"sys.argv = ['fulldepth', *{[str(a) for a in _search(house, tmp_path / 'out', '--no-fit')]}]\n"
        "from fulldepth.cli import main\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "Error: Cannot write" in done.stderr
    assert not list(tmp_path.glob("out/plan.json*"))

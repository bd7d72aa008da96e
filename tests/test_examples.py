"""Every example runs and learns."""

from __future__ import annotations

import ast
import copy
import json
import runpy
import sys

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fulldepth
from data.conftest import jsonl
from fulldepth.data import builtin_texts, train_tokenizer
from fulldepth.evaluation import EvaluateSettings, load_tasks
from fulldepth.execution.memory import parameter_bytes
from json_files import read_json
from places import ROOT
from skip import plain, planned

EXAMPLES = ROOT / "examples"


def run(name):
    history = runpy.run_path(str(EXAMPLES / f"{name}.py"))["main"]()
    return history


@pytest.mark.slow
def test_hand_written_loop():
    history = run("hand_written_loop")
    assert len(history) == 20
    assert history[-1]["ce"] < history[0]["ce"] - 0.3
    assert history[-1]["jump"] < 0.5 * history[0]["jump"]


@pytest.mark.slow
def test_any_module():
    """One seed, few steps: with residual connections cosine rises with CKA, without them it does not."""
    curves = runpy.run_path(str(EXAMPLES / "any_module.py"))["main"](1, 500)
    without, residual = ({name: values[0] for name, values in curves[kind].items()} for kind in (False, True))
    assert float(without["cka"][-2]) > 0.8
    assert float(without["cosine"][-2]) < 0.5 < float(residual["cosine"][-2])
    assert float(residual["accuracy"][-2]) > float(without["accuracy"][-2]) + 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", ["trainer", "sft"])
def test_trainers(name):
    if name == "sft":
        pytest.importorskip("trl")
    steps = [entry for entry in run(name) if "loss_jump" in entry]
    assert float(steps[-1]["loss_ce"]) < float(steps[0]["loss_ce"])
    assert float(steps[-1]["loss_jump"]) < float(steps[0]["loss_jump"])
    first = {key: float(value) for key, value in steps[0].items()}
    parts = first["loss_ce"] + first["loss_jump"] + 0.1 * first.get("loss_similarity", 0.0)
    assert first["loss"] == pytest.approx(parts, rel=1e-3)


def test_int8():
    """The losses are those of stock models in float64 whose weights are rounded to whole steps in every row.

    One attention has a huge weight in every row that nothing reaches, so that int8 turns all others into 0: the search
    on the quantised model removes it.
    """
    pytest.importorskip("torchao")
    script, dear = runpy.run_path(str(EXAMPLES / "int8.py")), 3
    model, examples = plain.trained(), plain.examples(8, 16)
    attention = plain.blocks_of(model)[dear - 1].self_attn
    attention.v_proj.weight.data[0] = 0
    attention.o_proj.weight.data[:, 0] = 1e4
    cost = {"forwards": 0, "flops": 0, "seconds": 0.0, "settings": {"search": "exact", "epochs": 1}}
    plan = planned.plan(model, (5,), cost=cost)
    losses, second = script["main"](model, plan, examples)
    coarse, packed, saved, rows = copy.deepcopy(model).double(), script["int8"](model), 0, 0
    for name, module in coarse.model.layers.named_modules():
        if isinstance(module, nn.Linear):
            step = module.weight.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127.5
            held = packed.model.layers.get_submodule(name).weight.dequantize().double() / step
            assert (held - held.round()).abs().max() < 1e-3
            assert (held - module.weight / step).abs().max() < 0.501
            module.weight.data.copy_(step * held)
            saved, rows = saved + 3 * held.numel() - 4 * len(held), rows + len(held)
    # A byte a row more in versions of torchao that keep zero points.
    assert parameter_bytes(model) - parameter_bytes(packed) in (saved, saved - rows)
    assert (second.blocks, second.search) == ([dear], "exact")
    corners = {
        "original": model.double(),
        "skipped": planned.scaled(model, plan),
        "quantised": coarse,
        "quantised, then skipped": planned.scaled(coarse, second),
        "skipped, then quantised": planned.scaled(coarse, plan),
    }
    expected = {name: plain.loss(one, examples.heldout, (), "attention") for name, one in corners.items()}
    assert {name: losses.mean(name) for name in losses.sums} == pytest.approx(expected, rel=1e-5)
    unlike = sorted(expected[name] for name in corners if name != "quantised, then skipped")
    assert np.diff(unlike).min() > 1e-3


def executed(notebook):
    """Run the code cells of a notebook in one namespace; returns what each displays: the value of its last line."""
    document = read_json(notebook)
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert not any(cell.get("outputs") for cell in document["cells"]), "outputs are not stored"
    namespace = {}
    displayed = []
    for cell in document["cells"]:
        if cell["cell_type"] != "code":
            continue
        statements = ast.parse(cell["source"])
        last = statements.body.pop() if isinstance(statements.body[-1], ast.Expr) else None
        exec(compile(statements, str(notebook), "exec"), namespace)
        value = None if last is None else eval(compile(ast.Expression(last.value), str(notebook), "eval"), namespace)
        displayed.append(value)
    return displayed


@pytest.mark.slow
def test_the_notebook(tmp_path, monkeypatch):
    texts = [text for text in builtin_texts("heldout")[0][:30_000].split("\n\n") if len(text) > 80]
    train_tokenizer(texts, vocab_size=300).save_pretrained(tmp_path)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=128, **sizes)).save_pretrained(tmp_path)
    monkeypatch.setenv("FULLDEPTH_MODEL", str(tmp_path))
    displayed = executed(EXAMPLES / "tour.ipynb")
    shown = [value for value in displayed if isinstance(value, fulldepth.Results)]
    assert [results.meta["kind"] for results in shown] == ["measure", "comparison"]
    blocks, losses, _ = next(value for value in displayed if isinstance(value, tuple))
    assert len(blocks) == 1
    assert len(losses) == 2
    error = next(value for value in displayed if isinstance(value, float))
    assert error < 1e-3
    change = displayed[-1]
    before = shown[0].values("displacement", "mean", "residual")
    rows = change[change.site == "residual"].set_index("layer")
    assert (rows.value - rows.difference).to_dict() == pytest.approx(before.to_dict())


def test_every_example_is_run():
    """Here; `authors` and `shapes` by tests/cli/test_tiny_recipes.py and tests/drawn_shapes.py."""
    here = {"any_module", "hand_written_loop", "int8", "sft", "task_rows", "trainer"}
    elsewhere = {"authors", "shapes"}
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == {"tour"}
    assert {path.stem for path in EXAMPLES.glob("*.py")} == here | elsewhere


def test_rows_of_tasks_are_what_the_harness_scores_and_none_that_is_read(tmp_path, monkeypatch):
    """Prompt and answer are a request of lm-eval: of the right choice, or of the target."""
    pytest.importorskip("lm_eval")
    folder = tmp_path / "data" / "lm-eval"
    folder.mkdir(parents=True)
    quiz = [{"question": f"What is {n}?", "choices": ["sun", "sea", f"sky {n}"], "gold": n % 3} for n in range(30)]
    ends = [{"context": f"The sky {n} is", "target": f"blue{n}"} for n in range(30)]
    jsonl(folder / "arc_easy_test.jsonl", *quiz)
    jsonl(folder / "lambada_test.jsonl", *ends)
    tasks, data = ["arc_easy_local", "lambada_local"], [str(tmp_path / "data")]
    options = ["--task-data", *data, "--skip", "20", "--choose", "3", "--heal", "5"]
    monkeypatch.setattr(sys, "argv", ["task_rows.py", ",".join(tasks), str(tmp_path / "rows"), *options])
    run("task_rows")
    scored = set()
    for unit in load_tasks(EvaluateSettings(tasks=tasks, task_data=data)).values():
        for task in unit.tasks["tasks"].values():
            for row in list(task.eval_docs)[20:]:
                requests = task.construct_requests(row, task.doc_to_text(row), metadata=("", 0, 0))
                right = requests[row["gold"]] if isinstance(requests, list) else requests
                scored.add("".join(right.args))
    choosing = [json.loads(line) for line in (tmp_path / "rows" / "choose.jsonl").read_text().splitlines()]
    texts = [row["prompt"] + row["response"] for row in choosing]
    texts += (tmp_path / "rows" / "heal.txt").read_text().split("\n\n")
    assert len(choosing) == 6
    assert len(texts) == len(set(texts)) == 16
    assert {*texts} <= scored
    monkeypatch.setattr(sys, "argv", [*sys.argv[:2], str(tmp_path / "more"), *options[:-1], "9"])
    with pytest.raises(SystemExit, match="arc_easy_local has 10 rows to learn from: lower"):
        run("task_rows")

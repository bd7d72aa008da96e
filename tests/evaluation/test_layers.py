"""Scores at every exit layer against lm-eval's own evaluation of the model, and of its first layers alone."""

from __future__ import annotations

import pytest
import torch

from evaluation import small_world
from evaluation.small_world import LAYERS
from fulldepth.evaluation import evaluate
from fulldepth.evaluation.local_tasks import local_task

lm_eval = pytest.importorskip("lm_eval")
SCORED = ["arc_easy_local", "lambada_local", "hellaswag_local", "piqa_local", "arc_challenge_local"]
LIMIT = 5
RESAMPLES = {"bootstrap_iters": 1000}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_world.write_data(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(autouse=True)
def _no_description_of_the_machine(monkeypatch):
    """`simple_evaluate` adds seconds of it to every result."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def stock(model, task, data, limit=LIMIT, batch_size=4, **options):
    """lm-eval's own scores of a model: metric -> (value, standard error)."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    output = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=small_world.tokenizer(), batch_size=batch_size),
        tasks=[local_task(task, [data])],
        task_manager=TaskManager(include_defaults=False),
        limit=limit,
        log_samples=False,
        **options,
    )
    (results,) = output["results"].values()
    scores = {}
    for key, value in results.items():
        metric, comma, how = key.partition(",")
        if comma and not metric.endswith("_stderr"):
            name = metric if how == "none" else f"{metric}:{how}"
            scores[name] = value, results[f"{metric}_stderr,{how}"]
    return scores


def ours(results, task, layer):
    """Metric -> (value, standard error) at an exit layer."""
    table = results.table
    rows = table[(table.site == task) & (table.layer == layer) & (table.measure == "task_score")]
    values = dict(zip(rows.statistic, rows.value, strict=True))
    return {name: (value, values[f"{name}_stderr"]) for name, value in values.items() if not name.endswith("_stderr")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_layer_has_the_scores_of_lm_eval_and_an_exit_layer_those_of_the_first_layers(data, dtype):
    model, differing = small_world.model(dtype=dtype), set()
    tasks = SCORED if dtype == torch.float32 else SCORED[:1]
    results = evaluate(
        model, tasks, tokenizer=small_world.tokenizer(), task_data=[str(data)], limit=LIMIT, batch_size=4, **RESAMPLES
    )
    for task in tasks:
        whole = stock(model, task, data, **RESAMPLES)
        assert ours(results, task, LAYERS) == whole
        for layer in range(1, LAYERS):
            expected = stock(small_world.first_layers(model, layer), task, data, **RESAMPLES)
            got = ours(results, task, layer)
            assert got.keys() == expected.keys()
            for metric, pair in expected.items():
                assert got[metric] == pytest.approx(pair, rel=1e-5), (task, layer, metric)
            differing.add(tuple(got.items()) != tuple(whole.items()))
    assert True in differing
    assert set(results.table.layer.unique()) == set(range(1, LAYERS + 1))


def test_one_pass_answers_all_layers(data):
    model, passes = small_world.model(), []
    model.register_forward_hook(lambda *_: passes.append(1))
    options = {"tokenizer": small_world.tokenizer(), "task_data": [str(data)], "limit": LIMIT}
    for layers in ("full", "all"):
        evaluate(model, ["arc_easy_local"], exit_layers=layers, **options)
        passes.append(0)
    full, each = "".join(map(str, passes)).split("0")[:2]
    assert len(full) == len(each) > 0


def test_generation_leaves_at_the_exit_layer(data):
    model, task = small_world.model(), "gsm8k_local"
    options = {"tokenizer": small_world.tokenizer(), "task_data": [str(data)], "limit": LIMIT, "batch_size": 4}
    results = evaluate(model, [task], exit_layers="2", num_fewshot=2, **options)
    assert ours(results, task, LAYERS) == stock(model, task, data, num_fewshot=2)
    assert ours(results, task, 2) == stock(small_world.first_layers(model, 2), task, data, num_fewshot=2)
    assert set(ours(results, task, 2)) == {"exact_match:strict-match", "exact_match:flexible-extract"}
    assert evaluate(model, [task], **options).meta["warnings"][0].startswith("gsm8k_local generates text")

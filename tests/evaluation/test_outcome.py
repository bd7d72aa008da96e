"""What is said of tasks: paired losses of exit layers, and the floor under advice; against plain formulas."""

from __future__ import annotations

import math
from time import process_time

import numpy as np
import pytest

from data.conftest import jsonl
from fulldepth.core.uncertainty import quantile
from fulldepth.evaluation.outcome import curves, findings, task_entries
from fulldepth.evaluation.scoring import Score, Scored, _add_guesses, _guesses, _none_right


def scored(layers, guess=0.25, unpaired=False):
    """A task with the right answers of each layer, `[L, N]`."""
    rows = np.asarray(layers, dtype=np.float64)
    count = rows.shape[1]
    scores = {
        at: [Score("t", "acc", float(r.mean()), float(r.std() / count**0.5), count, None if unpaired else r)]
        for at, r in enumerate(rows, start=1)
    }
    return Scored(
        layers={"t": list(scores)},
        scores=scores,
        higher_is_better={"t": {"acc": True}},
        chance={"t": guess},
        guesses={} if unpaired else {"t": np.full(count, guess)},
        clusters={} if unpaired else {"t": np.arange(count)},
    )


def answers(rng, count=600):
    """Layer 1 at random, layer 2 like the whole model but for one example, layer 3 the whole model."""
    full = rng.random(count) < 0.6
    near = full.copy()
    near[0] = not near[0]
    return [rng.random(count) < 0.25, near, full]


def test_losses_are_paired_by_example():
    layers = answers(np.random.default_rng(0))
    [curve] = curves(scored(layers))
    difference = np.subtract(layers[2], layers[0], dtype=float)
    assert curve.drops[0].value == pytest.approx(difference.mean())
    assert curve.drops[0].error == pytest.approx(difference.std(ddof=1) / 600**0.5, rel=0.2)  # in 32 groups
    assert curve.lead.value == pytest.approx(layers[2].mean() - 0.25)
    assert (curve.earliest, curve.by_estimate) == (2, 2)
    [low, high] = curve.drops[1].interval
    assert high - low == pytest.approx(2 * quantile(32) * np.hypot(curve.drops[1].error, 1 / 600))
    entry = task_entries(scored(layers))["t"]
    assert (entry["advised"], entry["earliest"], entry["earliest_by_estimate"]) == (True, 2, 2)
    found = findings(scored(layers))["earliest_exit t"]
    assert found.value == 2
    assert "from layer 2 of 3 on" in found.sentence


def test_few_examples_do_not_show_that_a_layer_is_enough():
    """Of 50 examples, equal answers leave an interval of 4 points."""
    full = np.random.default_rng(1).random(50) < 0.9
    [curve] = curves(scored([full, full]))
    assert (curve.earliest, curve.by_estimate) == (2, 1)
    [other] = curves(scored(answers(np.random.default_rng(0)), unpaired=True))
    assert other.drops[1].error > 10 / 600  # the errors of both scores


@pytest.mark.parametrize("unpaired", [False, True])
def test_nothing_is_advised_of_a_task_at_chance(unpaired):
    rng = np.random.default_rng(2)
    layers = rng.random((3, 400)) < 0.25
    result = scored(layers, unpaired=unpaired)
    found = findings(result)["earliest_exit t"]
    assert found.value is None
    assert task_entries(result)["t"]["advised"] is False


def test_a_guess_is_the_most_frequent_answer_where_that_is_clearly_better():
    rows = [{"doc_id": at, "target": "1" if at % 10 else "0"} for at in range(100)]
    assert _guesses(rows, dict.fromkeys(range(100), 4)).mean() == 0.9
    rows = [{"doc_id": at, "target": str(at % 4)} for at in range(100)]
    assert _guesses(rows, dict.fromkeys(range(100), 4)).mean() == 0.25
    assert _guesses(rows, {}).mean() == 0.25
    rows = [{"doc_id": at, "target": "ab"[at % 2]} for at in range(10)]
    assert _guesses(rows, {}).tolist() == [1, 0] * 5, "of equally frequent answers the first"
    rows = [{"doc_id": at, "target": str(at)} for at in range(30_000)]
    before = process_time()
    assert _guesses(rows, {}).sum() == 1
    assert process_time() - before < 2, "linear in the rows; counting each answer in all of them takes ten seconds"


@pytest.mark.parametrize(("flexible", "warnings"), [(0.0, 1), (1.0, 0)])
def test_an_answer_is_right_by_any_filter(flexible, warnings):
    """GSM8K reads each answer by two filters, which are two samples."""
    marks = {"strict-match": 0.0, "flexible-extract": flexible}
    samples = [
        {"filter": name, "doc_id": at, "exact_match": mark, "arguments": [("Question", {"until": []})]}
        for name, mark in marks.items()
        for at in range(4)
    ]
    found = _none_right("gsm8k_local", samples, ["exact_match"])
    assert len(found) == warnings
    assert all(line.startswith("None of the 4 answers of gsm8k_local is right") for line in found)


@pytest.mark.parametrize(
    ("gold", "choices", "metrics", "constant"),
    [
        ("gold", "choices", ["acc"], None),
        ("several", "choices", ["acc"], None),
        ("gold", "choices", ["acc", "acc_mutual_info"], None),
        (0, "choices", ["acc"], None),  # the right choice stands first, as in TruthfulQA
        ("mostly_no", ["no", "yes", "maybe"], ["acc"], "no"),
    ],
)
def test_the_accuracy_of_a_guess_is_that_of_lm_evals_own_scores(gold, choices, metrics, constant, tmp_path):
    """lm-eval marks random likelihoods, or likelihoods that always favour one text."""
    api = pytest.importorskip("lm_eval.api.task")
    rng = np.random.default_rng(0)
    rows = [
        {
            "question": f"Question {at}?",
            "choices": [f"{word} {at}" for word in "abcd"],
            "gold": int(rng.integers(4)),
            "several": sorted(rng.permutation(4)[:3].tolist()),
            "mostly_no": int(at % 10 == 0),
        }
        for at in range(60)
    ]
    config = {
        "task": "guessed",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(jsonl(tmp_path / "rows.jsonl", *rows))}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "question",
        "doc_to_target": gold,
        "doc_to_choice": choices,
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics],
    }
    task = api.ConfigurableTask(config=config)
    task.build_all_requests(rank=0, world_size=1)
    samples = [{"doc_id": at, "doc": doc, "target": task.doc_to_target(doc)} for at, doc in enumerate(task.eval_docs)]
    result = Scored()
    _add_guesses(result, "t", task, samples)
    marks = []
    for sample in samples:
        texts = task.doc_to_choice(sample["doc"])
        requests = len(texts) * (1 + ("acc_mutual_info" in metrics))
        for _ in range(1 if constant else 200):
            likelihoods = [float(text == constant) for text in texts] if constant else rng.random(requests)
            answered = task.process_results(sample["doc"], [(value, False) for value in likelihoods])
            marks.append(answered["acc"])
    assert result.chance["t"] == pytest.approx(np.mean(marks), abs=0 if constant else 0.015)


def perplexities(values, errors=(0.3, 0.4, 0.5)):
    """Word perplexities of three exit layers, of 100 texts that are not known one by one."""
    scores = {
        n: [Score("texts", "word_perplexity", value, error, 100)]
        for n, (value, error) in enumerate(zip(values, errors, strict=True), start=1)
    }
    return Scored({"texts": [1, 2, 3]}, scores, {"texts": {"word_perplexity": False}})


def test_a_perplexity_is_kept_within_a_hundredth_of_itself_and_lost_upwards():
    [curve] = curves(perplexities([60.0, 40.3, 40.0]))
    assert curve.tolerance == pytest.approx(0.4)
    assert [drop.value for drop in curve.drops] == pytest.approx([20.0, 0.3, 0.0])
    assert [drop.error for drop in curve.drops[:2]] == pytest.approx([math.hypot(0.3, 0.5), math.hypot(0.4, 0.5)])
    assert curve.by_estimate == 2
    [curve] = curves(perplexities([30.0, 40.5, 40.0]))
    assert curve.by_estimate == 3

"""`evaluate` on labelled data, against plain counts over stock outputs."""

from __future__ import annotations

import math

import pytest
import torch

import fulldepth
import tiny_models
from exit import plain
from fulldepth import evaluation
from fulldepth.errors import FulldepthError
from fulldepth.results import Results
from skip.word_tokenizer import tokenizer, words

NAMES = ("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.fixture(scope="module")
def rows():
    return [{"text": words(*range(3 + n % 7, 8 + n % 11)), "label": NAMES[n * n % 3]} for n in range(24)]


def gpt2():
    """A classifier that reads the last token, whose probabilities cover (0, 1)."""
    model = tiny_models.build("gpt2-classifier", dtype=torch.float64)
    model.config.pad_token_id = tokenizer().pad_token_id
    with torch.no_grad():
        model.score.weight.mul_(8.0)
    return model


@torch.no_grad()
def layer_logits(model, rows):
    """Of each text alone, the logits of stopping after layers 1..L, by stock modules."""
    found, kept = [], []
    hook = model.transformer.h[-1].register_forward_hook(
        lambda m, a, o: kept.append(o[0] if isinstance(o, tuple) else o)
    )
    for row in rows:
        ids = torch.tensor([tokenizer()(row["text"]).input_ids])
        states = list(model.transformer(ids, output_hidden_states=True).hidden_states)
        states[-1] = kept.pop()  # transformers gives the last state after the norm
        found.append([model.score(model.transformer.ln_f(state[:, -1]))[0].tolist() for state in states[1:]])
    hook.remove()
    return found


def test_accuracy_by_layer_by_class_and_with_early_exit(rows, tmp_path):
    model = gpt2()
    results = fulldepth.evaluate(
        model, data=rows, output=tmp_path / "out", tokenizer=tokenizer(), exit_thresholds=[0.5, 1.0], rounds=1
    )
    samples, targets = layer_logits(model, rows), [NAMES.index(row["label"]) for row in rows]
    task = next(iter(results.meta["tasks"]))
    assert results.meta["tasks"][task]["chance"] == max(map(targets.count, range(3))) / len(targets)  # constant answer
    for layer in (1, 2, 3):
        right = [
            sample[layer - 1].index(max(sample[layer - 1])) == t for sample, t in zip(samples, targets, strict=True)
        ]
        share = sum(right) / len(right)
        assert results.values("task_score", "accuracy", task)[layer] == pytest.approx(share)
    for early in results.meta["exits"]:
        expected = plain.row(samples, targets, "confidence", early["threshold"], 1)
        assert early["exits"] == expected["exits"]
        assert early["accuracy"] == pytest.approx(expected["accuracy"])
        assert early["measured_speedup"] > 0
    for index, entry in enumerate(results.meta["classes"]):
        own = [number for number, target in enumerate(targets) if target == index]
        right = [samples[n][-1].index(max(samples[n][-1])) == index for n in own]
        assert (entry["name"], entry["count"]) == (NAMES[index], len(own))
        if own:
            share = sum(right) / len(right)
            assert entry["value"] == pytest.approx(share)
            assert entry["early"][1] == pytest.approx(share)  # threshold 1: the full model
            if len(own) <= 16:  # groups of one: the textbook formula
                assert entry["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / (len(own) - 1)))
    stored = Results.load(tmp_path / "out")
    assert stored.meta["classes"] == results.meta["classes"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Every class" in page
    assert "Every threshold" in page


def test_labelled_data_and_tasks_exclude_each_other(rows):
    model = tiny_models.build("llama")
    with pytest.raises(FulldepthError, match="is a language model, which labelled data do not judge"):
        evaluation.evaluate(model, data=[row["text"] for row in rows], tokenizer=tokenizer())
    with pytest.raises(FulldepthError, match="--tasks is for language models, and --data for classifiers"):
        evaluation.evaluate(model, ["arc_easy_local"], data=rows)
    with pytest.raises(FulldepthError, match="or labelled --data for a classifier"):
        evaluation.evaluate(model)
    with pytest.raises(FulldepthError, match="--exit-thresholds are for labelled --data"):
        evaluation.evaluate(model, ["arc_easy_local"], exit_thresholds=[0.5])

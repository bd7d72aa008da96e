"""Scores of lm-eval's tasks against the sums of log-probabilities that they are made of."""

from __future__ import annotations

import json

import pytest
import torch

import tiny_models
from fulldepth.errors import FulldepthError
from fulldepth.execution.harness import TaskScorer
from fulldepth.hf import anatomy_candidates, skipping
from fulldepth.progress import Watcher
from skip import word_tokenizer

pytest.importorskip("lm_eval")
QUESTIONS = [
    {
        "question": word_tokenizer.words(number, number + 3, 1),
        "choices": [word_tokenizer.words(2), word_tokenizer.words(5, number), word_tokenizer.words(4)],
        "gold": number % 3,
    }
    for number in range(12)
]


@pytest.fixture
def task(tmp_path):
    """A multiple-choice task in two files."""
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    path = tmp_path / "choice.yaml"
    path.write_text(
        "task: choice\ndataset_path: json\n"
        f"dataset_kwargs:\n  data_files:\n    test: {data}\n"
        "test_split: test\noutput_type: multiple_choice\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: gold\n'
        "metric_list:\n  - metric: acc\n"
    )
    return str(path)


def plain_accuracy(model, tokenizer):
    """The share of questions whose right answer has the highest log-probability, written out."""
    right = 0
    for row in QUESTIONS:
        sums = []
        for choice in row["choices"]:
            before = tokenizer(row["question"])["input_ids"]
            whole = tokenizer(f"{row['question']} {choice}")["input_ids"]
            with torch.no_grad():
                said = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
            sums.append(sum(float(said[at - 1, whole[at]]) for at in range(len(before), len(whole))))
        right += max(range(3), key=sums.__getitem__) == row["gold"]
    return right / len(QUESTIONS)


def test_scores_are_those_of_plain_log_probabilities(task):
    tokenizer = word_tokenizer.tokenizer()
    scorer = TaskScorer([task], tokenizer)
    seen = set()
    for seed in range(3):
        model = tiny_models.build("llama", seed=seed)
        for layers in ((), (1, 3)):
            with skipping(anatomy_candidates(model)[0], layers):
                (score,) = scorer.scores({"one": model}, Watcher())["one"]
                expected = plain_accuracy(model, tokenizer)
            assert (score.task, score.metric, score.count) == ("choice", "acc", len(QUESTIONS))
            assert score.value == pytest.approx(expected)
            assert score.error == pytest.approx((expected * (1 - expected) / (len(QUESTIONS) - 1)) ** 0.5)
            seen.add(score.value)
    assert len(seen) > 1


def test_a_limit_reads_the_first_examples_only(task):
    (score,) = TaskScorer([task], word_tokenizer.tokenizer(), limit=3).score(tiny_models.build("llama"))
    assert score.count == 3


def test_bad_tasks_are_refused_before_anything_runs(task, tmp_path):
    with pytest.raises(FulldepthError, match="no task file"):
        TaskScorer([str(tmp_path / "absent.yaml")], word_tokenizer.tokenizer())
    (tmp_path / "questions.jsonl").unlink()
    with pytest.raises(FulldepthError, match="lm-eval cannot run"):
        TaskScorer([task], word_tokenizer.tokenizer()).score(tiny_models.build("llama"))


@pytest.mark.slow
def test_an_unknown_name_gets_the_nearest_ones():
    with pytest.raises(FulldepthError, match=r"Unknown lm-eval task 'arc_eazy'. Did you mean .*'arc_easy'"):
        TaskScorer(["arc_eazy"], word_tokenizer.tokenizer())

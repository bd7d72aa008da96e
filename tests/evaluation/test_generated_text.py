"""Tasks that generate text: sampling as in lm-eval's own run, and contexts that are cut."""

from __future__ import annotations

import json

import pytest

from data.conftest import jsonl
from evaluation import small_world
from fulldepth.evaluation import evaluate
from json_files import write_json

lm_eval = pytest.importorskip("lm_eval")
QUESTIONS = [f"{'word ' * length}{length}?" for length in (1, 4, 8, 9)]
ROOM, NEW = 40, 8
REPEATS = 3


def write_task(folder, **arguments):
    """A task of an own folder, which asks each question several times."""
    rows = [{"question": question, "answer": "no"} for question in QUESTIONS]
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(jsonl(folder / "rows.jsonl", *rows))}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["zzz"], "max_gen_toks": NEW, **arguments},
        "repeats": REPEATS,
        "metric_list": [{"metric": "exact_match"}],
    }
    write_json(folder / "mine.yaml", task)
    return task


def texts_of(rows):
    """The texts of every repetition, by example."""
    return [row["resps"][0] for row in sorted(rows, key=lambda row: row["doc_id"])]


@pytest.mark.parametrize(
    ("arguments", "is_sampled"),
    [
        ({"temperature": 0.9}, True),  # lm-eval samples then
        ({"temperature": 0.9, "do_sample": True}, True),
        ({"temperature": 0.9, "do_sample": False}, False),
        ({"top_p": 0.9}, False),
        ({}, False),
    ],
)
@pytest.mark.parametrize("config", [False, True])
def test_repeated_requests_are_sampled_where_the_harness_samples(arguments, is_sampled, config, tmp_path):
    """Whatever the checkpoint's own generation config says; every text is that of lm-eval's own run."""
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = small_world.model()
    model.generation_config.do_sample = config
    task = write_task(tmp_path, **arguments)
    whole = HFLM(pretrained=model, tokenizer=small_world.tokenizer(), batch_size=4)
    options = {"tasks": [task], "task_manager": TaskManager(include_defaults=False)}
    stock = lm_eval.simple_evaluate(model=whole, log_samples=True, **options)
    expected = texts_of(next(iter(stock["samples"].values())))
    out = tmp_path / "out"
    given = {"tokenizer": small_world.tokenizer(), "batch_size": 4, "include_path": str(tmp_path)}
    evaluate(model, ["mine"], out, log_samples=True, exit_layers="full", **given)
    got = texts_of(map(json.loads, (out / "samples_mine.jsonl").read_text().splitlines()))
    assert got == expected
    assert any(len(set(texts)) > 1 for texts in got) is is_sampled


def test_cut_contexts_of_generated_text_are_counted_once(tmp_path):
    """The tokenizer has one token for each byte: what is longer than the positions less the new tokens is cut."""
    model = small_world.model()
    model.config.max_position_embeddings = ROOM
    write_task(tmp_path)
    cut = sum(len(question) > ROOM - NEW for question in QUESTIONS)
    assert 0 < cut < len(QUESTIONS)
    for layers in ("full", "1,2"):
        options = {"tokenizer": small_world.tokenizer(), "include_path": str(tmp_path), "exit_layers": layers}
        warnings = evaluate(model, ["mine"], tmp_path / layers, **options).meta["warnings"]
        (line,) = (warning for warning in warnings if "did not fit" in warning)
        assert line.startswith(f"{cut} requests of mine did not fit in the model's positions")


def test_cut_contexts_of_answers_are_counted_once_also_when_they_are_resumed(tmp_path, monkeypatch):
    """The prompt and the choice are one token for each byte, of which the last is not read."""
    data = small_world.write_data(tmp_path / "data")
    model = small_world.model()
    model.config.max_position_embeddings = ROOM
    rows = [json.loads(line) for line in (data / "lm-eval" / "lambada_test.jsonl").read_text().splitlines()]
    cut = sum(len((row["context"] + row["target"]).encode()) - 1 > ROOM for row in rows)
    assert cut > 0
    monkeypatch.setattr("fulldepth.evaluation.run.shutil.rmtree", lambda *_, **__: None)  # keeps the answers
    for _ in range(2):
        options = {"tokenizer": small_world.tokenizer(), "task_data": [str(data)], "bootstrap_iters": 0}
        results = evaluate(model, ["lambada_local"], tmp_path / "out", resume=True, **options)
        (line,) = (warning for warning in results.meta["warnings"] if "did not fit" in warning)
        assert line.startswith(f"{cut} request")
        (tmp_path / "out" / "results.json").unlink()

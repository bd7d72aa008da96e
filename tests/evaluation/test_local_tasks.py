"""The tasks on local files against lm-eval's own definitions on the same documents, and malformed files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.conftest import jsonl
from evaluation import small_world
from fulldepth.evaluation.local_tasks import LOCAL_TASKS, hellaswag_query, local_task
from refusals import refused

lm_eval = pytest.importorskip("lm_eval")
LETTERS = "ABCDE"


def arc(row):
    labels = list(LETTERS[: len(row["choices"])])
    choices = {"text": row["choices"], "label": labels}
    return {"question": row["question"], "choices": choices, "answerKey": labels[row["gold"]]}


def piqa(row):
    first, second = (row["choices"] * 2)[:2]
    return {"goal": row["goal"], "sol1": first, "sol2": second, "label": row["gold"] % 2}


def hellaswag(row):
    """The context in HellaSwag's two parts: the second is the sentence that the choices finish."""
    activity, _, rest = row["context"].partition(": ")
    first, _, second = rest.rpartition(". ") if rest[-1] not in ".?!" else (rest, "", "")
    parts = {"ctx_a": f"{first}." if second else first, "ctx_b": second}
    return {"activity_label": activity, **parts, "endings": row["choices"], "label": row["gold"]}


OWN = {
    "arc_easy_local": ("arc/arc_easy.yaml", "arc_easy_test", arc),
    "arc_challenge_local": ("arc/arc_challenge.yaml", "arc_challenge_test", arc),
    "piqa_local": ("piqa/piqa.yaml", "piqa_valid", piqa),
    "hellaswag_local": ("hellaswag/hellaswag.yaml", "hellaswag_val", hellaswag),
    "lambada_local": ("lambada/lambada_openai.yaml", "lambada_test", lambda row: {"text": "".join(row.values())}),
    "gsm8k_local": ("gsm8k/gsm8k.yaml", None, dict),
}
"""Local task -> lm-eval's file, the file of rows, and the document that lm-eval's definition reads."""


def built(config):
    """A task with its requests."""
    from lm_eval.tasks import TaskManager

    (task,) = TaskManager(include_defaults=False).load([config])["tasks"].values()
    if task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(1234)
    task.build_all_requests(limit=6)
    return task


def own_definition(name, data):
    """lm-eval's own task on the documents of the local files."""
    import datasets
    from lm_eval.tasks._yaml_loader import load_yaml

    file, rows, document = OWN[name]
    config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / file)
    config.pop("tag", None)
    files = {"train": data / "gsm8k/train.jsonl", "test": data / "gsm8k/test.jsonl"}
    if rows is not None:
        split = config.get("test_split") or config["validation_split"]
        files = {split: data / f"lm-eval/{rows}.jsonl"}
        for other in ("training_split", "validation_split", "fewshot_split"):
            if config.get(other) != split:
                config.pop(other, None)
    splits = {
        split: datasets.Dataset.from_list([document(json.loads(line)) for line in path.read_text().splitlines()])
        for split, path in files.items()
    }
    config["custom_dataset"] = lambda **_: datasets.DatasetDict(splits)
    return built(config)


@pytest.mark.parametrize("name", LOCAL_TASKS)
def test_requests_targets_and_metrics_are_those_of_lm_eval(name, tmp_path):
    data = small_world.write_data(tmp_path)
    if name == "piqa_local":  # it has two choices
        path = data / "lm-eval/piqa_valid.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [{"goal": row["goal"], "choices": (row["choices"] * 2)[:2], "gold": row["gold"] % 2} for row in rows]
        jsonl(path, *rows)
    own, local = own_definition(name, data), built(local_task(name, [data]))
    assert [(one.request_type, one.args, one.doc_id) for one in local.instances] == [
        (one.request_type, one.args, one.doc_id) for one in own.instances
    ]
    assert len(local.instances) >= 6
    entries = ("metric_list", "filter_list", "repeats", "output_type", "target_delimiter", "num_fewshot")
    assert {entry: local.get_config(entry) for entry in entries} == {entry: own.get_config(entry) for entry in entries}
    for one, other in zip(local.eval_docs, own.eval_docs, strict=True):
        assert local.doc_to_target(one) == own.doc_to_target(other)


def test_hellaswag_prompts_of_the_real_file_capitalise_the_unfinished_sentence(shared_data):
    """3,243 of HellaSwag's 10,042 validation rows are captions, whose last sentence is unfinished."""
    lines = (shared_data / "lm-eval/hellaswag_val.jsonl").read_text().splitlines()
    contexts = [json.loads(line)["context"] for line in lines]
    changed = [context for context in contexts if hellaswag_query(context) != context]
    assert hellaswag_query(contexts[0]) == "Roof shingle removal: A man is sitting on a roof. He"
    assert len(contexts) == 10_042
    assert 3_200 < len(changed) <= 3_243


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"question": "a", "choices": ["b", "c"], "gold": 2}',
            "line 3: gold is 2; expected the number of the right choice, 0 to 1",
        ),
        (
            '{"question": "a", "choices": ["b", "c"], "gold": true}',
            "line 3: gold is True; expected the number of the right choice, 0 to 1",
        ),
        (
            '{"question": "a", "choices": {"text": ["b", "c"]}, "gold": 0}',
            "line 3: choices is .*; expected a list of two texts or more",
        ),
        (
            '{"question": "\\ud800", "choices": ["b", "c"], "gold": 0}',
            "line 3: question is .*; expected text that is not empty",
        ),
        (
            '{"question": "a", "choices": ["b"], "gold": 0}',
            "line 3: choices is .*; expected a list of two texts or more",
        ),
        (None, "arc_easy_test.jsonl is empty: it has 2 bytes and no text"),
    ],
)
def test_a_malformed_row_or_an_empty_file_is_named(line, message, tmp_path):
    row = '{"question": "{{ 1/0 }} {% raw", "choices": ["b", "{{c}}"], "gold": 0}\n'
    (tmp_path / "arc_easy_test.jsonl").write_text("\n\n" if line is None else row * 2 + line + "\n")
    with refused(message):
        local_task("arc_easy_local", [tmp_path])["custom_dataset"]()


def test_a_missing_file_is_named_with_the_places(tmp_path):
    for folders, named in (([tmp_path], "lm-eval/piqa_valid"), ([], "--task-data")):
        with refused(named):
            local_task("piqa_local", folders)

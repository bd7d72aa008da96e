"""Comparisons of evaluations: only the same examples, asked in the same way, have a difference."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
from numpy.testing import assert_allclose

from evaluation import small_world
from evaluation.test_layers import CHAT
from fulldepth.evaluation import evaluate
from fulldepth.results import Results, compare

pytest.importorskip("lm_eval")
TASKS = ["arc_easy_local", "gsm8k_local"]
COUNT = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_world.write_data(tmp_path_factory.mktemp("tasks"), rows=COUNT + 2)


def scored(which, data, tasks=TASKS, template=CHAT, output=None, **options):
    """The evaluation of one of two models."""
    tokenizer = small_world.tokenizer()
    tokenizer.chat_template = template
    given = {"limit": COUNT, "exit_layers": "full", "bootstrap_iters": 10, "num_fewshot": 0, "task_data": [str(data)]}
    given |= {"gen_kwargs": "max_gen_toks=4"} if "gsm8k_local" in tasks else {}
    return evaluate(small_world.model(which), tasks, output, tokenizer=tokenizer, **{**given, **options})


@pytest.fixture(scope="module")
def base(data):
    return scored(0, data)


def differences(compared, task):
    """`[rows]` of the scores of a task in the second model: differences and their errors."""
    rows = compared.table[(compared.table["model"] == "b") & (compared.table["site"] == task)]
    return rows[~rows["statistic"].str.endswith("_stderr")][["difference", "difference_error"]].to_numpy()


def edited(data, folder):
    """A copy of the data whose rows ask something else."""
    shutil.copytree(data, folder)
    for name in ("lm-eval/arc_easy_test.jsonl", "gsm8k/test.jsonl"):
        file = folder / name
        file.write_text(file.read_text().replace("times", "plus").replace("What is", "Who was"))
    return folder


OTHERWISE = {
    "solved examples": ({"num_fewshot": 2}, TASKS, r"the numbers of solved examples differ (b: 2, a: 0)"),
    "an instruction": ({"system_instruction": "Be brief."}, TASKS, "the system instructions differ"),
    "a template": ({"apply_chat_template": True}, TASKS, "only one of them uses a chat template"),
    "generation": ({"gen_kwargs": "max_gen_toks=3"}, ["gsm8k_local"], "differ (b: max_gen_toks 3; a: max_gen_toks 4)"),
    "other rows": ({}, TASKS, "the examples differ"),
    "fewer rows": ({"limit": COUNT - 1}, TASKS, "the numbers of examples differ (b: 5, a: 6)"),
}


@pytest.mark.parametrize("change", OTHERWISE)
def test_another_test_has_a_reason_in_place_of_a_difference(change, base, data, tmp_path):
    """Of another model. Of the same model the difference is that of the test, and a warning says so."""
    options, refused, reason = OTHERWISE[change]
    place = edited(data, tmp_path / "edited") if change == "other rows" else data
    compared = compare({"a": base, "b": scored(1, place, **options)}, output=tmp_path / "out")
    for task in TASKS:
        is_refused = task in refused
        assert (f"comparable {task}:b" in compared.headline) is is_refused
        assert (f"score {task}:b" in compared.headline) is not is_refused
        assert np.isnan(differences(compared, task)).all() == is_refused
    assert all(reason in compared.headline[f"comparable {task}:b"]["sentence"] for task in refused)
    assert compared.meta["models"][1]["paired"] is (set(refused) != set(TASKS))
    assert list(compared.headline)[: len(refused)] == [f"comparable {task}:b" for task in refused]
    again = compare({"a": base, "b": scored(0, place, **options)})
    assert not any(name.startswith("comparable") for name in again.headline)
    said = [line for line in again.meta["warnings"] if "are one model" in line]
    assert [line.partition(":")[0] for line in said] == refused
    assert all(reason in line for line in said)
    assert np.isfinite(differences(again, refused[0])[:, 0]).all()


def test_the_same_test_elsewhere_and_with_another_template_is_comparable(base, data, tmp_path):
    """A template belongs to the model. Equal arguments, written otherwise, ask the same."""
    shutil.copytree(data, tmp_path / "copy")
    same = {"gen_kwargs": "max_gen_toks=4,do_sample=false,temperature=0"}
    for found in (
        compare({"a": base, "b": scored(1, tmp_path / "copy", **same)}),
        compare(
            {
                "a": scored(0, data, apply_chat_template=True),
                "b": scored(1, data, apply_chat_template=True, template=CHAT.replace("<s>", "<s>## ")),
            }
        ),
    ):
        assert list(found.headline) == [f"score {task}:b" for task in TASKS]
        assert found.meta["models"][1]["paired"] is True
        assert not [line for line in found.meta["warnings"] if "not known" in line or "differ" in line]


def test_a_further_task_leaves_the_shared_one_paired(data, tmp_path):
    """The oracle is the mean of differences of lm-eval's own log of examples. Its bound is two standard errors."""
    marks = []
    both = []
    more = small_world.write_data(tmp_path / "data", rows=30)
    for seed, tasks in ((0, TASKS[:1]), (1, [*TASKS[:1], "piqa_local", "lambada_local"])):
        out = tmp_path / str(seed)
        both.append(scored(seed, more, tasks, output=out, limit=20, log_samples=True, num_fewshot=None))
        lines = (out / "samples_arc_easy_local.jsonl").read_text().splitlines()
        both[-1].meta["tasks"]["arc_easy_local"]["metric"] = "acc_norm"  # `acc` is the same for all such models
        marks.append([row["acc_norm"] for row in sorted(map(json.loads, lines), key=lambda row: row["doc_id"])])
    gap = np.subtract(marks[1], marks[0])
    assert gap.std() > 0
    error = gap.std(ddof=1) / len(gap) ** 0.5
    for pair, sign in ((both, 1), (both[::-1], -1)):
        compared = compare(dict(zip("ab", pair, strict=True)))
        assert_allclose(differences(compared, "arc_easy_local")[-1], [sign * gap.mean(), error], rtol=1e-5)
        finding = compared.headline["score arc_easy_local:b"]
        assert finding["standard_error"] == pytest.approx(error, rel=1e-5)
        measured = abs(gap.mean()) > 2 * error
        assert finding["value"] == pytest.approx(sign * gap.mean())
        assert ("no measurable difference (paired" in finding["sentence"]) is not measured
        assert compared.meta["models"][1]["paired"] is True


def test_earlier_results_are_compared_as_independent_ones_with_a_note(base, data):
    """Without hashes of examples, only equal groups are paired; the error is that of two independent scores."""
    old = scored(1, data)
    for entry in old.meta["tasks"].values():
        del entry["examples"], entry["asked"]
    together = compare({"a": base, "b": old})
    old.meta["groups"]["hash"] = "sha256:other"
    apart = compare({"a": base, "b": old})
    for compared, paired in ((together, True), (apart, False)):
        assert compared.meta["models"][1]["paired"] is paired
        (note,) = (line for line in compared.meta["warnings"] if "it is not known whether" in line)
        assert all(task in note for task in TASKS)
    errors = [result.values("task_score", "acc_stderr", "arc_easy_local")[small_world.LAYERS] for result in (base, old)]
    assert differences(apart, "arc_easy_local")[0, 1] == pytest.approx(math.hypot(*errors))
    sentence = apart.headline["score arc_easy_local:b"]["sentence"]
    assert "no measurable difference (unpaired, at most" in sentence, (
        "equal scores of other examples are not equal models"
    )


def test_another_seed_of_the_solved_examples_is_noted(data):
    one, other, plain = (scored(1, data, num_fewshot=shots, seed=seed) for shots, seed in ((1, 1), (1, 2), (0, 2)))
    (first, second) = (compare({"a": scored(0, data, num_fewshot=1, seed=1), "b": b}) for b in (one, other))
    assert not [line for line in first.meta["warnings"] if "seeds" in line]
    assert len([line for line in second.meta["warnings"] if "seeds of solved examples" in line]) == len(TASKS)
    assert np.isfinite(differences(second, "arc_easy_local")).all()
    without = compare({"a": scored(0, data, seed=1), "b": plain})
    assert not [line for line in without.meta["warnings"] if "seeds" in line]


def test_a_group_is_the_same_test_if_its_tasks_are(data, tmp_path):
    """Its score is no mean over examples that are known: the errors of both scores are added as independent ones."""
    task = (
        "task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}/lm-eval/{file}.jsonl\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list:\n  - metric: acc\ndoc_to_text: '{{{{{column}}}}}{mark}'\n"
    )
    group = (
        "group: both\ntask:\n  - one\n  - two\naggregate_metric_list:\n  - metric: acc\n    aggregation: mean\n"
        "    weight_by_size: true\n"
    )
    (tmp_path / "both.yaml").write_text(group)

    def run(seed, mark):
        for name, file, column in (("one", "arc_easy_test", "question"), ("two", "piqa_valid", "goal")):
            text = task.format(name=name, data=data, file=file, column=column, mark=mark if name == "two" else "")
            (tmp_path / f"{name}.yaml").write_text(text)
        return scored(seed, data, ["both"], include_path=str(tmp_path), task_data=None, num_fewshot=None)

    base, same, other = run(0, ""), run(1, ""), run(1, "?")
    assert set(base.meta["tasks"]) >= {"both", "one", "two"}
    found = compare({"a": base, "b": same})
    errors = [result.values("task_score", "acc_stderr", "both")[small_world.LAYERS] for result in (base, same)]
    assert differences(found, "both")[0, 1] == pytest.approx(math.hypot(*errors))
    assert np.isfinite(differences(found, "one")).all()
    refused = compare({"a": base, "b": other})
    assert [name for name in refused.headline if name.startswith("comparable")] == [
        f"comparable {name}:b" for name in refused.meta["models"][1]["tasks"] if name in ("both", "two")
    ]
    assert "defined differently" in refused.headline["comparable both:b"]["sentence"]


def test_generated_texts_are_compared_if_they_continue_the_same_text(tmp_path):
    def quality(seed, text, **options):
        path = tmp_path / "text.txt"
        path.write_text(text)
        given = {"prompts": 3, "prefix_tokens": 8, "max_new_tokens": 6, "exit_layers": "full", **options}
        tokenizer = small_world.tokenizer()
        return evaluate(small_world.model(seed), tokenizer=tokenizer, generation_quality=str(path), **given)

    text = "The sun saw a river, and the river saw a stone. " * 40
    base = quality(0, text)
    for other, reason in (
        (quality(1, text), ""),
        (quality(1, text.replace("sun", "moon")), "the texts differ"),
        (quality(1, text, max_new_tokens=5), "the lengths of their continuations differ (b: 5, a: 6)"),
        (quality(1, text, top_p=0.5), "the shares of nucleus sampling differ (b: 0.5, a: 0.95)"),
    ):
        compared = compare({"a": base, "b": other})
        rows = compared.table[compared.table["model"] == "b"]
        assert rows["difference"].isna().all() == bool(reason)
        assert ("comparable generated text:b" in compared.headline) is bool(reason)
        assert not reason or reason in compared.headline["comparable generated text:b"]["sentence"]


def test_the_page_of_refused_tasks_states_the_reason(base, data, tmp_path):
    compare({"a": base, "b": scored(1, data, num_fewshot=1)}, output=tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "are not comparable because the numbers of solved examples differ" in page
    assert Results.load(tmp_path / "out").headline

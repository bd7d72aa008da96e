"""A plan as results: rows and sentences out of the plan."""

from __future__ import annotations

import re

import pytest
from pandas.testing import assert_frame_equal

from fulldepth.results import COLUMNS, Results
from fulldepth.skip.outcome import headline
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


def test_a_plan_that_was_not_healed_says_so_and_what_is_doubtful_is_warned_of():
    model = build("gpt2")
    doubtful = NOTHING | {"unsure_rounds": [1]}
    plan = planned.plan(model, (2,), values=None, losses=[1.0, 1.5], cost=doubtful)
    results = planned.analysed(model, plan, EXAMPLES)
    assert set(results.table.state) == {"original", "skipped"}
    assert results.headline["loss_healed"]["value"] is None
    (unsure,) = results.meta["warnings"]
    assert "1 of 1 rounds" in unsure


@pytest.mark.parametrize(("losses", "healed"), [([2.0, 2.1, 2.5], 2.2), ([2.0, 1.9, 1.8], 1.8)])
def test_losses_without_errors_are_not_interpreted(losses, healed):
    plan = healed_plan(build("llama"), losses=losses, healed_loss=healed, search="greedy")
    found = headline(plan, LAYERS)
    assert found["loss_added"].value == pytest.approx(losses[-1] - losses[0])
    assert found["loss_added"].document()["standard_error"] is None
    assert "chose the blocks and stopped the training of scalars" in found["loss_added"].sentence
    assert found["loss_healed"].value == healed
    assert ("No epoch" in found["loss_healed"].sentence) is (healed == losses[-1])
    shown = [float(number) for number in re.findall(r"\d\.\d{4}", found["loss_healed"].sentence)]
    assert shown == [healed, losses[-1], 1.9, losses[0]], "losses only: no difference"

"""A plan as results: rows out of the plan, discrepancies by the formula in float64 on stock models, sentences."""

from __future__ import annotations

import copy
import re

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.testing import assert_allclose
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
    last = results.table.query("measure == 'mmd' and layer == @LAYERS").set_index("state").value
    assert results.headline["mmd"]["value"] == last["healed"]
    again = Results.load(tmp_path / "out")
    assert_frame_equal(again.table, results.table)
    assert (again.meta["kind"], again.meta["plan"], again.meta["warnings"]) == ("skip", plan.document(), [])


def test_a_plan_that_was_not_healed_says_so_and_what_is_doubtful_is_warned_of():
    model = build("gpt2")
    doubtful = {"cost": NOTHING | {"unsure_rounds": [1]}, "data": {"hash": "sha256:" + "1" * 64}}
    plan = planned.plan(model, (2,), values=None, losses=[1.0, 1.5], **doubtful)
    results = planned.analysed(model, plan, EXAMPLES)
    assert set(results.table.state) == {"original", "skipped"}
    assert results.headline["loss_healed"]["value"] is None
    unsure, other = results.meta["warnings"]
    assert "1 of 1 rounds" in unsure
    assert "other data" in other


@pytest.mark.parametrize(("losses", "healed"), [([2.0, 2.1, 2.5], 2.2), ([2.0, 1.9, 1.8], 1.8)])
def test_losses_without_errors_are_not_interpreted(losses, healed):
    plan = healed_plan(build("llama"), losses=losses, healed_loss=healed, search="greedy")
    found = headline(plan, pd.DataFrame(columns=[*COLUMNS, "removed", "state"]), LAYERS)
    assert found["loss_added"].value == pytest.approx(losses[-1] - losses[0])
    assert found["loss_added"].document()["standard_error"] is None
    assert "chose the blocks and stopped the training of scalars" in found["loss_added"].sentence
    assert found["loss_healed"].value == healed
    assert ("No epoch" in found["loss_healed"].sentence) is (healed == losses[-1])
    shown = [float(number) for number in re.findall(r"\d\.\d{4}", found["loss_healed"].sentence)]
    assert shown == [healed, losses[-1], 1.9, losses[0]], "losses only: no difference"


def discrepancy(x, y):
    """Squared MMD as a V-statistic, the bandwidth the median distance of all different pairs of the pooled points."""
    points = np.concatenate([x, y])
    squared = ((points[:, None] - points[None]) ** 2).sum(-1)
    width = np.median(np.sqrt(squared[np.triu_indices(len(points), 1)]))
    kernel = np.exp(-squared / (2 * width**2))
    n = len(x)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


@torch.no_grad()
def streams(model, examples):
    """[L+1, N, D] the stream at every token, one sequence at a time: into the first block, and out of each."""
    model, found, seen = copy.deepcopy(model).double(), [], []
    blocks = planned.layers(model)
    blocks[0].register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    for block in blocks:
        block.register_forward_hook(lambda m, given, out: seen.append(out[0] if isinstance(out, tuple) else out))
    for example in examples:
        seen.clear()
        model(input_ids=example.input_ids[None])
        found.append(torch.cat(seen))
    return torch.cat(found, dim=1).numpy()


@pytest.mark.parametrize(
    ("family", "blocks", "granularity", "healed"),
    [
        ("gpt2", (3, 1), "attention", False),
        ("gpt_neox", (2,), "attention", True),
        ("gemma2", (1,), "mlp", True),
        ("qwen3", (2,), "layer", False),
    ],
)
def test_the_discrepancy_is_that_of_stock_models(family, blocks, granularity, healed):
    model = build(family)
    plan = planned.plan(model, blocks, granularity, values="fitted" if healed else None, data=EXAMPLES.meta)
    own, reference = streams(planned.scaled(model, plan), EXAMPLES.heldout), streams(model, EXAMPLES.heldout)
    expected = [discrepancy(x, y) for x, y in zip(own, reference, strict=True)]
    assert expected[1 if healed else min(blocks)] > 1e-3  # there is something to see
    logits = model(input_ids=EXAMPLES.heldout[0].input_ids[None]).logits
    for batch_size in (1, 4):
        table = planned.analysed(model, plan, EXAMPLES, batch_size=batch_size).table
        rows = table[(table.measure == "mmd") & (table.state == ("healed" if healed else "skipped"))]
        assert rows.layer.tolist() == list(range(LAYERS + 1))
        assert set(rows["count"]) == {sum(map(len, EXAMPLES.heldout))}
        assert_allclose(rows.value, expected, rtol=1e-3, atol=1e-6)
    assert torch.equal(model(input_ids=EXAMPLES.heldout[0].input_ids[None]).logits, logits)

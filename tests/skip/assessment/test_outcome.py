"""A plan as results: rows out of the plan, and sentences that say what happened."""

from __future__ import annotations

import re

import pandas as pd
import pytest
from fulldepth.skip.assessment.outcome_headline import headline

from fulldepth.errors import FulldepthError
from fulldepth.hf import anatomy_candidates
from fulldepth.results import COLUMNS, Results
from fulldepth.skip.assessment.outcome import analyse, settings_of
from fulldepth.skip.summary import lines
from skip import plain, planned
from tiny_models import LAYERS, build

EXAMPLES = plain.examples(4, 6)


def select(results, measure, **where) -> pd.DataFrame:
    rows = results.table[results.table.measure == measure]
    for name, value in where.items():
        rows = rows[rows[name] == value]
    return rows


def healed_plan(model, **entries):
    entries = {"losses": [2.0, 2.1, 2.5], "healed_loss": 2.2, "control_loss": {"scalars_only": 1.9}} | entries
    return planned.plan(model, (3, 1), **entries)


def test_rows_say_what_the_plan_says(tmp_path) -> None:
    model = build("llama")
    plan = healed_plan(model, data=EXAMPLES.meta)
    results = analyse(model, plan, EXAMPLES, output=tmp_path / "out")
    assert list(results.table.columns) == [*COLUMNS, "removed", "state"]
    losses = select(results, "loss")
    kept = losses[["layer", "value", "removed", "state"]].astype(object)
    assert kept.where(kept.notna(), None).values.tolist() == [
        [None, 2.0, 0, "original"],
        [3, 2.1, 1, "skipped"],
        [1, 2.5, 2, "skipped"],
        [1, 2.2, 2, "healed"],
        [None, 1.9, 0, "scalars_only"],
    ]
    assert set(losses["count"]) == {sum(int((e.labels != -100).sum()) for e in EXAMPLES.heldout)}
    scalars = {
        (f"{row.statistic}_{row.site[:3]}", row.layer): row.value for row in select(results, "scalar").itertuples()
    }
    assert scalars == {
        (name, int(layer)): value for layer, factors in plan.scalars.items() for name, value in factors.items()
    }
    assert select(results, "mmd").groupby("state").size().to_dict() == {"healed": LAYERS + 1, "skipped": LAYERS + 1}
    assert set(select(results, "mmd").removed) == {2}
    norms = select(results, "spectral_norm")
    assert len(norms) == 7 * LAYERS
    assert norms.removed.isna().all()
    assert set(norms.state) == {"original"}
    again = Results.load(tmp_path / "out")
    pd.testing.assert_frame_equal(again.table, results.table)
    assert again.meta["plan"] == plan.document()
    assert again.meta["kind"] == "skip"
    assert again.meta["model"]["num_layers"] == LAYERS
    assert again.meta["warnings"] == []


def test_a_plan_that_was_not_healed_says_so() -> None:
    model = build("gpt2")
    plan = planned.plan(model, (2,), values=None, losses=[1.0, 1.5], data=EXAMPLES.meta)
    results = analyse(model, plan, EXAMPLES)
    assert set(results.table.state) == {"original", "skipped"}
    assert select(results, "scalar").empty
    assert results.headline["loss_healed"] == {
        "value": None,
        "unit": "nats",
        "sentence": "No scalars were fitted: the model is not healed.",
    }
    assert "not healed" in results.headline["mmd"]["sentence"]


@pytest.mark.parametrize(
    ("losses", "healed", "added", "helped"),
    [
        ([2.0, 2.1, 2.5], 2.2, "adds 0.5000 nats to", True),
        ([2.0, 2.1, 2.5], 2.5, "adds 0.5000 nats to", False),
        ([2.0, 1.9, 1.8], 1.7, "takes 0.2000 nats off", True),
    ],
)
def test_losses_without_errors_are_not_interpreted(losses, healed, added, helped) -> None:
    model = build("llama")
    plan = healed_plan(model, losses=losses, healed_loss=healed, control_loss={"scalars_only": 1.9})
    found = headline(plan, pd.DataFrame(columns=[*COLUMNS, "removed", "state"]), anatomy_candidates(model)[0])
    assert set(found) == {"loss_added", "loss_healed"}
    assert found["loss_added"].value == pytest.approx(losses[-1] - losses[0])
    assert found["loss_added"].document()["standard_error"] is None
    assert found["loss_healed"].value == healed
    assert added in found["loss_added"].sentence
    assert "of layers 3, 1, in this order" in found["loss_added"].sentence
    assert ("No epoch" not in found["loss_healed"].sentence) is helped
    shown = [float(number) for number in re.findall(r"\d\.\d{4}", found["loss_healed"].sentence)]
    assert shown == [healed, losses[-1], 1.9, losses[0]], "losses only: no difference"
    assert not any(remark.startswith(("+", "-")) for _, _, remark in lines(plan)), "no difference without an error"


def test_discrepancy_in_words() -> None:
    model = build("gemma2")
    plan = healed_plan(model, data=EXAMPLES.meta)
    results = analyse(model, plan, EXAMPLES)
    last = select(results, "mmd", layer=LAYERS).set_index("state").value
    assert results.headline["mmd"]["value"] == last["healed"]
    both = f"{last['skipped']:.2e} before and {last['healed']:.2e} after healing"
    assert both in results.headline["mmd"]["sentence"]
    assert "spectral_norm" not in results.headline  # one large layer decides a mean over few layers


def test_settings_come_from_the_plan() -> None:
    model = build("llama")
    cost = {"forwards": 0, "flops": 0, "seconds": 0.0, "settings": {"criterion": "kl", "epochs": 3, "budget": None}}
    settings = settings_of(planned.plan(model, (2,), cost=cost), {"epochs": 4})
    assert (settings.blocks, settings.criterion, settings.epochs, settings.granularity) == (1, "kl", 4, "attention")
    assert settings_of(planned.plan(model, (2, 1), "mlp"), {}).granularity == "mlp"


def test_what_is_refused_and_what_is_warned_of(tmp_path) -> None:
    model = build("llama")
    plan = healed_plan(model, data={"hash": "sha256:" + "1" * 64})
    with pytest.raises(FulldepthError, match="another LlamaForCausalLM"):
        analyse(build("llama", seed=1), plan, EXAMPLES)
    assert any("other data" in line for line in analyse(model, plan, EXAMPLES, output=tmp_path).meta["warnings"])
    with pytest.raises(FulldepthError, match="already holds results"):
        analyse(model, plan, EXAMPLES, output=tmp_path)
    cost = {"forwards": 0, "flops": 0, "seconds": 0.0, "unsure_rounds": [2]}
    unsure = analyse(model, healed_plan(model, cost=cost, data=EXAMPLES.meta), EXAMPLES)
    assert ["1 of 2 rounds" in line for line in unsure.meta["warnings"]] == [True]


@pytest.mark.parametrize(
    ("search", "healed", "words"),
    [
        ("greedy", True, "chose the blocks and stopped the training of scalars"),
        ("greedy", False, "chose the blocks"),
        ("given", True, "stopped the training of scalars"),
        ("given", False, None),
    ],
)
def test_losses_say_what_was_decided_on_their_sequences(search, healed, words) -> None:
    model = build("llama")
    made = planned.plan(model, [2], values="fitted" if healed else None, search=search, data=EXAMPLES.meta)
    sentence = analyse(model, made, EXAMPLES).headline["loss_added"]["sentence"]
    told = [name for name, _, _ in lines(made)]
    assert ("in-sample" in told) == (words is not None)
    ending = f"Measured on the text that {words}; expect slightly more loss on other text."
    assert sentence.endswith(ending) if words else "Measured on" not in sentence

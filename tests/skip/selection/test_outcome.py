"""A plan as results: rows out of the plan, discrepancies by the formula in float64 on stock models, sentences."""

from __future__ import annotations

import copy
import re

import numpy as np
import pandas as pd
import pytest
import torch

from fulldepth import measure
from fulldepth.errors import FulldepthError
from fulldepth.execution.language_model import prove
from fulldepth.hf.scalars import Scalars
from fulldepth.hf.surgery import Switches
from fulldepth.results import COLUMNS, Results
from fulldepth.skip.exports.fold import fold
from fulldepth.skip.selection.fit import make_batches
from fulldepth.skip.selection.outcome import analyse, discrepancies, headline, settings_of
from fulldepth.skip.summary import lines
from skip import plain, planned
from skip.word_tokenizer import tokenizer, words
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
    assert select(results, "mmd").groupby("state").size().to_dict() == {"healed": LAYERS + 1, "skipped": LAYERS + 1}
    assert set(select(results, "mmd").removed) == {2}
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
    assert results.headline["loss_healed"]["value"] is None
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
    found = headline(plan, pd.DataFrame(columns=[*COLUMNS, "removed", "state"]), LAYERS)
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


def test_settings_come_from_the_plan() -> None:
    model = build("llama")
    stored = {"criterion": "kl", "epochs": 3, "budget": None, "of_an_earlier_version": True}
    cost = {"forwards": 0, "flops": 0, "seconds": 0.0, "settings": stored}
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


CASES = [
    ("llama", (2,), "attention", True),
    ("gpt2", (3, 1), "attention", False),
    ("gpt_neox", (2,), "attention", True),
    ("gemma2", (1,), "mlp", True),
    ("qwen3", (2,), "layer", False),
]


def discrepancy(x: np.ndarray, y: np.ndarray) -> float:
    """Squared MMD as a V-statistic, the bandwidth the median distance of all different pairs of the pooled points."""
    points = np.concatenate([x, y])
    squared = ((points[:, None] - points[None]) ** 2).sum(-1)
    width = np.median(np.sqrt(squared[np.triu_indices(len(points), 1)]))
    kernel = np.exp(-squared / (2 * width**2))
    n = len(x)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()


@torch.no_grad()
def streams(model, examples) -> np.ndarray:
    """[L+1, N, D] the stream at every token, one sequence at a time: into the first block, and out of each."""
    model, found = copy.deepcopy(model).double(), []
    blocks = planned.layers(model)
    for example in examples:
        seen: list[torch.Tensor] = []

        def note(module, given, seen=seen):
            seen.append(given[0])

        def after(module, given, output, seen=seen):
            seen.append(output[0] if isinstance(output, tuple) else output)

        hooks = [blocks[0].register_forward_pre_hook(note)] + [block.register_forward_hook(after) for block in blocks]
        model(input_ids=example.input_ids[None])
        for hook in hooks:
            hook.remove()
        found.append(torch.cat(seen))
    return torch.cat(found, dim=1).numpy()


def read(model, examples, plan, healed, **options):
    """The rows of `discrepancies`."""
    batches = make_batches(examples, 3)
    anatomy, _ = prove(model, batches[0].inputs)
    scalars = Scalars.from_dict(plan.scalars, LAYERS, plan.granularity) if healed else None
    with Switches(anatomy, plan.granularity) as switches:
        return discrepancies(switches, batches, frozenset(plan.blocks), scalars, **options)


@pytest.mark.parametrize(("family", "blocks", "granularity", "healed"), CASES)
def test_the_discrepancy_is_that_of_stock_models(family, blocks, granularity, healed) -> None:
    model, examples = build(family), plain.sentences(7, seed=3)
    plan = planned.plan(model, blocks, granularity, values="fitted" if healed else None)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(input_ids=examples[0].input_ids[None]).logits
    rows = read(model, examples, plan, healed)
    own, reference = streams(planned.scaled(model, plan), examples), streams(model, examples)
    expected = [discrepancy(x, y) for x, y in zip(own, reference, strict=True)]
    assert [row.layer for row in rows] == list(range(LAYERS + 1))
    assert {(row.measure, row.site, row.count) for row in rows} == {("mmd", "residual", sum(map(len, examples)))}
    np.testing.assert_allclose([row.value for row in rows], expected, rtol=1e-3, atol=1e-6)
    first = 1 if healed else min(blocks)
    assert expected[first] > 1e-3  # there is something to see
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(input_ids=examples[0].input_ids[None]).logits, logits)


def test_batches_do_not_matter_and_seeds_choose_the_sample() -> None:
    model, examples = build("llama"), plain.sentences(9, seed=5)
    plan = planned.plan(model, (2,))
    anatomy, _ = prove(model, make_batches(examples, 9)[0].inputs)
    with Switches(anatomy) as switches:

        def values(batch_size: int, seed: int) -> list[float]:
            batches = make_batches(examples, batch_size)
            rows = discrepancies(switches, batches, frozenset({2}), None, reservoir_tokens=20, seed=seed)
            assert {row.count for row in rows} == {20}
            return [row.value for row in rows]

        assert values(1, 0) == pytest.approx(values(9, 0), rel=1e-4)
        assert values(9, 1)[-1] != pytest.approx(values(9, 0)[-1], rel=1e-3)
    assert plan.blocks == [2]


def test_the_model_is_whole_after_an_error() -> None:
    model, examples = build("llama"), plain.sentences(3, seed=5)
    batches = make_batches(examples, 3)
    anatomy, _ = prove(model, batches[0].inputs)
    with Switches(anatomy) as switches:
        with pytest.raises(RuntimeError):
            discrepancies(switches, batches, frozenset({2}), Scalars(LAYERS, {2}), watcher=Breaking())
        assert not switches.skipped
        assert switches.scalars is None


class Breaking:
    def advance(self, count: int) -> None:
        raise RuntimeError


def test_measure_sees_the_same_in_the_folded_model(tmp_path) -> None:
    tokens = 40  # a sample
    model, numbers = build("llama"), [[(7 * n + 3 * i * i) % 80 for i in range(12)] for n in range(6)]
    pairs = [{"prompt": words(*row[:5]), "response": " " + words(*row[5:])} for row in numbers]
    plan = planned.plan(model, (1, 3), values=None)
    model.save_pretrained(tmp_path / "original")
    found = analyse(
        model, plan, [words(1, 2, 3)], heldout=pairs, tokenizer=tokenizer(), reservoir_tokens=tokens, fit=False
    )
    folded = copy.deepcopy(model)
    fold(folded, plan)
    seen = measure(
        folded,
        pairs,
        measures=["mmd"],
        tokenizer=tokenizer(),
        reference=str(tmp_path / "original"),
        reservoir_tokens=tokens,
    )
    own = found.table[found.table.measure == "mmd"]
    assert own["count"].tolist() == seen.table["count"].tolist() == [min(tokens, 72)] * (LAYERS + 1)
    np.testing.assert_allclose(own["value"], seen.table["value"], rtol=1e-4, atol=1e-9)
    assert own[["measure", "site", "layer", "statistic", "unit"]].values.tolist() == (
        seen.table[["measure", "site", "layer", "statistic", "unit"]].values.tolist()
    )

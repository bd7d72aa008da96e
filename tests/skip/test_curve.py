"""Curves: break points by closed form and by plain fits, losses by stock models with zeroed projections."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from fulldepth.core.progress import Watcher
from fulldepth.data.examples import read_examples
from fulldepth.results import Results
from fulldepth.settings import layer
from fulldepth.settings.search import CurveSettings
from fulldepth.skip.curve import FEWEST, LEVEL, _headline, curve, find_breakpoint
from fulldepth.skip.plan import Plan
from json_files import change_json
from marks import thorough
from refusals import refused
from skip import plain
from skip.word_tokenizer import tokenizer, words
from tiny_models import LAYERS, build

NUMBERS = np.arange(13.0)
TRIED = 2


def hinge(kink, before=0.02, after=0.3):
    return 2.0 + before * NUMBERS + (after - before) * np.maximum(0, NUMBERS - kink)


def noisy(mean, count, seed, spread=0.2):
    """Sequences whose errors add up from block to block, at levels of their own."""
    generator = np.random.default_rng(seed)
    walk = generator.normal(0, spread, (count, len(mean))).cumsum(1)
    return mean + walk + generator.normal(0, 1, (count, 1))


def windowed(mean, documents, share, seed, spread=0.2):
    """Losses, tokens and documents of windows, 4 to 16 a document, of an intraclass correlation `share`."""
    generator = np.random.default_rng(seed)
    owner = np.repeat(np.arange(documents), generator.integers(4, 17, documents))
    own = generator.normal(size=(documents, len(mean)))[owner]
    errors = share**0.5 * own + (1 - share) ** 0.5 * generator.normal(size=(len(owner), len(mean)))
    losses = mean + spread * errors.cumsum(1) + generator.normal(size=(documents, 1))[owner]
    return losses, generator.integers(60, 129, len(owner)).astype(float), owner


@pytest.mark.parametrize("kink", [2, 4, 11])
def test_a_closed_form_without_noise_is_found_exactly(kink):
    losses = hinge(kink) + np.linspace(0, 3, 6)[:, None]
    found = find_breakpoint(losses, np.ones(6))
    assert (found.blocks, found.low, found.high, found.straight_until) == (kink, kink, kink, kink)
    assert found.confidence == 1
    assert found.excess == pytest.approx(0.28)
    uneven = np.delete(np.arange(13), [5, 9])  # some steps remove two blocks
    found = find_breakpoint(losses[:, uneven], np.ones(6), removed=uneven)
    assert (found.blocks, found.low, found.high, found.straight_until) == (kink, kink, kink, kink)
    assert found.excess == pytest.approx(0.56 if kink == 4 else 0.28)
    line = find_breakpoint(np.tile(0.3 * uneven, (6, 1)), np.ones(6), removed=uneven)
    assert (line.blocks, line.straight_until) == (None, 12)


@pytest.mark.parametrize("kink", [3, thorough(7)])
def test_a_break_is_found_in_noise(kink):
    found = [find_breakpoint(noisy(hinge(kink), 300, s), np.ones(300), seed=s, resamples=200) for s in range(20)]
    assert sum(one.blocks == kink for one in found) >= 14
    assert sum(one.low is not None and one.low <= kink <= one.high for one in found) >= 18
    assert 0.4 < np.mean([one.confidence for one in found]) <= 1
    in_windows = [find_breakpoint(*windowed(hinge(kink), 30, 0.5, s, 0.05), resamples=20) for s in range(20)]
    assert sum(one.blocks == kink for one in in_windows) >= 18
    assert all(one.documents == 30 for one in in_windows)


SMOOTH = {
    "cubic": 0.0006 * NUMBERS**3,
    "doubling": 0.002 * 2.0**NUMBERS,
    "root": 0.1 * np.sqrt(NUMBERS),
}


@pytest.mark.parametrize(("name", "most"), [*((name, 12) for name in SMOOTH), ("doubling", 3)])
def test_a_smooth_curve_has_no_break_however_far_it_is_followed(name, most):
    curve_of = 2.0 + SMOOTH[name][: most + 1]
    exact = find_breakpoint(np.tile(curve_of, (8, 1)), np.ones(8), resamples=20)
    assert (exact.blocks, exact.confidence) == (None, 1)
    assert exact.straight_until < most
    assert (exact.excess < 0) == (name == "root")
    found = [find_breakpoint(noisy(curve_of, 200, s, 0.05), np.ones(200), seed=s, resamples=20) for s in range(40)]
    assert sum(one.blocks is not None for one in found) <= 4  # 5 % of 40, and chance


@pytest.mark.parametrize("mean", [hinge(4, 0.1, 0.1), np.zeros(13), hinge(5, 0.3, 0.02)], ids=["line", "0", "down"])
def test_what_does_not_bend_upwards_has_no_break(mean):
    found = find_breakpoint(np.tile(mean, (8, 1)), np.ones(8))
    assert (found.blocks, found.low, found.confidence) == (None, None, 1)


def test_the_answer_depends_on_the_seed_of_the_resamples_and_not_on_how_far_the_curve_is_followed():
    losses = noisy(hinge(4), 200, 3, 0.1)
    found = [find_breakpoint(losses[:, : most + 1], np.ones(200), resamples=100) for most in (5, 8, 12)]
    assert {(one.blocks, one.straight_until, one.excess) for one in found} == {(4, 4, found[0].excess)}
    for most in (1, 4):  # two points are a line
        line = find_breakpoint(losses[:, : most + 1], np.ones(200), resamples=10)
        assert (line.blocks, line.straight_until) == (None, most)
    losses = noisy(hinge(6), 40, 3)
    first, again, other = (find_breakpoint(losses, np.ones(40), seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first.confidence != other.confidence


THOROUGH = [thorough(n, share, 1000) for n in (5, 12, 40) for share in (0.3, 0.7)]


@pytest.mark.parametrize(("documents", "share", "draws"), [(5, 0.5, 200), (20, 0.5, 200), *THOROUGH])
def test_straight_curves_bend_no_more_often_than_the_level_says(documents, share, draws):
    """Upwards or downwards; with windows taken as independent two thirds bend or more."""
    line = hinge(4, 0.1, 0.1)
    found = (find_breakpoint(*windowed(line, documents, share, seed), resamples=1) for seed in range(draws))
    false = sum(one.straight_until < len(NUMBERS) - 1 for one in found)
    assert stats.binom.sf(false - 1, draws, LEVEL) > 0.001


def test_errors_sum_by_document_whatever_the_order_and_the_labels():
    losses, tokens, owner = windowed(0.02 * NUMBERS**2.2, 12, 0.5, 1, 0.05)
    found = find_breakpoint(losses, tokens, owner, resamples=10)
    until = found.straight_until
    fit = [np.polynomial.Polynomial.fit(NUMBERS[: until + 1], row[: until + 1], 1)(until + 1) for row in losses]
    each = losses[:, until + 1] - fit
    rate = (each * tokens).sum() / tokens.sum()
    squares = sum((((each - rate) * tokens)[owner == document]).sum() ** 2 for document in range(12))
    assert found.excess == pytest.approx(rate)
    assert found.excess_error == pytest.approx((12 / 11 * squares) ** 0.5 / tokens.sum())
    order = np.random.default_rng(2).permutation(len(losses))
    again = find_breakpoint(losses[order], tokens[order], 9**17 + 7 * owner[order], resamples=10)
    assert again.excess_error == pytest.approx(found.excess_error)
    assert (again.blocks, again.confidence) == (found.blocks, found.confidence)
    few = find_breakpoint(*windowed(hinge(6), FEWEST - 1, 0.5, 0, 0.0))
    assert (few.blocks, few.confidence, few.excess_error, few.documents) == (None, None, None, FEWEST - 1)


def test_a_curve_has_no_target_and_nothing_that_describes_one():
    for options, name in (
        ({"target_speedup": 1.2}, "--set target_speedup"),
        ({"decode_share": 0.5}, "--set decode_share"),
    ):
        with refused(f"has no target; leave {name} out"):
            layer(CurveSettings, options)
    assert layer(CurveSettings, {"decode_share": 1.0}).decode_share == 1.0


def pairs(count=30):
    generator = np.random.default_rng(0)
    return [
        {
            "prompt": words(*generator.integers(0, 80, generator.integers(2, 6)).tolist()),
            "response": words(*generator.integers(0, 80, generator.integers(1, 7)).tolist()),
        }
        for _ in range(count)
    ]


def stock(model, blocks, examples):
    """[N, 4] by a stock model whose blocks' output projections are zero: summed loss, KL, agreement, and tokens."""
    found = []
    for example in examples:
        targets = example.labels[1:][example.labels[1:] != -100]
        p = plain.log_probabilities(model, example)
        with plain.zeroed(model, blocks, "attention"):
            q = plain.log_probabilities(model, example)
        loss = -q.gather(1, targets[:, None]).sum()
        found.append([loss, (p.exp() * (p - q)).sum(), (p.argmax(-1) == q.argmax(-1)).sum(), len(targets)])
    return np.array(found, dtype=float)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("curve") / "out", build("llama")
    found = curve(model, pairs(), blocks=TRIED, output=folder, tokenizer=tokenizer(), batch_size=4)
    examples = read_examples(pairs(), tokenizer(), 64).heldout
    columns = [stock(model, found.plan.blocks[:number], examples) for number in range(TRIED + 1)]
    return SimpleNamespace(found=found, model=model, folder=folder, columns=columns)


def test_every_number_is_that_of_a_stock_model(drawn):
    plan, results = drawn.found
    assert len(plan.blocks) == TRIED
    table, tokens = results.table, drawn.columns[0][:, 3]
    for number, column in enumerate(drawn.columns):
        means = column.sum(0) / tokens.sum()
        expected = dict(zip(("loss", "kl", "greedy_agreement"), means, strict=False))
        expected["loss_added"] = means[0] - drawn.columns[0][:, 0].sum() / tokens.sum()
        rows = table.query("removed == @number and statistic == 'mean'").set_index("measure")
        for measure, value in expected.items():
            assert rows.loc[measure, "value"] == pytest.approx(value, abs=2e-4), (measure, number)
            assert rows.loc[measure, "count"] == tokens.sum()
        assert rows.loc["loss", "value"] == pytest.approx(plan.losses[number], abs=1e-6)
        if number:
            assert rows.loc["loss", "layer"] == plan.blocks[number - 1]
    gap = drawn.columns[TRIED][:, 0] - drawn.columns[0][:, 0]
    residuals = gap - gap.sum() / tokens.sum() * tokens  # every pair is a document
    error = (len(gap) / (len(gap) - 1) * (residuals**2).sum()) ** 0.5 / tokens.sum()
    last = table.query("measure == 'loss_added' and removed == @TRIED").set_index("statistic")["value"]
    assert last["high"] - last["low"] == pytest.approx(2 * error * stats.t.isf(0.025, len(gap) - 1), rel=2e-3)
    for _, rows in table[table.measure != "break_point"].groupby(["measure", "removed"]):
        by = rows.set_index("statistic")["value"]
        assert by["low"] <= by["mean"] <= by["high"]
    expected = find_breakpoint(np.stack([column[:, 0] / tokens for column in drawn.columns], axis=1), tokens)
    said = results.meta["break_point"]
    assert (said["blocks"], said["confidence"]) == (expected.blocks, expected.confidence)
    assert results.headline["break_point"]["value"] == expected.blocks
    assert len(table[table.measure == "break_point"]) == (0 if expected.blocks is None else 3)


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        (1, "tested by a third (1 removed attention block)."),
        (2, "tested by a third (2 removed attention blocks)."),
        (3, "straight line up to 3 removed attention blocks (24 documents)."),
    ],
)
def test_a_line_is_called_straight_only_if_a_point_could_have_shown_that_it_is_not(blocks, words):
    """A line through the first three points is tested by the fourth; the sentence is that of a straight curve."""
    losses = 3 + 0.1 * np.arange(blocks + 1) + np.random.default_rng(0).normal(size=(24, 1))
    found = find_breakpoint(losses, np.ones(24))
    assert found.straight_until == blocks
    plan = SimpleNamespace(counts=[*range(blocks + 1)], granularity="attention", data={})
    columns = {"measure": "loss_added", "removed": blocks, "statistic": ["mean", "low", "high"], "value": 0.1 * blocks}
    said = _headline(plan, found, pd.DataFrame(columns))["break_point"].sentence
    assert said.endswith(words)
    assert said.startswith("No break point is stated") == (blocks < 3)


def test_an_interrupted_curve_goes_on(drawn):
    plan, results = drawn.found
    again = Results.load(drawn.folder)
    assert (again.meta["kind"], again.meta["plan"]) == ("curve", plan.document())
    assert Plan.load(drawn.folder) == plan
    options = {"blocks": TRIED, "output": drawn.folder, "tokenizer": tokenizer(), "batch_size": 4}
    with refused("already holds"):
        curve(drawn.model, pairs(), **options)
    resumed = curve(drawn.model, pairs(), resume=True, **options)
    assert resumed.plan == plan
    assert resumed.results.table["value"].tolist() == again.table["value"].tolist() == results.table["value"].tolist()


def test_all_blocks_in_another_order():
    model, said = build("gpt2"), []
    heard = Watcher(say=said.append)
    found = curve(model, pairs(12), tokenizer=tokenizer(), search="last", granularity="layer", watcher=heard)
    assert any(f"has {LAYERS} blocks" in line for line in said)
    assert found.plan.blocks == list(range(LAYERS, 0, -1))
    assert "too few held-out rows (2, where 5 are needed)" in found.results.headline["loss_added"]["sentence"]
    assert set(found.results.table.statistic) == {"mean"}


def test_layers_that_the_configuration_leaves_out_are_no_secret(tmp_path):
    """A Llama's layer has nine weights. Of three layers two are built, and everything computed is about those two."""
    build("llama").save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", num_hidden_layers=LAYERS - 1)
    found = curve(tmp_path, pairs(12), tokenizer=tokenizer(), search="last", granularity="layer")
    assert found.plan.blocks == list(range(LAYERS - 1, 0, -1))
    assert any("holds 9 weights that the model does not use" in line for line in found.results.meta["warnings"])


def test_a_layer_counts_as_its_attention_and_its_mlp():
    names = ["mlp 1", "layer 2", "attention 3"]
    found = curve(build("llama"), pairs(), tokenizer=tokenizer(), granularity="any", given=names)
    means = found.results.table.query("measure == 'loss' and statistic == 'mean'")
    assert dict(zip(means["removed"], means["value"], strict=True)) == pytest.approx(
        dict(zip([0, 1, 3, 4], found.plan.losses, strict=True)), abs=1e-6
    )
    sentences = " ".join(finding["sentence"] for finding in found.results.headline.values())
    assert "4 removed blocks add" in sentences
    assert "up to 4 removed" in sentences or "after 3 removed" in sentences


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("llama", {"blocks": 0}, "blocks"),
        ("llama", {"serch": "last"}, "serch"),
        ("llama", {"target_speedup": 1.2}, r"\(--blocks\) and has no target; leave --set target_speedup out"),
        ("bert", {}, "causal language model"),
    ],
)
def test_what_is_refused(family, options, named):
    with refused(named):
        curve(build(family), pairs(6), tokenizer=tokenizer(), **options)


@pytest.mark.parametrize(
    ("losses", "weights"),
    [(np.ones((3, 4)), np.ones(4)), (np.ones(4), np.ones(4)), (np.full((3, 4), np.nan), np.ones(3))],
)
def test_losses_that_make_no_curve_are_refused(losses, weights):
    with pytest.raises(AssertionError):
        find_breakpoint(losses, weights)

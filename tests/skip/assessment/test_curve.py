"""Curves: break points by closed form and by plain fits, losses by stock models with zeroed projections."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from fulldepth.data.examples import read_examples
from fulldepth.errors import FulldepthError
from fulldepth.progress import Watcher
from fulldepth.results import Results
from fulldepth.skip.assessment.breakpoint import FEWEST, LEVEL, find_breakpoint
from fulldepth.skip.assessment.curve import curve
from fulldepth.skip.plan import Plan
from skip.word_tokenizer import tokenizer, words
from tiny_models import LAYERS, build

NUMBERS = np.arange(13.0)
TRIED = 2


def hinge(kink, before=0.02, after=0.3, numbers=NUMBERS):
    return 2.0 + before * numbers + (after - before) * np.maximum(0, numbers - kink)


def noisy(mean, count, seed, spread=0.2, level=1.0):
    """Sequences whose errors add up from block to block, at levels of their own."""
    generator = np.random.default_rng(seed)
    walk = generator.normal(0, spread, (count, len(mean))).cumsum(1)
    return mean + walk + generator.normal(0, level, (count, 1))


@pytest.mark.parametrize("kink", [2, 4, 11])
def test_a_closed_form_without_noise_is_found_exactly(kink) -> None:
    losses = hinge(kink) + np.linspace(0, 3, 6)[:, None]
    found = find_breakpoint(losses, np.ones(6))
    assert (found.blocks, found.low, found.high, found.straight_until) == (kink, kink, kink, kink)
    assert found.confidence == 1
    assert found.excess == pytest.approx(0.28)


@pytest.mark.parametrize("kink", [3, pytest.param(7, marks=pytest.mark.thorough)])
def test_a_break_is_found_in_noise(kink) -> None:
    found = [find_breakpoint(noisy(hinge(kink), 300, s), np.ones(300), seed=s, resamples=200) for s in range(20)]
    assert sum(one.blocks == kink for one in found) >= 14
    assert sum(one.low is not None and one.low <= kink <= one.high for one in found) >= 18
    assert 0.4 < np.mean([one.confidence for one in found]) <= 1


SMOOTH = {
    "parabola": 0.004 * NUMBERS**2,
    "line and parabola": 0.05 * NUMBERS + 0.003 * NUMBERS**2,
    "cubic": 0.0006 * NUMBERS**3,
    "exponential": 0.05 * np.exp(0.3 * NUMBERS),
    "doubling": 0.002 * 2.0**NUMBERS,
    "root": 0.1 * np.sqrt(NUMBERS),
}


@pytest.mark.parametrize("most", [3, 12])
@pytest.mark.parametrize("name", SMOOTH)
def test_a_smooth_curve_has_no_break_however_far_it_is_followed(name, most) -> None:
    curve_of = 2.0 + SMOOTH[name][: most + 1]
    exact = find_breakpoint(np.tile(curve_of, (8, 1)), np.ones(8), resamples=20)
    assert (exact.blocks, exact.confidence) == (None, 1)
    assert exact.straight_until < most
    assert (exact.excess < 0) == (name == "root")
    found = [find_breakpoint(noisy(curve_of, 200, s, 0.05), np.ones(200), seed=s, resamples=20) for s in range(40)]
    assert sum(one.blocks is not None for one in found) <= 4  # 5 % of 40, and chance


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_the_answer_does_not_depend_on_how_far_the_curve_is_followed(spread) -> None:
    losses = noisy(hinge(4), 200, 3, spread)
    found = [find_breakpoint(losses[:, : most + 1], np.ones(200), resamples=100) for most in (5, 8, 12)]
    assert {(one.blocks, one.straight_until, one.excess) for one in found} == {(4, 4, found[0].excess)}
    line = find_breakpoint(losses[:, :5], np.ones(200), resamples=10)
    assert (line.blocks, line.straight_until) == (None, 4)


@pytest.mark.parametrize(
    "mean", [hinge(4, 0.1, 0.1), np.full(13, 2.0), np.zeros(13), hinge(5, 0.3, 0.02)], ids=["line", "flat", "0", "down"]
)
def test_what_does_not_bend_upwards_has_no_break(mean) -> None:
    found = find_breakpoint(np.tile(mean, (8, 1)), np.ones(8))
    assert found.blocks is None
    assert found.low is None
    assert found.confidence == 1


def test_seeds_decide_the_resamples() -> None:
    losses = noisy(hinge(6), 40, 3)
    assert find_breakpoint(losses, np.ones(40), seed=1) == find_breakpoint(losses, np.ones(40), seed=1)
    assert find_breakpoint(losses, np.ones(40), seed=1).confidence != (
        find_breakpoint(losses, np.ones(40), seed=2).confidence
    )
    assert find_breakpoint(losses[:, :2], np.ones(40)).blocks is None  # two points are a line


def windowed(mean, documents, share, seed, spread=0.2):
    """Losses, tokens and documents of windows, 4 to 16 a document, of an intraclass correlation `share`."""
    generator = np.random.default_rng(seed)
    owner = np.repeat(np.arange(documents), generator.integers(4, 17, documents))
    own = generator.normal(size=(documents, len(mean)))[owner]
    errors = share**0.5 * own + (1 - share) ** 0.5 * generator.normal(size=(len(owner), len(mean)))
    losses = mean + spread * errors.cumsum(1) + generator.normal(size=(documents, 1))[owner]
    return losses, generator.integers(60, 129, len(owner)).astype(float), owner


def false_bends(documents, share, draws):
    """Straight curves that are said to bend, upwards or downwards."""
    line = hinge(4, 0.1, 0.1)
    found = (find_breakpoint(*windowed(line, documents, share, seed), resamples=1) for seed in range(draws))
    return sum(one.straight_until < len(NUMBERS) - 1 for one in found)


@pytest.mark.parametrize("documents", [5, 20])
def test_straight_curves_bend_no_more_often_than_the_level_says(documents) -> None:
    """With windows taken as independent two thirds bend or more."""
    assert stats.binom.sf(false_bends(documents, 0.5, 200) - 1, 200, LEVEL) > 0.001


@pytest.mark.thorough
@pytest.mark.parametrize("share", [0.3, 0.7])
@pytest.mark.parametrize("documents", [5, 8, 12, 40])
def test_straight_curves_of_many_kinds_do_not_bend(documents, share) -> None:
    assert stats.binom.sf(false_bends(documents, share, 1000) - 1, 1000, LEVEL) > 0.001


def test_a_planted_kink_is_found_in_windows_of_documents() -> None:
    found = [find_breakpoint(*windowed(hinge(4), 30, 0.5, seed, 0.05), resamples=20) for seed in range(20)]
    assert sum(one.blocks == 4 for one in found) >= 18
    assert all(one.documents == 30 for one in found)


def test_errors_sum_by_document_whatever_the_order_and_the_labels() -> None:
    losses, tokens, owner = windowed(0.02 * NUMBERS**2.2, 12, 0.5, 1, 0.05)
    found = find_breakpoint(losses, tokens, owner, resamples=10)
    until = found.straight_until
    fit = [np.polynomial.Polynomial.fit(NUMBERS[: until + 1], row[: until + 1], 1)(until + 1) for row in losses]
    each = losses[:, until + 1] - fit
    rate, squares = (each * tokens).sum() / tokens.sum(), 0.0
    for document in range(12):
        squares += sum((each[i] - rate) * tokens[i] for i in np.flatnonzero(owner == document)) ** 2
    assert found.excess == pytest.approx(rate)
    assert found.excess_error == pytest.approx((12 / 11 * squares) ** 0.5 / tokens.sum())
    order = np.random.default_rng(2).permutation(len(losses))
    again = find_breakpoint(losses[order], tokens[order], 9**17 + 7 * owner[order], resamples=10)
    assert again.excess_error == pytest.approx(found.excess_error)
    assert (again.blocks, again.confidence) == (found.blocks, found.confidence)


def test_few_documents_give_no_verdict() -> None:
    losses, tokens, owner = windowed(hinge(6), FEWEST - 1, 0.5, 0, 0.0)
    found = find_breakpoint(losses, tokens, owner)
    assert (found.blocks, found.confidence, found.excess_error, found.documents) == (None, None, None, FEWEST - 1)


@pytest.mark.parametrize(
    ("losses", "weights"),
    [(np.ones((3, 4)), np.ones(4)), (np.ones(4), np.ones(4)), (np.full((3, 4), np.nan), np.ones(3))],
)
def test_nonsense_is_refused(losses, weights) -> None:
    with pytest.raises(FulldepthError):
        find_breakpoint(losses, weights)


def pairs(count=30, seed=0):
    generator = np.random.default_rng(seed)
    return [
        {
            "prompt": words(*generator.integers(0, 80, generator.integers(2, 6)).tolist()),
            "response": words(*generator.integers(0, 80, generator.integers(1, 7)).tolist()),
        }
        for _ in range(count)
    ]


def stock(model, blocks, examples):
    """Sums by a stock model whose blocks' output projections are zero: loss, KL, agreement, each by sequence."""
    cut = copy.deepcopy(model).double()
    for block in blocks:
        layer = cut.base_model.layers[block - 1]
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    base = copy.deepcopy(model).double()
    found = []
    for example in examples:
        where = (example.labels != -100).nonzero()[:, 0]
        with torch.no_grad():
            p, q = (m(input_ids=example.input_ids[None]).logits[0, where - 1].log_softmax(-1) for m in (base, cut))
        loss = -q[torch.arange(len(where)), example.labels[where]].sum()
        found.append([loss, (p.exp() * (p - q)).sum(), (p.argmax(-1) == q.argmax(-1)).sum(), len(where)])
    return np.array(found, dtype=float)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("curve") / "out", build("llama")
    titles = []
    watcher = SimpleNamespace(say=lambda line: None, begin=lambda title, total: titles.append(title), advance=int)
    found = curve(model, pairs(), blocks=TRIED, output=folder, tokenizer=tokenizer(), batch_size=4, watcher=watcher)
    return SimpleNamespace(found=found, model=model, folder=folder, titles=titles)


def test_every_number_is_that_of_a_stock_model(drawn) -> None:
    plan, results = drawn.found
    assert len(plan.blocks) == TRIED
    examples = read_examples(pairs(), tokenizer(), 64).heldout
    table = results.table
    base = None
    for number in range(TRIED + 1):
        sums = stock(drawn.model, plan.blocks[:number], examples).sum(0)
        expected = dict(zip(("loss", "kl", "greedy_agreement"), sums[:3] / sums[3], strict=True))
        base = base or expected["loss"]
        expected["loss_added"] = expected["loss"] - base
        rows = table[(table.removed == number) & (table.statistic == "mean")].set_index("measure")
        for measure, value in expected.items():
            assert rows.loc[measure, "value"] == pytest.approx(value, abs=2e-4), (measure, number)
            assert rows.loc[measure, "count"] == sums[3]
        assert rows.loc["loss", "value"] == pytest.approx(plan.losses[number], abs=1e-6)
        if number:
            assert rows.loc["loss", "layer"] == plan.blocks[number - 1]
    first = table[table.removed == 0].set_index(["measure", "statistic"])["value"]
    assert (first["kl", "mean"], first["greedy_agreement", "mean"], first["loss_added", "high"]) == (0, 1, 0)
    sums = [stock(drawn.model, plan.blocks[:number], examples) for number in (0, TRIED)]
    gap, tokens = sums[1][:, 0] - sums[0][:, 0], sums[0][:, 3]
    residuals = gap - gap.sum() / tokens.sum() * tokens  # every pair is a document
    error = (len(gap) / (len(gap) - 1) * (residuals**2).sum()) ** 0.5 / tokens.sum()
    last = table[(table.measure == "loss_added") & (table.removed == TRIED)].set_index("statistic")["value"]
    assert last["high"] - last["low"] == pytest.approx(2 * error * stats.t.isf(0.025, len(gap) - 1), rel=2e-3)
    for _, rows in table[table.measure != "break_point"].groupby(["measure", "removed"]):
        by = rows.set_index("statistic")["value"]
        assert by["low"] <= by["mean"] <= by["high"]


def test_the_break_point_is_that_of_the_sequences(drawn) -> None:
    plan, results = drawn.found
    examples = read_examples(pairs(), tokenizer(), 64).heldout
    columns = [stock(drawn.model, plan.blocks[:number], examples) for number in range(TRIED + 1)]
    tokens = columns[0][:, 3]
    expected = find_breakpoint(np.stack([column[:, 0] / tokens for column in columns], axis=1), tokens)
    said = results.meta["break_point"]
    assert said["blocks"] == expected.blocks
    assert said["confidence"] == expected.confidence
    assert said["straight_until"] == expected.straight_until
    assert results.headline["break_point"]["value"] == expected.blocks
    rows = results.table[results.table.measure == "break_point"]
    assert len(rows) == (0 if expected.blocks is None else 3)


def test_plans_and_folder(drawn) -> None:
    plan, results = drawn.found
    again = Results.load(drawn.folder)
    assert again.meta["kind"] == "curve"
    assert again.meta["plan"] == plan.document()
    assert again.table["value"].tolist() == results.table["value"].tolist()
    assert isinstance(again.figures(), dict)
    assert Plan.load(drawn.folder) == plan
    shorter = drawn.found.plan_of(1)
    assert (shorter.blocks, shorter.losses) == (plan.blocks[:1], plan.losses[:2])
    shorter.check_model(drawn.model)
    with pytest.raises(FulldepthError, match="1 to 2"):
        drawn.found.plan_of(3)
    assert drawn.titles[-1] == "Curve"
    assert not any("forward" in vars(module) for module in drawn.model.modules())


def test_an_interrupted_curve_goes_on(drawn) -> None:
    options = {"blocks": TRIED, "output": drawn.folder, "tokenizer": tokenizer(), "batch_size": 4}
    with pytest.raises(FulldepthError, match="already holds"):
        curve(drawn.model, pairs(), **options)
    found = curve(drawn.model, pairs(), resume=True, **options)
    assert found.plan == drawn.found.plan
    assert found.results.table["value"].tolist() == drawn.found.results.table["value"].tolist()


def test_other_orders_and_parts() -> None:
    found = curve(build("gpt2"), pairs(12), tokenizer=tokenizer(), search="given", given=[3, 1], granularity="mlp")
    assert found.plan.blocks == [3, 1]
    assert found.results.table["removed"].max() == 2
    found = curve(build("gpt2"), pairs(12), tokenizer=tokenizer(), search="last", blocks=1, granularity="layer")
    assert found.plan.blocks == [3]
    said: list[str] = []
    heard = Watcher(say=said.append)
    found = curve(build("gpt2"), pairs(12), tokenizer=tokenizer(), search="last", blocks=12, watcher=heard)
    assert any(f"has {LAYERS} blocks" in line for line in said)
    assert found.plan.blocks == list(range(LAYERS, 0, -1))  # all that there are
    assert "2 held-out documents" in found.results.headline["break_point"]["sentence"]
    assert "2 held-out documents" in found.results.headline["loss_added"]["sentence"]
    assert set(found.results.table.statistic) == {"mean"}
    assert found.results.figures()


@pytest.mark.parametrize(
    ("family", "options", "named"),
    [
        ("llama", {"blocks": 0}, "blocks"),
        ("llama", {"serch": "last"}, "serch"),
        ("bert", {}, "causal language model"),
    ],
)
def test_what_is_refused(family, options, named) -> None:
    with pytest.raises(FulldepthError, match=named):
        curve(build(family), pairs(6), tokenizer=tokenizer(), **options)

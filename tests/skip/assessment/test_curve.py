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


@pytest.mark.parametrize("kink", [2, 4, 7, 11])
def test_a_closed_form_without_noise_is_found_exactly(kink) -> None:
    losses = hinge(kink) + np.linspace(0, 3, 6)[:, None]
    found = find_breakpoint(losses, np.ones(6))
    assert (found.blocks, found.low, found.high, found.shape) == (kink, kink, kink, "kink")
    assert found.confidence == 1
    assert found.slope_before == pytest.approx(0.02)
    assert found.slope_after == pytest.approx(0.3)
    assert found.excess == pytest.approx(0.28)


@pytest.mark.parametrize("kink", [3, 7])
def test_a_break_is_found_in_noise(kink) -> None:
    hits, covered, sure = 0, 0, []
    for seed in range(20):
        found = find_breakpoint(noisy(hinge(kink), 300, seed), np.ones(300), seed=seed, resamples=200)
        hits += found.blocks == kink
        covered += found.low is not None and found.low <= kink <= found.high
        sure.append(found.confidence)
    assert hits >= 14
    assert covered >= 18
    assert 0.4 < np.mean(sure) <= 1


def test_no_break_in_straight_lines_with_noise() -> None:
    line = hinge(4, 0.1, 0.1)
    found = [find_breakpoint(noisy(line, 100, s), np.ones(100), seed=s, resamples=200) for s in range(60)]
    none = [one for one in found if one.blocks is None]
    assert len(none) >= 57
    assert all(one.slope_before == one.slope_after for one in none)
    assert all(one.shares["none"] == one.confidence for one in none)
    assert np.mean([one.confidence for one in none]) > 0.8


SMOOTH = {
    "parabola": 0.004 * NUMBERS**2,
    "line and parabola": 0.05 * NUMBERS + 0.003 * NUMBERS**2,
    "cubic": 0.0006 * NUMBERS**3,
    "exponential": 0.05 * np.exp(0.3 * NUMBERS),
    "doubling": 0.002 * 2.0**NUMBERS,
    "root": 0.1 * np.sqrt(NUMBERS),
}


@pytest.mark.parametrize("most", [3, 5, 7, 9, 12])
@pytest.mark.parametrize("name", SMOOTH)
def test_a_smooth_curve_has_no_break_however_far_it_is_followed(name, most) -> None:
    curve_of = 2.0 + SMOOTH[name][: most + 1]
    exact = find_breakpoint(np.tile(curve_of, (8, 1)), np.ones(8), resamples=20)
    assert (exact.blocks, exact.confidence) == (None, 1)
    assert exact.shape == ("concave" if name == "root" else "gradual")
    found = [find_breakpoint(noisy(curve_of, 200, s, 0.05), np.ones(200), seed=s, resamples=20) for s in range(40)]
    assert sum(one.blocks is not None for one in found) <= 4  # 5 % of 40, and chance


@pytest.mark.parametrize("spread", [0.0, 0.1])
def test_the_answer_does_not_depend_on_how_far_the_curve_is_followed(spread) -> None:
    losses = noisy(hinge(4), 200, 3, spread)
    found = [find_breakpoint(losses[:, : most + 1], np.ones(200), resamples=100) for most in (5, 6, 8, 10, 12)]
    assert {(one.blocks, one.shape, one.straight_until, one.excess) for one in found} == {
        (4, "kink", 4, found[0].excess)
    }
    assert find_breakpoint(losses[:, :5], np.ones(200), resamples=10).shape == "line"


@pytest.mark.parametrize(
    "mean", [hinge(4, 0.1, 0.1), np.full(13, 2.0), np.zeros(13), hinge(5, 0.3, 0.02)], ids=["line", "flat", "0", "down"]
)
def test_what_does_not_bend_upwards_has_no_break(mean) -> None:
    found = find_breakpoint(np.tile(mean, (8, 1)), np.ones(8))
    assert found.blocks is None
    assert found.low is None
    assert found.confidence == 1


def test_the_excess_is_that_of_a_fit_to_the_weighted_mean() -> None:
    generator = np.random.default_rng(5)
    for seed in range(5):
        weights = generator.integers(1, 40, 60).astype(float)
        losses = noisy(0.02 * NUMBERS**2.2, 60, seed, spread=0.05)
        found = find_breakpoint(losses, weights, resamples=10)
        until = found.straight_until
        line = np.polynomial.Polynomial.fit(
            NUMBERS[: until + 1], np.average(losses, axis=0, weights=weights)[: until + 1], 1
        )
        mean = np.average(losses, axis=0, weights=weights)
        assert found.excess == pytest.approx(mean[until + 1] - line(until + 1))
        each = [
            row[until + 1] - np.polynomial.Polynomial.fit(NUMBERS[: until + 1], row[: until + 1], 1)(until + 1)
            for row in losses
        ]
        drawn_means = [
            np.average(np.take(each, rows), weights=weights[rows])
            for rows in np.random.default_rng(0).integers(0, 60, (4000, 60))
        ]
        assert found.excess_error == pytest.approx(np.std(drawn_means), rel=0.08)


@pytest.mark.parametrize("tolerance", [0.0, 0.01, 0.05, 0.2])
def test_a_tolerance_is_exceeded_first_where_plain_fits_say(tolerance) -> None:
    mean = 2.0 + 0.004 * NUMBERS**2
    excess = [
        mean[k + 1] - np.polynomial.Polynomial.fit(NUMBERS[: k + 1], mean[: k + 1], 1)(k + 1) for k in range(1, 12)
    ]
    expected = next((k for k, value in enumerate(excess, 1) if value > tolerance), None)
    found = find_breakpoint(np.tile(mean, (3, 1)), np.ones(3), tolerance=tolerance, resamples=10)
    assert found.blocks == expected
    assert found.shape == ("line" if expected is None else "tolerance")


def test_seeds_and_small_samples() -> None:
    losses = noisy(hinge(6), 40, 3)
    assert find_breakpoint(losses, np.ones(40), seed=1) == find_breakpoint(losses, np.ones(40), seed=1)
    other = find_breakpoint(losses, np.ones(40), seed=2)
    assert find_breakpoint(losses, np.ones(40), seed=1).shares != other.shares
    assert find_breakpoint(losses[:4], np.ones(4)).blocks is None
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
    return sum(one.shape != "line" for one in found)


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
    assert (again.excess_error, again.shape) == (pytest.approx(found.excess_error), found.shape)
    assert again.shares == found.shares


def test_few_documents_give_no_verdict() -> None:
    losses, tokens, owner = windowed(hinge(6), FEWEST - 1, 0.5, 0, 0.0)
    found = find_breakpoint(losses, tokens, owner)
    assert (found.shape, found.blocks, found.confidence, found.excess_error, found.shares) == (
        ("unknown", None, None, None, {})
    )
    found = find_breakpoint(losses, tokens, owner, tolerance=0.1)
    assert (found.shape, found.blocks, found.confidence, found.low) == ("tolerance", 6, None, None)


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
    found = curve(model, pairs(), max_blocks=TRIED, output=folder, tokenizer=tokenizer(), batch_size=4, watcher=watcher)
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
    assert said["slope_before"] == pytest.approx(expected.slope_before, abs=1e-3)
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
    options = {"max_blocks": TRIED, "output": drawn.folder, "tokenizer": tokenizer(), "batch_size": 4}
    with pytest.raises(FulldepthError, match="already holds"):
        curve(drawn.model, pairs(), **options)
    found = curve(drawn.model, pairs(), resume=True, **options)
    assert found.plan == drawn.found.plan
    assert found.results.table["value"].tolist() == drawn.found.results.table["value"].tolist()


def test_other_orders_and_parts() -> None:
    found = curve(build("gpt2"), pairs(12), tokenizer=tokenizer(), search="given", given=[3, 1], granularity="mlp")
    assert found.plan.blocks == [3, 1]
    assert found.results.table["removed"].max() == 2
    assert "mlp blocks" in found.results.headline["loss_added"]["sentence"]
    found = curve(build("gpt2"), pairs(12), tokenizer=tokenizer(), search="last", max_blocks=1, granularity="layer")
    assert found.plan.blocks == [3]
    said: list[str] = []
    heard = Watcher(say=said.append)
    found = curve(build("gpt2"), pairs(12), tokenizer=tokenizer(), search="last", max_blocks=12, watcher=heard)
    assert f"The model has {LAYERS} blocks: the curve ends there, not at max_blocks = 12." in said
    assert found.plan.blocks == list(range(LAYERS, 0, -1))  # all that there are
    few = "2 held-out documents, and at least 5 are needed"
    assert found.results.headline["break_point"]["sentence"] == f"No break point is stated: {few}."
    assert "(no interval: 2 documents" in found.results.headline["loss_added"]["sentence"]
    assert set(found.results.table.statistic) == {"mean"}
    assert found.results.figures()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_blocks": 0}, "max_blocks"),
        ({"blocks": 2}, "max_blocks, not blocks"),
        ({"serch": "last"}, "serch"),
    ],
)
def test_wrong_options_are_refused(options, words) -> None:
    with pytest.raises(FulldepthError, match=words):
        curve(build("llama"), pairs(6), tokenizer=tokenizer(), **options)
    with pytest.raises(FulldepthError, match="no causal language model"):
        curve(build("bert"), pairs(6), tokenizer=tokenizer())

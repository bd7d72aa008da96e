"""Linear CKA (aligned training, Eq. 3) and its unbiased form, against the textbook estimators."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ortho_group

from fulldepth.metrics import Cka, Setup, cka_matrix, linear_cka
from fulldepth.metrics.hsic import hsic_of_views


def hsic_1(k, n):
    """Unbiased HSIC of two Gram matrices with zeroed diagonals (Song et al., 2012), as written."""
    k_bar, l_bar = k
    one = np.ones(n)
    cross = np.trace(k_bar @ l_bar)
    product = (one @ k_bar @ one) * (one @ l_bar @ one) / ((n - 1) * (n - 2))
    return (cross + product - 2 / (n - 2) * (one @ k_bar @ l_bar @ one)) / (n * (n - 3))


def oracle(x, y, debiased):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if not debiased:
        x, y = x - x.mean(0), y - y.mean(0)
        return np.sum((y.T @ x) ** 2) / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y))
    grams = [g - np.diag(np.diag(g)) for g in (x @ x.T, y @ y.T)]
    xy, xx, yy = (hsic_1((grams[i], grams[j]), len(x)) for i, j in ((0, 1), (0, 0), (1, 1)))
    return xy / np.sqrt(xx * yy)


@pytest.mark.parametrize("debiased", [True, False])
@pytest.mark.parametrize(("n", "d", "e"), [(40, 6, 9), (12, 30, 5)])
def test_against_the_textbook(n, d, e, debiased, generator):
    x = torch.randn(n, d, generator=generator)
    y = x @ torch.randn(d, e, generator=generator) + torch.randn(n, e, generator=generator)
    assert float(linear_cka(x, y, debiased=debiased)) == pytest.approx(oracle(x, y, debiased), rel=1e-9)
    for dtype in (torch.float16, torch.bfloat16):
        a, b = x.to(dtype), y.to(dtype)
        expected = oracle(a.double(), b.double(), debiased)
        assert float(linear_cka(a, b, debiased=debiased)) == pytest.approx(expected, rel=1e-9)


def test_independent_features_are_unlike_only_for_the_debiased_estimate(generator):
    for n, biased in ((64, 0.92), (1024, 0.43)):
        x, y = torch.randn(2, n, 768, generator=generator)
        assert float(linear_cka(x, y)) == pytest.approx(biased, abs=0.01)
        assert abs(float(linear_cka(x, y, debiased=True))) < 0.05


@pytest.mark.parametrize("debiased", [True, False])
def test_a_large_common_mean_does_not_break_float32(debiased, generator):
    x = torch.randn(128, 256, generator=generator)
    y = x + 0.5 * torch.randn(128, 256, generator=generator)
    expected = oracle(x, y, debiased)
    assert float(linear_cka(x + 20, y + 20, debiased=debiased)) == pytest.approx(expected, abs=1e-5)
    features = torch.stack([x, y]) + 20
    assert float(cka_matrix(features, debiased=debiased)[0, 1]) == pytest.approx(expected, abs=1e-5)


@given(st.integers(0, 2**32 - 1), st.booleans(), st.floats(1e-2, 1e2))
def test_properties(seed, debiased, scale):
    rng = np.random.default_rng(seed)
    x = torch.tensor(rng.normal(size=(25, 4)))
    y = x @ torch.tensor(rng.normal(size=(4, 6))) + torch.tensor(rng.normal(size=(25, 6)))
    rotation = torch.tensor(ortho_group.rvs(6, random_state=rng))
    value = float(linear_cka(x, y, debiased=debiased))
    assert value <= 1 + 1e-9
    assert debiased or value >= 0
    assert float(linear_cka(x, x, debiased=debiased)) == pytest.approx(1, abs=1e-9)
    assert float(linear_cka(y, x, debiased=debiased)) == pytest.approx(value, abs=1e-9)
    assert float(linear_cka(x, scale * y @ rotation + 3, debiased=debiased)) == pytest.approx(value, abs=1e-9)
    stretched = y * torch.tensor([100.0, 1, 1, 1, 1, 1])
    assert abs(float(linear_cka(x, stretched, debiased=debiased)) - value) > 1e-6, "not free of every linear map"


@pytest.mark.parametrize("debiased", [True, False])
def test_the_matrix_is_every_pair(debiased, generator):
    features = torch.randn(5, 30, 7, generator=generator).cumsum(0)
    got = cka_matrix(features, debiased=debiased)
    expected = [[oracle(a, b, debiased) for b in features.numpy()] for a in features.numpy()]
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_constant_layer_has_no_similarity(generator):
    features = torch.randn(2, 30, 7, generator=generator)
    features[1] = 0.1
    for debiased in (True, False):
        value = cka_matrix(features, debiased=debiased)
        assert value[0, 0].item() == pytest.approx(1)
        assert value[0, 1].isnan()


@pytest.mark.parametrize("world_name", ["world", "no_first"])
def test_rows_against_the_textbook(world_name, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    expected, layers = {}, range(world.layers + 1)
    for view in ("", ":no-first") if world.first_tokens else ("",):
        states = world.tokens(view=view)
        for a in layers:
            for b in layers:
                for name, debiased in (("debiased", True), ("biased", False)):
                    value = oracle(states[a], states[b], debiased)
                    expected["residual", a, b, f"{name}{view}"] = (value, states.shape[1])
    expect(any_split(Cka, world), expected)


def hsic_of_blocks(states, blocks):
    """[S, S] mean of the unbiased HSIC over blocks of tokens, weighted by their tokens, as written."""
    total = 0
    for block in blocks:
        layers = states[:, block]
        grams = [x @ x.T - np.diag((x * x).sum(1)) for x in layers]
        n = len(block)
        total = total + n * np.array([[hsic_1((k, m), n) for m in grams] for k in grams])
    return total


@pytest.mark.parametrize("split", [(20,), (1,) * 20, (7, 1, 9, 3)])
def test_blocks_of_sequences_against_the_textbook(split, invented, same_rows):
    """Blocks of 4 sequences of 6 tokens (at most half of 60 tokens), in any batches; the last block is smaller."""
    world = invented(lengths=(6,) * 18 + (4, 6), width=7).replace(options={"reservoir_tokens": 60})
    rows = world.rows(Cka, split)
    where = {"": list(world.positions()), ":no-first": list(world.positions(":no-first"))}
    for view, positions in where.items():
        states = world.tokens(view=view)
        blocks = [[i for i, (n, _) in enumerate(positions) if n // 4 == b] for b in range(5)]

        def cka(kept, states=states, blocks=blocks):
            hsic = hsic_of_blocks(states, [blocks[b] for b in kept])
            return hsic / np.sqrt(np.outer(np.diag(hsic), np.diag(hsic)))

        whole, sizes = cka(range(5)), np.array([len(block) for block in blocks])
        h = (sizes.sum() / sizes)[:, None, None]
        pseudo = h * whole - (h - 1) * np.array([cka([b for b in range(5) if b != left]) for left in range(5)])
        error = np.sqrt((((pseudo - (pseudo / h).sum(0)) ** 2) / (h - 1)).sum(0) / 5)
        for a in range(4):
            for b in range(4):
                row = rows["residual", a, b, "debiased" + view]
                assert (row.value, row.count) == (pytest.approx(whole[a, b], abs=2e-6), len(positions))
                if a != b:
                    found = rows["residual", a, b, "standard_error_of_debiased" + view].value
                    assert found == pytest.approx(error[a, b], rel=1e-3, abs=1e-6)


def test_long_sequences_are_blocks_by_parts(invented):
    """Sequences of 50 tokens, at most 20 in a block: three parts of 17, 17 and 16 tokens each."""
    world = invented(lengths=(50,) * 3).replace(options={"reservoir_tokens": 40})
    blocks = [np.array(part) + 50 * n for n in range(3) for part in np.array_split(np.arange(50), 3)]
    hsic = hsic_of_blocks(world.tokens(), blocks)
    expected = hsic / np.sqrt(np.outer(np.diag(hsic), np.diag(hsic)))
    for split in ((3,), (1, 2)):
        rows = world.rows(Cka, split)
        found = [[rows["residual", a, b, "debiased"].value for b in range(4)] for a in range(4)]
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_sequences_in_any_order_count_once(invented):
    """More than two blocks are open at a time: some end early, and no token is lost."""
    world = invented(lengths=(6,) * 20).replace(options={"reservoir_tokens": 60})
    metric = Cka(world.setup())
    for observation in world.observations((3, 1, 9, 7), order=torch.randperm(20, generator=torch.Generator())):
        metric.update(observation)
    rows = [row for row in metric.rows() if row.statistic == "debiased"]
    assert {row.count for row in rows} <= set(range(110, 121))
    assert all(row.value == pytest.approx(1, abs=1e-6) for row in rows if row.layer == row.other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("loud", [1, 165, 30000])
def test_float32_products_with_outliers(loud, dtype, generator):
    """A token of many times the median norm, a huge common mean, a small layer: within 1e-6 of plain float64."""
    x = torch.randn(4, 200, 30, generator=generator).cumsum(0)
    x[1:, 7] *= loud
    x[2] += 20
    x[3] *= 1e-6
    x = x.to(dtype)
    later = torch.arange(200) % 20 > 0
    for debiased in (True, False):
        for hsic, chosen in zip(hsic_of_views(x, later, debiased), (torch.ones_like(later), later), strict=True):
            found = hsic.values / torch.outer(*[hsic.values.diagonal().sqrt()] * 2)
            states = x.double()[:, chosen]
            expected = [[oracle(a, b, debiased) for b in states] for a in states]
            np.testing.assert_allclose(found, expected, atol=1e-6)


def test_blocks_agree_with_all_tokens_about_one_population(generator):
    """The average over blocks estimates what one block of all tokens does, and its standard error says how well."""
    estimates, errors = [], []
    for _ in range(40):
        x = torch.randn(640, 12, generator=generator)
        y = x @ torch.randn(12, 12, generator=torch.Generator().manual_seed(1)) + 6 * torch.randn(
            640, 12, generator=generator
        )
        setup = Setup(num_layers=1, width=12, sequence_length=8, num_sequences=80, num_tokens=640, reservoir_tokens=80)
        metric = Cka(setup)
        hsic = metric.blocks
        features, keys = torch.stack([x, y]), (torch.arange(80)[:, None] << 24 | torch.arange(8)).flatten()
        for number in range(16):
            hsic._add_sums(hsic._sums(number, features[:, number * 40 : number * 40 + 40], keys[:40]))
        values = metric._of_blocks(hsic.hsic, hsic.terms, hsic.tokens)
        estimates.append(float(values["debiased"][0, 0, 1] - linear_cka(x, y, debiased=True)))
        errors.append(float(values["standard_error_of_debiased"][0, 0, 1]))
    assert abs(np.mean(estimates)) < 3 * np.std(estimates) / 40**0.5 + 0.01
    assert np.std(estimates) < 2 * np.mean(errors)

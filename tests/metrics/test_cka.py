"""Linear CKA (aligned training, Eq. 3) and its unbiased form, against the textbook estimators."""

import numpy as np
import pytest
import torch

from fulldepth.core import uncertainty
from fulldepth.metrics import Cka, Observation, Setup, cka, cka_matrix, hsic, linear_cka
from fulldepth.metrics.hsic import hsic_of
from fulldepth.metrics.reservoir import priority
from metrics.conftest import table
from metrics.oracle import jackknife, plain_cka


@pytest.mark.parametrize("debiased", [True, False])
@pytest.mark.parametrize(("n", "d", "e"), [(40, 6, 9), (12, 30, 5)])
def test_against_the_textbook(n, d, e, debiased, generator):
    x = torch.randn(n, d, generator=generator)
    y = x @ torch.randn(d, e, generator=generator) + torch.randn(n, e, generator=generator)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        a, b = x.to(dtype), y.to(dtype)
        expected = plain_cka(a.double(), b.double(), debiased)
        assert float(linear_cka(a, b, debiased=debiased)) == pytest.approx(expected, rel=1e-9)


def test_a_constant_layer_has_no_similarity(generator):
    features = torch.randn(2, 30, 7, generator=generator)
    features[1] = 0.1
    for debiased in (True, False):
        value = cka_matrix(features, debiased=debiased)
        assert value[0, 0].item() == pytest.approx(1)
        assert value[0, 1].isnan()


def filled(world, split=(20,), order=None, **options):
    metric = Cka(world.setup(**options))
    for observation in world.observations(split, order=order):
        metric.update(observation)
    return metric


def by_leaving_out(states, owner, clusters=None):
    """[S, S] debiased CKA of all tokens, and its jackknife error over groups of sequences, as written."""

    def cka(kept):
        return np.array([[plain_cka(a[kept], b[kept], True) for b in states] for a in states])

    return cka(range(len(owner))), jackknife(owner if clusters is None else [clusters[n] for n in owner], cka)


@pytest.mark.parametrize("by_channels", [True, False])
@pytest.mark.parametrize("first_tokens", [True, False])
def test_all_tokens_count_in_any_order_against_the_textbook(
    first_tokens, by_channels, invented, same_rows, monkeypatch
):
    """One estimate over the tokens of all sequences, whatever the order and the batches, and its jackknife error; also
    where the shared sample is smaller; from products of tokens and of channels.
    """
    monkeypatch.setattr(hsic, "_fewer_by_channels", lambda *_: by_channels)
    world = invented(lengths=(6,) * 18 + (4, 6), width=7).replace(options={"reservoir_tokens": 20})
    if not first_tokens:
        counted = world.counted.clone()
        counted[:, 0] = False
        world = world.replace(counted=counted, first_tokens=False)
    rows = world.rows(Cka, (20,))
    for view in ("", ":no-first") if first_tokens else ("",):
        owner = [n for n, _ in world.positions(view)]
        values, errors = by_leaving_out(world.tokens(view=view), owner)
        for a in range(4):
            for b in range(4):
                row = rows["residual", a, b, "debiased" + view]
                assert (row.value, row.count) == (pytest.approx(values[a, b], abs=2e-6), len(owner))
                error = rows["residual", a, b, "standard_error_of_debiased" + view].value
                assert error == pytest.approx(errors[a, b], rel=1e-4, abs=1e-6)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    same_rows(table(filled(world, (7, 1, 9, 3), order).rows()), rows)


@pytest.mark.parametrize("far", [False, True])
def test_many_tokens_of_few_channels_are_multiplied_by_channel(far, generator, monkeypatch):
    """In groups with and without first tokens, several for one group; a token far from all others is no sum's end."""
    mean = torch.randn(4, 300, 1, 3, generator=generator)
    states = (
        mean + torch.randn(4, 300, 5, 3, generator=generator) + mean[:1] * torch.tensor([3.0, 2, 1, 0]).view(4, 1, 1, 1)
    )
    if far:
        states[:, 7, 2] += 3e4
    used = []
    by_channels = hsic._products_of_channels
    monkeypatch.setattr(hsic, "_products_of_channels", lambda *given: used.append(by_channels(*given)) or used[-1])
    setup = Setup(
        3, 3, sequence_length=5, num_sequences=300, num_tokens=1500, clusters=tuple(n // 5 for n in range(300))
    )
    metric, everything = Cka(setup), torch.ones(300, 5, dtype=torch.bool)
    metric.update(Observation({"residual": states}, everything, everything, torch.arange(300)))
    found = metric.compute()
    assert [result is None for result in used][:1] == [far]
    tokens = states.flatten(1, 2).double().numpy()
    later = np.arange(1500) % 5 > 0
    for view, kept in enumerate((np.ones(1500, bool), later)):
        for a in range(4):
            for b in range(a, 4):
                for name, debiased in (("debiased", True), ("biased", False)):
                    expected = plain_cka(tokens[a][kept], tokens[b][kept], debiased)
                    assert float(found[name][view, a, b]) == pytest.approx(expected, abs=2e-6), (view, a, b, name)


def cka_of(states, clusters=(), **options):
    """Statistics of states `[S, N, T, D]`, all tokens counted."""
    layers, count, length, width = states.shape
    setup = Setup(layers - 1, width, sequence_length=length, num_sequences=count, num_tokens=count * length,
                  first_tokens=False, clusters=clusters, **options)  # fmt: skip
    metric, everything = Cka(setup), torch.ones(count, length, dtype=torch.bool)
    metric.update(Observation({"residual": states}, everything, everything, torch.arange(count)))
    return metric.compute()


def test_influences_are_of_clusters_and_give_the_error(invented):
    world = invented(lengths=(6,) * 18 + (4, 6), width=7)
    clusters = tuple(n % 5 for n in range(20))
    metric = filled(world, clusters=clusters)
    errors = by_leaving_out(world.tokens(), [n for n, _ in world.positions()], clusters)[1]
    found = {(item.layer, item.other): item for item in metric.influences()}
    assert found.keys() == {(0, 1), (0, 3), (1, 2), (1, 3), (2, 3)}
    for pair, item in found.items():
        assert (item.measure, item.site, item.statistic, len(item.values)) == ("cka", "residual", "debiased", 5)
        assert float(uncertainty.error_of(item.values)) == pytest.approx(errors[pair], rel=1e-4)


def test_a_sample_where_memory_lacks(generator, monkeypatch):
    """HSIC of the sample is, over seeds, that of all tokens; the count says how many tokens there are."""
    monkeypatch.setattr(cka, "STORED", 4 * 8 * 40)
    mean = torch.randn(2, 30, 1, 4, generator=generator)
    mean[1] += mean[0]
    states = mean + torch.randn(2, 30, 4, 4, generator=generator)
    x, y = (layer.flatten(0, 1).double() for layer in states)
    whole = hsic_of([x, y]).debiased.values
    found = []
    for seed in range(300):
        sample = priority(torch.arange(30)[:, None] << 24 | torch.arange(4), seed).flatten().argsort()[:40]
        found.append(hsic_of([x[sample], y[sample]]).debiased.values)
        if seed < 3:
            result = cka_of(states, reservoir_tokens=10, seed=seed)
            assert result["count"] == 40
            expected = plain_cka(x[sample].numpy(), y[sample].numpy(), True)
            assert result["debiased"][0, 0, 1] == pytest.approx(expected, abs=1e-6)
    mean, error = torch.stack(found).mean(0), torch.stack(found).std(0) / 300**0.5
    assert bool(((mean - whole).abs() < 3.5 * error).all())


RHO, SPREAD = 0.25, torch.linspace(2, 0.5, 6)
"""Share of the variance that a document's tokens have in common; standard deviations of the channels of layer 0."""


def documents(generator, count=48, windows=2, length=8):
    """States [2, N, T, D] of windows of documents, tokens of which are alike, and the document of each window.

    Layer 1 is a layer 0 rotated and noisy, so its covariances, and CKA, are known.
    """

    def normal():
        common = torch.randn(count, 1, 1, 6, generator=generator)
        own = torch.randn(count, windows, length, 6, generator=generator)
        return (RHO**0.5 * common + (1 - RHO) ** 0.5 * own).flatten(0, 1)

    x = normal() * SPREAD
    return torch.stack([x, (x + 1.5 * normal()).roll(1, -1)]), torch.arange(count).repeat_interleave(windows)


def coverage(draws, **options):
    """Share of 95 % intervals that hold CKA of the population."""
    x, y = SPREAD**2, SPREAD**2 + 1.5**2
    truth = float((x @ x) / (x.norm() * y.norm()))
    held = []
    for draw in range(draws):
        states, document = documents(torch.Generator().manual_seed(draw))
        found = cka_of(states, tuple(document.tolist()), **options)
        value, error = (float(found[name][0, 0, 1]) for name in ("debiased", "standard_error_of_debiased"))
        held.append(abs(value - truth) < uncertainty.quantile(32) * error)
    return sum(held) / draws


def test_coverage_of_the_interval():
    assert 0.86 <= coverage(50) <= 1


@pytest.mark.thorough
def test_coverage_of_the_interval_in_many_draws():
    assert 0.90 <= coverage(1000) <= 0.98


def test_the_time_is_forecast_by_the_square_of_the_number_of_tokens(monkeypatch, generator):
    """2 s for 8 tokens and 5 s for 16 give 2 + 3 (64^2 - 8^2) / (16^2 - 8^2) = 65 s for 64."""
    monkeypatch.setattr(cka, "TRIALS", (8, 16))
    monkeypatch.setattr(cka.time, "perf_counter", iter([0.0, 2.0, 10.0, 15.0]).__next__)
    state = torch.random.get_rng_state()
    assert Cka(Setup(3, 5, num_tokens=64, num_sequences=64)).forecast() == 65.0
    assert Cka(Setup(3, 5, num_tokens=60, num_sequences=60)).forecast() == 0.0
    assert torch.equal(torch.random.get_rng_state(), state)


def test_progress_is_that_of_the_products(generator):
    """Each block of rows has the products right of the diagonal; a second run, in float64, tells nothing twice."""
    measure, told = Cka(Setup(2, 4, num_tokens=40, num_sequences=40)), []
    measure.advance = told.append
    states = torch.randn(3, 40, 1, 4, generator=generator)
    states[1] = states[0] * 1e-30
    everything = torch.ones(40, 1, dtype=torch.bool)
    measure.update(Observation({"residual": states}, everything, everything, torch.arange(40)))
    measure.rows()
    assert sum(told) == Cka.steps
    assert all(done > 0 for done in told)

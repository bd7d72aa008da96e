"""Measures of tokens, predictions and routers: each function and the rows of its accumulator against one oracle.

The oracles are scikit-learn, SciPy and plain loops in float64. Rows are those of two invented data sets, in any split
into batches and with any padding.
"""

import math
import re
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose
from sklearn.metrics import f1_score

from fulldepth import metrics
from fulldepth.metrics import METRICS, RenyiEntropy
from metrics.oracle import accuracy, cosines, loss, matrix_of_cosines, mmd, nc1, psi, ratio, renyi, settles, zeta

ALPHAS = (0.5, 1.0, 2.0)


def retrieval(tokens):
    """(mass, share), each [H][r], of a list of tokens' weights: [H][r] or, between heads, [H][r][H]."""
    mass, share = [], []
    for token in np.asarray(tokens):
        parts = token if token.ndim == 3 else token[..., None]
        mass.append([[math.fsum(part) for part in head] for head in parts])
        sizes = [[math.fsum(map(abs, part)) for part in head] for head in parts]
        share.append([[size / math.fsum(head) for size in head] for head in sizes])
    return np.mean(mass, 0), np.mean(share, 0)


def expected_source(weights, shares):
    """sum_h p(h) sum_m p(m|h) m of weights [H_kv][r] and shares [H]; each head has the router of its group."""
    group = len(shares) // len(weights)
    return math.fsum(p * chance * m for h, p in enumerate(shares) for m, chance in enumerate(weights[h // group]))


def added(update, stream):
    """Norm of each update over that of its stream, and their cosine."""
    sizes = np.linalg.norm(update, axis=-1), np.linalg.norm(stream, axis=-1)
    return sizes[0] / sizes[1], np.einsum("...d,...d", update, stream) / (sizes[0] * sizes[1])


FUNCTIONS = {
    "displacement": (metrics.displacement, psi, lambda h, y: h[:2]),
    "norm_ratio": (metrics.norm_ratio, ratio, lambda h, y: h[:2]),
    "contribution": (metrics.contribution, added, lambda h, y: h[:2]),
    "cosine": (metrics.cosine_matrix, matrix_of_cosines, lambda h, y: [h]),
    "raw cosine": (
        partial(metrics.cosine_matrix, center=False),
        partial(matrix_of_cosines, center=False),
        lambda h, y: [h],
    ),
    "mmd": (metrics.mmd, mmd, lambda h, y: (h[0], h[1, :9])),
    "mmd of a bandwidth": (metrics.mmd, mmd, lambda h, y: (h[0], h[1, :1], 0.7)),
    "nc1": (metrics.nc1, nc1, lambda h, y: (h[0], abs(y))),
    "nc1 of few": (metrics.nc1, nc1, lambda h, y: (h[0, :7], abs(y[:7]))),
    **{
        f"entropy of {side} at {alpha:g}": (
            metrics.renyi_entropy,
            lambda h, alpha: [renyi(z, alpha) for z in h],
            lambda h, y, n=n, alpha=alpha: (h[:, :n], alpha),
        )
        for side, n in (("many", 20), ("few", 5))
        for alpha in (*ALPHAS, 3.0)
    },
}
"""Name -> function, oracle, and what both are given of states h [4, 20, 8] and targets y [20]."""


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, dtype, generator):
    h = (torch.randn(4, 20, 8, generator=generator).cumsum(0) + 2).to(dtype)
    y = torch.randint(4, (20,), generator=generator)
    y[:3] = -100
    function, oracle, given = FUNCTIONS[name]
    expected = oracle(*given(h.double().numpy(), y.numpy()))
    assert_allclose(function(*given(h, y)), expected, rtol=1e-5, atol=1e-9 if dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("shape", [(3, 4), (2, 5, 3, 4), (3, 4, 3)])
def test_functions_of_routers(shape, generator):
    routing = torch.randn(shape, generator=generator, dtype=torch.float64)
    tokens = routing.flatten(0, 1) if len(shape) == 4 else routing[None]
    mass, share = retrieval(tokens.numpy())
    assert_allclose(metrics.retrieval_weight(routing), mass, rtol=1e-12)
    assert_allclose(metrics.retrieval_share(routing), share, rtol=1e-12)
    for heads in (3, 6):
        shares = torch.rand(heads, generator=generator, dtype=torch.float64).softmax(0)
        found = metrics.expected_retrieval(torch.from_numpy(share), shares)
        assert float(found) == pytest.approx(expected_source(share, shares.tolist()), rel=1e-12)


def test_heads_count_by_the_norm_of_their_slice(generator):
    w_o = torch.randn(6, 4 * 3, generator=generator)
    w_o[:, 3:6] *= 7
    norms = [np.linalg.norm(w_o[:, 3 * h : 3 * h + 3].double()) for h in range(4)]
    assert_allclose(metrics.head_shares(w_o, 4), np.array(norms) / sum(norms), rtol=1e-12)


def test_numbers_at_the_edges(generator):
    """A large common mean in float32, and two classes on a line (within 1, between 4, K 2)."""
    x, y = torch.randn(2, 30, 8, generator=generator) + torch.tensor([1000, 1001])[:, None, None]
    assert metrics.mmd(x, y).item() == pytest.approx(mmd(x.double().numpy(), y.double().numpy()), abs=1e-8)
    line = torch.tensor([[-3.0], [-1.0], [1.0], [3.0]])
    assert metrics.nc1(line, torch.tensor([0, 0, 1, 1])).item() == pytest.approx(1 / 4 / 2)


def views(world):
    """Suffix and states [L+1, N, D] of every view."""
    for view in ("", ":no-first") if world.first_tokens else ("",):
        yield view, world.tokens(view=view)


def of_pairs(values):
    """Rows of a function of the states before and after each layer: of each view and layer a mean."""

    def rows(world):
        for view, states in views(world):
            for layer, pair in enumerate(pairwise(states), start=1):
                yield ("residual", layer, None, f"mean{view}"), (np.mean(values(*pair)), states.shape[1])

    return rows


def rows_of_contribution(world):
    for view, states in views(world):
        for layer, middle in enumerate(world.tokens("attention_output", view), start=1):
            x, y = states[layer - 1 : layer + 1]
            parts = {"layer": (y - x, x), "attention": (middle - x, x), "mlp": (y - middle, middle)}
            for part, pair in parts.items():
                for statistic, values in zip(("relative_norm", "cosine"), added(*pair), strict=True):
                    yield (part, layer, None, statistic + view), (values.mean(), len(values))
            for part, after in (("layer", y), ("attention", middle)):
                yield (part, layer, None, f"stream_cosine{view}"), (cosines(x, after).mean(), len(x))


def rows_of_displacement(world):
    for view, states in views(world):
        pairs = [("residual", layer, pair) for layer, pair in enumerate(pairwise(states), start=1)]
        pairs.append(("final_normed", world.layers, (states[-2], world.tokens("final_normed", view)[0])))
        for site, layer, pair in pairs:
            values = psi(*pair)
            for name, value in (("mean", values.mean()), ("std", values.std())):
                yield (site, layer, None, name + view), (value, len(values))


def rows_of_cosine(world):
    for view, states in views(world):
        for a, x in enumerate(states):
            for b, y in enumerate(states):
                centred = cosines(x, y, center=True)
                named = {"mean": centred.mean(), "mean_raw": cosines(x, y).mean()}
                shares = (5, 25, 50, 75, 95) if b == world.layers else ()
                named |= {f"p{share:02}": np.percentile(centred, share) for share in shares}
                yield from ((("residual", a, b, name + view), (v, len(centred))) for name, v in named.items())


def rows_of_jumps(world):
    mean = [psi(x, y).mean() for x, y in pairwise(world.tokens())]
    for layer in range(2, world.layers + 1):
        yield ("residual", layer, None, "value"), (zeta(mean, layer), None)


def of_logits(value):
    def rows(world):
        count = int((world.targets != -100).sum())
        for layer, logits in enumerate(world.logits.double().numpy()):
            yield ("residual", layer, None, "mean"), (value(logits, world.targets.numpy()), count)

    return rows


def of_both_lenses(value, sign):
    """Means of the linear lens, and what it gains: at each layer, and over the first half of them."""

    def rows(world):
        targets = world.targets.numpy()
        count = int((targets != -100).sum())
        linear, plain = (
            [value(logits, targets) for logits in both.double().numpy()] for both in (world.linear_logits, world.logits)
        )
        gains = [sign * (ours - theirs) for ours, theirs in zip(linear, plain, strict=True)]
        for layer in range(world.layers + 1):
            yield ("residual", layer, None, "mean"), (linear[layer], count)
            yield ("residual", layer, None, "gain"), (gains[layer], count)
        yield ("residual", None, None, "gain_of_early_layers"), (np.mean(gains[1 : world.layers // 2 + 1]), count)

    return rows


def rows_of_f1(world):
    known = world.targets != -100
    targets = world.targets[known].numpy()
    for layer, logits in enumerate(world.logits[:, known]):
        value = f1_score(targets, logits.argmax(-1).numpy(), average="macro")
        yield ("residual", layer, None, "macro"), (value, len(targets))


def rows_of_saturation(world):
    top = world.logits[1:, world.targets != -100].argmax(-1)  # the embeddings are no layer
    layers = np.array([settles(column) for column in top.T.tolist()])
    for layer in range(1, world.layers + 1):
        named = {"count": (layers == layer).sum(), "share": (layers == layer).mean()}
        named["cumulative"] = (layers <= layer).mean()
        yield from ((("residual", layer, None, name), (value, None)) for name, value in named.items())
    yield ("residual", None, None, "median"), (np.sort(layers)[(len(layers) - 1) // 2], len(layers))


def rows_of_depth(world):
    accuracies = [accuracy(logits, world.targets.numpy()) for logits in world.logits.numpy()][1:]
    for kind, bar in (("eps", 1.0), ("relative_eps", accuracies[-1])):
        for eps in (0.01, 0.05, 0.1, *((0.2,) if kind == "eps" else ())):
            enough = [n for n, value in enumerate(accuracies, start=1) if value >= (1 - eps) * bar]
            depth = min(enough, default=world.layers)
            yield ("residual", None, None, f"{kind}={eps:g}"), (depth, int((world.targets != -100).sum()))


def rows_of_mmd(world):
    for layer, pair in enumerate(zip(world.tokens(), world.tokens("reference"), strict=True)):
        yield ("residual", layer, None, "value"), (mmd(*pair), len(pair[0]))


def rows_of_nc1(world):
    labels = np.array([world.labels[n].item() for n, _ in world.positions()])
    for layer, h in enumerate(world.tokens()):
        yield ("residual", layer, None, "value"), (nc1(h[labels >= 0], labels[labels >= 0]), int((labels >= 0).sum()))


def rows_of_entropy(world):
    for site, first in (("residual", 0), ("value", 1)):
        for layer, states in enumerate(world.states[site].double().numpy(), start=first):
            sequences = [h[: int(mask.sum())] for h, mask in zip(states, world.mask, strict=True)]
            for alpha in ALPHAS:
                value = np.mean([renyi(z, alpha) for z in sequences])
                yield (site, layer, None, f"mean:plain:{alpha:g}"), (value, len(sequences))


def routers(world, site="routing"):
    """Layer, number of counted tokens, and each token's weights (one entry if all share them)."""
    positions = list(world.positions())
    for layer, weights in world.coefficients[site].items():
        plain = weights.double().numpy()
        yield layer, len(positions), [plain[n, t] for n, t in positions] if plain.ndim == 4 else [plain]


def rows_of_retrieval(world):
    for layer, count, tokens in routers(world):
        for statistic, heads in zip(("mean", "share"), retrieval(tokens), strict=True):
            yield from ((("routing", layer, m, statistic), (heads[:, m].mean(), count)) for m in range(layer))
            for head in range(2):
                for m in range(layer) if statistic == "share" else [layer - 1]:
                    yield (f"head_{head}", layer, m, statistic), (heads[head, m], count)


def rows_of_expected_source(world):
    for layer, count, tokens in routers(world):
        shares = world.setup().head_shares[layer - 1]
        values = [expected_source(retrieval([token])[1].tolist(), shares) for token in tokens]
        yield ("routing", layer, None, "value"), (np.mean(values), count)


ROWS = {
    "displacement": rows_of_displacement,
    "norm_ratio": of_pairs(ratio),
    "contribution": rows_of_contribution,
    "cosine": rows_of_cosine,
    "jump_rate": rows_of_jumps,
    "lens_accuracy": of_logits(accuracy),
    "lens_loss": of_logits(loss),
    "linear_lens_accuracy": of_both_lenses(accuracy, 1),
    "linear_lens_loss": of_both_lenses(loss, -1),
    "lens_f1": rows_of_f1,
    "saturation": rows_of_saturation,
    "effective_depth": rows_of_depth,
    "mmd": rows_of_mmd,
    "nc1": rows_of_nc1,
    "renyi_entropy": rows_of_entropy,
    "retrieval_weight": rows_of_retrieval,
    "expected_retrieval": rows_of_expected_source,
}


@pytest.mark.parametrize("world_name", ["world", "no_first"])
@pytest.mark.parametrize("name", ROWS)
def test_rows(name, world_name, request, any_split, expect):
    world = request.getfixturevalue(world_name)
    if name == "effective_depth":  # a world of layers that are more and more often right
        known = world.targets != -100
        logits = world.logits.clone()
        logits[2:, known] += 4 * F.one_hot(world.targets[known], 5)
        world = world.replace(logits=logits)
    rows = any_split(METRICS[name], world, rtol=1e-5, atol=1e-6)
    if name in ("displacement", "norm_ratio"):
        rows = {key: row for key, row in rows.items() if not re.match(r"p\d\d", key[3])}
    expect(rows, dict(ROWS[name](world)))


@pytest.mark.parametrize("lengths", [(500,) * 40, (2, 2)])
def test_percentiles_of_displacement_come_from_a_fine_histogram(lengths, invented):
    world = invented(lengths=lengths, layers=2, width=4)
    rows = world.rows(metrics.Displacement, (1, len(lengths) - 1))
    for view, states in views(world):
        for layer, pair in enumerate(pairwise(states), start=1):
            for share in (5, 50, 95):
                got = rows["residual", layer, None, f"p{share:02}{view}"].value
                assert abs(math.sqrt(got) - math.sqrt(np.percentile(psi(*pair), share))) < 2e-4


def test_percentiles_of_norm_ratios_come_from_a_fine_histogram(invented):
    world = invented(lengths=(50,) * 12, layers=2, width=4)
    rows = world.rows(metrics.NormRatio, (5, 7))
    for view, states in views(world):
        for layer, pair in enumerate(pairwise(states), start=1):
            for share in (5, 50, 95):
                got = rows["residual", layer, None, f"p{share:02}{view}"].value
                assert got == pytest.approx(np.percentile(ratio(*pair), share), rel=1e-3)


def test_beyond_the_reservoir_the_count_says_how_many_tokens_entered(world, same_rows):
    world = world.replace(options={"reservoir_tokens": 30})
    rows = world.rows(metrics.Cosine)
    same_rows(world.rows(metrics.Cosine, (1,) * 12, order=range(11, -1, -1)), rows, rtol=1e-5, atol=1e-6)
    values = cosines(*world.tokens()[[0, 3]], center=True)
    centred, raw = (rows["residual", 0, 3, name] for name in ("mean", "mean_raw"))
    assert (centred.count, raw.count) == (30, len(values))
    assert abs(centred.value - values.mean()) < 4 * values.std() / np.sqrt(30)


def test_a_cap_of_entropies_takes_the_same_sequences_whatever_the_batching(invented, same_rows):
    """The error is that of a mean over the chosen sequences, each its own cluster."""
    world = invented(lengths=(7,) * 20).replace(options={"entropy_sequences": 5})
    rows = world.rows(RenyiEntropy, (20,))
    same_rows(world.rows(RenyiEntropy, (3, 1, 9, 7), order=range(19, -1, -1)), rows, rtol=1e-5, atol=1e-6)
    chosen = RenyiEntropy(world.setup()).chosen.tolist()
    assert chosen != RenyiEntropy(world.setup(seed=3)).chosen.tolist()
    values = [renyi(world.states["residual"][2, n].double().numpy(), 2.0) for n in chosen]
    mean, error = (rows["residual", 2, None, f"{name}:plain:2"] for name in ("mean", "standard_error"))
    assert (mean.value, error.value) == (
        pytest.approx(np.mean(values)),
        pytest.approx(scipy.stats.sem(values), rel=1e-4),
    )
    assert mean.count == 5


profiles = hnp.arrays(np.float64, st.integers(2, 12), elements=st.floats(0, 1))


@given(profiles, st.floats(0.001, 1))
def test_jump_rate_and_effective_depth_of_any_profile(profile, eps):
    layers, given = len(profile), torch.tensor(profile)
    for start in range(2, layers + 1):
        expected = pytest.approx(zeta(profile, start), abs=1e-9)
        assert metrics.jump_rate(given, start) == metrics.jump_rate(given, start - layers - 1) == expected
    for relative, bar in ((False, 1 - eps), (True, (1 - eps) * profile[-1])):
        enough = [n for n, value in enumerate(profile, start=1) if value >= bar]
        assert metrics.effective_depth(given, eps, relative=relative) == min(enough, default=layers)


@pytest.mark.parametrize("count", [13, 20, 49, 100, 1700])
def test_effective_depth_counts_a_layer_that_is_exactly_good_enough(world, count):
    """Layer 1 has one right prediction less than the tolerance allows, layer 2 exactly as many, in whole numbers."""
    for percent in (1, 5, 10, 20):
        for last in range(100 // percent, count + 1, 100 // percent):
            enough = last * (100 - percent) // 100
            measure = metrics.EffectiveDepth(world.setup())
            measure.sums[0] = torch.tensor([0, enough - 1, enough, last])
            measure.counts[0] = count
            values = {number.statistic: number.value for number in metrics.EffectiveDepth.compute(measure)}
            names = [f"relative_eps={percent / 100:g}"] * (percent < 20) + [f"eps={percent / 100:g}"] * (last == count)
            assert [values[name] for name in names] == [2.0] * len(names)


@given(hnp.arrays(np.int64, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=st.integers(0, 2)))
def test_saturation_of_any_predictions(predictions):
    expected = [settles(column) for column in predictions.T.tolist()]
    assert metrics.saturation_layer(torch.tensor(predictions)).tolist() == expected


@pytest.mark.parametrize(("shift", "error"), [(0.5, True), (-0.5, True), (-9, False)])
def test_a_jump_that_is_clamped_by_chance_keeps_its_error(shift, error):
    """Twenty rows of one token whose mean increase is `shift` standard errors; a jackknife says almost 0 for -0.5."""
    metric = metrics.JumpRate(metrics.Setup(num_layers=2, width=1, num_sequences=20))
    increase = np.random.default_rng(0).normal(size=20)
    sem = scipy.stats.sem(increase)
    increase += shift * sem - increase.mean()
    metric.counts += 1
    metric.sums += torch.tensor(np.stack([np.full(20, 0.3), 0.3 + 0.01 * increase], axis=1))[metric.setup.group_of]
    rows = {row.statistic: row.value for row in metric.rows()}
    assert rows["value"] == pytest.approx(max(0.0, shift * sem))
    assert rows["standard_error"] == (pytest.approx(sem) if error else 0)

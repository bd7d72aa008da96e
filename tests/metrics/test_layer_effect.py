"""The parts of `layer_effect`: the relative change, the drawn positions, the quantile with its error, the sums."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from fulldepth.metrics import LayerEffect, Removals, Setup, relative_change
from fulldepth.metrics.layer_effect import draw_starts, pairs, sampled_quantile
from metrics.oracle import of_ratio
from tiny_models import seeded


def test_relative_change_is_the_norm_of_the_difference_over_that_of_the_update():
    rng = np.random.default_rng(0)
    update, changed = rng.normal(size=(2, 5, 7))
    expected = [np.linalg.norm(a - b) / np.linalg.norm(a) for a, b in zip(update, changed, strict=True)]
    assert_allclose(relative_change(torch.tensor(update), torch.tensor(changed)), expected, rtol=1e-14)
    zero = torch.zeros(2, 3)
    assert relative_change(zero, zero).isnan().all()
    assert relative_change(zero, torch.ones(2, 3)).isinf().all()
    with pytest.raises(ValueError, match="must have one shape"):
        relative_change(zero, torch.zeros(2, 4))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_relative_change_of_long_updates_in_half_precision(dtype):
    """Their norm, 128,000, is infinite in float16."""
    update = torch.full((1, 4096), 2000.0, dtype=dtype)
    assert_allclose(relative_change(update, update / 2), 0.5, rtol=1e-6)


def test_drawn_positions_are_distinct_multiples_of_eight_below_the_length():
    lengths = torch.tensor([100, 8, 9, 25, 40])
    starts = draw_starts(lengths, torch.arange(5), 3, seed=4)  # [3, 5]
    assert starts.shape == (3, 5)
    for length, drawn in zip(lengths.tolist(), starts.T.tolist(), strict=True):
        there = [start for start in drawn if start]
        assert there == sorted(set(there))
        assert len(there) == min(3, (length - 1) // 8)
        assert all(start % 8 == 0 and start < length for start in there)
    alone = draw_starts(lengths[4:], torch.tensor([4]), 3, seed=4)
    assert torch.equal(alone[:, 0], starts[:, 4]), "the draw depends on the other sequences of a batch"
    assert not torch.equal(draw_starts(lengths, torch.arange(5), 3, seed=5), starts)


def test_every_position_is_drawn_equally_often():
    starts = draw_starts(torch.full((4000,), 48), torch.arange(4000), 2, seed=0)  # 2 of 8, 16, 24, 32, 40
    counts = torch.stack([(starts == start).sum() for start in range(8, 48, 8)])
    assert_allclose(counts / 4000, 0.4, atol=4 * np.sqrt(0.4 * 0.6 / 4000))


def test_the_quantile_is_numpys_and_its_error_covers():
    values = torch.randn(311, 4, generator=seeded(1), dtype=torch.float64)
    values[5, 2] = torch.nan
    quantile, _ = sampled_quantile(values, torch.arange(311) % 32, 32)
    assert_allclose(quantile, np.nanquantile(values, 0.9, axis=0), rtol=1e-12)
    rng = np.random.default_rng(2)
    group = torch.arange(32).repeat_interleave(40)
    truth = np.sqrt(1 + 0.5**2) * 1.2815515655446004  # 90 % quantile of a normal with an effect of the document
    hits = 0
    for _ in range(400):
        sample = rng.normal(size=(1280, 1)) + 0.5 * np.repeat(rng.normal(size=(32, 1)), 40, axis=0)
        found, error = sampled_quantile(torch.tensor(sample), group, 32)
        hits += abs(float(found) - truth) <= 1.96 * float(error)
    assert 0.90 <= hits / 400 <= 0.98


def batch(generator, sequences, layers=3, per_sequence=5):
    """`Removals` of a few sequences, with numbers drawn for them."""
    sequence = torch.tensor(sequences).repeat_interleave(per_sequence)
    count = len(sequence)
    position = torch.arange(per_sequence).repeat(len(sequences))

    def draw(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    return Removals(
        "layer", "all", sequence << 24 | position, draw(pairs(layers).shape[1], count), draw(layers, count),
        draw(layers, count), draw(layers, count), sequence,
    )  # fmt: skip


def test_rows_of_all_layers_and_influences_are_means_with_errors_by_documents_whatever_the_batches():
    setup = Setup(num_layers=3, width=4, num_sequences=12, clusters=tuple(range(12)), num_tokens=60, double=True)
    measure = LayerEffect(setup)
    generator = seeded(3)
    parts = [batch(generator, [0, 1, 2, 3, 4]), batch(generator, [5]), batch(generator, [6, 7, 8, 9, 10, 11])]
    for part in parts:
        measure.update(part)
    rows = {(row.statistic, row.layer, row.other): row for row in measure.rows()}
    later = torch.cat([part.later for part in parts], dim=1).numpy()
    keys = torch.cat([part.keys for part in parts]).numpy() >> 24
    loss = torch.cat([part.loss_added for part in parts], dim=1).numpy()

    def error(values):
        sums = np.array([values[keys == document].sum() for document in range(12)])
        return of_ratio(range(12), sums, np.full(12, 5))

    both = (later[0] + later[1]) / 2  # the layers after the first one
    second = later[2]  # the one layer after the second; the third has none
    divergence = torch.cat([part.divergence for part in parts], dim=1).numpy()
    for name, values in (("later", (both + second) / 2), ("divergence", divergence.mean(0))):
        statistic = f"{name}_all_of_layers"
        assert_allclose(rows[statistic, None, None].value, values.mean(), rtol=1e-12)
        assert_allclose(rows[f"standard_error_of_{statistic}", None, None].value, error(values), rtol=1e-12)
        assert rows[statistic, None, None].count == (2 if name == "later" else 3)
    assert not any("future" in statistic for statistic, *_ in rows)
    influences = {(entry.statistic, entry.layer): entry.values for entry in measure.influences()}
    assert influences.keys() >= {("later_all", 1), ("divergence_all", 3), ("loss_added", 2)}
    spread = np.sqrt(12 / 11 * np.square(influences["loss_added", 2]).sum())
    assert_allclose(spread, error(loss[1]), rtol=1e-12)
    spread = np.sqrt(12 / 11 * np.square(influences["divergence_all_of_layers", None]).sum())
    assert_allclose(spread, error(divergence.mean(0)), rtol=1e-12)
    assert {row.statistic for row in rows.values()} <= LayerEffect.units.keys()


def test_memory_is_bounded_and_a_reset_starts_afresh():
    setup = Setup(num_layers=3, width=4, num_sequences=12, num_tokens=60, reservoir_tokens=20)
    measure = LayerEffect(setup)
    promised = measure.nbytes
    measure.update(batch(seeded(5), [7, 8, 9, 10, 11]))
    measure.rows()
    measure.reset()
    measure.update(batch(seeded(6), [0, 1, 2, 3, 4, 5]))
    fresh = LayerEffect(setup)
    fresh.update(batch(seeded(6), [0, 1, 2, 3, 4, 5]))
    assert measure.rows() == fresh.rows()
    assert measure.nbytes == promised

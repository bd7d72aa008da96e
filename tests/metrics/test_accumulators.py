"""What holds for every measure: registry entry, bounded memory, one pass for all, any number of processes."""

import dataclasses

import pytest
import torch
from torch import distributed
from torchmetrics import Metric

from fulldepth.metrics import METRICS, Observation, Readout, Row, Setup

OF_BOXES = ("average_precision",)
"""Measures of detectors, which read predicted and true boxes instead of tokens."""
NAMES = tuple(name for name in METRICS if name not in OF_BOXES)
TWINS = {"displacement", "cosine", "cka", "norm_ratio"}
"""Measures whose result without the first token stands beside the other."""


@pytest.fixture
def wordy_world(invented):
    """Equal lengths, and enough of every word for a probe."""
    world = invented(lengths=(15,) * 12)
    return world.replace(words=torch.arange(180).reshape(12, 15) % 4 - 1)


@pytest.fixture
def ragged_world(wordy_world):
    """The same with sequences of unlike lengths."""
    mask = torch.arange(15) < torch.tensor([15, 9, 12, 15, 8, 3, 15, 10, 14, 6, 15, 11])[:, None]
    targets, words = wordy_world.targets.masked_fill(~mask, -100), wordy_world.words.masked_fill(~mask, -1)
    return wordy_world.replace(mask=mask, counted=mask, targets=targets, words=words)


@pytest.fixture
def weights(generator):
    """(projection, layer, matrix)."""
    names = ("self_attn.q_proj", "mlp.down_proj")
    shapes = {1: (6, 5), 2: (6, 5), 3: (4, 6, 5)}  # of layer 3 every projection has four experts
    return [(name, layer, torch.randn(shapes[layer], generator=generator)) for layer in (1, 2, 3) for name in names]


def fill(metrics, world, weights, split):
    for observation in world.observations(split):
        for name in metrics.keys() - {"spectral_norm"}:
            metrics[name].update(observation)
    for matrix in weights if "spectral_norm" in metrics else ():
        metrics["spectral_norm"].update(*matrix)


def together(world, weights, names=NAMES, split=(12,)):
    """One pass feeds all: they share one `Setup` and its reservoirs."""
    return [row for metric in filled(world, weights, names, split) for row in metric.rows()]


def filled(world, weights, names, split=(12,)):
    setup = world.setup()
    metrics = {name: METRICS[name](setup) for name in names}
    fill(metrics, world, weights, split)
    return list(metrics.values())


def keyed(rows):
    return {row[:5]: Row(*row) for row in rows}


def held(metric):
    """Bytes of a metric's states, those of its own reservoirs included; the reservoirs of a `Setup` count apart."""
    shared = set(metric.setup.reservoirs.values())
    owners = [module for module in metric.modules() if isinstance(module, Metric) and module not in shared]
    return sum(getattr(owner, name).nbytes for owner in owners for name in owner._defaults)


def test_every_row_has_its_measure_and_a_declared_unit(wordy_world, weights):
    rows = together(wordy_world.replace(options={"reservoir_tokens": 60}), weights)
    assert {row.measure for row in rows} == set(NAMES)
    for row in rows:
        bare = row.statistic.removesuffix(":no-first")
        assert row.unit == METRICS[row.measure].units[bare], row
        assert row.unit in {"1", "%", "nats", "tokens", "layers"}, row
        assert (type(row.value), type(row.count)) == (float, int), row
        assert row.count > 0, row
    emitted = {(row.measure, row.statistic.removesuffix(":no-first")) for row in rows}
    assert emitted == {(name, statistic) for name in NAMES for statistic in METRICS[name].units}
    assert {row.measure for row in rows if row.statistic.endswith(":no-first")} == TWINS


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_bounded_and_said_beforehand(name, wordy_world, weights):
    wordy_world = wordy_world.replace(options={"reservoir_tokens": 60})
    metric = METRICS[name](wordy_world.setup())
    promised, before = metric.nbytes, held(metric)
    for _ in range(3):
        fill({name: metric}, wordy_world, weights, (5, 7))
    assert held(metric) == before == promised == metric.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_a_reset_starts_afresh(name, wordy_world, weights):
    setup = wordy_world.setup()
    metric = METRICS[name](setup)
    fill({name: metric}, wordy_world.with_states(residual=wordy_world.states["residual"] ** 2), weights, (12,))
    metric.rows()
    metric.reset()
    for reservoir in setup.reservoirs.values():
        reservoir.reset()
    fill({name: metric}, wordy_world, weights, (12,))
    assert keyed(metric.rows()) == keyed(together(wordy_world, weights, (name,)))


def batch_of(observation):
    fields = ("states", "attention_mask", "counted", "sequence", "labels", "words", "coefficients")
    batch = {name: getattr(observation, name) for name in fields}
    return {
        **batch,
        "readout": {f.name: getattr(observation.lens, f.name) for f in dataclasses.fields(observation.lens)},
    }


def scenario(world, names, weights, split, first_rank):
    """`first_rank` batches go to rank 0, the others to rank 1."""
    setup = world.setup()
    settings = {
        f.name: getattr(setup, f.name) for f in dataclasses.fields(setup) if f.name not in ("device", "reservoirs")
    }
    batches = [batch_of(observation) for observation in world.observations(split)]
    return {
        "setup": settings,
        "names": list(names),
        "batches": [batches[:first_rank], batches[first_rank:]],
        "weights": [weights[:4], weights[4:]],
    }


def measured(path):
    """Rows and influences of every measure of each scenario, over what both processes saw."""
    found, rank = [], distributed.get_rank()
    for scenario in torch.load(path):
        setup = Setup(**scenario["setup"])
        metrics = {name: METRICS[name](setup) for name in scenario["names"]}
        for batch in scenario["batches"][rank]:
            lens = Readout(**batch.pop("readout"))
            observation = Observation(**batch, readout=lambda lens=lens: lens)
            for name in metrics.keys() - {"spectral_norm"}:
                metrics[name].update(observation)
        for site, layer, weight in scenario["weights"][rank]:
            metrics["spectral_norm"].update(site, layer, weight)
        rows = [row for metric in metrics.values() for row in metric.rows()]
        found.append((rows, [influence for metric in metrics.values() for influence in metric.influences()]))
    return found


def test_two_processes_say_what_one_says(wordy_world, ragged_world, weights, tmp_path, same_rows, two_processes):
    no_coherence = [name for name in NAMES if name != "coherence"]
    capped = ragged_world.replace(options={"reservoir_tokens": 40, "entropy_sequences": 5})
    parts = (
        (wordy_world, NAMES, (5, 1, 4, 2), 1),
        (capped, no_coherence, (3, 3, 5, 1), 3),
        (wordy_world, NAMES, (12,), 1),  # the second process has nothing to read
    )
    torch.save([scenario(w, names, weights, split, n) for w, names, split, n in parts], tmp_path / "scenarios.pt")
    for found in two_processes(measured, tmp_path / "scenarios.pt"):
        for (rows, influences), (world, names, _, _) in zip(found, parts, strict=True):
            got = {tuple(row[:5]): Row(*row) for row in rows}
            same_rows(got, keyed(together(world, weights, names)), rtol=1e-6, atol=1e-6)
            alone = [influence for metric in filled(world, weights, names) for influence in metric.influences()]
            assert [influence[:5] for influence in influences] == [influence[:5] for influence in alone]
            for influence, expected in zip(influences, alone, strict=True):
                assert influence[5] == pytest.approx(expected.values, rel=1e-5, abs=1e-7, nan_ok=True), expected

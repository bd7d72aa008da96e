"""What holds for every measure: registry entry, bounded memory, one pass for all, any number of processes."""

import pickle

import pytest
import torch
from torch import distributed
from torchmetrics import Metric

from fulldepth.metrics import METRICS, Row

OF_BOXES = ("average_precision",)
"""Measures of detectors, which read predicted and true boxes instead of tokens."""
OF_REMOVALS = ("layer_effect",)
"""Measures of models without a part, which read `Removals` (test_layer_effect.py)."""
NAMES = tuple(name for name in METRICS if name not in OF_BOXES + OF_REMOVALS)
TWINS = {"displacement", "cosine", "cka", "norm_ratio", "contribution"}
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


def fill(metrics, observations, weights):
    """Metrics whose names are keys read observations, and the spectral norm matrices."""
    for observation in observations:
        for name in metrics.keys() - {"spectral_norm"}:
            metrics[name].update(observation)
    if "spectral_norm" in metrics:
        metrics["spectral_norm"].update(weights)


def filled(names, world, observations, weights):
    """One pass feeds all: they share one `Setup` and its reservoirs."""
    setup = world.setup()
    metrics = {name: METRICS[name](setup) for name in names}
    fill(metrics, observations, weights)
    return list(metrics.values())


def together(world, weights, names=NAMES):
    return [row for metric in filled(names, world, world.observations(), weights) for row in metric.rows()]


def keyed(rows):
    return {tuple(row[:5]): Row(*row) for row in rows}


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
        fill({name: metric}, wordy_world.observations((5, 7)), weights)
    assert held(metric) == before == promised == metric.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_shared_samples_of_tokens_exist_before_the_first_batch(name, wordy_world, weights):
    """So that the check of memory counts them."""
    setup = wordy_world.setup()
    metric = METRICS[name](setup)
    existing = set(setup.reservoirs)
    fill({name: metric}, wordy_world.observations(), weights)
    metric.rows()
    assert set(setup.reservoirs) == existing


@pytest.mark.parametrize("name", NAMES)
def test_a_reset_starts_afresh(name, wordy_world, weights):
    metric = METRICS[name](wordy_world.setup())
    other = wordy_world.with_states(residual=wordy_world.states["residual"] ** 2)
    fill({name: metric}, other.observations(), weights)
    metric.rows()
    metric.reset()
    fill({name: metric}, wordy_world.observations(), weights)
    assert keyed(metric.rows()) == keyed(together(wordy_world, weights, (name,)))


def measured(path):
    """Rows and influences of every measure of each scenario, over what both processes saw."""
    found, rank = [], distributed.get_rank()
    for world, names, weights, split, first in pickle.loads(path.read_bytes()):
        batches = list(world.observations(split))  # so many of the first ones go to rank 0
        metrics = filled(names, world, *((batches[:first], weights[:4]), (batches[first:], weights[4:]))[rank])
        rows = [tuple(row) for metric in metrics for row in metric.rows()]
        found.append((rows, [tuple(influence) for metric in metrics for influence in metric.influences()]))
    return found


def test_two_processes_say_what_one_says(wordy_world, ragged_world, weights, tmp_path, same_rows, two_processes):
    no_coherence = [name for name in NAMES if name != "coherence"]
    capped = ragged_world.replace(options={"reservoir_tokens": 40, "entropy_sequences": 5})
    parts = (
        (wordy_world, NAMES, weights, (5, 1, 4, 2), 1),
        (capped, no_coherence, weights, (3, 3, 5, 1), 3),
        (wordy_world, NAMES, weights, (12,), 1),  # the second process has nothing to read
    )
    (tmp_path / "worlds").write_bytes(pickle.dumps(parts))
    for found in two_processes(measured, tmp_path / "worlds"):
        for (rows, influences), (world, names, *_) in zip(found, parts, strict=True):
            alone = filled(names, world, world.observations(), weights)
            expected = [row for metric in alone for row in metric.rows()]
            same_rows(keyed(rows), keyed(expected), rtol=1e-6, atol=1e-6)
            whole = [influence for metric in alone for influence in metric.influences()]
            assert [influence[:5] for influence in influences] == [influence[:5] for influence in whole]
            for influence, one in zip(influences, whole, strict=True):
                assert influence[5] == pytest.approx(one.values, rel=1e-5, abs=1e-7, nan_ok=True), one

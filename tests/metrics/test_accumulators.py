"""What holds for every measure: registry entry, bounded memory, one pass for all, any number of processes."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchmetrics import Metric

from fulldepth.metrics import METRICS, Row, Setup
from fulldepth.metrics.displacement import BINS

HERE = Path(__file__).parent
OF_BOXES = ("average_precision",)
"""Measures of detectors, which read predicted and true boxes instead of tokens."""
NAMES = tuple(name for name in METRICS if name not in OF_BOXES)
ISSUE = (
    "displacement jump_rate coherence cosine cka norm_ratio lens_accuracy lens_loss saturation effective_depth nc1 "
    "renyi_entropy separability spectral_norm mmd retrieval_weight expected_retrieval stream_mixing"
)
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
    states = [getattr(owner, name) for owner in owners for name in owner._defaults]
    return sum(t.nbytes for state in states for t in (state if isinstance(state, list) else [state]))


def test_the_registry_is_the_issue_and_each_measure_has_its_tests():
    assert sorted(METRICS) == sorted((*ISSUE.split(), *OF_BOXES))
    for name, measure in METRICS.items():
        assert measure.name == name
        assert "def test_" in (HERE / f"test_{name}.py").read_text(encoding="utf-8")
    assert {path.stem for path in HERE.glob("test_*.py")} == {
        *(f"test_{name}" for name in METRICS),
        "test_accumulators",
        "test_coverage",
        "test_errors",
        "test_memory",
        "test_probe",
        "test_reservoir",
    }


def test_every_row_has_its_measure_and_a_declared_unit(wordy_world, weights):
    rows = together(wordy_world.replace(options={"reservoir_tokens": 60}), weights)
    assert {row.measure for row in rows} == set(NAMES)
    for row in rows:
        bare = row.statistic.removesuffix(":no-first")
        assert row.unit == METRICS[row.measure].units[bare], row
        assert row.unit in {"1", "%", "nats", "tokens", "layers"}, row
        assert type(row.value) is float, row
        assert type(row.count) is int, row
        assert row.count > 0, row
        assert row.layer is None or type(row.layer) is int, row
    emitted = {(row.measure, row.statistic.removesuffix(":no-first")) for row in rows}
    assert emitted == {(name, statistic) for name in NAMES for statistic in METRICS[name].units}
    assert {row.measure for row in rows if row.statistic.endswith(":no-first")} == TWINS


def test_under_a_policy_without_first_tokens_there_is_no_twin(wordy_world, weights):
    counted = wordy_world.counted.clone()
    counted[:, 0] = False
    rows = together(wordy_world.replace(counted=counted, first_tokens=False), weights)
    assert not [row for row in rows if row.statistic.endswith(":no-first")]
    twins = {(*row[:4], row.statistic.removesuffix(":no-first")): row for row in together(wordy_world, weights)}
    for row in rows:
        if row.measure in TWINS:
            assert (row.value, row.count) == (pytest.approx(twins[row[:5]].value, abs=1e-6), twins[row[:5]].count)


def test_the_last_token_alone_can_be_counted(ragged_world, weights, same_rows):
    last = ragged_world.mask.sum(1) - 1
    counted = torch.nn.functional.one_hot(last, 15).bool()
    world = ragged_world.replace(counted=counted)
    names = [name for name in NAMES if name != "coherence"]
    rows = keyed(together(world, weights, names))
    assert rows["displacement", "residual", 1, None, "mean"].count == 12
    assert rows["cosine", "residual", 0, 3, "mean:no-first"].count == 12, "no sequence has one token only"
    same_rows(keyed(together(world, weights, names, (5, 1, 4, 2))), rows, rtol=1e-5, atol=1e-6)


def test_one_pass_for_all_says_what_each_says_alone(wordy_world, weights, same_rows):
    alone = [row for name in NAMES for row in together(wordy_world, weights, (name,))]
    same_rows(keyed(together(wordy_world, weights, split=(5, 1, 4, 2))), keyed(alone), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_bounded_and_said_beforehand(name, wordy_world, weights):
    wordy_world = wordy_world.replace(options={"reservoir_tokens": 60})
    metric = METRICS[name](wordy_world.setup())
    promised, before = metric.nbytes, held(metric)
    for _ in range(3):
        fill({name: metric}, wordy_world, weights, (5, 7))
    assert held(metric) == before == promised == metric.nbytes


@pytest.mark.parametrize("name", NAMES)
def test_what_torchmetrics_keeps_beside_the_states_is_small(name, wordy_world, weights):
    """The storage behind every tensor of a metric, before an update, after it, and after a reset."""

    def stored():
        owners = [module for module in metric.modules() if isinstance(module, Metric)]
        tensors = [t for owner in owners for t in (*owner.metric_state.values(), *owner._defaults.values())]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values()), len(tensors)

    metric = METRICS[name](wordy_world.setup())
    fresh = {key: value.clone() for key, value in metric.metric_state.items()}
    for step in (lambda: None, lambda: fill({name: metric}, wordy_world, weights, (12,)), metric.reset):
        step()
        total, count = stored()
        shared = sum(reservoir.nbytes for reservoir in metric.setup.reservoirs.values())
        assert metric.nbytes <= total <= metric.nbytes + shared + 16 * count
    assert all(torch.equal(value, fresh[key]) for key, value in metric.metric_state.items())


def test_bytes_held_by_closed_form():
    """L = 4 layers, D = 32, K = 7 frequencies of T = 12 tokens, G = 32 groups; 8 bytes a number, 16 if complex."""
    setup = Setup(
        num_layers=4,
        width=32,
        value_width=16,
        chained=False,
        routed_heads=2,
        num_streams=3,
        sequence_length=12,
        num_sequences=48,
        num_tokens=500,
        words=("a", "b", "c"),
        projections=("q", "k"),
        reservoir_tokens=100,
        entropy_sequences=7,
        head_shares=((0.5, 0.5),) * 4,
    )
    assert setup.groups == 32
    cells, kept = 32 * 7, 500  # channels times frequencies; occurrences of a word
    lens, per_layer = 8 * (4 + 2) * 32, 2 * 8 * 4
    assert {name: METRICS[name](setup).nbytes for name in NAMES} == {
        "displacement": 2 * 5 * (BINS + 2 * 32 + 1) * 8,
        "jump_rate": per_layer * 32,
        "coherence": cells * (2 * 4 * 16 + (5 + 4 + 4) * 8 + (4 * 16 + 5 * 8) * 16) + 8 * 16,
        "cosine": 2 * 2 * 5**2 * 8,
        "norm_ratio": 2 * per_layer * 32,
        "lens_accuracy": lens,
        "lens_loss": lens,
        "saturation": 8 * 4 * 32,
        "effective_depth": 8 * 5 * 32,
        "renyi_entropy": 320 * 32,
        "separability": 3 * (kept * (4 * (5 * 32 + 4 * 16) + 2 * 24) + 2 * 8),
        "spectral_norm": 5 * 8 * 2 * 4,
        "retrieval_weight": 8 * 4 * (2 * 2 * 4 + 1),
        "expected_retrieval": per_layer,
        "stream_mixing": 832,
        # sums of products of 15 pairs of layers, and the first tokens of 48 sequences
        "cka": setup.groups * 8 * (1 + 5 * 32 + 5 + 5 * 5 * 32 + 5 * 5 + 15 * 32 * 32)
        + 5 * 32 * 8  # the centre
        + 48 * 5 * 32 * 4,
        **dict.fromkeys(("nc1", "mmd"), 0),
    }


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


@pytest.mark.parametrize("name", NAMES)
def test_rows_can_be_read_while_more_data_come(name, wordy_world, weights, same_rows):
    metric = METRICS[name](wordy_world.setup())
    for index, observation in enumerate(wordy_world.observations((6, 6))):
        for matrix in weights[3 * index : 3 * index + 3] if name == "spectral_norm" else ():
            metric.update(*matrix)
        if name != "spectral_norm":
            metric.update(observation)
        rows = metric.rows()
    same_rows(keyed(rows), keyed(together(wordy_world, weights, (name,))), rtol=1e-5, atol=1e-6)


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


def test_two_processes_say_what_one_says(wordy_world, ragged_world, weights, tmp_path, same_rows):
    no_coherence = [name for name in NAMES if name != "coherence"]
    capped = ragged_world.replace(options={"reservoir_tokens": 40, "entropy_sequences": 5})
    parts = (
        (wordy_world, NAMES, (5, 1, 4, 2), 1),
        (capped, no_coherence, (3, 3, 5, 1), 3),
        (wordy_world, NAMES, (12,), 1),  # the second process has nothing to read
    )
    torch.save([scenario(w, names, weights, split, n) for w, names, split, n in parts], tmp_path / "scenarios.pt")
    command = [sys.executable, str(HERE / "one_of_two.py"), str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in (0, 1)]
    try:
        errors = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], "\n".join(errors)
    for rank in (0, 1):
        found = json.loads((tmp_path / f"rows-{rank}.json").read_text())
        for (rows, influences), (world, names, _, _) in zip(found, parts, strict=True):
            got = {tuple(row[:5]): Row(*row) for row in rows}
            same_rows(got, keyed(together(world, weights, names)), rtol=1e-6, atol=1e-6)
            alone = [influence for metric in filled(world, weights, names) for influence in metric.influences()]
            assert [influence[:5] for influence in influences] == [list(influence[:5]) for influence in alone]
            for influence, expected in zip(influences, alone, strict=True):
                assert influence[5] == pytest.approx(expected.values, rel=1e-5, abs=1e-7, nan_ok=True), expected

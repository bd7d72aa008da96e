"""Rules and the choice of a threshold, against plain code and exhaustive search."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from exit import plain
from fulldepth.early_exit import Exit, Readings, calibrated, candidates, outcome, splits
from fulldepth.errors import FulldepthError
from fulldepth.execution.decoding import certainty, theoretical_speedup

RULES = ("confidence", "margin", "entropy", "patience")


def readings(logits, targets, per_sequence=1, clusters=None):
    """The readings of `logits: [L+1, N, C]`."""
    count = len(targets)
    return Readings(
        logits.argmax(-1),
        {rule: torch.stack([certainty(layer, rule) for layer in logits]) for rule in RULES[:3]},
        torch.arange(count) // per_sequence,
        torch.arange(count) // per_sequence if clusters is None else clusters,
        torch.stack([-layer.log_softmax(-1)[torch.arange(count), targets] for layer in logits]),
        targets,
    )


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    layers=st.integers(1, 6),
    classes=st.integers(2, 5),
    scale=st.sampled_from([0.0, 1.0, 5.0, 1e3]),
    rule=st.sampled_from(RULES),
    threshold=st.one_of(st.sampled_from([1e-9, 0.5, 1.0, 1 / 3, 2 / 3]), st.floats(0.01, 1.0)),
    data=st.data(),
)
def test_layers_are_those_of_a_plain_loop(seed, layers, classes, scale, rule, threshold, data):
    logits = scale * torch.randn(layers, 9, classes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    min_layer = data.draw(st.integers(1, layers))
    values = torch.stack([certainty(layer, "margin" if rule == "patience" else rule) for layer in logits])
    assert bool(((values >= -1e-12) & (values <= 1)).all())
    got = Exit(rule, threshold, min_layer, layers).layers(values, logits.argmax(-1))
    margins = [] if rule == "patience" else (values - threshold).abs().flatten().tolist()
    if min(margins, default=1.0) > 1e-9:  # rounding decides nothing
        expected = [plain.leave(logits[:, i].tolist(), rule, threshold, min_layer) for i in range(9)]
        assert got.tolist() == expected
    assert int(got.min()) >= min(min_layer, layers)
    assert Exit(rule, 1.0, min_layer, layers).layers(values, logits.argmax(-1)).tolist() == [layers] * 9
    lower = Exit(rule, threshold / 2, min_layer, layers).layers(values, logits.argmax(-1))
    assert bool((lower <= got).all())


def test_the_speed_up_of_the_paper():
    assert theoretical_speedup(torch.tensor([0, 0, 5])) == 1
    assert theoretical_speedup(torch.tensor([5, 0, 0])) == 3
    assert theoretical_speedup(torch.tensor([1, 2, 3])) == pytest.approx(3 * 6 / (1 + 4 + 9))


def world(seed, count=400, layers=4, classes=3):
    """Readings whose later layers are better and surer."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(classes, (count,), generator=generator)
    signal = torch.nn.functional.one_hot(targets, classes).double()
    noise = torch.randn(layers + 1, count, classes, dtype=torch.float64, generator=generator)
    strength = torch.linspace(0.2, 2.5, layers + 1, dtype=torch.float64)[:, None, None]
    return readings(strength * signal * 2 + noise, targets)


@pytest.mark.parametrize("rule", RULES)
def test_the_threshold_is_the_lowest_that_keeps_the_accuracy(rule):
    data = world(0)
    target = 0.02
    tried = sorted(candidates(data, rule, 1, [0.5, 0.9]), reverse=True)
    drops = {t: outcome(data, Exit(rule, t, 1, 4)).drop.value for t in tried}
    fine = [t for index, t in enumerate(tried) if all(drops[u] <= target for u in tried[: index + 1])]
    assert calibrated(data, rule, 1, [0.5, 0.9], target) == min(fine)
    assert drops[1.0] == 0


def test_no_threshold_is_chosen_where_none_keeps_the_accuracy():
    """Every layer but the last is sure of a wrong class."""
    targets = torch.zeros(50, dtype=torch.int64)
    logits = torch.zeros(4, 50, 3, dtype=torch.float64)
    logits[:3, :, 1], logits[3, :, 0] = 40.0, 40.0
    assert calibrated(readings(logits, targets), "confidence", 1, [0.5, 0.99], 0.01) == 1.0


def test_splits_share_no_sequence():
    data = readings(torch.randn(3, 60, 3), torch.randint(3, (60,)), per_sequence=5)
    parts = splits(data, 0.25, 0)
    one, other = (set(parts[name].sequence.tolist()) for name in ("calibration", "report"))
    assert len(one) == 3
    assert one | other == set(range(12))
    assert not one & other
    assert splits(data, 0.25, 1)["report"].sequence.tolist() != parts["report"].sequence.tolist()
    with pytest.raises(FulldepthError, match="give two or more"):
        splits(readings(torch.randn(3, 5, 3), torch.randint(3, (5,)), per_sequence=5), 0.5, 0)


def test_standard_errors_are_those_of_means_over_sequences():
    data = world(3, count=12)
    found = outcome(data, Exit("confidence", 0.6, 1, 4))
    correct = (
        found.layers.new_tensor([data.prediction[layer, i] for i, layer in enumerate(found.layers)]) == data.target
    )
    expected = correct.double().std() / 12**0.5
    assert found.accuracy.error == pytest.approx(float(expected))

"""Memory of the accumulators beside their states: parts of the sample are copied, and never all of it at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fulldepth.execution.memory import AllocationTracker
from fulldepth.metrics import METRICS, Setup, cosine, hsic, reservoir

LAYERS, WIDTH, LENGTH, SEQUENCES = 8, 64, 64, 16


@pytest.fixture
def filled(monkeypatch):
    """Accumulators of cosine and CKA that share a full reservoir, and its bytes."""
    monkeypatch.setattr(cosine, "BLOCK", 1 << 12)
    monkeypatch.setattr(hsic, "BLOCK", 1 << 14)
    monkeypatch.setattr(reservoir, "CHUNK", 16)
    setup = Setup(
        LAYERS, WIDTH, sequence_length=LENGTH, num_sequences=SEQUENCES, num_tokens=LENGTH * SEQUENCES,
        reservoir_tokens=LENGTH * SEQUENCES,
    )  # fmt: skip
    measures = {name: METRICS[name](setup) for name in ("cosine", "cka")}
    shared = setup.reservoir("residual")
    tokens = torch.randn(LAYERS + 1, LENGTH * SEQUENCES, WIDTH, generator=torch.Generator().manual_seed(0))
    keys = (torch.arange(SEQUENCES)[:, None] << 24 | torch.arange(LENGTH)).flatten()
    seen = SimpleNamespace(tokens=tokens, keys=keys, token_labels=torch.full_like(keys, -100))
    size = tokens.nbytes
    with AllocationTracker([tokens, keys, *shared.metric_state.values()]) as tracker:
        shared.observe(seen, "residual")
    for measure in measures.values():
        measure._update_count = 1
    return measures, shared, size, tracker.peak


def test_offered_tokens_are_copied_in_parts(filled):
    *_, size, peak = filled
    assert peak < 0.1 * size


@pytest.mark.parametrize(("name", "most"), [("cosine", 0.5), ("cka", 1.8)])
def test_rows_hold_at_most_one_copy_of_the_sample_and_parts(filled, name, most):
    measures, shared, size, _ = filled
    shared.compute()  # sorts the tokens where they are
    existing = [*shared.metric_state.values(), *measures[name].metric_state.values()]
    with AllocationTracker(existing) as tracker:
        result = measures[name].compute()
    assert result["count"].max() == LENGTH * SEQUENCES
    assert tracker.peak < most * size


def test_the_sample_is_the_reservoirs_own_memory(filled):
    _, shared, size, _ = filled
    with AllocationTracker([*shared.metric_state.values()]) as tracker:
        sample = shared.compute()
    assert tracker.peak < 0.35 * size
    assert sample.features.untyped_storage().data_ptr() == shared.features.untyped_storage().data_ptr()
    assert sample.keys.tolist() == sorted(sample.keys.tolist())

"""The order in which models take turns."""

from __future__ import annotations

import pytest

from fulldepth.execution.latency import order


@pytest.mark.parametrize("count", [2, 3, 5])
def test_everybody_is_first_and_runs_once_a_round(count) -> None:
    rounds = [order(count, number, seed=4) for number in range(2 * count)]
    assert all(sorted(found) == list(range(count)) for found in rounds)
    assert sorted(found[0] for found in rounds[:count]) == list(range(count))
    assert len({tuple(found) for found in rounds}) >= count
    assert rounds == [order(count, number, seed=4) for number in range(2 * count)]

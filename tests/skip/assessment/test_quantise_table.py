"""The verdict on the order of quantisation and removal: paired, by document, and only beyond its error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fulldepth.skip.assessment.quantise_table import FIRST, ORIGINAL, SECOND, Combination, _order
from scipy import stats

from fulldepth.results import Finding


def verdict(gap: np.ndarray, tokens: np.ndarray, documents: np.ndarray) -> Finding:
    """Of two orders whose summed losses differ by `gap` in each sequence."""
    plan: Any = SimpleNamespace(blocks=[2])
    anatomy: Any = None
    sums = {ORIGINAL: 2.0 * tokens, FIRST: 3.0 * tokens + gap, SECOND: 3.0 * tokens}
    return _order({name: Combination(name, anatomy, plan, of, tokens, documents) for name, of in sums.items()})


def drawn(documents: int, truth: float, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Windows, 4 to 16 a document, whose difference has an intraclass correlation of 0.5."""
    owner = np.repeat(np.arange(documents), generator.integers(4, 17, documents))
    tokens = generator.integers(60, 129, len(owner)).astype(float)
    noise = generator.normal(size=documents)[owner] + generator.normal(size=len(owner))
    return tokens * (truth + 0.1 * noise), tokens, owner


@pytest.mark.parametrize("documents", [5, 20])
def test_equal_orders_are_not_told_apart(documents) -> None:
    """Before, a gap above 1 % of the cost of both was a verdict: most of these."""
    generator, draws = np.random.default_rng(0), 1000
    found = [verdict(*drawn(documents, 0.0, generator)) for _ in range(draws)]
    better = sum("is better" in str(one.sentence) for one in found)
    assert stats.binom.sf(better - 1, draws, 0.06) > 0.001
    none = next(one for one in found if "is better" not in str(one.sentence))
    assert str(none.sentence).startswith("No measurable difference (at most 0.")
    assert sum(abs(one.value or 0) > 0.01 for one in found) > 0.6 * draws


def test_a_difference_is_found_with_the_error_of_its_formula() -> None:
    gap, tokens, documents = drawn(20, 0.2, np.random.default_rng(1))
    found = verdict(gap, tokens, documents)
    rate, squares = sum(gap) / sum(tokens), 0.0
    for owner in set(documents.tolist()):
        at = np.flatnonzero(documents == owner)
        squares += sum(gap[i] - rate * tokens[i] for i in at) ** 2
    assert found.value == pytest.approx(rate)
    assert found.standard_error == pytest.approx((20 / 19 * squares) ** 0.5 / sum(tokens))
    assert str(found.sentence).startswith(
        f"Quantising last is better by {rate:.4f} nats ± {found.standard_error:.4f}: "
    )
    order = np.random.default_rng(2).permutation(len(gap))
    again = verdict(gap[order], tokens[order], 9**17 - 7 * documents[order])
    assert (again.value, again.standard_error) == pytest.approx((found.value, found.standard_error))


def test_two_documents_give_no_verdict() -> None:
    gap, tokens, documents = drawn(2, 5.0, np.random.default_rng(1))
    found = verdict(gap, tokens, documents)
    assert str(found.sentence).startswith("No verdict from 2 held-out documents on the difference between the orders: ")
    assert (found.standard_error, found.no_standard_error) == (None, "2 held-out documents")

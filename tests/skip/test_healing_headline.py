from types import SimpleNamespace

import numpy as np
import pytest

from fulldepth.execution.heldout import HeldoutLosses
from fulldepth.skip.healed import healing_headline
from metrics.oracle import of_ratio


def test_findings_of_a_healing_are_differences_from_the_model_that_they_name():
    tokens, documents, rng = np.full(12, 10.0), np.arange(12), np.random.default_rng(0)
    levels = {"original": 2.0, "removed": 3.0, "refitted": 2.5, "trained": 2.2, "control": 1.9}
    sums = {label: 10 * (level + rng.normal(0, 0.01, 12)) for label, level in levels.items()}
    losses = HeldoutLosses(sums, tokens, documents)
    healing = SimpleNamespace(
        readings=dict.fromkeys(("loss", "kl", "greedy_agreement"), losses),
        examples=SimpleNamespace(meta={"name": "texts", "kind": "text"}),
    )
    found = dict(healing_headline(healing))
    pairs = {f"loss_added {label}": (label, "original") for label in levels if label != "original"}
    pairs |= {"net_cost": ("trained", "control"), "healing": ("trained", "removed")}
    assert found.keys() == pairs.keys()
    for name, (first, second) in pairs.items():
        gap = sums[first] - sums[second]
        assert found[name].value == pytest.approx(gap.sum() / 120)
        assert found[name].standard_error == pytest.approx(of_ratio(documents.tolist(), gap, tokens))
        assert f"{found[name].value:+.4f} against" in found[name].sentence

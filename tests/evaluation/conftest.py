"""What the tests of evaluation share."""

import pytest


@pytest.fixture(autouse=True)
def _no_description_of_the_machine(monkeypatch):
    """`simple_evaluate` adds seconds of it to every result."""
    pytest.importorskip("lm_eval")
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)

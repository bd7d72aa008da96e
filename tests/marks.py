"""Marks of test cases."""

import pytest


def thorough(*case):
    """A case that runs in `make test-all` only."""
    return pytest.param(*case, marks=pytest.mark.thorough)

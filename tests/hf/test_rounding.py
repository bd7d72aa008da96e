"""Comparison of states up to rounding, against numpy on whole arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fulldepth.hf import rounding
from fulldepth.hf.rounding import check_close, is_close, relative_error
from refusals import refused
from tiny_models import seeded


@pytest.mark.parametrize("place", [0, 5, 22])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_the_largest_of_all_parts_over_the_largest_entry_of_all(place, dtype, monkeypatch):
    monkeypatch.setattr(rounding, "COMPARED_AT_ONCE", 4)
    expected = torch.randn(23, generator=seeded(place)).to(dtype)
    expected[11] = -50.0
    actual = expected.clone()
    actual[place] += 3.0
    numbers, others = (tensor.double().numpy() for tensor in (actual, expected))
    error = np.abs(numbers - others).max() / np.abs(others).max()
    assert relative_error(actual, expected) == pytest.approx(error, rel=1e-12)
    assert is_close(actual, expected) == (dtype == torch.bfloat16 and error <= 6e-2)
    with refused(f"^layer 3 misses its state by {error:.1e} .relative.; load it again$"):
        check_close("layer 3 misses its state", actual, expected, torch.float32, "; load it again")
    actual[place] = torch.nan
    assert not is_close(actual, expected)
    with refused("by nan"):
        check_close("it misses", actual, expected)

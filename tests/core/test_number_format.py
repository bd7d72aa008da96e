"""Standard errors in texts: their digits, and none where none is known."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from fulldepth.core.number_format import plus_minus


@given(st.floats(1e-9, 1e6))
def test_an_error_has_two_digits_at_least_and_no_exponent(error):
    mark, digits = plus_minus(error).split()
    assert mark == "±"
    assert "e" not in digits
    assert math.isclose(float(digits.replace(",", "")), error, rel_tol=0.05)


def test_an_unknown_error_is_not_written():
    assert {plus_minus(error) for error in (None, math.nan, math.inf)} == {""}
    assert [plus_minus(error) for error in (0.0, 0.00432, 0.12, 99.4, 99.6, 1234.5)] == [
        "± 0",
        "± 0.0043",
        "± 0.12",
        "± 99",
        "± 100",
        "± 1,234",
    ]
    assert plus_minus(0.00432, 3) == "± 0.004"

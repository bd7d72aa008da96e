"""Standard errors in texts: their digits, and none where none is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulldepth.core.number_format import (
    bytes_in_words,
    in_percent,
    in_percent_with_error,
    plus_minus,
    rounded,
    to_decimals,
)
from fulldepth.core.thresholds import degrees


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


@given(st.integers(0, 10**15))
def test_bytes_are_written_with_a_unit_that_shows_them(count):
    """Read back with the SI's factors: right to the last decimal, and no size but 0 reads as 0."""
    number, unit = bytes_in_words(count).split()
    factor = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}[unit]
    assert math.isclose(float(number) * factor, count, abs_tol=0.0051 * factor if factor > 1 else 0)
    assert (float(number) == 0) == (count == 0)


def test_examples_of_bytes_in_words():
    assert [bytes_in_words(count) for count in (0, 980, 1000, 1_460_000, 15.2e9, 2.5e12)] == [
        "0 bytes",
        "980 bytes",
        "1.00 kB",
        "1.46 MB",
        "15.20 GB",
        "2.50 TB",
    ]


def test_numbers_below_zero_and_small_ones():
    assert [rounded(value) for value in (-51_234.4, -999.94, 0.12817)] == ["-51,234", "-999.9", "0.1282"]
    assert [rounded(value, "+.3g") for value in (51_234.4, 0.5, -1000.0)] == ["+51,234", "+0.5", "-1,000"]
    assert [to_decimals(value) for value in (0.0, 0.0004, 0.0006, 1.25)] == ["0.000", "below 0.0005", "0.001", "1.250"]


@pytest.mark.parametrize("angle", [0.0, 16.3, 42.0, 90.0, 180.0])
def test_the_angle_of_a_displacement(angle):
    """Of two vectors at this angle."""
    first, second = np.array([1.0, 0.0]), np.array([math.cos(math.radians(angle)), math.sin(math.radians(angle))])
    assert degrees((1 - first @ second) / 2) == pytest.approx(angle)


@given(st.integers(1, 10**6), st.data())
def test_a_share_in_per_cent_is_right_to_its_decimal_and_reads_as_none_or_all_only_where_it_is(of, data):
    count = data.draw(st.integers(0, of))
    text = in_percent(count / of).removesuffix(" %")
    bound, _, number = text.rpartition(" ")
    if bound:
        assert 0 < count < of
        assert (100 * count / of < float(number)) == (bound == "below")
    else:
        assert abs(float(number) - 100 * count / of) <= 0.0501
        assert (number in ("0", "100")) == (count in (0, of))


def test_examples_of_shares():
    assert [in_percent(share) for share in (0, 1 / 40, 0.46, 0.975, 1 - 1e-4, 1e-5, 1)] == [
        "0 %",
        "2.5 %",
        "46 %",
        "97.5 %",
        "above 99.9 %",
        "below 0.1 %",
        "100 %",
    ]


def test_a_share_has_as_many_decimals_as_its_error():
    pairs = ((0.7, 0.02), (0.4638, 0.0093), (0.3, 0.0004), (0.3, 0.0), (0.3, 1e-17), (0.3, math.nan))
    assert [in_percent_with_error(*pair) for pair in pairs] == [
        "70.0 ± 2.0 %",
        "46.4 ± 0.9 %",
        "30.00 ± 0.04 %",
        "30.0 ± 0.0 %",
        "30.0 ± 0.0 %",
        "30.0 %",
    ]

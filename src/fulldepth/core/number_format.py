"""How numbers and their standard errors are written in texts."""

from __future__ import annotations

import math


def rounded(value: float, form: str = ".4g") -> str:
    """A number in Python's format `form`, from 1,000 on with thousands separators: `0.1282`, `12.5`, `51,200`."""
    sign = "+" if form.startswith("+") else ""
    return f"{value:{sign},.0f}" if abs(value) >= 1000 else f"{value:{form}}"


def plus_minus(error: float | None, decimals: int | None = None) -> str:
    """A standard error behind its number: `± 0.0043`, with `decimals` decimals or (None) two significant digits.

    Empty if the error is not known (None, NaN or infinite).
    """
    if error is None or not math.isfinite(error):
        return ""
    if decimals is not None:
        return f"± {error:.{decimals}f}"
    if error >= 99.5:  # more digits than two, rather than an exponent
        return f"± {error:,.0f}"
    text = f"{error:.2g}"
    return f"± {error:.{1 - math.floor(math.log10(error))}f}" if "e-" in text else f"± {text}"


def with_error(value: float, error: float, decimals: int) -> str:
    """A number and its standard error with as many decimals: `0.128 ± 0.001`, `0.1500 ± 0.0001`.

    There are `decimals` decimals, or up to three more if the error's first digit needs them; an error that needs more
    is rounding noise. Without a known error, the number stands alone.
    """
    if not math.isfinite(error):
        return f"{value:.{decimals}f}"
    needed = -math.floor(math.log10(error)) if error > 0 else decimals
    digits = needed if decimals < needed <= decimals + 3 else decimals
    return f"{value:.{digits}f} {plus_minus(error, digits)}"


def bytes_in_words(count: float) -> str:
    """A number of bytes in the largest decimal unit that it fills: `980 bytes`, `1.46 MB`, `15.20 GB`."""
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} bytes"


def to_decimals(value: float, decimals: int = 3) -> str:
    """A number of at least 0 with a fixed number of decimals; `below 0.0005` where they would all be zeros."""
    least = 0.5 * 10.0**-decimals
    return f"below {least:.{decimals + 1}f}" if 0 < value < least else f"{value:.{decimals}f}"


def in_percent(share: float) -> str:
    """A share in per cent, with one decimal unless it is whole: `46 %`, `2.5 %`.

    A share that is neither 0 nor 1 reads as neither: `below 0.1 %`, `above 99.9 %`.
    """
    number = f"{100 * share:.1f}".removesuffix(".0")
    if number == "0" and share > 0:
        return "below 0.1 %"
    return "above 99.9 %" if number == "100" and share < 1 else f"{number} %"


def in_percent_with_error(share: float, error: float) -> str:
    """A share in per cent and its standard error, as `with_error` writes them: `46.2 ± 1.1 %`, `0.30 ± 0.04 %`."""
    return f"{with_error(100 * share, 100 * error, 1)} %"

"""What fulldepth refuses."""

from contextlib import contextmanager

import pytest

from fulldepth.core.errors import FulldepthError


@contextmanager
def refused(words=None, *parts, most=1000):
    """`with refused("layer 9"):` passes if its block raises a `FulldepthError` of fewer than `most` characters that
    matches the words, a regular expression, and has all parts as they stand.
    """
    with pytest.raises(FulldepthError, match=words) as caught:
        yield caught
    message = str(caught.value)
    assert len(message) < most
    for part in parts:
        assert part in message, message


def refuses(load, given, *words, **options):
    """`load(given, **options)` is refused in one short line that has all the words."""
    with refused(None, *words) as caught:
        load(given, **options)
    assert "\n" not in str(caught.value)

"""What fulldepth refuses."""

import pytest

from fulldepth.errors import FulldepthError


def refused(words=None):
    """`with refused("layer 9"):` passes if its block raises a `FulldepthError` that matches the words."""
    return pytest.raises(FulldepthError, match=words)


def refuses(load, given, *words, **options):
    """`load(given, **options)` is refused in one short line that has all the words."""
    with refused() as caught:
        load(given, **options)
    message = str(caught.value)
    assert len(message) < 1000
    assert "\n" not in message
    for word in words:
        assert word in message, message

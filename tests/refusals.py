"""What fulldepth refuses."""

from contextlib import contextmanager

import pytest

from fulldepth.errors import FulldepthError


@contextmanager
def refused(words=None):
    """`with refused("layer 9"):` passes if its block raises a short `FulldepthError` that matches the words."""
    with pytest.raises(FulldepthError, match=words) as caught:
        yield caught
    assert len(str(caught.value)) < 1000


def refuses(load, given, *words, **options):
    """`load(given, **options)` is refused in one short line that has all the words."""
    with refused() as caught:
        load(given, **options)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message

"""JSON files, read and changed; any JSON value."""

import json

from hypothesis import strategies as st


def read_json(path):
    """What a file holds."""
    return json.loads(path.read_text())


def write_json(path, value):
    """Make or replace a file."""
    path.write_text(json.dumps(value))


def change_json(path, **entries):
    """Change or add entries of a file's mapping."""
    write_json(path, read_json(path) | entries)


def any_value(floats=None):
    """Hypothesis' strategy for JSON values; of finite numbers, if no others are given."""
    floats = st.floats(allow_nan=False, allow_infinity=False) if floats is None else floats
    return st.recursive(
        st.none() | st.booleans() | st.integers() | floats | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=20,
    )

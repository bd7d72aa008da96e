"""JSON files, read and changed."""

import json


def read_json(path):
    """What a file holds."""
    return json.loads(path.read_text())


def write_json(path, value):
    """Make or replace a file."""
    path.write_text(json.dumps(value))


def change_json(path, **entries):
    """Change or add entries of a file's mapping."""
    write_json(path, read_json(path) | entries)

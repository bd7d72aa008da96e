"""`Finding` and `provenance`, against JSON written by hand and the versions that the packages themselves state."""

from __future__ import annotations

import json
import math
import sys
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import torch

import fulldepth
from fulldepth.errors import FulldepthError
from fulldepth.results import Finding, Results, finite, provenance, tabulate

TABLE = tabulate([("jump_rate", "residual", 4, None, "value", 1.5, 10, "%")])
WRITTEN = {
    Finding(2, "layers"): '{"value": 2, "unit": "layers"}',
    Finding(None, "nats", "Unknown."): '{"value": null, "unit": "nats", "sentence": "Unknown."}',
    Finding(math.nan, "x", ""): '{"value": null, "unit": "x", "sentence": ""}',
    Finding(1.5, "%", "So much.", 0.25): '{"value": 1.5, "unit": "%", "standard_error": 0.25, "sentence": "So much."}',
    Finding(29, "layers", interval=(24, 30)): '{"value": 29, "unit": "layers", "interval": [24, 30]}',
    Finding(1.5, sentence="So much.", no_standard_error="one sequence"): (
        '{"value": 1.5, "unit": "1", "standard_error": null, "sentence": "So much.", '
        '"no_standard_error": "one sequence"}'
    ),
}


@pytest.mark.parametrize("finding", WRITTEN, ids=str)
def test_a_finding_is_the_entry_of_a_headline(finding, tmp_path):
    document = {"kind": "measure", "headline": {"a": finding}}
    assert json.dumps(finite(document)["headline"]["a"]) == WRITTEN[finding]
    Results(TABLE, finite(document)).save(tmp_path, page=False)
    assert Results.load(tmp_path).headline == {"a": json.loads(WRITTEN[finding])}


@pytest.mark.parametrize(
    ("entry", "where"),
    [({"unit": "%"}, "value"), ({"value": "high"}, "value"), ({"value": 1, "standard_error": "0.1"}, "standard_error")],
)
def test_an_entry_that_is_no_finding_is_refused(entry, where, tmp_path):
    Results(TABLE, {"kind": "measure", "headline": {"a": entry | {"added later": [1]}}}).save(tmp_path, page=False)
    with pytest.raises(FulldepthError, match=rf"headline\.a\.{where}: "):
        Results.load(tmp_path)


def test_provenance_says_when_and_with_which_versions():
    before = datetime.now(UTC) - timedelta(seconds=1)
    block = provenance("bench", {"rounds": 3}, packages=("torch", "numpy"), seed=7)
    assert before <= datetime.fromisoformat(block.pop("created")) <= datetime.now(UTC)
    python = ".".join(map(str, sys.version_info[:3]))
    stated = {"fulldepth": fulldepth.__version__, "torch": torch.__version__, "numpy": np.__version__, "python": python}
    assert block.pop("versions") == stated
    assert block == {"kind": "bench", "complete": True, "settings": {"rounds": 3}, "seed": 7}
    assert list(provenance("comparison", {}, packages=())["versions"]) == ["fulldepth", "python"]

"""A slice of the fuzzer that fits into every test run; `make fuzz` is the long run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fulldepth
from marks import thorough


@pytest.mark.slow
@pytest.mark.parametrize("cases", [60, thorough(400)])
def test_malformed_input_ends_with_a_message_and_whole_files(tmp_path, cases):
    """Each planted fault is noticed, and no seed of the slice gives a fault.

    In a process of its own: cases are forks, and this one has threads.
    """
    paths = [Path(__file__).parents[1], Path(fulldepth.__file__).parents[1]]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-m", "fuzz", "--planted", "--cases", str(cases), "--root", tmp_path / "fuzz"]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-3000:]}"
    assert f"{cases} cases, 0 failed, 0 planted faults missed." in done.stdout

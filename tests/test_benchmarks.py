"""The benchmarks are not run here; what they import from the package must exist."""

import subprocess
import sys

from places import ROOT

BENCHMARKS = ROOT / "benchmarks"


def test_every_benchmark_can_be_imported():
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    program = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=BENCHMARKS, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr

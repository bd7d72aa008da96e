"""The benchmarks are not run here; what they import from the package must exist, and their own arithmetic be right."""

import importlib
import subprocess
import sys

import numpy as np
import torch
from torch.nn import functional as F

from places import ROOT

BENCHMARKS = ROOT / "benchmarks"


def test_every_benchmark_can_be_imported():
    names = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
    program = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=BENCHMARKS, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_products_of_bfloat16_in_float32_are_those_of_float64_rounded(monkeypatch):
    """A sum of 64 products is rounded once, so it is off by half a unit in the last of 8 bits, and float32's errors."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    products = importlib.import_module("healing_text").Float32Products
    generator = torch.Generator().manual_seed(0)
    states, weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((3, 5, 64), (7, 64), (7,)))
    doubled = [tensor.double().numpy() for tensor in (states, weight, bias)]
    terms = np.abs(doubled[0]) @ np.abs(doubled[1]).T
    for given, added in (((weight,), 0), ((weight, None), 0), ((weight, bias), doubled[2])):
        exact = doubled[0] @ doubled[1].T + added
        with products():
            for _ in range(2):  # the second time with weights that are converted already
                result = F.linear(states, *given)
        assert result.dtype == torch.bfloat16
        error = np.abs(result.double().numpy() - exact)
        assert (error <= 2.0**-8 * np.abs(exact) + 1e-5 * terms).all()
    with products():
        assert torch.equal(F.linear(states.float(), weight.float()), states.float() @ weight.float().T)

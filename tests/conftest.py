"""What every test shares: no network, one thread, seeded randomness, a cache of its own."""

import logging
import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest
from filelock import FileLock

from fulldepth.core.processor import LIMIT, failing_bfloat16

if LIMIT not in os.environ and "PYTEST_XDIST_WORKER" not in os.environ and (failing := failing_bfloat16()) is not None:
    os.environ[LIMIT] = failing[1] or "AVX2"  # read at the first product; inherited by all processes

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # stock models of the tests stay on the CPU; ours go to a visible GPU

import torch

from two_processes import TwoProcesses

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["FULLDEPTH_CACHE"] = tempfile.mkdtemp(prefix="fulldepth-tests-")
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
hypothesis.settings.register_profile("fulldepth", deadline=None)
hypothesis.settings.load_profile("fulldepth")


def pytest_unconfigure():
    """Remove the tokens that tests made."""
    shutil.rmtree(os.environ["FULLDEPTH_CACHE"], ignore_errors=True)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """`made_once(name, make)`: a folder that `make` fills in the first test process that asks for it, for all of them.

    Tests must not change it.
    """
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def folder_of(name, make):
        folder, done = root / f"shared-{name}", root / f"shared-{name}.done"
        with FileLock(root / f"shared-{name}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # of a test process that failed
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return folder_of


@pytest.fixture(scope="session")
def two_processes():
    """`two_processes(function, *arguments)`: the results of a function in each of two processes, see its module."""
    pool = TwoProcesses()
    yield pool
    pool.stop()


class _Deprecations(logging.Handler):
    """Collects what transformers logs about names that it will drop."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        message = record.getMessage()
        if message.startswith("`BlipModel` is going to be deprecated"):
            return  # the class of a tested model, not a name in a call
        if "deprecated" in message or "ignoring" in message:
            self.messages.append(message)


@pytest.fixture(autouse=True)
def no_deprecated_calls():
    """Fails a test in which transformers logs that a name in a call is deprecated, or that it ignores an argument."""
    handler, logger = _Deprecations(), logging.getLogger("transformers")
    logger.addHandler(handler)
    yield
    logger.removeHandler(handler)
    assert not handler.messages


@pytest.fixture
def generator():
    """A seeded source of random tensors."""
    return torch.Generator().manual_seed(0)


@pytest.fixture(scope="session")
def shared_data():
    """Folder of real data sets: `$FULLDEPTH_DATA`, or `shared/data` beside the checkout.

    Absent, the test is skipped; with `$FULLDEPTH_REQUIRE_DATA` (as in CI) it fails.
    """
    beside = Path(__file__).parents[2] / "shared" / "data"
    folder = Path(os.environ.get("FULLDEPTH_DATA") or beside)
    if not folder.is_dir():
        absent = pytest.fail if os.environ.get("FULLDEPTH_REQUIRE_DATA") else pytest.skip
        absent(f"needs the data folder {folder}")
    return folder

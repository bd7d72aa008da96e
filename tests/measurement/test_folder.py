"""A result folder that was interrupted, damaged, or is wanted by two commands at once."""

from __future__ import annotations

import os
import threading

import pytest
from pandas.testing import assert_frame_equal
from torch import distributed

from fulldepth.core import files
from fulldepth.core.distributed import Processes
from fulldepth.core.errors import FulldepthError
from fulldepth.measurement import MeasureSettings
from fulldepth.results import DOCUMENT, Results, TableMismatchError
from refusals import refused

SETTINGS = MeasureSettings(max_sequences=2, sequence_length=12, measures=["displacement"])


@pytest.fixture
def measured(into, checkpoint, tmp_path):
    """`measured(family, **options)`: measure into one folder; returns the results and what was said."""

    def run(family="llama", **options):
        results, said = into(checkpoint(family), tmp_path / "out", SETTINGS, **options)
        return results, " ".join(said)

    return run


def test_a_save_that_was_interrupted_is_measured_again(measured, tmp_path, monkeypatch):
    whole, _ = measured()
    real, begun = os.replace, []

    def stop_at_the_second(*arguments):
        begun.append(arguments)
        if len(begun) == 2:
            raise KeyboardInterrupt
        real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "replace", stop_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            measured("gpt2", overwrite=True)
    with pytest.raises(TableMismatchError):
        Results.load(tmp_path / "out")
    with refused("another run"):
        measured("gpt2")  # the document is still that of the first run
    again, said = measured()
    assert "measured again" in said
    assert_frame_equal(again.table, whole.table, check_dtype=False)
    assert "nothing to do" in measured()[1]


def test_a_damaged_document_and_a_folder_of_another_command_are_refused(measured, tmp_path):
    out = tmp_path / "out"
    measured()
    (out / DOCUMENT).write_text('{"schema_version": 1, "headline": 3}')
    with refused(r"headline.*--overwrite"):
        measured()
    assert measured(overwrite=True)[0].headline
    before = (out / DOCUMENT).read_bytes()
    (out / "plan.json").touch()
    with refused("skip"):
        measured(overwrite=True)
    assert (out / DOCUMENT).read_bytes() == before


def test_every_process_hears_what_the_first_one_met(monkeypatch, tmp_path):
    """Two ranks as two threads: the first cannot have the folder, and the second is told rather than left waiting."""
    (tmp_path / "out").write_text("a file")
    barrier, gathered, said = threading.Barrier(2, timeout=10), {}, {}

    def gather(values, value, group=None):
        gathered[int(threading.current_thread().name)] = value
        barrier.wait()
        values[:] = [gathered[0], gathered[1]]

    def work(rank):
        try:
            with Processes(rank, 2).holding(tmp_path / "out"):
                pytest.fail("held")
        except FulldepthError as error:
            said[rank] = str(error)

    monkeypatch.setattr(distributed, "all_gather_object", gather)
    threads = [threading.Thread(target=work, args=(rank,), name=str(rank)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert said[0] == said[1]
    assert str(tmp_path / "out") in said[0]

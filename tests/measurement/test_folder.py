"""A result folder that was interrupted, damaged, or is wanted by two commands at once."""

from __future__ import annotations

import os
import threading

import pandas as pd
import pytest
from torch import distributed

from fulldepth import files
from fulldepth.distributed import Processes
from fulldepth.errors import FulldepthError
from fulldepth.measurement import MeasureSettings, measure_into
from fulldepth.progress import Watcher
from fulldepth.results import DOCUMENT, Results, TableMismatchError

SETTINGS = MeasureSettings(max_sequences=2, sequence_length=12, measures=["displacement"])


@pytest.fixture
def measured(checkpoint, text_file, tmp_path):
    """`measured(family, **options)`: measure into one folder; returns the results and what was said."""

    def run(family="llama", **options):
        said = []
        watcher = Watcher(say=said.append)
        results = measure_into(
            checkpoint(family), str(text_file), tmp_path / "out", SETTINGS, watcher=watcher, **options
        )
        return results, said

    return run


def fail_at_second_rename(monkeypatch):
    real, begun = os.replace, []

    def replace(*arguments):
        begun.append(arguments)
        if len(begun) == 2:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(files.os, "replace", replace)


def test_a_save_that_was_interrupted_is_measured_again(measured, tmp_path, monkeypatch):
    whole, _ = measured()
    with monkeypatch.context() as patched:
        fail_at_second_rename(patched)
        with pytest.raises(KeyboardInterrupt):
            measured("gpt2", overwrite=True)
    with pytest.raises(TableMismatchError):
        Results.load(tmp_path / "out")
    with pytest.raises(FulldepthError, match="another run"):
        measured("gpt2")  # the document is still that of the first run
    again, said = measured()
    assert any("was interrupted" in line and "measured again" in line for line in said)
    assert not any("nothing to do" in line for line in said)
    pd.testing.assert_frame_equal(again.table, whole.table, check_dtype=False)
    assert any("nothing to do" in line for line in measured()[1])


def test_a_damaged_document_is_refused_with_a_way_out(measured, tmp_path):
    measured()
    (tmp_path / "out" / DOCUMENT).write_text('{"schema_version": 1, "headline": 3}')
    with pytest.raises(FulldepthError, match=r"Cannot read .*headline.*--overwrite"):
        measured()
    assert measured(overwrite=True)[0].headline


def test_a_folder_of_another_command_is_refused_even_to_overwrite(measured, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "plan.json").touch()
    with pytest.raises(FulldepthError, match="which needs its own results there"):
        measured(overwrite=True)
    assert not (tmp_path / "out" / DOCUMENT).exists()


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
    assert "Cannot write into" in said[0]

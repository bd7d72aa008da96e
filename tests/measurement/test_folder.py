"""A result folder that was interrupted, damaged, or is wanted by two commands at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pandas as pd
import pytest
from torch import distributed

from fulldepth import files, measure
from fulldepth.distributed import Processes
from fulldepth.errors import FulldepthError
from fulldepth.files import locked
from fulldepth.measurement import MeasureSettings, measure_into
from fulldepth.progress import Watcher
from fulldepth.results import DOCUMENT, TABLE, Results, TableMismatchError

SETTINGS = MeasureSettings(max_sequences=2, sequence_length=12, measures=["displacement"])
HOLD = """
import sys
from fulldepth.files import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    input()
"""


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


@pytest.fixture
def held(tmp_path):
    """The folder, held by another process."""
    program = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "out"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    assert program.stdout.readline() == "held\n"
    yield tmp_path / "out"
    program.communicate("\n")


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


@pytest.mark.parametrize(
    "entries", [{"data": {}}, {"timings": {"load": 1.0}}, {"kind": "skip"}, {"model": 3}, {"headline": None}]
)
def test_a_damaged_part_of_a_series_is_measured_again(checkpoint, text_file, tmp_path, entries):
    run = tmp_path / "run"
    for step in (1, 2):
        (run / f"checkpoint-{step}").mkdir(parents=True)
        for path in checkpoint("llama").iterdir():
            (run / f"checkpoint-{step}" / path.name).symlink_to(path)
    whole = measure_into(run, str(text_file), tmp_path / "out", SETTINGS)
    for name in (DOCUMENT, TABLE):
        (tmp_path / "out" / name).unlink()
    part = tmp_path / "out" / "steps" / "checkpoint-1" / DOCUMENT
    document = json.loads(part.read_text()) | entries
    part.write_text(json.dumps({name: value for name, value in document.items() if value is not None}))
    said = []
    again = measure_into(run, str(text_file), tmp_path / "out", SETTINGS, watcher=Watcher(say=said.append))
    assert sum("measured already" in line for line in said) == 1
    pd.testing.assert_frame_equal(again.table, whole.table, check_dtype=False)


def test_one_folder_takes_one_measurement_at_a_time(refused, checkpoint, text_file, held):
    refused("measure", checkpoint("llama"), "--data", text_file, "--output", held, says=["Another fulldepth process"])
    assert [path.name for path in held.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["settings.yaml", "plan.json", "progress.json"])
def test_a_folder_of_another_command_is_refused_even_to_overwrite(measured, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).touch()
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


def test_what_the_first_process_finds_is_what_one_process_finds():
    assert Processes().first(lambda: 3) == 3
    with pytest.raises(KeyError):
        Processes().first(lambda: {}["a"])


@pytest.mark.parametrize(
    ("setting", "bound"),
    [
        ("max_sequences=99999999999999999999", "1000000000"),
        ("sequence_length=99999999999", "10000000"),
        ("batch_size=2000000000", "1000000000"),
        ("reservoir_tokens=99999999999999999999", "1000000000"),
        ("seed=99999999999", "4294967295"),
        ("grid_samples=1001", "1000"),
    ],
)
def test_numbers_have_upper_bounds(refused, checkpoint, text_file, tmp_path, setting, bound):
    command = ["measure", checkpoint("llama"), "--data", text_file, "--output", tmp_path / "out", "--set", setting]
    refused(*command, says=[setting.partition("=")[0], f"less than or equal to {bound}"])
    assert not (tmp_path / "out").exists()


def test_a_lock_is_no_part_of_a_model(checkpoint, text_file, tmp_path):
    with locked(tmp_path / "out"):
        first = measure_into(checkpoint("llama"), str(text_file), tmp_path / "out", SETTINGS)
    assert first.headline == measure(checkpoint("llama"), str(text_file), **SETTINGS.model_dump()).headline

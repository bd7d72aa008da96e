"""How the program ends: mistakes of ours, signals, closed pipes, several processes, long messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fulldepth.cli import program
from fulldepth.core import launch
from fulldepth.core.errors import FulldepthError, brief
from fulldepth.core.files import atomic
from fulldepth.settings import layer
from fulldepth.settings.bench import BenchSettings
from refusals import refused


class Panic(BaseException):
    """What a library in Rust raises when it panics."""


def inside(monkeypatch, action):
    """Let `fulldepth report` do something else."""
    monkeypatch.setattr("fulldepth.results.report", lambda *_, **__: action())


def throw(error):
    raise error


MEMORY_OPTIONS = "--batch-size, --sequence-length or model, or --device-map auto"
BUG = "Error: This is a bug in fulldepth: "


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (FulldepthError("got x, expected y"), "got x, expected y"),
        (FulldepthError("markup [red]stays[/red] as it is [/]"), "markup [red]stays[/red] as it is [/]"),
        (torch.OutOfMemoryError("CUDA out of memory."), "Out of memory"),
        (None, "Out of memory"),
        (PermissionError(13, "Permission denied", "/there"), "/there"),
        (RuntimeError("basic_ios::clear: iostream error"), "The disk is full, or a file cannot be written"),
        (RuntimeError("size mismatch"), f"{BUG}RuntimeError: size mismatch"),
        (KeyError("x" * 9000), f"{BUG}KeyError: 'xxx"),
        (TypeError("two\nlines\x1b[31m"), f"{BUG}TypeError: two lines [31m"),
        (Panic("index out of bounds"), f"{BUG}Panic: index out of bounds"),
    ],
)
def test_an_error_is_one_short_line_and_the_unforeseen_a_bug_of_ours(main, monkeypatch, error, words):
    inside(monkeypatch, lambda: throw(error) if error else torch.empty(1 << 55))
    code, out, err = main("report", "somewhere")
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.strip().splitlines()) == 1
    assert len(err) < 1000
    assert (BUG in err) is (BUG in words)
    if BUG in words:
        assert "--debug" in err
        with pytest.raises(type(error)):
            main("report", "somewhere", "--debug")


@pytest.mark.parametrize(
    ("command", "function", "advice"),
    [
        (
            "train tiny-llama --output run",
            "fulldepth.training.train",
            "micro_batch_size, sequence_length or model, or gradient_checkpointing=true",
        ),
        ("measure gpt2 --data corpus:builtin --output out", "fulldepth.measurement.measure_into", MEMORY_OPTIONS),
        ("report somewhere", "fulldepth.results.report", "model"),
    ],
)
def test_advice_on_memory_names_settings_of_the_command(main, monkeypatch, tmp_path, command, function, advice):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(function, lambda *_, **__: throw(torch.OutOfMemoryError("CUDA out of memory.")))
    assert main(*command.split())[2] == f"Error: Out of memory. Try a smaller {advice}.\n"


def test_a_message_stays_short_and_keeps_its_lines(main, monkeypatch):
    inside(monkeypatch, lambda: throw(FulldepthError("\n".join(f"setting_{n}: got {n}" for n in range(500)))))
    _, _, err = main("report", "somewhere")
    lines = err.strip().splitlines()
    assert len(err) < 1000
    assert lines[0] == "Error: setting_0: got 0"
    shown = len(lines) - 1
    assert shown > 20
    assert lines[-1] == f"... and {500 - shown} lines more."
    assert brief("a\nb") == "a\nb"
    assert len(brief("x" * 10**7)) == 950


def test_a_signal_ends_the_program_and_leaves_nothing_half_written(main, monkeypatch, tmp_path):
    number, before = signal.SIGTERM, signal.getsignal(signal.SIGTERM)

    def write():
        with atomic(tmp_path / "page") as part:
            part.write_text("half")
            os.kill(os.getpid(), number)
            time.sleep(10)

    inside(monkeypatch, write)
    code, _, err = main("report", "somewhere")
    assert code == 128 + number
    assert err.endswith(". Run again: fulldepth report somewhere\n")
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) == before


def test_ctrl_c_is_no_bug_wherever_it_comes(main, monkeypatch):
    class Named:
        def __set_name__(self, owner, name):
            raise KeyboardInterrupt

    def importing():
        type("Class", (), {"field": Named()})  # before Python 3.12 a RuntimeError

    def cleaning():
        try:
            throw(KeyboardInterrupt())
        finally:
            raise OSError("cannot clean up")

    for action in (importing, cleaning):
        inside(monkeypatch, action)
        assert main("report", "somewhere")[::2] == (130, "Interrupted. Run again: fulldepth report somewhere\n")
    monkeypatch.setattr(program, "ending_cleanly", lambda: throw(KeyboardInterrupt()))
    assert main("report", "somewhere")[::2] == (130, "Interrupted. Run again: fulldepth report somewhere\n")


def test_the_first_process_tells_of_a_mistake_and_the_others_only_if_they_are_left(main, monkeypatch):
    inside(monkeypatch, lambda: throw(FulldepthError("no such file")))
    slept = []
    monkeypatch.setattr(launch.time, "sleep", slept.append)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main("report", "somewhere")[2] == "Error: no such file\n"
    assert slept == []
    monkeypatch.setenv("RANK", "1")
    assert main("report", "somewhere")[2] == "Error: process 1: no such file\n"
    assert sum(slept) == pytest.approx(program.PATIENCE, abs=launch.STEP), "torchrun ends this process meanwhile"


@pytest.mark.parametrize("mistake", [["report", "somewhere"], ["train", "--stepz", "3"]])
def test_torchrun_describes_one_process_where_all_make_the_same_mistake(main, monkeypatch, tmp_path, mistake):
    inside(monkeypatch, lambda: throw(FulldepthError("no such file")))
    monkeypatch.setattr(launch.time, "sleep", lambda seconds: None)
    monkeypatch.setenv("WORLD_SIZE", "2")
    ended = []
    for rank in ("0", "1"):
        file = tmp_path / rank / "error.json"
        file.parent.mkdir()
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("TORCHELASTIC_ERROR_FILE", str(file))):
            monkeypatch.setenv(name, value)
        code, _, err = main(*mistake)
        ended.append((code, "no such file" in err or "No such option: --stepz" in err, err == "", file.exists()))
    assert ended == [(2, True, False, True), (0, False, True, False)]
    failures = {0: ProcessFailure(0, 10, 2, str(tmp_path / "0" / "error.json"))}
    *_, last, _ = str(ChildFailedError("fulldepth", failures)).splitlines()
    assert last.startswith(("  traceback : no such file", "  traceback : No such option: --stepz"))


def test_torchrun_prints_our_error_last(main, monkeypatch, tmp_path):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    inside(monkeypatch, lambda: throw(FulldepthError("no accelerators")))
    assert main("report", "somewhere")[0] == 2
    failures = {0: ProcessFailure(0, 10, 2, str(file)), 1: ProcessFailure(1, 11, -15, "")}
    *_, last, _ = str(ChildFailedError("fulldepth", failures)).splitlines()
    assert last == "  traceback : no accelerators"


def test_a_process_that_lost_another_one_blames_no_bug(main, monkeypatch):
    lost = RuntimeError("[/pytorch/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
    inside(monkeypatch, lambda: throw(lost))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "Another process ended" in main("report", "somewhere")[2]


def test_a_closed_pipe_ends_quietly():
    program = subprocess.Popen(
        [sys.executable, "-m", "fulldepth", "train", "--list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None
    assert program.stderr is not None
    program.stdout.close()
    assert program.stderr.read() == b""
    program.stderr.close()
    assert program.wait(60) in (0, 1)


def test_a_console_that_lacks_characters_shows_escapes(tmp_path):
    code = "from fulldepth.core import console; console.accept_any_text(); console.line('0.5 \\xb1 0.1 \\u2026')"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    printed = subprocess.run([sys.executable, "-c", code], env=ascii_only, capture_output=True, check=True)
    assert printed.stdout == rb"0.5 \xb1 0.1 \u2026" + os.linesep.encode()
    narrow = {**ascii_only, "COLUMNS": "40"}
    helped = subprocess.run([sys.executable, "-m", "fulldepth", "train", "-h"], env=narrow, capture_output=True)
    assert helped.returncode == 0, helped.stderr
    assert b"\\u2026" in helped.stdout


@pytest.mark.parametrize("text", ["9" * 30, "1,x", "", "1," + "9" * 5000])
def test_lists_of_whole_numbers(text):
    with refused(r"batches|digits"):
        layer(BenchSettings, {"batches": text})
    assert layer(BenchSettings, {"batches": "3, 7"}).batches == [3, 7]


def test_names_that_nothing_can_be_written_to_are_refused(main, monkeypatch, tmp_path):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    inside(monkeypatch, lambda: throw(RuntimeError(f"Symlink loop from {str(loop)!r}")))  # as pathlib says it
    for output, words in (("\udcff", "is not UTF-8"), (loop, "the link leads to itself")):
        code, out, err = main("report", tmp_path, "--output", output)
        assert (code, out) == (2, "")
        assert words in err
        assert "This is a bug" not in err


def test_errors_in_a_circle_are_walked_once():
    first, second = ValueError("a"), ValueError("b")
    first.__context__, second.__context__ = second, first
    assert not program._is_interrupted(first)
    second.__context__ = KeyboardInterrupt()
    assert program._is_interrupted(first)

"""Reading and writing files: bounds, schemas, atomic replacement, locks, leftovers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pydantic
import pytest
from hypothesis import given

from fulldepth.core import files
from json_files import any_value, write_json
from refusals import refused


class Point(pydantic.BaseModel):
    x: int
    y: list[float]


@given(value=any_value())
def test_json_is_read_as_the_standard_library_reads_it(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("json") / "value.json"
    write_json(path, value)
    assert files.read_json(path) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "Expecting"),
        ('{"a": 1, "a": 2}', "appears twice"),
        ("[NaN]", "NaN is not valid JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * 70 + "]" * 70, "nested deeper than 64 levels"),
        ("9" * 5000, "digits"),
        ("\udcff", "codec"),
        ('{"x": 1, "y": [1]}' + " " * 2000, "larger than"),
    ],
)
def test_broken_json_is_refused_with_its_reason(tmp_path, text, says):
    path = tmp_path / "broken.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with refused(says, str(path)):
        files.read_json(path, most=1000 if "larger" in says else files.MOST_BYTES)


def test_a_device_or_a_pipe_is_never_opened(tmp_path):
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    for place in (pipe, Path("/dev/zero"), tmp_path, tmp_path / "absent.json"):
        with refused(r"not a regular file|missing"):
            files.read_bytes(place)


def test_a_document_is_validated_strictly(tmp_path):
    path = tmp_path / "point.json"
    path.write_text('{"x": 1, "y": [1, 2.5]}')
    assert files.read_document(path, Point) == Point(x=1, y=[1.0, 2.5])
    for text, where in (('{"x": "1", "y": []}', "x"), ('{"x": 1, "y": [null]}', "y.0"), ("[]", "the document")):
        path.write_text(text)
        with refused(f"point.json: {where}: "):
            files.read_document(path, Point)


def test_a_document_of_another_version_is_not_called_damaged(tmp_path):
    class Versioned(pydantic.BaseModel):
        schema_version: Literal[4]

    path = tmp_path / "progress.json"
    path.write_text('{"schema_version": 3}')
    with refused(r"progress\.json: it has schema_version 3, this fulldepth reads 4\."):
        files.read_document(path, Versioned)


def test_any_library_error_names_the_file_but_interruption_passes():
    class Panic(BaseException):
        """As Rust libraries raise when they panic."""

    for error in (Exception("bare"), Panic("panicked\n" * 500), KeyError("k"), RecursionError(), MemoryError()):
        with refused(r"Cannot read some\.file: ") as caught, files.reading("some.file"):
            raise error
        assert len(str(caught.value)) < 500
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)), files.reading("some.file"):
            raise error


def fail_while_writing(target):
    with files.atomic(target) as part:
        part.write_text("new")
        raise ZeroDivisionError


def fail_while_filling(target):
    with files.atomic_folder(target) as part:
        (part / "file").write_text("new")
        raise ZeroDivisionError


def test_an_exception_leaves_the_old_file_and_nothing_else(tmp_path):
    with files.atomic(tmp_path / "kept.txt") as part:
        part.write_text("old")
    with pytest.raises(ZeroDivisionError):
        fail_while_writing(tmp_path / "kept.txt")
    with pytest.raises(ZeroDivisionError):
        fail_while_filling(tmp_path / "folder")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"kept.txt": "old"}


def test_leftovers_of_a_killed_process_go_and_others_stay(tmp_path):
    program = (
        "import os, sys; from pathlib import Path; from fulldepth.core import files\n"
        "root = Path(sys.argv[1])\n"
        "part = files.temporary_name(root / 'table'); part.write_text('half')\n"
        "part = files.temporary_name(root / 'model'); part.mkdir(); (part / 'weights').write_text('half')\n"
        "os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    own = files.temporary_name(tmp_path / "running")
    own.write_text("being written")
    foreign = tmp_path / ".table.elsewhere-1.part"
    foreign.write_text("perhaps being written on another machine")
    (tmp_path / ".mine.part").write_text("not ours")
    assert len(list(tmp_path.iterdir())) == 5
    with files.atomic(tmp_path / "table") as part:
        part.write_text("whole")
    assert len(list(tmp_path.glob(".table*"))) == 1, "the leftover of the same file is gone, unless it may be in use"
    (tmp_path / "table").unlink()
    assert {path.name.split(".")[1] for path in files.remove_leftovers(tmp_path)} == {"model"}
    assert {path.name for path in tmp_path.iterdir()} == {own.name, foreign.name, ".mine.part"}
    os.utime(foreign, (0, 0))
    with files.atomic(tmp_path / "other") as part:
        part.write_text("of another name")
    assert foreign.exists()
    assert files.remove_leftovers(tmp_path) == [foreign]


def test_a_digest_is_that_of_fips_180_4(tmp_path):
    """Of `abc`, from appendix B.1, and of a text as of its bytes in UTF-8."""
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    file = tmp_path / "text"
    file.write_bytes(b"abc")
    assert {files.sha256_of("abc"), files.sha256_of(b"abc"), files.sha256_of_file(file)} == {expected}
    assert files.sha256_of("é") == files.sha256_of(b"\xc3\xa9") != expected
    with refused(f"Cannot read {tmp_path / 'absent'}"):
        files.sha256_of_file(tmp_path / "absent")


def test_a_folder_is_held_by_one_process(tmp_path):
    program = "import sys; from fulldepth.core import files\nwith files.locked(sys.argv[1]): print('in')"

    def enter():
        return subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, check=False
        )

    with files.locked(tmp_path), files.locked(tmp_path / "." / "../" / tmp_path.name):
        assert "Another fulldepth process" in enter().stderr
        assert (tmp_path / files.LOCK).exists()
    assert not list(tmp_path.iterdir())
    assert enter().stdout == "in\n"


def test_a_held_folder_that_stays_empty_is_gone_afterwards(tmp_path):
    with files.locked(tmp_path / "new" / "run"):
        pass
    assert not list(tmp_path.iterdir())
    with files.locked(tmp_path / "new" / "run"):
        (tmp_path / "new" / "run" / "result").write_text("kept")
    assert [path.name for path in (tmp_path / "new" / "run").iterdir()] == ["result"]

"""Nothing that only Unix has is used unguarded: Windows lacks these modules and functions."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys

from fulldepth.cli.program import ending_cleanly
from fulldepth.core import files
from places import ROOT

SOURCES = sorted((ROOT / "src").rglob("*.py"))
MODULES = {"resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "syslog", "posix", "readline", "crypt", "nis"}
FUNCTIONS = {
    "os": {
        *("fork", "forkpty", "getuid", "geteuid", "getgid", "getegid", "setsid", "killpg", "getpgid", "getpgrp"),
        *("sched_getaffinity", "sched_setaffinity", "pread", "pwrite", "nice", "getloadavg", "uname", "sysconf"),
        *("mkfifo", "chown", "fchmod", "fchown", "wait", "waitpid", "posix_fallocate", "statvfs", "sync", "kill"),
    },
    "signal": {"SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "alarm", "setitimer", "pause"},
    "time": {"tzset"},
    "socket": {"AF_UNIX"},
}
"""Module -> what it lacks on Windows; `os.kill(process, 0)` exists there and interrupts the process."""


def unguarded(path):
    """Uses of what only Unix has, in functions that do not ask whether it exists."""
    tree = ast.parse(path.read_text())
    found = []
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [f"{path.name}:{node.lineno} imports {name}" for name in names if name.split(".")[0] in MODULES]
        if isinstance(node, ast.ImportFrom) and node.module in FUNCTIONS:
            found += [f"{path.name}:{node.lineno} {a.name}" for a in node.names if a.name in FUNCTIONS[node.module]]
    asked = {
        (ast.unparse(call.args[0]), call.args[1].value)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("hasattr", "getattr") and len(call.args) > 1
        if isinstance(call.args[1], ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            use = (node.value.id, node.attr)
            if node.attr in FUNCTIONS.get(node.value.id, ()) and use not in asked:
                found.append(f"{path.name}:{node.lineno} {'.'.join(use)}")
    return found


def test_no_module_uses_what_only_unix_has_unguarded():
    assert [use for path in SOURCES for use in unguarded(path)] == []


def test_the_search_finds_what_it_looks_for(tmp_path):
    path = tmp_path / "code.py"
    path.write_text(
        "import os, fcntl\nfrom signal import SIGALRM\nos.fork()\nif hasattr(os, 'nice'):\n    os.nice(1)\n"
    )
    assert unguarded(path) == ["code.py:1 imports fcntl", "code.py:2 SIGALRM", "code.py:3 os.fork"]


def test_everything_is_imported_where_unix_modules_are_missing():
    script = (
        "import sys, os, signal\nimport psutil  # has code of its own for Windows\n"
        "for name in ('resource', 'fcntl', 'pwd', 'grp', 'termios'):\n    sys.modules[name] = None\n"
        "for name in ('pread', 'sched_getaffinity', 'fork', 'getuid'):\n    delattr(os, name)\n"
        "del signal.SIGHUP\n"
        "sys.argv = ['fulldepth', 'train', '--list']\n"
        "from fulldepth import cli, reporting, results\ncli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_files_are_read_and_written_without_them(tmp_path, monkeypatch):
    for module, name in ((os, "pread"), (os, "sched_getaffinity"), (os, "fork"), (signal, "SIGHUP")):
        monkeypatch.delattr(module, name)
    flush = os.fsync

    def windows_fsync(handle):
        assert os.get_blocking(handle) is not None
        os.write(handle, b"")  # fails for a file that is open for reading only, as FlushFileBuffers does
        flush(handle)

    monkeypatch.setattr(os, "fsync", windows_fsync)
    with files.atomic(tmp_path / "a.bin") as part:
        part.write_bytes(b"abc")
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    host = files._host()
    left, kept = (tmp_path / f".a.bin.{host}-{number}.part" for number in (ended.pid, os.getppid()))
    left.touch()
    kept.touch()
    assert files.remove_leftovers(tmp_path) == [left]
    assert kept.exists()
    with ending_cleanly():
        pass

"""Two processes in one gloo group that last as long as the tests: `two_processes(function, *arguments)`.

A function is sent by its name, so it stands in a module that can be imported from `tests`; it runs in both processes.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import traceback
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from unittest import mock

import torch
from torch import distributed

OTHER = 60
"""Seconds that one process may go on after the other has failed."""


class TwoProcesses:
    """The pool; it starts at the first call, and anew after a failure."""

    def __init__(self):
        self.processes = []
        self.ends = []

    def __call__(self, function, *arguments, timeout=300):
        """What `function(*arguments)` returns in the processes of rank 0 and 1."""
        if not self.processes or not all(process.is_alive() for process in self.processes):
            self.stop()
            self.start()
        for end in self.ends:
            end.send((function, arguments))
        results = {}
        while len(results) < 2:
            silent = [end for rank, end in enumerate(self.ends) if rank not in results]
            answered = wait(silent, timeout)
            if not answered:
                self.stop()
                raise AssertionError(f"{function.__name__} did not end in time; so far: {results}")
            for end in answered:
                rank = self.ends.index(end)
                try:
                    results[rank] = end.recv()
                except EOFError:
                    results[rank] = (False, "the process ended")
                if not results[rank][0]:
                    timeout = OTHER
        if not all(done for done, _ in results.values()):
            self.stop()
            raise AssertionError("\n".join(str(value) for done, value in results.values() if not done))
        return [results[rank][1] for rank in (0, 1)]

    def start(self):
        """Start both processes, which meet at a free port."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = get_context("spawn")
        for rank in (0, 1):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, port, [*sys.path, str(Path(__file__).parents[1])]), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.ends.append(ours)

    def stop(self):
        """End both processes."""
        for process in self.processes:
            process.kill()
            process.join()
        self.processes, self.ends = [], []


def _serve(end, rank, port, path):
    sys.path[:] = path
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of tests that end the children of their process
    distributed.init_process_group("gloo")
    while True:
        try:
            function, arguments = end.recv()
        except EOFError:
            return
        try:
            end.send((True, function(*arguments)))
        except BaseException:
            end.send((False, f"rank {rank}: {traceback.format_exc()}"))


def fulldepth(*arguments):
    """The command `fulldepth ARGUMENTS` in each of the processes: exit code, standard output, standard error."""
    from fulldepth.cli import main

    code, out, err = 0, io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["fulldepth", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()

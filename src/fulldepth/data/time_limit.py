"""`within`: ends Python code that runs for too long, such as a chat template with an endless loop."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

AGAIN = 1.0
"""Seconds after which code that caught the exception receives it again."""

T = TypeVar("T")


class TookTooLong(Exception):  # noqa: N818  # raised by the interpreter inside code of others
    """Raised inside code that exceeds its time limit."""


def within(seconds: float, function: Callable[[], T]) -> T:
    """The result of a function that is ended when it runs for longer, on every system and in every thread.

    The exception arrives between two instructions of Python, so a single call of a library that never returns is not
    ended. In interpreters that cannot raise an exception in a thread there is no limit.

    Args:
        seconds: limit of wall-clock time.
        function: takes no arguments.

    Raises:
        TookTooLong: if it ran for longer.
    """
    python = getattr(ctypes, "pythonapi", None)
    if python is None:
        return function()
    thread, done, lock = ctypes.c_ulong(threading.get_ident()), threading.Event(), threading.Lock()

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            with lock:
                if not done.is_set():
                    python.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TookTooLong))
            wait = AGAIN

    def finish() -> None:
        with lock:
            done.set()
            python.PyThreadState_SetAsyncExc(thread, None)  # forgets an exception that has not arrived

    try:
        threading.Thread(target=watch, name="time limit", daemon=True).start()
        return function()
    finally:
        try:
            finish()
        except TookTooLong:  # it arrived at the very end of the limit; the next one is a second away
            finish()

"""The command line: the program, its general options, and its exit.

Commands are a thin layer: they parse, show progress, call one function of a verb, and print the path of the page. Verbs
are imported when called, so that `--help` needs no torch.
"""

from __future__ import annotations

import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.exceptions import TyperException

from fulldepth.core import console, launch, shell
from fulldepth.core.errors import FulldepthError, StoppedError, brief, is_disk_full, is_out_of_memory, one_line


class Program(typer.core.TyperGroup):
    """The group of all commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name; the name may be one word or two."""
        if len(args) > 1 and f"{args[0]} {args[1]}" in self.commands:
            args = [f"{args[0]} {args[1]}", *args[2:]]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Of several processes, only the first reports a mistake in the arguments."""
        try:
            return super().invoke(ctx)
        except TyperException as error:
            message = error.format_message()
            if not launch.is_main():
                _fail(message)
            launch.report_error(message)
            raise


app = typer.Typer(
    name="fulldepth",
    cls=Program,
    help="Find out how much of a Transformer's depth really works.\n\n"
    "Start with `fulldepth demo --output demo-run/`, or measure a checkpoint of your own: "
    "`fulldepth measure MODEL --data text.txt --output out/`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

DEBUG = {"on": False}
"""Set by `--debug`: errors show their traceback."""
RUNNING: dict[str, Any] = {}
"""State of the running command: `resumable` (it has the option `--resume`), `output` (its result folder),
`overwrites` (it may replace results there), `saved` (when results there had been saved before), and `settings` (the
class of its settings)."""

ENDINGS = {130: "Interrupted", 128 + signal.SIGTERM: "Terminated", 129: "Hung up"}
"""Exit code of a signal -> message."""
PATIENCE = 3.0
"""Seconds that a process other than the first waits before it reports an error."""
LOST = ("Connection closed by peer", "Connection reset by peer", "NCCL", "gloo")
"""Parts of torch.distributed's messages when another process has ended."""

Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
"""Option of every command; it may also follow the command's name."""


def _print_version(requested: bool) -> None:
    """Print the version and exit; runs before the command is resolved."""
    if requested:
        from fulldepth import __version__

        typer.echo(f"fulldepth {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Debug = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Options of every command."""
    DEBUG["on"] = debug


def main() -> None:
    """Run the command line; every error ends with one message and exit code 2, every signal with 128 + its number."""
    try:
        RUNNING.clear()
        console.accept_any_text()
        with ending_cleanly():
            for argument in sys.argv[1:]:  # may be written to results, pages and logs
                try:
                    argument.encode()
                except UnicodeEncodeError as error:
                    raise FulldepthError(f"The argument {one_line(ascii(argument), 200)} is not UTF-8.") from error
            app(standalone_mode=True)
    except SystemExit as leaving:  # typer turns an interruption into 130 without a message
        if leaving.code in ENDINGS:
            _end(leaving.code, ENDINGS[leaving.code])
        raise
    except GeneratorExit:
        raise
    except StoppedError as error:
        _end(128 + signal.SIGTERM, str(error).removesuffix("."))
    except BaseException as error:  # libraries in Rust panic with a BaseException
        if _is_interrupted(error):
            _end(130, ENDINGS[130])
        if DEBUG["on"]:
            raise
        _fail(_message(error))


def _fail(message: str) -> NoReturn:
    """Print an error, hand it to torchrun, and exit with 2.

    Of several processes, only the first reports an error that all share. The others wait for it and exit with 0,
    because torchrun prints seven lines for each process that fails; it fails if any process does.
    """
    if not launch.is_main():
        if launch.first_has_reported(PATIENCE):
            sys.exit(0)
        message = f"process {launch.rank()}: {message}"
    console.error(brief(message))
    launch.report_error(brief(message))
    sys.exit(2)


def _is_interrupted(error: BaseException | None) -> bool:
    """Return True if Ctrl-C caused an error, also if a library caught it and raised another error."""
    seen: set[int] = set()  # the chain has a cycle if a library raises an earlier error again
    while error is not None and id(error) not in seen and not isinstance(error, KeyboardInterrupt):
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return isinstance(error, KeyboardInterrupt)


def _end(code: int, message: str) -> NoReturn:
    """Print the message of a signal with the command to run again, and exit."""
    if launch.is_main():
        name = Path(sys.argv[0]).name
        start = "python -m fulldepth" if name == "__main__.py" else name
        if launch.world() > 1:
            start = "torchrun ... -m fulldepth"
        arguments = sys.argv[1:]
        output = RUNNING.get("output")
        if RUNNING.get("resumable"):
            arguments = [*arguments, *(["--resume"] if "--resume" not in arguments else [])]
        elif output is not None and not RUNNING.get("overwrites") and is_saved(output):
            arguments = ["report", shell.path(output)]
        typer.echo(f"{message}. Run again: {start} {shlex.join(arguments)}", err=True)
    sys.exit(code)


def is_saved(output: Path) -> bool:
    """Return True if the running command has saved its results; at most their page is missing."""
    return saved_at(output) != RUNNING.get("saved")


def saved_at(output: Path | None) -> int | None:
    """When the results in a folder were saved, in nanoseconds; None if it holds none."""
    from fulldepth.results import DOCUMENT

    document = None if output is None else output / DOCUMENT
    return document.stat().st_mtime_ns if document is not None and document.is_file() else None


@contextmanager
def ending_cleanly() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into a regular exit, so that temporary files are removed.

    Signals that are ignored (`nohup`) or handled already are left alone. Under torchrun only the first process writes
    files; the others keep the default handler and end at once, as a Python handler could not interrupt a library call.
    """
    signals = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    if threading.current_thread() is not threading.main_thread() or not launch.is_main():
        signals = []
    defaults = [number for number in signals if signal.getsignal(number) is signal.SIG_DFL]

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in defaults:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in defaults:
            signal.signal(number, signal.SIG_DFL)


def _less_memory() -> str:
    """Name the options of the running command that save memory."""
    settings = RUNNING.get("settings")
    if settings is None:
        return "Try a smaller model."
    known = settings.model_fields
    sizes = [settings.option(name) for name in ("micro_batch_size", "batch_size", "sequence_length") if name in known]
    alternatives = (("device_map", "auto"), ("gradient_checkpointing", True))
    changes = [f", or {settings.option(name, value)}" for name, value in alternatives if name in known]
    smaller = f"{', '.join(sizes)} or model" if sizes else "model"
    return f"Try a smaller {smaller}{''.join(changes[:1])}."


def _message(error: BaseException) -> str:
    """The message that is printed for an error."""
    if isinstance(error, FulldepthError):
        return str(error)
    if isinstance(error, MemoryError | RuntimeError) and is_out_of_memory(error):
        return f"Out of memory. {_less_memory()}"
    if is_disk_full(error) and not isinstance(error, OSError):
        return f"The disk is full, or a file cannot be written ({one_line(error, 200)})."
    if isinstance(error, RuntimeError) and "Symlink loop" in str(error):  # raised by pathlib before Python 3.13
        return f"{one_line(error, 800)}: the link leads to itself."
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        return f"{reason}: {error.filename}" if error.filename else reason
    if launch.world() > 1 and any(sign in str(error) for sign in LOST):
        return f"Another process ended, and this one cannot go on without it ({one_line(error, 200)})."
    detail = one_line(error, 500)
    return (
        f"This is a bug in fulldepth: {type(error).__name__}{f': {detail}' if detail else ''}. Run the command again "
        "with --debug for the traceback, and please report it."
    )
